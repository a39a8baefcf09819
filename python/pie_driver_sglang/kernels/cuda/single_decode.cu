// Attention of a decode step of one row, from the product of queries, keys and values on.
//
// A cluster of CTAs attends for one KV head. Each CTA has a range of the stored tokens, and loads its
// first keys and values before the previous kernel has ended. Partial results meet in the shared
// memory of the cluster's first CTA, so that no CTA waits for memory of the whole GPU. The first CTA
// has the new token, too, and stores it.
//
// A warp sees 16 tokens at once, by matrix instructions whose operands are loaded from memory into
// the registers where the instruction wants them: a score does not depend on the order of a head's
// dimensions, and neither does what is seen on that of its rows.
//
//     scores[heads, tokens] = queries[heads, dims] x keys[dims, tokens]      8 tokens an instruction
//     seen[dims, heads]     = values[dims, tokens] x weights[tokens, heads]  16 dims an instruction
//
// In what follows a thread is (g, t) = (lane / 4, lane % 4), as PTX describes these instructions.
//
// Constants from outside: BF16 (or FP16 if 0), DIM (64 or 128), GROUP (query heads of a KV head, at
// most 8), CLUSTER (CTAs), THREADS, NORMED (heads are RMS-normed).

typedef long long i64;

constexpr int LANES = DIM / 8;
constexpr int TEAMS = THREADS / LANES;
constexpr int WARPS = THREADS / 32;
constexpr int HALF = DIM / 2;
constexpr int ELEMENTS = GROUP * DIM;
constexpr int TOKENS = 16;
constexpr int CHUNKS = DIM / 32;
constexpr int VECTORS = DIM / 64;
constexpr float LOWEST = -1e30f;

static_assert((DIM == 64 || DIM == 128) && GROUP <= 8, "no such heads");

// What each of some warps, or of some CTAs, has seen, to be merged.
template <int COUNT>
struct Parts {
    float4 seen[COUNT][ELEMENTS / 4];
    float largest[COUNT][GROUP];
    float total[COUNT][GROUP];
};

struct Shared {
    uint4 queries[GROUP][LANES];
    uint4 key[LANES];
    uint4 value[LANES];
    Parts<WARPS> warps;
    Parts<CLUSTER> ctas;
};

struct Eight {
    float x[8];
};

__device__ inline Eight widen(uint4 from) {
    Eight out;
    u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BF16
        out.x[2 * i] = __uint_as_float(words[i] << 16);
        out.x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
        asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.f32.f16 %0, lo;\n cvt.f32.f16 %1, hi;}"
            : "=f"(out.x[2 * i]), "=f"(out.x[2 * i + 1]) : "r"(words[i]));
#endif
    }
    return out;
}

__device__ inline uint4 narrow(const Eight& from) {
    return make_uint4(narrow(from.x[0], from.x[1]), narrow(from.x[2], from.x[3]),
                      narrow(from.x[4], from.x[5]), narrow(from.x[6], from.x[7]));
}

__device__ inline float exp2_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// The sum over a team, in every thread of it.
__device__ inline float team_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Norms (where heads are normed) and turns a head whose pairs are HALF apart.
__device__ inline uint4 turn(uint4 head, const uint4* weight, float epsilon, const Eight& cosine,
                             const Eight& sine, int lane) {
    Eight x = widen(head);
#if NORMED
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x.x[i] * x.x[i];
    float spread = rsqrtf(team_sum(squares) / DIM + epsilon);
    Eight w = widen(weight[lane]);
#pragma unroll
    for (int i = 0; i < 8; i++) x.x[i] = x.x[i] * spread * w.x[i];
    // Rounded as a norm's kernel would do.
    x = widen(narrow(x));
#endif
    Eight turned;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float other = __shfl_xor_sync(0xffffffffu, x.x[i], LANES / 2);
        turned.x[i] = x.x[i] * cosine.x[i] + (lane < LANES / 2 ? -other : other) * sine.x[i];
    }
    return narrow(turned);
}

