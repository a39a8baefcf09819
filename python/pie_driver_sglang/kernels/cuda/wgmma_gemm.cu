// WGMMA GEMM for Hopper (sm_90a): out[rows, outputs] = rows[rows, inputs] x weight[outputs, inputs]^T, with
// an epilogue: scales, then store, SwiGLU, or residual add.
//
// Operands are swapped (outputs are M of the instruction, rows are N), so that few rows are padded little.
// A CTA has a tile of BLOCK_N outputs and all rows. One producer warp issues TMA loads of weights and rows,
// stage by stage; each consumer warpgroup multiplies 64 outputs by all rows. Another warp computes the
// rows' scales. The weights of the first stages are loaded before the previous kernel has ended (PDL).
//
// A cluster has MULTICAST x SPLIT_K CTAs. MULTICAST CTAs have the same inputs and other outputs: each loads
// a share of the rows for all of them by TMA multicast, because the L2 cache cannot deliver all rows to
// every CTA in time. SPLIT_K CTAs divide the inputs; each receives the sums of a share of the rows in
// distributed shared memory, and adds them in a fixed order.
//
// Rows beyond BLOCK_M are further tiles, blockIdx.y. An output is the same chain of WGMMAs over K whatever
// BLOCK_M, WARPGROUPS, MULTICAST, K_ATOMS and STAGES are. SPLIT_K changes its bits, and SQUARE_WARPGROUPS
// those of sums of squares. A CTA may do all splits itself, one after the other, with the same result: where
// there are many tiles, that is faster than a cluster.
//
// Macros: FP8 (else 16 bits), BF16 (dtype of 16-bit rows and outputs; FP16 if 0), BLOCK_M (padded rows: 8,
// 16 or a multiple of 32, at most 256), WARPGROUPS (consumers), MULTICAST, SPLIT_K, K_ATOMS (swizzle atoms
// of 128 bytes of K in a stage), STAGES, EPILOGUE (0 store, 1 SwiGLU, 2 residual add), RMS_NORM (deferred
// RMSNorm from partial sums of squares), SQUARE_WARPGROUPS (whose outputs' squares are one partial sum),
// SEQUENTIAL_SPLITS (in place of SPLIT_K, which is 1 then), SPLIT_ATOMS (splits begin at multiples of so many
// atoms of K: 2, or 1 for an odd number of atoms), BIAS (of outputs, added after the scales; only with 0 store),
// LORA (adapters of rows: lora.cuh continues the sums over their ranks before the epilogue).

typedef unsigned long long u64;

constexpr bool SWIGLU = EPILOGUE == 1, ADD_RESIDUAL = EPILOGUE == 2, SCALES = FP8 || RMS_NORM;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + (SCALES ? 64 : 32);
constexpr int CLUSTER = MULTICAST * SPLIT_K;
constexpr int BLOCK_N = WARPGROUPS * 64;
constexpr int ATOM_BYTES = 128, ATOM_INPUTS = FP8 ? 128 : 64;
constexpr int WEIGHT_BYTES = BLOCK_N * ATOM_BYTES, X_BYTES = BLOCK_M * ATOM_BYTES;
constexpr int STAGE_BYTES = K_ATOMS * (WEIGHT_BYTES + X_BYTES);
constexpr int ROWS_PER_CTA = BLOCK_M / MULTICAST;
constexpr int BLOCKS = BLOCK_M / 8, BLOCKS_PER_SPLIT = (BLOCKS + SPLIT_K - 1) / SPLIT_K;
constexpr int OUT_PER_CTA = SWIGLU ? BLOCK_N / 2 : BLOCK_N;
constexpr int SQUARE_PARTS = WARPGROUPS / SQUARE_WARPGROUPS;
// With adapters registers would keep two CTAs with small stages from sharing an SM.
constexpr int CTAS_PER_SM = LORA && STAGES * STAGE_BYTES <= 100 << 10 ? 2 : 1;
// Row tiles that read a tile of weights one after the other, while it is in L2.
constexpr int ROW_TILES = 8;

