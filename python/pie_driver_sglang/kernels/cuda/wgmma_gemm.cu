// The product of the rows of a batch and a matrix, on the matrix unit of a warpgroup (sm_90a).
//
// Outputs are the first dimension of the matrix instruction, rows the second: a batch has as many
// rows as it has. A CTA has a tile of outputs. One warp asks the copy engine (TMA) for weights and
// rows, stage by stage; each warpgroup multiplies 64 outputs by all rows. Another warp finds the rows'
// scales. What the first stages need of the weights is on its way before the previous kernel has ended.
//
// In a cluster, ACROSS CTAs have the same inputs and other outputs: each fetches a share of the rows
// for all of them, because the L2 cache has no time to give every CTA all rows. PARTS of them divide
// the inputs; each is sent all sums of a share of the rows, and adds them in a fixed order.
//
// Constants from outside: FP8 (else 16 bits), BF16 (of rows or outputs of 16 bits; FP16 if 0), ROWS
// (8, 16 or a multiple of 32, at most 256), WARPGROUPS, ACROSS, PARTS, SLABS (of 128 bytes of each row
// of a stage), STAGES, KIND (0 stores, 1 joins a gate and an up projection, 2 adds), NORMED.

typedef unsigned long long u64;

constexpr bool JOINS = KIND == 1, ADDS = KIND == 2, SCALES = FP8 || NORMED;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + (SCALES ? 64 : 32);
constexpr int CLUSTER = ACROSS * PARTS;
constexpr int TILE = WARPGROUPS * 64;
constexpr int SLAB = 128, OF_SLAB = FP8 ? 128 : 64;
constexpr int WEIGHT_BYTES = TILE * SLAB, ROW_BYTES = ROWS * SLAB;
constexpr int STAGE_BYTES = SLABS * (WEIGHT_BYTES + ROW_BYTES);
constexpr int SHARE = ROWS / ACROSS;
constexpr int BLOCKS = ROWS / 8, OWN_BLOCKS = (BLOCKS + PARTS - 1) / PARTS;
constexpr int OUTPUTS = JOINS ? TILE / 2 : TILE;

static_assert(ROWS == 8 || ROWS == 16 || ROWS % 32 == 0 && ROWS <= 256, "no such rows");
static_assert(ROWS % (ACROSS * 8) == 0, "rows are not divided");
static_assert(PARTS == 1 || PARTS * OWN_BLOCKS * CONSUMERS * 16 <= STAGES * STAGE_BYTES,
              "sums have no room");

struct alignas(64) Map { unsigned char bytes[128]; };

struct Shared {
    u64 full[STAGES], empty[STAGES], summed;
    float of_rows[ROWS];
    float squares[CONSUMERS / 32][OWN_BLOCKS * 8];
};

__device__ inline u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same place in the shared memory of another CTA.
__device__ inline u32 remote(u32 at, u32 rank) {
    u32 out;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(at), "r"(rank));
    return out;
}

// All threads of a cluster. No memory is made visible: a fence of that scope takes a microsecond.
__device__ inline void cluster_meets() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ inline void consumers_meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ inline void begin(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ inline void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// Weights of a slab: every one is read once.
__device__ inline void fetch_weights(u32 to, const Map* map, int input, int tile, u32 barrier,
                                     u64 policy) {
    if (JOINS) {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to), "l"(map),
                     "r"(input), "r"(0), "r"(tile * (TILE / 16)), "r"(barrier), "l"(policy) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(input),
                     "r"(tile * TILE), "r"(barrier), "l"(policy) : "memory");
    }
}

// A share of the rows of a slab, for all CTAs that want it.
__device__ inline void fetch_rows(u32 to, const Map* map, int input, int row, u32 barrier, u32 ctas) {
    if (ACROSS > 1) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map),
                     "r"(input), "r"(row), "r"(barrier), "h"((unsigned short)ctas) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(input), "r"(row),
                     "r"(barrier) : "memory");
    }
}

