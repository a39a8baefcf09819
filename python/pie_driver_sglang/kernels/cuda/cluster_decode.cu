// Attention of a decode step of one token, fused with q/k norm, rotary embedding and the KV cache store.
//
// A cluster of CTAs attends for one KV head. Each CTA has a range of the stored tokens, and loads its first
// keys and values before the previous kernel (the QKV projection) has ended. Partial softmax results are
// merged in the distributed shared memory of the cluster's first CTA, instead of in global memory. The first
// CTA also has the new token, and stores it.
//
// A warp processes 16 tokens at once by mma.m16n8k16. Operands are loaded from global memory into the
// registers of the fragment layout: a score does not depend on the order of a head's dimensions, nor an
// output on that of its rows.
//
//     scores[heads, tokens] = queries[heads, dims] x keys[dims, tokens]      8 tokens an instruction
//     values[dims, heads]   = values[dims, tokens] x weights[tokens, heads]  16 dims an instruction
//
// In what follows a thread is (g, t) = (lane / 4, lane % 4), as in PTX's description of fragments.
//
// Macros: BF16 (FP16 if 0), DIM (64 or 128), GROUP (query heads of a KV head, at most 8), CLUSTER (CTAs),
// THREADS, QK_NORM.

typedef long long i64;

constexpr int LANES = DIM / 8;
constexpr int TEAMS = THREADS / LANES;
constexpr int WARPS = THREADS / 32;
constexpr int HALF = DIM / 2;
constexpr int ELEMENTS = GROUP * DIM;
constexpr int TOKENS = 16;
constexpr int CHUNKS = DIM / 32;
constexpr int VECTORS = DIM / 64;
constexpr float MIN_SCORE = -1e30f;

static_assert((DIM == 64 || DIM == 128) && GROUP <= 8, "unsupported DIM or GROUP");

// Partial softmax results of warps or CTAs: weighted values, maximum score and sum of weights.
template <int COUNT>
struct Partials {
    float4 values[COUNT][ELEMENTS / 4];
    float max_score[COUNT][GROUP];
    float total[COUNT][GROUP];
};

struct Shared {
    uint4 queries[GROUP][LANES];
    uint4 key[LANES];
    uint4 value[LANES];
    Partials<WARPS> warps;
    Partials<CLUSTER> ctas;
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

// Sum over a team of threads, in each of them.
__device__ inline float team_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// RMSNorm (with QK_NORM) and NeoX rotary embedding of a head.
__device__ inline uint4 norm_rope(uint4 head, const uint4* weight, float epsilon, const Eight& cosine,
                             const Eight& sine, int lane) {
    Eight x = widen(head);
#if QK_NORM
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x.x[i] * x.x[i];
    float rstd = rsqrtf(team_sum(squares) / DIM + epsilon);
    Eight w = widen(weight[lane]);
#pragma unroll
    for (int i = 0; i < 8; i++) x.x[i] = x.x[i] * rstd * w.x[i];
    // Rounded as the output of a norm kernel would be.
    x = widen(narrow(x));
#endif
    Eight rotated;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float other = __shfl_xor_sync(0xffffffffu, x.x[i], LANES / 2);
        rotated.x[i] = x.x[i] * cosine.x[i] + (lane < LANES / 2 ? -other : other) * sine.x[i];
    }
    return narrow(rotated);
}

__device__ inline Eight load_floats(const float* from) {
    float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ inline u32 shared_address(const void* at) {
    return (u32)__cvta_generic_to_shared(at);
}

// The address of `at` in the shared memory of the cluster's first CTA.
__device__ inline u32 map_to_leader(const void* at) {
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

// Four neighbouring dims of a head, merged; weights are relative to the maximum score.
struct Merged {
    float4 values;
    float max_score, total;
};

template <int COUNT>
__device__ inline Merged merge(const Partials<COUNT>& parts, int quad) {
    int head = quad / (DIM / 4);
    float maxima[COUNT];
    Merged all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), MIN_SCORE, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        maxima[i] = parts.max_score[i][head];
        all.max_score = fmaxf(all.max_score, maxima[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float weight = exp2_of(maxima[i] - all.max_score);
        float4 part = parts.values[i][quad];
        all.values.x += weight * part.x;
        all.values.y += weight * part.y;
        all.values.z += weight * part.z;
        all.values.w += weight * part.w;
        all.total += weight * parts.total[i][head];
    }
    return all;
}

__device__ inline void mma_m16n8k16(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
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

// A thread's keys and values of 16 tokens.
struct Tokens {
    // Of tokens g and g + 8: 8 dims from 32 c + 8 t on.
    uint4 keys[2][CHUNKS];
    // Of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: 8 dims from 64 v + 8 g on.
    uint4 values[4][VECTORS];
};

// The KV cache of a KV head.
struct KvHead {
    const int* slots;
    const unsigned short* keys;
    const unsigned short* values;
    i64 key_stride, value_stride;
};

__device__ inline int load_slot(const KvHead& kv, int token, int end) {
    return token < end ? kv.slots[token] : -1;
}

__device__ inline uint4 load_if(int slot, const unsigned short* from, i64 stride, int dim) {
    // Slots that were never written may hold NaNs.
    return slot < 0 ? make_uint4(0, 0, 0, 0) : *(const uint4*)(from + slot * stride + dim);
}

// `slot` is that of token lane % 16, or -1.
__device__ inline void load_keys(Tokens& tokens, const KvHead& kv, int slot, int g, int t) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int own = __shfl_sync(0xffffffffu, slot, g + 8 * i);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            tokens.keys[i][c] = load_if(own, kv.keys, kv.key_stride, 32 * c + 8 * t);
    }
}

__device__ inline void load_values(Tokens& tokens, const KvHead& kv, int slot, int g, int t) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int own = __shfl_sync(0xffffffffu, slot, 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            tokens.values[i][v] = load_if(own, kv.values, kv.value_stride, 64 * v + 8 * g);
    }
}