static_assert(BLOCK_M == 8 || BLOCK_M == 16 || BLOCK_M % 32 == 0 && BLOCK_M <= 256, "unsupported BLOCK_M");
static_assert(BLOCK_M % (MULTICAST * 8) == 0, "MULTICAST does not divide BLOCK_M");
// Blocks of 8 rows whose residual is loaded at a time.
constexpr int RESIDUAL_BLOCKS = SPLIT_K > 1 || BLOCKS < 8 ? BLOCKS_PER_SPLIT : 8;
static_assert(SPLIT_K == 1 || SEQUENTIAL_SPLITS == 1, "splits of two kinds");
static_assert(!BIAS || EPILOGUE == 0, "a bias with another epilogue");
static_assert(!LORA || !FP8, "adapters of FP8 weights");
static_assert(SPLIT_ATOMS % K_ATOMS == 0, "a stage reaches over the end of a split");
static_assert(SPLIT_K == 1 || SPLIT_K * BLOCKS_PER_SPLIT * CONSUMERS * 16 <= STAGES * STAGE_BYTES,
              "split-K sums exceed the stages");

struct alignas(64) TensorMap { unsigned char bytes[128]; };

struct Shared {
    u64 full[STAGES], empty[STAGES], split_sums_full;
    float row_scales[BLOCK_M];
    float sum_squares[CONSUMERS / 32][BLOCKS_PER_SPLIT * 8];
};

__device__ inline u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The same address in the shared memory of another CTA of the cluster.
__device__ inline u32 map_shared_rank(u32 at, u32 rank) {
    u32 out;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(at), "r"(rank));
    return out;
}

// Cluster barrier without a fence: one of cluster scope takes a microsecond.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ inline void consumer_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ inline void mbarrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ inline void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// TMA load of an atom of weights, evict-first: each weight is read once.
__device__ inline void tma_load_weights(u32 to, const TensorMap* map, int input, int tile, u32 barrier,
                                        u64 policy) {
    if (SWIGLU) {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to), "l"(map),
                     "r"(input), "r"(0), "r"(tile * (BLOCK_N / 16)), "r"(barrier), "l"(policy) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(input),
                     "r"(tile * BLOCK_N), "r"(barrier), "l"(policy) : "memory");
    }
}

// TMA load of a share of the rows of an atom, multicast to `ctas`.
__device__ inline void tma_load_rows(u32 to, const TensorMap* map, int input, int row, u32 barrier,
                                     u32 ctas) {
    if (MULTICAST > 1) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map),
                     "r"(input), "r"(row), "r"(barrier), "h"((unsigned short)ctas) : "memory");
    } else {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(input), "r"(row),
                     "r"(barrier) : "memory");
    }
}

// WGMMA shared memory descriptor: K-major, 128-byte swizzle, 8 rows in a swizzle atom.
__device__ inline u64 smem_descriptor(u32 at) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)
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
#define ACC_4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define ACC_16(i) ACC_4(i), ACC_4(i + 4), ACC_4(i + 8), ACC_4(i + 12)
#if BLOCK_M == 8
#define ACC_REGISTERS NAMES_OF_8
#define DESCRIPTORS "%4, %5"
#define SCALE_D "%6"
#define ACC_OPERANDS ACC_4(0)
#elif BLOCK_M == 16
#define ACC_REGISTERS NAMES_OF_16
#define DESCRIPTORS "%8, %9"
#define SCALE_D "%10"
#define ACC_OPERANDS ACC_4(0), ACC_4(4)
#elif BLOCK_M == 32
#define ACC_REGISTERS NAMES0
#define DESCRIPTORS "%16, %17"
#define SCALE_D "%18"
#define ACC_OPERANDS ACC_16(0)
#elif BLOCK_M == 64
#define ACC_REGISTERS NAMES0 NAMES1
#define DESCRIPTORS "%32, %33"
#define SCALE_D "%34"
#define ACC_OPERANDS ACC_16(0), ACC_16(16)
#elif BLOCK_M == 96
#define ACC_REGISTERS NAMES0 NAMES1 NAMES2
#define DESCRIPTORS "%48, %49"
#define SCALE_D "%50"
#define ACC_OPERANDS ACC_16(0), ACC_16(16), ACC_16(32)
#elif BLOCK_M == 128
#define ACC_REGISTERS NAMES0 NAMES1 NAMES2 NAMES3
#define DESCRIPTORS "%64, %65"
#define SCALE_D "%66"
#define ACC_OPERANDS ACC_16(0), ACC_16(16), ACC_16(32), ACC_16(48)
#elif BLOCK_M == 160
#define ACC_REGISTERS NAMES0 NAMES1 NAMES2 NAMES3 NAMES4
#define DESCRIPTORS "%80, %81"
#define SCALE_D "%82"
#define ACC_OPERANDS ACC_16(0), ACC_16(16), ACC_16(32), ACC_16(48), ACC_16(64)
#elif BLOCK_M == 192
#define ACC_REGISTERS NAMES0 NAMES1 NAMES2 NAMES3 NAMES4 NAMES5
#define DESCRIPTORS "%96, %97"
#define SCALE_D "%98"
#define ACC_OPERANDS ACC_16(0), ACC_16(16), ACC_16(32), ACC_16(48), ACC_16(64), ACC_16(80)
#elif BLOCK_M == 224
#define ACC_REGISTERS NAMES0 NAMES1 NAMES2 NAMES3 NAMES4 NAMES5 NAMES6
#define DESCRIPTORS "%112, %113"
#define SCALE_D "%114"
#define ACC_OPERANDS ACC_16(0), ACC_16(16), ACC_16(32), ACC_16(48), ACC_16(64), ACC_16(80), ACC_16(96)
#else
#define ACC_REGISTERS NAMES0 NAMES1 NAMES2 NAMES3 NAMES4 NAMES5 NAMES6 NAMES7
#define DESCRIPTORS "%128, %129"
#define SCALE_D "%130"
#define ACC_OPERANDS \
    ACC_16(0), ACC_16(16), ACC_16(32), ACC_16(48), ACC_16(64), ACC_16(80), ACC_16(96), ACC_16(112)
