// FP8 GEMV: out[1, outputs] = quantize(rms_norm(row)) x weight[outputs, inputs]^T, with scales and an epilogue:
// store, SwiGLU or residual add.
//
// Every CTA normalizes the row and quantizes it to FP8 in its shared memory, so no kernel runs between two
// GEMVs. Weights go from global memory to registers in the fragment layout of mma.m16n8k32: a sum does not
// depend on the order of its inputs, so a thread may load 16 neighbouring ones. The first weights are loaded
// before the previous kernel has ended (PDL).
//
// The warps of a CTA divide the inputs. A tile is 16 outputs, or 8 of a gate and 8 of an up projection. The
// eight columns of the instruction are all the same row.
//
// Macros: BF16 (FP16 if 0), INPUTS, THREADS, UNROLL (pieces of 64 inputs that a warp loads at once),
// CTAS_PER_SM, EPILOGUE (0 store, 1 SwiGLU, 2 residual add), RMS_NORM, STATIC_SCALE (the row's scale is given),
// GROUPED (groups of 128 inputs of the row and 128x128 blocks of the weight have scales).

constexpr int WARPS = THREADS / 32;
constexpr int PIECE = 64;
constexpr int PIECES = INPUTS / WARPS / PIECE;
constexpr int LOOP_STEPS = PIECES / UNROLL;
constexpr int LOADS = (INPUTS / 8 + THREADS - 1) / THREADS;
constexpr int TILE = 16;
constexpr int GROUP = 128, GROUPS = INPUTS / GROUP, PIECES_PER_GROUP = GROUP / PIECE;
constexpr bool SWIGLU = EPILOGUE == 1, ADD_RESIDUAL = EPILOGUE == 2;
constexpr float FP8_MAX = 448.0f, MIN_ABS_MAX = 1e-10f;

static_assert(!GROUPED || UNROLL % PIECES_PER_GROUP == 0, "UNROLL has no whole groups");
static_assert(INPUTS == WARPS * PIECES * PIECE && PIECES == LOOP_STEPS * UNROLL, "warps do not divide INPUTS");

struct Shared {
    uint4 row[INPUTS / 16];
    float sums[2][WARPS][TILE];
    float sum_squares[WARPS];
    float abs_max[WARPS];
    float scales[GROUPED ? GROUPS : 1];
};

__device__ inline void widen(uint4 from, float (&to)[8]) {
    u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BF16
        to[2 * i] = __uint_as_float(words[i] << 16);
        to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
#else
        asm("{.reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.f32.f16 %0, lo;\n cvt.f32.f16 %1, hi;}"
            : "=f"(to[2 * i]), "=f"(to[2 * i + 1]) : "r"(words[i]));
#endif
    }
}

__device__ inline unsigned short narrow(float x) {
    unsigned short out;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
#endif
    return out;
}

__device__ inline float rounded(float x) { return widen(narrow(x)); }

__device__ inline u32 pack_e4m3x4(float a, float b, float c, float d) {
    u32 out;
    asm("{.reg .b16 lo, hi;\n cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n mov.b32 %0, {lo, hi};}"
        : "=r"(out) : "f"(a), "f"(b), "f"(c), "f"(d));
    return out;
}