// Online softmax of a warp.
struct OnlineSoftmax {
    // Of head g: the maximum score, and this thread's part of the sum of weights.
    float max_score, total;
    // Of heads 2 t and 2 t + 1: see `dim_of`.
    float values[CHUNKS * 2][4];
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
        // Two accumulators halve the dependency chain.
        float sums[2][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint4 q = queries[c], k = tokens.keys[i][c];
            mma_m16n8k16(sums[0], q.x, 0, q.y, 0, k.x, k.y);
            mma_m16n8k16(sums[1], q.z, 0, q.w, 0, k.z, k.w);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) scores[i][n] = sums[0][n] + sums[1][n];
    }
}

// Turns scores into weights, in the fragment layout of the next MMA; `valid` tokens exist.
__device__ inline void update_softmax(OnlineSoftmax& softmax, const float (&scores)[2][2], u32 (&weights)[2],
                             int valid, float scale, int t) {
    float x[2][2], max_score = softmax.max_score;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            x[i][n] = 8 * i + 2 * t + n < valid ? scores[i][n] * scale : MIN_SCORE;
            max_score = fmaxf(max_score, x[i][n]);
        }
    max_score = fmaxf(max_score, __shfl_xor_sync(0xffffffffu, max_score, 1));
    max_score = fmaxf(max_score, __shfl_xor_sync(0xffffffffu, max_score, 2));
    float rescale = exp2_of(softmax.max_score - max_score);
    softmax.max_score = max_score;
    softmax.total *= rescale;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            x[i][n] = 8 * i + 2 * t + n < valid ? exp2_of(x[i][n] - max_score) : 0.0f;
            softmax.total += x[i][n];
        }
        weights[i] = narrow(x[i][0], x[i][1]);
    }
    float first = __shfl_sync(0xffffffffu, rescale, 8 * t);
    float second = __shfl_sync(0xffffffffu, rescale, 8 * t + 4);
#pragma unroll
    for (int j = 0; j < CHUNKS * 2; j++) {
        softmax.values[j][0] *= first;
        softmax.values[j][1] *= second;
        softmax.values[j][2] *= first;
        softmax.values[j][3] *= second;
    }
}