#endif
#if FP8
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n" STRINGIFY(BLOCK_M) "k32.f32.e4m3.e4m3 "
#define SUFFIX ", added, 1, 1;}"
#elif BF16
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n" STRINGIFY(BLOCK_M) "k16.f32.bf16.bf16 "
#define SUFFIX ", added, 1, 1, 0, 0;}"
#else
#define INSTRUCTION "wgmma.mma_async.sync.aligned.m64n" STRINGIFY(BLOCK_M) "k16.f32.f16.f16 "
#define SUFFIX ", added, 1, 1, 0, 0;}"
#endif

// One WGMMA of 64 outputs, all rows and 32 bytes of K; `accumulate` 0 overwrites the sums.
__device__ inline void wgmma(float (&acc)[BLOCK_M / 2], u64 weights, u64 rows, u32 accumulate) {
    asm volatile("{.reg .pred added;\nsetp.ne.b32 added, " SCALE_D ", 0;\n"
                 INSTRUCTION "{" ACC_REGISTERS "}, " DESCRIPTORS SUFFIX
                 : ACC_OPERANDS : "l"(weights), "l"(rows), "r"(accumulate));
}

__device__ inline float low_half(u32 x) { return widen((unsigned short)x); }
__device__ inline float high_half(u32 x) { return widen((unsigned short)(x >> 16)); }

// Transposes an 8x8 matrix of 16-bit numbers, of which a thread has two neighbours of a row.
__device__ inline u32 transpose_8x8(u32 x) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

__device__ inline float silu_mul(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// Sums a row's few partial sums of squares; the loads are issued at once.
__device__ inline float sum_of(const float* numbers, int count) {
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

// Row scales into shared memory: those of FP8 rows, or 1 / rms.
__device__ inline void load_row_scales(Shared& shared, const float* row_scales, int count,
                                       int square_tiles, float width, float epsilon) {
    for (int row = threadIdx.x % 32; row < BLOCK_M; row += 32) {
        float scale = 0.0f;
        if (row < count) {
            if (FP8) {
                scale = row_scales[row];
            } else {
                float sum_squares = sum_of(row_scales + (long long)row * square_tiles, square_tiles);
                scale = rsqrtf(sum_squares / width + epsilon);
            }
        }
        shared.row_scales[row] = scale;
    }
    asm volatile("bar.arrive 2, %0;" ::"n"(CONSUMERS + 32) : "memory");
}

// Consumers wait for the row scales.
__device__ inline void wait_for_scales() {
    if (SCALES) asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS + 32) : "memory");
}