__device__ inline Eight load_floats(const float* from) {
    float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ inline u32 shared_address(const void* at) {
    return (u32)__cvta_generic_to_shared(at);
}

// The place in the shared memory of the cluster's first CTA that `at` has here.
__device__ inline u32 at_first(const void* at) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(remote) : "r"(shared_address(at)));
    return remote;
}

__device__ inline void store_remote(u32 at, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

__device__ inline void store_remote(u32 at, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// Four neighbouring numbers of a head, from all parts; their weights are relative to the largest.
struct Merged {
    float4 seen;
    float largest, total;
};

template <int COUNT>
__device__ inline Merged merge(const Parts<COUNT>& parts, int four) {
    int head = four / (DIM / 4);
    float levels[COUNT];
    Merged all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), LOWEST, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        levels[i] = parts.largest[i][head];
        all.largest = fmaxf(all.largest, levels[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float weight = exp2_of(levels[i] - all.largest);
        float4 part = parts.seen[i][four];
        all.seen.x += weight * part.x;
        all.seen.y += weight * part.y;
        all.seen.z += weight * part.z;
        all.seen.w += weight * part.w;
        all.total += weight * parts.total[i][head];
    }
    return all;
}

// One matrix instruction, 16 by 8 by 16, of 16 bits.
__device__ inline void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
#define KIND "bf16.bf16"
#else
#define KIND "f16.f16"
#endif
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Keys and values of 16 tokens, in a thread of a warp.
struct Tokens {
    // Of tokens g and g + 8: 8 dims from 32 c + 8 t on.
    uint4 keys[2][CHUNKS];
    // Of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: 8 dims from 64 v + 8 g on.
    uint4 values[4][VECTORS];
};

// What is stored of a KV head.
struct Stored {
    const int* slots;
    const unsigned short* keys;
    const unsigned short* values;
    i64 key_stride, value_stride;
};

__device__ inline int place(const Stored& stored, int token, int end) {
    return token < end ? stored.slots[token] : -1;
}

__device__ inline uint4 load_if(int slot, const unsigned short* from, i64 stride, int dim) {
    // Storage that nothing is written to may hold what is not a number.
    return slot < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(from + slot * stride + dim);
}

// `slot` is that of token lane % 16, or -1.
__device__ inline void load_keys(Tokens& tokens, const Stored& stored, int slot, int g, int t) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int own = __shfl_sync(0xffffffffu, slot, g + 8 * i);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            tokens.keys[i][c] = load_if(own, stored.keys, stored.key_stride, 32 * c + 8 * t);
    }
}

__device__ inline void load_values(Tokens& tokens, const Stored& stored, int slot, int g, int t) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int own = __shfl_sync(0xffffffffu, slot, 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            tokens.values[i][v] = load_if(own, stored.values, stored.value_stride, 64 * v + 8 * g);
    }
}

// The softmax so far of what a warp has seen.
struct Sight {
    // Of head g: the largest score, and this thread's part of the sum of weights.
    float largest, total;
    // Of heads 2 t and 2 t + 1: see `dim_of`.
    float seen[CHUNKS * 2][4];
};

// The dim of numbers 0 and 1 (`upper` 0) or 2 and 3 of instruction j.
__device__ inline int dim_of(int j, int upper, int g) {
    return DIM == 128 ? 64 * upper + 8 * g + j : 8 * g + j + 4 * upper;
}

__device__ inline u32 word(uint4 from, int i) {
    return i == 0 ? from.x : i == 1 ? from.y : i == 2 ? from.z : from.w;
}

// Number j of each of two vectors.
__device__ inline u32 pair(uint4 a, uint4 b, int j) {
    return __byte_perm(word(a, j / 2), word(b, j / 2), j % 2 == 0 ? 0x5410 : 0x7632);
}

__device__ inline void score(float (&scores)[2][2], const uint4 (&queries)[CHUNKS],
                             const Tokens& tokens) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // Two sums, so that an instruction waits for half of the others.
        float sums[2][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint4 q = queries[c], k = tokens.keys[i][c];
            multiply(sums[0], q.x, 0, q.y, 0, k.x, k.y);
            multiply(sums[1], q.z, 0, q.w, 0, k.z, k.w);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) scores[i][n] = sums[0][n] + sums[1][n];
    }
}