// Where an operand is: 8 rows of 128 bytes make a block, whose 16-byte words are swizzled.
__device__ inline u64 operand(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define TEXT(x) #x
#define NUMBER(x) TEXT(x)
#define NAMES_OF_8 "%0,%1,%2,%3"
#define NAMES_OF_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES1 "," "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES2 "," "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES3 "," "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES4 "," "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES5 "," "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES6 "," "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES7 "," "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#if ROWS == 8
#define NAMES NAMES_OF_8
#define BOTH "%4, %5"
#define ADDED "%6"
#define ALL_SUMS FOUR(0)
#elif ROWS == 16
#define NAMES NAMES_OF_16
#define BOTH "%8, %9"
#define ADDED "%10"
#define ALL_SUMS FOUR(0), FOUR(4)
#elif ROWS == 32
#define NAMES NAMES0
#define BOTH "%16, %17"
#define ADDED "%18"
#define ALL_SUMS SUMS(0)
#elif ROWS == 64
#define NAMES NAMES0 NAMES1
#define BOTH "%32, %33"
#define ADDED "%34"
#define ALL_SUMS SUMS(0), SUMS(16)
#elif ROWS == 96
#define NAMES NAMES0 NAMES1 NAMES2
#define BOTH "%48, %49"
#define ADDED "%50"
#define ALL_SUMS SUMS(0), SUMS(16), SUMS(32)
#elif ROWS == 128
#define NAMES NAMES0 NAMES1 NAMES2 NAMES3
#define BOTH "%64, %65"
#define ADDED "%66"
#define ALL_SUMS SUMS(0), SUMS(16), SUMS(32), SUMS(48)
#elif ROWS == 160
#define NAMES NAMES0 NAMES1 NAMES2 NAMES3 NAMES4
#define BOTH "%80, %81"
#define ADDED "%82"
#define ALL_SUMS SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64)
#elif ROWS == 192
#define NAMES NAMES0 NAMES1 NAMES2 NAMES3 NAMES4 NAMES5
#define BOTH "%96, %97"
#define ADDED "%98"
#define ALL_SUMS SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64), SUMS(80)
#elif ROWS == 224
#define NAMES NAMES0 NAMES1 NAMES2 NAMES3 NAMES4 NAMES5 NAMES6
#define BOTH "%112, %113"
#define ADDED "%114"
#define ALL_SUMS SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64), SUMS(80), SUMS(96)
#else
#define NAMES NAMES0 NAMES1 NAMES2 NAMES3 NAMES4 NAMES5 NAMES6 NAMES7
#define BOTH "%128, %129"
#define ADDED "%130"
#define ALL_SUMS SUMS(0), SUMS(16), SUMS(32), SUMS(48), SUMS(64), SUMS(80), SUMS(96), SUMS(112)
#endif
#if FP8
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n" NUMBER(ROWS) "k32.f32.e4m3.e4m3 "
#define ENDING ", added, 1, 1;}"
#elif BF16
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n" NUMBER(ROWS) "k16.f32.bf16.bf16 "
#define ENDING ", added, 1, 1, 0, 0;}"
#else
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n" NUMBER(ROWS) "k16.f32.f16.f16 "
#define ENDING ", added, 1, 1, 0, 0;}"
#endif

// Products of 32 bytes of each of 64 outputs and of all rows; adds them, or begins with them.
__device__ inline void multiply(float (&sums)[ROWS / 2], u64 weights, u64 rows, u32 adds) {
    asm volatile("{.reg .pred added;\nsetp.ne.b32 added, " ADDED ", 0;\n"
                 INSTRUCTION "{" NAMES "}, " BOTH ENDING
                 : ALL_SUMS : "l"(weights), "l"(rows), "r"(adds));
}

__device__ inline float lower(u32 x) { return widen((unsigned short)x); }
__device__ inline float upper(u32 x) { return widen((unsigned short)(x >> 16)); }

// Transposes 8 by 8 numbers of 16 bits, of which a thread has two neighbours of a row.
__device__ inline u32 transposed(u32 x) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

__device__ inline float silu(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// The sum of some numbers, of which a row has few: all are asked for at once.
__device__ inline float total(const float* numbers, int count) {
    float out = 0.0f;
    if (count % 4 == 0) {
#pragma unroll 16
        for (int i = 0; i < count / 4; i++) {
            float4 four = ((const float4*)numbers)[i];
            out += four.x + four.y + four.z + four.w;
        }
    } else {
#pragma unroll 16
        for (int i = 0; i < count; i++) out += numbers[i];
    }
    return out;
}

// What the rows' sums are to be multiplied by.
__device__ inline void find_scales(Shared& shared, const float* of_rows, int count, int square_count,
                                   float width, float epsilon) {
    for (int row = threadIdx.x % 32; row < ROWS; row += 32) {
        float scale = 0.0f;
        if (row < count) {
            if (FP8) {
                scale = of_rows[row];
            } else {
                float squares = total(of_rows + (long long)row * square_count, square_count);
                scale = rsqrtf(squares / width + epsilon);
            }
        }
        shared.of_rows[row] = scale;
    }
    asm volatile("bar.arrive 2, %0;" ::"n"(CONSUMERS + 32) : "memory");
}

// For the scales of rows.
__device__ inline void wait_for_scales() {
    if (SCALES) asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS + 32) : "memory");
}