__device__ inline uint4 load_streaming(const uint4* from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

__device__ inline void mma_m16n8k32(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Pointers to the weights and block scales of a thread's two outputs.
struct WeightPtrs {
    const unsigned char *upper, *lower;
    const float *upper_scales, *lower_scales;
};

// Weights of a thread's two outputs, UNROLL pieces of inputs.
struct WeightFragments {
    uint4 upper[UNROLL], lower[UNROLL];
    float upper_scales[UNROLL / PIECES_PER_GROUP + 1], lower_scales[UNROLL / PIECES_PER_GROUP + 1];
};

__device__ inline void load(WeightFragments& fragments, const WeightPtrs& at, int number) {
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        fragments.upper[i] = load_streaming((const uint4*)(at.upper + (number * UNROLL + i) * PIECE));
        fragments.lower[i] = load_streaming((const uint4*)(at.lower + (number * UNROLL + i) * PIECE));
    }
    if (GROUPED) {
#pragma unroll
        for (int i = 0; i < UNROLL / PIECES_PER_GROUP; i++) {
            fragments.upper_scales[i] = at.upper_scales[number * (UNROLL / PIECES_PER_GROUP) + i];
            fragments.lower_scales[i] = at.lower_scales[number * (UNROLL / PIECES_PER_GROUP) + i];
        }
    }
}

// Multiplies fragments by their inputs of the row.
__device__ inline void accumulate(float (&sums)[4], const WeightFragments& fragments, const uint4* row,
                           const float* row_scales) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        uint4 x = row[i * (PIECE / 16)], u = fragments.upper[i], l = fragments.lower[i];
        float (&to)[4] = GROUPED ? part : sums;
        mma_m16n8k32(to, u.x, l.x, u.y, l.y, x.x, x.y);
        mma_m16n8k32(to, u.z, l.z, u.w, l.w, x.z, x.w);
        if (GROUPED && i % PIECES_PER_GROUP == PIECES_PER_GROUP - 1) {
            int group = i / PIECES_PER_GROUP;
            sums[0] += part[0] * (row_scales[group] * fragments.upper_scales[group]);
            sums[2] += part[2] * (row_scales[group] * fragments.lower_scales[group]);
            part[0] = part[1] = part[2] = part[3] = 0.0f;
        }
    }
}

// Eight numbers of the row, after RMSNorm if there is one.
__device__ inline void rms_norm_8(uint4 given, uint4 norm, float rstd, float (&x)[8]) {
    widen(given, x);
    if (!RMS_NORM) return;
    float w[8];
    widen(norm, w);
    // Rounded as the output of a norm kernel would be.
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = rounded(x[j] * w[j] * rstd);
}

// Block reduction: the sum of squares and the maximum of `x`.
__device__ inline void reduce(Shared& shared, float& sum_squares, float& x) {
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum_squares += __shfl_xor_sync(0xffffffffu, sum_squares, step);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    if (threadIdx.x % 32 == 0) {
        shared.sum_squares[warp] = sum_squares;
        shared.abs_max[warp] = x;
    }
    __syncthreads();
    sum_squares = x = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        sum_squares += shared.sum_squares[w];
        x = fmaxf(x, shared.abs_max[w]);
    }
}

// Quantizes the row into shared memory; returns its scale. Group scales go to shared memory, too.
__device__ inline float quantize(Shared& shared, const uint4* row, const uint4 (&norm)[LOADS],
                                 float epsilon, const float* static_scale) {
    int thread = threadIdx.x;
    uint4 given[LOADS];
    float sum_squares = 0.0f, abs_max = 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread;
        given[i] = at < INPUTS / 8 ? row[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        float x[8], w[8];
        widen(given[i], x);
        if (RMS_NORM) widen(norm[i], w);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum_squares += x[j] * x[j];
            abs_max = fmaxf(abs_max, fabsf(RMS_NORM ? x[j] * w[j] : x[j]));
        }
    }
    if (RMS_NORM || !GROUPED) reduce(shared, sum_squares, abs_max);
    float rstd = RMS_NORM ? rsqrtf(sum_squares / INPUTS + epsilon) : 1.0f;
    // Rounding is monotonic, so the largest product gives the largest rounded number.
    float scale = fmaxf(rounded(abs_max * rstd), MIN_ABS_MAX) / FP8_MAX;
    if (STATIC_SCALE) scale = *static_scale;
    if (GROUPED) scale = 1.0f;
    float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread;
        float x[8];
        rms_norm_8(given[i], norm[i], rstd, x);
        if (GROUPED) {
            // 16 threads have a group.
            float group_max = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) group_max = fmaxf(group_max, fabsf(x[j]));