// Scores become weights, in the registers where the next instruction wants them. `known` is how many
// of the tokens there are.
__device__ inline void weigh(Sight& sight, const float (&scores)[2][2], u32 (&weights)[2],
                             int known, float scale, int t) {
    float x[2][2], largest = sight.largest;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            x[i][n] = 8 * i + 2 * t + n < known ? scores[i][n] * scale : LOWEST;
            largest = fmaxf(largest, x[i][n]);
        }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    float shrink = exp2_of(sight.largest - largest);
    sight.largest = largest;
    sight.total *= shrink;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            x[i][n] = 8 * i + 2 * t + n < known ? exp2_of(x[i][n] - largest) : 0.0f;
            sight.total += x[i][n];
        }
        weights[i] = narrow(x[i][0], x[i][1]);
    }
    float first = __shfl_sync(0xffffffffu, shrink, 8 * t);
    float second = __shfl_sync(0xffffffffu, shrink, 8 * t + 4);
#pragma unroll
    for (int j = 0; j < CHUNKS * 2; j++) {
        sight.seen[j][0] *= first;
        sight.seen[j][1] *= second;
        sight.seen[j][2] *= first;
        sight.seen[j][3] *= second;
    }
}

__device__ inline void look(Sight& sight, const Tokens& tokens, const u32 (&weights)[2]) {
#pragma unroll
    for (int j = 0; j < CHUNKS * 2; j++) {
        // The upper rows of an instruction have the other half of a head, or of a vector.
        constexpr int UPPER = VECTORS - 1;
        int k = DIM == 128 ? j : j + 4;
        u32 a0 = pair(tokens.values[0][0], tokens.values[1][0], j);
        u32 a1 = pair(tokens.values[0][UPPER], tokens.values[1][UPPER], k);
        u32 a2 = pair(tokens.values[2][0], tokens.values[3][0], j);
        u32 a3 = pair(tokens.values[2][UPPER], tokens.values[3][UPPER], k);
        multiply(sight.seen[j], a0, a1, a2, a3, weights[0], weights[1]);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
lone_attend(const uint4* qkv, unsigned short* out, const uint4* query_norm, const uint4* key_norm,
            float query_epsilon, float key_epsilon, const float* rotations, const int* table,
            const i64* table_row, const i64* kv_len, const i64* position, const i64* slot,
            unsigned short* keys, unsigned short* values, float scale, i64 rotation_stride,
            i64 table_stride, i64 key_stride, i64 key_head_stride, i64 value_stride,
            i64 value_head_stride) {
    extern __shared__ uint4 memory[];
    Shared& shared = *(Shared*)memory;
    int rank = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int g = lane / 4, t = lane % 4;
    // The first CTA's memory must exist before another one stores there.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

    i64 length = *kv_len;
    int count = length > 1 ? (int)length - 1 : 0;
    int share = (count + CLUSTER - 1) / CLUSTER;
    int begin = rank * share, end = min(begin + share, count);
    unsigned short* head_keys = keys + kv_head * key_head_stride;
    unsigned short* head_values = values + kv_head * value_head_stride;
    Stored stored = {table + *table_row * table_stride, head_keys, head_values, key_stride,
                     value_stride};
    constexpr int STRIDE = WARPS * TOKENS;
    int at = begin + warp * TOKENS;
    Tokens tokens;
    int places = place(stored, at + lane % 16, end);
    load_keys(tokens, stored, places, g, t);
    load_values(tokens, stored, places, g, t);
    // Places of the next tokens are known before these are seen.
    places = place(stored, at + STRIDE + lane % 16, end);

    int member = thread % LANES, team = thread / LANES;
    const float* row = rotations + *position * rotation_stride + (member * 8) % HALF;
    Eight cosine = load_floats(row), sine = load_floats(row + HALF);
    i64 own = *slot;

    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // A team turns a head: a query head of the group, or the key.
    int query_heads = kv_heads * GROUP;
    uint4 value = qkv[(query_heads + kv_heads + kv_head) * LANES + member];
    constexpr int TOGETHER = 32 / LANES;
    for (int head = team; head / TOGETHER <= GROUP / TOGETHER; head += TEAMS) {
        bool is_key = head >= GROUP;
        uint4 x = qkv[(is_key ? query_heads + kv_head : kv_head * GROUP + head) * LANES + member];
        x = turn(x, is_key ? key_norm : query_norm, is_key ? key_epsilon : query_epsilon, cosine,
                 sine, member);
        if (head < GROUP) shared.queries[head][member] = x;
        if (head == GROUP) shared.key[member] = x;
    }
    if (rank == 0 && team == 0) {
        shared.value[member] = value;
        *(uint4*)(head_values + own * value_stride + member * 8) = value;
    }
    __syncthreads();
    uint4 queries[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        queries[c] = g < GROUP ? shared.queries[g][4 * c + t] : make_uint4(0, 0, 0, 0);

    Sight sight;
    sight.largest = LOWEST;
    sight.total = 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNKS * 2; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) sight.seen[j][n] = 0.0f;
    float scores[2][2];
    u32 weights[2];
    for (; at < end; at += STRIDE) {
        // Registers are loaded anew as soon as they have been used.
        score(scores, queries, tokens);
        load_keys(tokens, stored, places, g, t);
        weigh(sight, scores, weights, end - at, scale, t);
        look(sight, tokens, weights);
        load_values(tokens, stored, places, g, t);
        places = place(stored, at + 2 * STRIDE + lane % 16, end);
    }
    // The last warp has the fewest tokens.
    if (rank == 0 && warp == WARPS - 1) {
        if (lane < LANES)
            *(uint4*)(head_keys + own * key_stride + lane * 8) = shared.key[lane];
        Tokens fresh = {};
        if (g == 0)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) fresh.keys[0][c] = shared.key[4 * c + t];
        if (t == 0)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) fresh.values[0][v] = shared.value[8 * v + g];
        score(scores, queries, fresh);
        weigh(sight, scores, weights, 1, scale, t);
        look(sight, fresh, weights);
    }

    // The warps of the CTA, then the CTAs of the cluster.
    sight.total += __shfl_xor_sync(0xffffffffu, sight.total, 1);
    sight.total += __shfl_xor_sync(0xffffffffu, sight.total, 2);
    if (t == 0 && g < GROUP) {
        shared.warps.largest[warp][g] = sight.largest;
        shared.warps.total[warp][g] = sight.total;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int head = 2 * t + n % 2;
#pragma unroll
        for (int j = 0; j < CHUNKS * 2; j += 4) {
            float4 four = make_float4(sight.seen[j][n], sight.seen[j + 1][n], sight.seen[j + 2][n],
                                      sight.seen[j + 3][n]);
            int first = head * DIM + dim_of(j, n / 2, g);
            if (head < GROUP) shared.warps.seen[warp][first / 4] = four;
        }
    }
    __syncthreads();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    for (int four = thread; four < ELEMENTS / 4; four += THREADS) {
        Merged all = merge(shared.warps, four);
        store_remote(at_first(&shared.ctas.seen[rank][four]), all.seen);
        if (four % (DIM / 4) == 0) {
            int head = four / (DIM / 4);
            store_remote(at_first(&shared.ctas.largest[rank][head]), all.largest);
            store_remote(at_first(&shared.ctas.total[rank][head]), all.total);
        }
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (rank > 0) return;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int four = thread; four < ELEMENTS / 4; four += THREADS) {
        Merged all = merge(shared.ctas, four);
        float share = 1.0f / all.total;
        ((uint2*)out)[kv_head * (ELEMENTS / 4) + four] =
            make_uint2(narrow(all.seen.x * share, all.seen.y * share),
                       narrow(all.seen.z * share, all.seen.w * share));
    }
}