// The place of a thread in the results.
struct Place {
    unsigned short* out;  // Of its warp's outputs, the first row.
    int outputs, count, lane;
    float upper_scale, lower_scale;  // Of its two outputs.
};

// What is to be added to, of 8 rows and 16 outputs of a warp.
struct Before {
    u32 upper, lower;
};

__device__ inline Before load_before(const Place& at, int block) {
    int row = block * 8 + at.lane / 4;
    if (row >= at.count) return {0, 0};
    const u32* from = (const u32*)(at.out + (long long)row * at.outputs + at.lane % 4 * 2);
    return {from[0], from[4]};
}

// Ends 8 rows of a warp's outputs; returns the sum of squares of what it has of its row.
__device__ inline float finish(const Shared& shared, const Place& at, int block, float4 sums,
                               const Before& before) {
    int lane = at.lane, row = block * 8 + lane / 4;
    if (SCALES) {
        float first = shared.of_rows[block * 8 + lane % 4 * 2];
        float second = shared.of_rows[block * 8 + lane % 4 * 2 + 1];
        sums.x *= first * at.upper_scale;
        sums.y *= second * at.upper_scale;
        sums.z *= first * at.lower_scale;
        sums.w *= second * at.lower_scale;
    }
    u32* to = (u32*)(at.out + (long long)row * at.outputs + lane % 4 * 2);
    if (JOINS) {
        // Rounded as the output of a product would be.
        u32 gate = narrow(sums.x, sums.y), up = narrow(sums.z, sums.w);
        u32 own = transposed(narrow(silu(lower(gate), lower(up)), silu(upper(gate), upper(up))));
        if (row < at.count) *to = own;
        return 0.0f;
    }
    if (ADDS) {
        u32 high = transposed(before.upper), low = transposed(before.lower);
        sums.x += lower(high);
        sums.y += upper(high);
        sums.z += lower(low);
        sums.w += upper(low);
    }
    u32 high = transposed(narrow(sums.x, sums.y)), low = transposed(narrow(sums.z, sums.w));
    if (row >= at.count) return 0.0f;
    to[0] = high;
    to[4] = low;
    float a = lower(high), b = upper(high), c = lower(low), d = upper(low);
    return a * a + b * b + c * c + d * d;
}

// Keeps a sum of squares of four threads.
__device__ inline void keep(Shared& shared, int own_block, float squares) {
    int lane = threadIdx.x % 32;
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    if (lane % 4 == 0) shared.squares[threadIdx.x / 32][own_block * 8 + lane / 4] = squares;
}