#pragma unroll
            for (int step = 8; step > 0; step /= 2)
                group_max = fmaxf(group_max, __shfl_xor_sync(0xffffffffu, group_max, step));
            float group_scale = fmaxf(group_max, MIN_ABS_MAX) / FP8_MAX;
            inverse = 1.0f / group_scale;
            if (at % 16 == 0 && at < INPUTS / 8) shared.scales[at / 16] = group_scale;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= inverse;
        if (at < INPUTS / 8) {
            ((uint2*)shared.row)[at] = make_uint2(pack_e4m3x4(x[0], x[1], x[2], x[3]),
                                                  pack_e4m3x4(x[4], x[5], x[6], x[7]));
        }
    }
    __syncthreads();
    return scale;
}

// Pointers of a thread in a tile.
__device__ inline WeightPtrs weight_ptrs(const unsigned char* weight, const float* scales, int tile,
                                         int tiles) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Fragment layout of the MMA: the thread's outputs and its first input.
    int upper = tile * (SWIGLU ? 8 : 16) + lane / 4;
    int lower = upper + (SWIGLU ? tiles * 8 : 8);
    int first = warp * (PIECES * PIECE) + lane % 4 * 16;
    int group = warp * PIECES / PIECES_PER_GROUP;
    return {weight + (long long)upper * INPUTS + first, weight + (long long)lower * INPUTS + first,
            scales + upper / GROUP * GROUPS + group, scales + lower / GROUP * GROUPS + group};
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
fp8_gemv(const uint4* row, const unsigned char* weight, const float* scales, const uint4* norm,
         const float* static_scale, unsigned short* out, float epsilon, int tiles) {
    __shared__ Shared shared;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int tile = blockIdx.x;
    WeightPtrs at = weight_ptrs(weight, scales, tile, tiles);
    WeightFragments fragments;
    load(fragments, at, 0);
    uint4 norms[LOADS];
    if (RMS_NORM) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int eight = i * THREADS + thread;
            norms[i] = eight < INPUTS / 8 ? norm[eight] : make_uint4(0, 0, 0, 0);
        }
    }
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float scale = quantize(shared, row, norms, epsilon, static_scale);

    const uint4* warp_row = shared.row + warp * (PIECES * PIECE / 16) + lane % 4;
    const float* row_scales = shared.scales + (GROUPED ? warp * PIECES / PIECES_PER_GROUP : 0);
    for (int buffer = 0; tile < tiles; buffer ^= 1) {
        int next = tile + gridDim.x;
        WeightPtrs next_at = weight_ptrs(weight, scales, next, tiles);
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        // Loaded early for the epilogue.
        constexpr int OUTPUTS = SWIGLU ? 8 : 16;
        int output = tile * OUTPUTS + thread % OUTPUTS;
        float output_scale = 1.0f, residual = 0.0f;
        if (thread < 16) {
            if (!GROUPED)
                output_scale = scales[output + (thread < OUTPUTS ? 0 : tiles * 8)] * scale;
            if (ADD_RESIDUAL) residual = widen(out[output]);
        }
#pragma unroll 1
        for (int b = 0; b < LOOP_STEPS; b++) {
            WeightFragments next_fragments;
            if (b + 1 < LOOP_STEPS) {
                load(next_fragments, at, b + 1);
            } else if (next < tiles) {
                load(next_fragments, next_at, 0);
            }
            accumulate(sums, fragments, warp_row + b * (UNROLL * PIECE / 16),
                       row_scales + b * (UNROLL / PIECES_PER_GROUP));
            fragments = next_fragments;
        }
        if (lane % 4 == 0) {
            shared.sums[buffer][warp][lane / 4] = sums[0];
            shared.sums[buffer][warp][lane / 4 + 8] = sums[2];
        }
        __syncthreads();
        if (warp == 0) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += shared.sums[buffer][w][lane % 16];
            total *= output_scale;
            if (SWIGLU) {
                // Rounded as the output of an unfused GEMM would be.
                float gate = rounded(total);
                float up = rounded(__shfl_down_sync(0xffffffffu, total, 8));
                total = gate / (1.0f + __expf(-gate)) * up;
            }
            if (ADD_RESIDUAL) total += residual;
            if (lane < OUTPUTS) out[output] = narrow(total);
        }
        tile = next;
        at = next_at;
    }
}