// A thread's part of the output tile.
struct OutputTile {
    unsigned short* out;  // Of its warp's outputs, the first row.
    int outputs, count, lane;
    float upper_scale, lower_scale;  // Of its two outputs.
    float upper_bias, lower_bias;
};

// The residual of 8 rows and a warp's 16 outputs.
struct ResidualBlock {
    u32 high_half, low_half;
};

__device__ inline ResidualBlock load_residual(const OutputTile& at, int block) {
    int row = block * 8 + at.lane / 4;
    if (row >= at.count) return {0, 0};
    const u32* from = (const u32*)(at.out + (long long)row * at.outputs + at.lane % 4 * 2);
    return {from[0], from[4]};
}

// Applies the epilogue to 8 rows of a warp's outputs; returns the thread's sum of squares of its row.
__device__ inline float epilogue(const Shared& shared, const OutputTile& at, int block, float4 acc,
                                 const ResidualBlock& residual) {
    int lane = at.lane, row = block * 8 + lane / 4;
    if (SCALES) {
        float first = shared.row_scales[block * 8 + lane % 4 * 2];
        float second = shared.row_scales[block * 8 + lane % 4 * 2 + 1];
        acc.x *= first * at.upper_scale;
        acc.y *= second * at.upper_scale;
        acc.z *= first * at.lower_scale;
        acc.w *= second * at.lower_scale;
    }
    if (BIAS) {
        acc.x += at.upper_bias;
        acc.y += at.upper_bias;
        acc.z += at.lower_bias;
        acc.w += at.lower_bias;
    }
    u32* to = (u32*)(at.out + (long long)row * at.outputs + lane % 4 * 2);
    if (SWIGLU) {
        // Rounded as the output of an unfused GEMM would be.
        u32 gate = narrow(acc.x, acc.y), up = narrow(acc.z, acc.w);
        u32 joined = transpose_8x8(narrow(silu_mul(low_half(gate), low_half(up)),
                                          silu_mul(high_half(gate), high_half(up))));
        if (row < at.count) *to = joined;
        return 0.0f;
    }
    if (ADD_RESIDUAL) {
        u32 high = transpose_8x8(residual.high_half), low = transpose_8x8(residual.low_half);
        acc.x += low_half(high);
        acc.y += high_half(high);
        acc.z += low_half(low);
        acc.w += high_half(low);
    }
    u32 high = transpose_8x8(narrow(acc.x, acc.y)), low = transpose_8x8(narrow(acc.z, acc.w));
    if (row >= at.count) return 0.0f;
    to[0] = high;
    to[4] = low;
    float a = low_half(high), b = high_half(high), c = low_half(low), d = high_half(low);
    return a * a + b * b + c * c + d * d;
}

#if LORA
#include "lora.cuh"
#endif

// Reduces a sum of squares over four threads, into shared memory.
__device__ inline void store_sum_squares(Shared& shared, int block, float sum_squares) {
    int lane = threadIdx.x % 32;
    sum_squares += __shfl_xor_sync(0xffffffffu, sum_squares, 1);
    sum_squares += __shfl_xor_sync(0xffffffffu, sum_squares, 2);
    if (lane % 4 == 0) shared.sum_squares[threadIdx.x / 32][block * 8 + lane / 4] = sum_squares;
}

// Sends the sums of each block of 8 rows to the CTA that reduces it.
__device__ inline void send_split_sums(Shared& shared, u32 stages, u32 split, u32 multicast_rank,
                                       const float (&acc)[BLOCK_M / 2]) {
#pragma unroll
    for (int owner = 0; owner < SPLIT_K; owner++) {
        u32 rank = owner * MULTICAST + multicast_rank;
        u32 barrier = map_shared_rank(address(&shared.split_sums_full), rank);
        u32 first = stages + (split * BLOCKS_PER_SPLIT * CONSUMERS + threadIdx.x) * 16;
        u32 to = map_shared_rank(first, rank);
#pragma unroll
        for (int i = 0; i < BLOCKS_PER_SPLIT && owner * BLOCKS_PER_SPLIT + i < BLOCKS; i++) {
            const float* from = acc + (owner * BLOCKS_PER_SPLIT + i) * 4;
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0],"
                         " {%1, %2, %3, %4}, [%5];" ::"r"(to + i * (CONSUMERS * 16)),
                         "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(barrier)
                         : "memory");
        }
    }
}