// Gives the sums of each block of rows to the CTA that has them in all parts.
__device__ inline void send(Shared& shared, u32 stages, u32 part, u32 across,
                            const float (&sums)[ROWS / 2]) {
#pragma unroll
    for (int owner = 0; owner < PARTS; owner++) {
        u32 rank = owner * ACROSS + across, barrier = remote(address(&shared.summed), rank);
        u32 to = remote(stages + (part * OWN_BLOCKS * CONSUMERS + threadIdx.x) * 16, rank);
#pragma unroll
        for (int i = 0; i < OWN_BLOCKS && owner * OWN_BLOCKS + i < BLOCKS; i++) {
            const float* from = sums + (owner * OWN_BLOCKS + i) * 4;
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],"
                         " {%1, %2, %3, %4}, [%5];" ::"r"(to + i * (CONSUMERS * 16)),
                         "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(barrier)
                         : "memory");
        }
    }
}

// The numbers of a thread in one of its CTA's blocks of rows: all parts, in their order.
__device__ inline float4 received(u32 stages, int block) {
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        u32 at = stages + ((part * OWN_BLOCKS + block) * CONSUMERS + threadIdx.x) * 16;
        float4 found;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(at) : "memory");
        out.x += found.x;
        out.y += found.y;
        out.z += found.z;
        out.w += found.w;
    }
    return out;
}

// What a CTA has of the inputs.
struct Range {
    int first, steps;  // Stages.
};

// Asks for all stages, the first ones' weights at once.
struct Producer {
    Shared& shared;
    u32 stages;
    const Map *weights, *rows;
    int tile;
    u32 across, part;
    Range range;
    u64 policy;

    __device__ inline u32 stage(int step) { return stages + step % STAGES * STAGE_BYTES; }

    __device__ inline void ask_weights(int step) {
        u32 barrier = address(&shared.full[step % STAGES]);
        expect(barrier, STAGE_BYTES);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            int input = ((range.first + step) * SLABS + slab) * OF_SLAB;
            fetch_weights(stage(step) + slab * WEIGHT_BYTES, weights, input, tile, barrier, policy);
        }
    }

    __device__ inline void ask_rows(int step) {
        u32 barrier = address(&shared.full[step % STAGES]);
        u32 to = stage(step) + SLABS * WEIGHT_BYTES + across * SHARE * SLAB;
        u32 ctas = ((1u << ACROSS) - 1) << part * ACROSS;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            int input = ((range.first + step) * SLABS + slab) * OF_SLAB;
            fetch_rows(to + slab * ROW_BYTES, rows, input, across * SHARE, barrier, ctas);
        }
    }

    __device__ inline void ask_first() {
        for (int step = 0; step < min(STAGES, range.steps); step++) ask_weights(step);
    }

    __device__ inline void ask_all() {
        for (int step = 0; step < range.steps; step++) {
            if (step >= STAGES) {
                wait(address(&shared.empty[step % STAGES]), (step / STAGES - 1) & 1);
                ask_weights(step);
            }
            ask_rows(step);
        }
    }
};