__device__ inline void accumulate_values(OnlineSoftmax& softmax, const Tokens& tokens,
                                         const u32 (&weights)[2]) {
#pragma unroll
    for (int j = 0; j < CHUNKS * 2; j++) {
        // The upper rows of the MMA have the other half of a head, or of a vector.
        constexpr int UPPER = VECTORS - 1;
        int k = DIM == 128 ? j : j + 4;
        u32 a0 = pair(tokens.values[0][0], tokens.values[1][0], j);
        u32 a1 = pair(tokens.values[0][UPPER], tokens.values[1][UPPER], k);
        u32 a2 = pair(tokens.values[2][0], tokens.values[3][0], j);
        u32 a3 = pair(tokens.values[2][UPPER], tokens.values[3][UPPER], k);
        mma_m16n8k16(softmax.values[j], a0, a1, a2, a3, weights[0], weights[1]);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
cluster_decode(const uint4* qkv, unsigned short* out, const uint4* query_norm, const uint4* key_norm,
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
    // The first CTA must run before another one stores into its memory.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

    i64 length = *kv_len;
    int count = length > 1 ? (int)length - 1 : 0;
    int tokens_per_cta = (count + CLUSTER - 1) / CLUSTER;
    int begin = rank * tokens_per_cta, end = min(begin + tokens_per_cta, count);
    unsigned short* head_keys = keys + kv_head * key_head_stride;
    unsigned short* head_values = values + kv_head * value_head_stride;
    KvHead kv = {table + *table_row * table_stride, head_keys, head_values, key_stride,
                     value_stride};
    constexpr int STRIDE = WARPS * TOKENS;
    int at = begin + warp * TOKENS;
    Tokens tokens;
    int slots_ahead = load_slot(kv, at + lane % 16, end);
    load_keys(tokens, kv, slots_ahead, g, t);
    load_values(tokens, kv, slots_ahead, g, t);
    // Slots are loaded one iteration ahead.
    slots_ahead = load_slot(kv, at + STRIDE + lane % 16, end);

    int team_lane = thread % LANES, team = thread / LANES;
    const float* row = rotations + *position * rotation_stride + (team_lane * 8) % HALF;
    Eight cosine = load_floats(row), sine = load_floats(row + HALF);
    i64 new_slot = *slot;

    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // A team of threads rotates a head: a query head of the group, or the key.
    int query_heads = kv_heads * GROUP;
    uint4 value = qkv[(query_heads + kv_heads + kv_head) * LANES + team_lane];
    constexpr int TOGETHER = 32 / LANES;
    for (int head = team; head / TOGETHER <= GROUP / TOGETHER; head += TEAMS) {
        bool is_key = head >= GROUP;
        uint4 x = qkv[(is_key ? query_heads + kv_head : kv_head * GROUP + head) * LANES + team_lane];
        x = norm_rope(x, is_key ? key_norm : query_norm, is_key ? key_epsilon : query_epsilon, cosine,
                 sine, team_lane);
        if (head < GROUP) shared.queries[head][team_lane] = x;
        if (head == GROUP) shared.key[team_lane] = x;
    }
    if (rank == 0 && team == 0) {
        shared.value[team_lane] = value;
        *(uint4*)(head_values + new_slot * value_stride + team_lane * 8) = value;
    }
    __syncthreads();
    uint4 queries[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        queries[c] = g < GROUP ? shared.queries[g][4 * c + t] : make_uint4(0, 0, 0, 0);

    OnlineSoftmax softmax;
    softmax.max_score = MIN_SCORE;
    softmax.total = 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNKS * 2; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) softmax.values[j][n] = 0.0f;
    float scores[2][2];
    u32 weights[2];
    for (; at < end; at += STRIDE) {
        // Registers are reloaded as soon as they have been used.
        score(scores, queries, tokens);
        load_keys(tokens, kv, slots_ahead, g, t);
        update_softmax(softmax, scores, weights, end - at, scale, t);
        accumulate_values(softmax, tokens, weights);
        load_values(tokens, kv, slots_ahead, g, t);
        slots_ahead = load_slot(kv, at + 2 * STRIDE + lane % 16, end);
    }
    // The last warp has the fewest tokens.
    if (rank == 0 && warp == WARPS - 1) {
        if (lane < LANES)
            *(uint4*)(head_keys + new_slot * key_stride + lane * 8) = shared.key[lane];
        Tokens new_token = {};
        if (g == 0)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) new_token.keys[0][c] = shared.key[4 * c + t];
        if (t == 0)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) new_token.values[0][v] = shared.value[8 * v + g];
        score(scores, queries, new_token);
        update_softmax(softmax, scores, weights, 1, scale, t);
        accumulate_values(softmax, new_token, weights);
    }

    // Merge the warps of the CTA, then the CTAs of the cluster.
    softmax.total += __shfl_xor_sync(0xffffffffu, softmax.total, 1);
    softmax.total += __shfl_xor_sync(0xffffffffu, softmax.total, 2);
    if (t == 0 && g < GROUP) {
        shared.warps.max_score[warp][g] = softmax.max_score;
        shared.warps.total[warp][g] = softmax.total;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int head = 2 * t + n % 2;
#pragma unroll
        for (int j = 0; j < CHUNKS * 2; j += 4) {
            float4 quad = make_float4(softmax.values[j][n], softmax.values[j + 1][n], softmax.values[j + 2][n],
                                      softmax.values[j + 3][n]);
            int first = head * DIM + dim_of(j, n / 2, g);
            if (head < GROUP) shared.warps.values[warp][first / 4] = quad;
        }
    }
    __syncthreads();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    for (int quad = thread; quad < ELEMENTS / 4; quad += THREADS) {
        Merged all = merge(shared.warps, quad);
        store_remote(map_to_leader(&shared.ctas.values[rank][quad]), all.values);
        if (quad % (DIM / 4) == 0) {
            int head = quad / (DIM / 4);
            store_remote(map_to_leader(&shared.ctas.max_score[rank][head]), all.max_score);
            store_remote(map_to_leader(&shared.ctas.total[rank][head]), all.total);
        }
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (rank > 0) return;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int quad = thread; quad < ELEMENTS / 4; quad += THREADS) {
        Merged all = merge(shared.ctas, quad);
        float inverse = 1.0f / all.total;
        ((uint2*)out)[kv_head * (ELEMENTS / 4) + quad] =
            make_uint2(narrow(all.values.x * inverse, all.values.y * inverse),
                       narrow(all.values.z * inverse, all.values.w * inverse));
    }
}