// Reduces a thread's sums of one block over all splits, in order.
__device__ inline float4 reduce_split_sums(u32 stages, int block) {
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int split = 0; split < SPLIT_K; split++) {
        u32 at = stages + ((split * BLOCKS_PER_SPLIT + block) * CONSUMERS + threadIdx.x) * 16;
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

// A CTA's share of the inputs, in stages.
struct KRange {
    int first, steps;
};

// The producer: issues the TMA loads of all stages.
struct Producer {
    Shared& shared;
    u32 stages;
    const TensorMap *weights, *rows;
    int tile, first_row;
    u32 multicast_rank, split;
    KRange k_range;
    u64 policy;

    __device__ inline u32 stage(int step) { return stages + step % STAGES * STAGE_BYTES; }

    __device__ inline void load_weights(int step) {
        u32 barrier = address(&shared.full[step % STAGES]);
        mbarrier_expect_tx(barrier, STAGE_BYTES);
#pragma unroll
        for (int atom = 0; atom < K_ATOMS; atom++) {
            int input = ((k_range.first + step) * K_ATOMS + atom) * ATOM_INPUTS;
            tma_load_weights(stage(step) + atom * WEIGHT_BYTES, weights, input, tile, barrier,
                             policy);
        }
    }

    __device__ inline void load_rows(int step) {
        u32 barrier = address(&shared.full[step % STAGES]);
        u32 to = stage(step) + K_ATOMS * WEIGHT_BYTES + multicast_rank * ROWS_PER_CTA * ATOM_BYTES;
        u32 ctas = ((1u << MULTICAST) - 1) << split * MULTICAST;
#pragma unroll
        for (int atom = 0; atom < K_ATOMS; atom++) {
            int input = ((k_range.first + step) * K_ATOMS + atom) * ATOM_INPUTS;
            tma_load_rows(to + atom * X_BYTES, rows, input,
                          first_row + multicast_rank * ROWS_PER_CTA, barrier, ctas);
        }
    }

    __device__ inline void load_first_weights() {
        for (int step = 0; step < min(STAGES, k_range.steps); step++) load_weights(step);
    }

    __device__ inline void load_all() {
        for (int step = 0; step < k_range.steps; step++) {
            if (step >= STAGES) {
                mbarrier_wait(address(&shared.empty[step % STAGES]), (step / STAGES - 1) & 1);
                load_weights(step);
            }
            load_rows(step);
        }
    }
};

// Multiplies stages from `first` to `end`, of all `steps`; one WGMMA group runs while the next stage is
// awaited.
__device__ inline void multiply_stages(Shared& shared, u32 stages, int first, int end, int steps, u32 split,
                                       float (&acc)[BLOCK_M / 2]) {
    int group = threadIdx.x / 128, thread = threadIdx.x % 128;
#pragma unroll 1
    for (int step = first; step < end; step++) {
        int number = step % STAGES;
        u32 at = stages + number * STAGE_BYTES;
        u64 weights = smem_descriptor(at + group * 64 * ATOM_BYTES);
        u64 rows = smem_descriptor(at + K_ATOMS * WEIGHT_BYTES);
        mbarrier_wait(address(&shared.full[number]), step / STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int atom = 0; atom < K_ATOMS; atom++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                wgmma(acc, weights + (atom * WEIGHT_BYTES + i * 32) / 16,
                      rows + (atom * X_BYTES + i * 32) / 16, step - first + atom + i);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        // The previous step has ended, so its stage is free.
        int ended = step - 1;
        if (ended >= 0 && ended + STAGES < steps && thread < MULTICAST) {
            u32 barrier = address(&shared.empty[ended % STAGES]);
            mbarrier_arrive(map_shared_rank(barrier, split * MULTICAST + thread));
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
}

// Multiplies all stages of the CTA.
__device__ inline void consume(Shared& shared, u32 stages, KRange k_range, int split_units, u32 split,
                               float (&acc)[BLOCK_M / 2]) {
    if (SEQUENTIAL_SPLITS == 1) {
        multiply_stages(shared, stages, 0, k_range.steps, k_range.steps, split, acc);
        return;
    }
    float total[BLOCK_M / 2] = {};
    int first = 0;
#pragma unroll 1
    for (int part = 0; part < SEQUENTIAL_SPLITS; part++) {
        int end = (part + 1) * split_units / SEQUENTIAL_SPLITS * (SPLIT_ATOMS / K_ATOMS);
        multiply_stages(shared, stages, first, end, k_range.steps, split, acc);
        first = end;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i++) total[i] += acc[i];
    }
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++) acc[i] = total[i];
}

// Reduces split-K sums and stores the tile.
__device__ inline void store_tile(Shared& shared, u32 stages, const float (&acc)[BLOCK_M / 2],
                                  const OutputTile& at, u32 multicast_rank, u32 split) {
    int first_block = split * BLOCKS_PER_SPLIT;
    ResidualBlock residual[2][RESIDUAL_BLOCKS];
#pragma unroll
    for (int i = 0; ADD_RESIDUAL && i < RESIDUAL_BLOCKS; i++)
        residual[0][i] = load_residual(at, first_block + i);
    if (SPLIT_K > 1) {
        // All CTAs have read the stages that the sums overwrite.
        cluster_sync();
        send_split_sums(shared, stages, split, multicast_rank, acc);
        mbarrier_wait(address(&shared.split_sums_full), 0);
    }
    wait_for_scales();
#pragma unroll
    for (int i = 0; i < BLOCKS_PER_SPLIT; i++) {
        if (first_block + i >= BLOCKS) break;
        int part = i / RESIDUAL_BLOCKS;
        // While these blocks are stored, the residual of the next ones is loaded.
#pragma unroll
        for (int j = 0; ADD_RESIDUAL && i % RESIDUAL_BLOCKS == 0 && j < RESIDUAL_BLOCKS; j++) {
            int next = i + RESIDUAL_BLOCKS + j;
            if (next < BLOCKS_PER_SPLIT) residual[(part + 1) % 2][j] = load_residual(at, first_block + next);
        }
        float4 block_acc;
        if (SPLIT_K > 1) {
            block_acc = reduce_split_sums(stages, i);
        } else {
            block_acc = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
        }
        float sum_squares = epilogue(shared, at, first_block + i, block_acc,
                                     residual[part % 2][i % RESIDUAL_BLOCKS]);
        if (ADD_RESIDUAL) store_sum_squares(shared, i, sum_squares);
    }
}

// Stores the CTA's partial sums of squares of its rows, of which each row has `parts`.
__device__ inline void store_out_sum_squares(const Shared& shared, float* out_sum_squares, int first_row,
                                             int count, int parts, int tile) {
    constexpr int WARPS = SQUARE_WARPGROUPS * 4;
    consumer_sync();
    for (int i = threadIdx.x; i < BLOCKS_PER_SPLIT * 8 * SQUARE_PARTS; i += CONSUMERS) {
        int row = i / SQUARE_PARTS, part = i % SQUARE_PARTS;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared.sum_squares[part * WARPS + w][row];
        if (first_row + row < count)
            out_sum_squares[(long long)(first_row + row) * parts + tile * SQUARE_PARTS + part] = total;
    }
}

// Tiles of weights and of rows of a cluster: few tiles of rows at a time have each tile of weights.
struct ClusterTiles {
    int weights, rows;
};

__device__ inline ClusterTiles cluster_tiles() {
    int across = gridDim.x / CLUSTER, cluster = blockIdx.y * across + blockIdx.x / CLUSTER;
    int group = cluster / (ROW_TILES * across), within = cluster % (ROW_TILES * across);
    int rows = min(ROW_TILES, (int)gridDim.y - group * ROW_TILES);
    return {within / rows, group * ROW_TILES + within % rows};
}

// L2 policy of weights: each is read once, or by several tiles of rows.
__device__ inline u64 weights_policy() {
    u64 policy;
    if (gridDim.y == 1) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}

__device__ inline void init_barriers(Shared& shared, u32 split) {
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(address(&shared.full[i]), 1);
        mbarrier_init(address(&shared.empty[i]), MULTICAST * WARPGROUPS);
    }
    if (SPLIT_K > 1) {
        mbarrier_init(address(&shared.split_sums_full), 1);
        int blocks = max(0, min(BLOCKS_PER_SPLIT, BLOCKS - (int)split * BLOCKS_PER_SPLIT));
        mbarrier_expect_tx(address(&shared.split_sums_full), blocks * SPLIT_K * CONSUMERS * 16);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, CTAS_PER_SM)
wgmma_gemm(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows,
           const float* weight_scales, const float* row_scales, const unsigned short* bias,
           unsigned short* out, float* out_sum_squares, float epsilon, int count, int outputs, int inputs,
           int square_tiles
#if LORA
           , const unsigned short* lora_values, const unsigned short* lora_up, const int* lora_slots,
           const int* lora_ranks, long long up_slot_stride, int up_row_stride, int first_end, int second_end,
           int value_stride, int padded_rank
#endif
) {
    extern __shared__ unsigned char dynamic[];
    __shared__ Shared shared;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    u32 rank = CLUSTER == 1 ? 0 : rank_in_cluster();
    u32 multicast_rank = rank % MULTICAST, split = rank / MULTICAST;
    ClusterTiles tiles = cluster_tiles();
    int tile = tiles.weights * MULTICAST + multicast_rank, first_row = tiles.rows * BLOCK_M;
    count -= first_row;
    out += (long long)first_row * outputs;
    row_scales += (long long)first_row * (FP8 ? 1 : square_tiles);
    u32 stages = (address(dynamic) + 1023) & ~1023u;
    // Splits begin at multiples of SPLIT_ATOMS, whatever a stage has.
    int split_units = inputs / (SPLIT_ATOMS * ATOM_INPUTS);
    KRange k_range = {(int)split * split_units / SPLIT_K * (SPLIT_ATOMS / K_ATOMS), 0};
    k_range.steps = ((int)split + 1) * split_units / SPLIT_K * (SPLIT_ATOMS / K_ATOMS) - k_range.first;
    if (thread == 0) init_barriers(shared, split);
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;");
    Producer producer = {shared,         stages, &weights, &rows, tile, first_row,
                         multicast_rank, split,  k_range,  weights_policy()};
    bool is_producer = thread == CONSUMERS;
    if (is_producer) producer.load_first_weights();
    __syncwarp();
#if LORA
    // Slots, ranks and adapters were written before the first kernel of the step.
    int lora_upper = tile * OUT_PER_CTA + warp * (SWIGLU ? 8 : 16);
    LoraTile lora = {lora_values + (long long)first_row * value_stride, lora_up, lora_slots + first_row,
                     lora_ranks, up_slot_stride, up_row_stride, value_stride, padded_rank, count,
                     lora_upper, lora_upper + (SWIGLU ? outputs : 8), first_end, second_end};
    LoraGroup lora_group = {};
    if (warp < CONSUMERS / 32) {
        lora.prefetch();
        lora_group = lora.load_group(-1, split);
    }
#endif
    // Barriers are initialized before other CTAs arrive at them.
    if (MULTICAST > 1) cluster_sync();
    // With adapters the previous kernel is the shrink, launched when the inputs had been written.
    if (LORA)
        __threadfence();
    else
        asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp >= CONSUMERS / 32) {
        if (is_producer) producer.load_all();
        if (warp > CONSUMERS / 32) {
            load_row_scales(shared, row_scales, count, square_tiles, (float)inputs, epsilon);
        }
        __syncwarp();
        if (SPLIT_K > 1) cluster_sync();
    } else {
        float acc[BLOCK_M / 2];
        int first = tile * OUT_PER_CTA + warp * (SWIGLU ? 8 : 16);
        OutputTile at = {out + first, outputs, count, lane, 1.0f, 1.0f, 0.0f, 0.0f};
        if (FP8) {
            at.upper_scale = weight_scales[first + lane / 4];
            at.lower_scale = weight_scales[first + lane / 4 + (SWIGLU ? outputs : 8)];
        }
        if (BIAS) {
            at.upper_bias = widen(bias[first + lane / 4]);
            at.lower_bias = widen(bias[first + lane / 4 + 8]);
        }
        consume(shared, stages, k_range, split_units, split, acc);
#if LORA
        pdl_wait();
        lora.add(acc, lora_group);
#endif
        store_tile(shared, stages, acc, at, multicast_rank, split);
        if (ADD_RESIDUAL && out_sum_squares) {
            int parts = outputs / (SQUARE_WARPGROUPS * 64);
            store_out_sum_squares(shared, out_sum_squares + (long long)first_row * parts,
                                  split * BLOCKS_PER_SPLIT * 8, count, parts, tile);
        }
    }
}