// Multiplies all stages, one of them while the next one is waited for.
__device__ inline void consume(Shared& shared, u32 stages, int steps, u32 part,
                               float (&sums)[ROWS / 2]) {
    int group = threadIdx.x / 128, thread = threadIdx.x % 128;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        int number = step % STAGES;
        u32 at = stages + number * STAGE_BYTES;
        u64 weights = operand(at + group * 64 * SLAB), rows = operand(at + SLABS * WEIGHT_BYTES);
        wait(address(&shared.full[number]), step / STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                multiply(sums, weights + (slab * WEIGHT_BYTES + i * 32) / 16,
                         rows + (slab * ROW_BYTES + i * 32) / 16, step + slab + i);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        // The step before has ended: whoever has more for its stage may write it.
        int ended = step - 1;
        if (ended >= 0 && ended + STAGES < steps && thread < ACROSS) {
            arrive(remote(address(&shared.empty[ended % STAGES]), part * ACROSS + thread));
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Stores a tile, or what a part has of it.
__device__ inline void end_tile(Shared& shared, u32 stages, const float (&sums)[ROWS / 2],
                                const Place& at, u32 across, u32 part) {
    int own = part * OWN_BLOCKS;
    Before before[PARTS > 1 ? OWN_BLOCKS : 1];
    if (PARTS > 1) {
#pragma unroll
        for (int i = 0; ADDS && i < OWN_BLOCKS; i++) before[i] = load_before(at, own + i);
        // All CTAs have read what the sums are stored over.
        cluster_meets();
        send(shared, stages, part, across, sums);
        wait(address(&shared.summed), 0);
    }
    wait_for_scales();
#pragma unroll
    for (int i = 0; i < OWN_BLOCKS; i++) {
        if (own + i >= BLOCKS) break;
        float4 mine;
        if (PARTS > 1) {
            mine = received(stages, i);
        } else {
            mine = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
            if (ADDS) before[0] = load_before(at, i);
        }
        float squares = finish(shared, at, own + i, mine, before[PARTS > 1 ? i : 0]);
        if (ADDS) keep(shared, i, squares);
    }
}

// Stores the sums of squares that a CTA has of its rows.
__device__ inline void leave_squares(const Shared& shared, float* left, int own_row, int count,
                                     int tiles, int tile) {
    consumers_meet();
    for (int i = threadIdx.x; i < OWN_BLOCKS * 8; i += CONSUMERS) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < CONSUMERS / 32; w++) total += shared.squares[w][i];
        if (own_row + i < count) left[(long long)(own_row + i) * tiles + tile] = total;
    }
}

__device__ inline void begin_barriers(Shared& shared, u32 part) {
    for (int i = 0; i < STAGES; i++) {
        begin(address(&shared.full[i]), 1);
        begin(address(&shared.empty[i]), ACROSS * WARPGROUPS);
    }
    if (PARTS > 1) {
        begin(address(&shared.summed), 1);
        int blocks = max(0, min(OWN_BLOCKS, BLOCKS - (int)part * OWN_BLOCKS));
        expect(address(&shared.summed), blocks * PARTS * CONSUMERS * 16);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
batch_product(const __grid_constant__ Map weights, const __grid_constant__ Map rows,
              const float* of_weights, const float* of_rows, unsigned short* out, float* left,
              float epsilon, int count, int outputs, int inputs, int square_count) {
    extern __shared__ unsigned char dynamic[];
    __shared__ Shared shared;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    u32 rank = CLUSTER == 1 ? 0 : rank_in_cluster(), across = rank % ACROSS, part = rank / ACROSS;
    int tile = blockIdx.x / CLUSTER * ACROSS + across;
    u32 stages = (address(dynamic) + 1023) & ~1023u;
    int all = inputs / (SLABS * OF_SLAB);
    Range range = {(int)part * all / PARTS, 0};
    range.steps = ((int)part + 1) * all / PARTS - range.first;
    if (thread == 0) begin_barriers(shared, part);
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    Producer producer = {shared, stages, &weights, &rows, tile, across, part, range, policy};
    bool asks = thread == CONSUMERS;
    if (asks) producer.ask_first();
    __syncwarp();
    // Their barriers are there before others arrive at them.
    if (ACROSS > 1) cluster_meets();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp >= CONSUMERS / 32) {
        if (asks) producer.ask_all();
        if (warp > CONSUMERS / 32) {
            find_scales(shared, of_rows, count, square_count, (float)inputs, epsilon);
        }
        __syncwarp();
        if (PARTS > 1) cluster_meets();
    } else {
        float sums[ROWS / 2];
        int first = tile * OUTPUTS + warp * (JOINS ? 8 : 16);
        Place at = {out + first, outputs, count, lane, 1.0f, 1.0f};
        if (FP8) {
            at.upper_scale = of_weights[first + lane / 4];
            at.lower_scale = of_weights[first + lane / 4 + (JOINS ? outputs : 8)];
        }
        consume(shared, stages, range.steps, part, sums);
        end_tile(shared, stages, sums, at, across, part);
        if (ADDS && left) {
            leave_squares(shared, left, part * OWN_BLOCKS * 8, count, outputs / TILE, tile);
        }
    }
}
