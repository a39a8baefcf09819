// The product of one row and a matrix in FP8, from the row as the kernel before left it.
//
// Every CTA norms the row (where it is to be normed) and makes FP8 of it in its shared memory, so no
// kernel comes between two products. Weights go from memory to registers in the layout that the
// matrix instruction takes: a sum does not depend on the order of its inputs, so a thread may load
// 16 neighbouring ones. What a CTA needs first is on its way before the previous kernel has ended.
//
// The warps of a CTA divide the inputs; a tile is 16 outputs, or 8 of a gate and 8 of an up
// projection. The eight columns of the instruction are all the same row.
//
// Constants from outside: BF16 (or FP16 if 0), INPUTS, THREADS, BATCH (pieces of 64 inputs of a warp
// that are loaded at once), RESIDENT (CTAs of a multiprocessor), KIND (0 stores, 1 joins a gate and an
// up projection, 2 adds), NORMED, FIXED (the row's scale is given), GROUPED (128 inputs of the row,
// and 128 by 128 weights, have a scale of their own).

constexpr int WARPS = THREADS / 32;
constexpr int PIECE = 64;
constexpr int PIECES = INPUTS / WARPS / PIECE;
constexpr int BATCHES = PIECES / BATCH;
constexpr int LOADS = (INPUTS / 8 + THREADS - 1) / THREADS;
constexpr int TILE = 16;
constexpr int GROUP = 128, GROUPS = INPUTS / GROUP, TOGETHER = GROUP / PIECE;
constexpr bool GATED = KIND == 1, ADDS = KIND == 2;
constexpr float LARGEST = 448.0f, LEAST = 1e-10f;

static_assert(!GROUPED || BATCH % TOGETHER == 0, "a batch has no whole groups");
static_assert(INPUTS == WARPS * PIECES * PIECE && PIECES == BATCHES * BATCH, "inputs are not divided");

struct Shared {
    uint4 row[INPUTS / 16];
    float sums[2][WARPS][TILE];
    float squares[WARPS];
    float largest[WARPS];
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

__device__ inline u32 four(float a, float b, float c, float d) {
    u32 out;
    asm("{.reg .b16 lo, hi;\n cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        " cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n mov.b32 %0, {lo, hi};}"
        : "=r"(out) : "f"(a), "f"(b), "f"(c), "f"(d));
    return out;
}

__device__ inline uint4 load_once(const uint4* from) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(from));
    return out;
}

__device__ inline void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Where the weights of a thread's two outputs are, and the scales of their blocks.
struct Place {
    const unsigned char *upper, *lower;
    const float *upper_scales, *lower_scales;
};

// Some pieces of a thread's two outputs.
struct Batch {
    uint4 upper[BATCH], lower[BATCH];
    float upper_scales[BATCH / TOGETHER + 1], lower_scales[BATCH / TOGETHER + 1];
};

__device__ inline void load(Batch& batch, const Place& at, int number) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        batch.upper[i] = load_once((const uint4*)(at.upper + (number * BATCH + i) * PIECE));
        batch.lower[i] = load_once((const uint4*)(at.lower + (number * BATCH + i) * PIECE));
    }
    if (GROUPED) {
#pragma unroll
        for (int i = 0; i < BATCH / TOGETHER; i++) {
            batch.upper_scales[i] = at.upper_scales[number * (BATCH / TOGETHER) + i];
            batch.lower_scales[i] = at.lower_scales[number * (BATCH / TOGETHER) + i];
        }
    }
}

// Adds what a batch gives with its part of the row.
__device__ inline void add(float (&sums)[4], const Batch& batch, const uint4* row,
                           const float* row_scales) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        uint4 x = row[i * (PIECE / 16)], u = batch.upper[i], l = batch.lower[i];
        float (&into)[4] = GROUPED ? part : sums;
        multiply(into, u.x, l.x, u.y, l.y, x.x, x.y);
        multiply(into, u.z, l.z, u.w, l.w, x.z, x.w);
        if (GROUPED && i % TOGETHER == TOGETHER - 1) {
            int group = i / TOGETHER;
            sums[0] += part[0] * (row_scales[group] * batch.upper_scales[group]);
            sums[2] += part[2] * (row_scales[group] * batch.lower_scales[group]);
            part[0] = part[1] = part[2] = part[3] = 0.0f;
        }
    }
}

// Eight numbers of the row, normed if it is to be.
__device__ inline void norm_eight(uint4 given, uint4 norm, float spread, float (&x)[8]) {
    widen(given, x);
    if (!NORMED) return;
    float w[8];
    widen(norm, w);
    // Rounded as a norm's kernel would do.
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = rounded(x[j] * w[j] * spread);
}

// The sum of squares and the largest number of all threads; `x` is the largest one here.
__device__ inline void reduce(Shared& shared, float& squares, float& x) {
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, step);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    if (threadIdx.x % 32 == 0) {
        shared.squares[warp] = squares;
        shared.largest[warp] = x;
    }
    __syncthreads();
    squares = x = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        squares += shared.squares[w];
        x = fmaxf(x, shared.largest[w]);
    }
}

// The row in FP8, in shared memory; returns its scale. With groups their scales are there, too.
__device__ inline float quantize(Shared& shared, const uint4* row, const uint4 (&norm)[LOADS],
                                 float epsilon, const float* fixed) {
    int thread = threadIdx.x;
    uint4 given[LOADS];
    float squares = 0.0f, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread;
        given[i] = at < INPUTS / 8 ? row[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        float x[8], w[8];
        widen(given[i], x);
        if (NORMED) widen(norm[i], w);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            squares += x[j] * x[j];
            largest = fmaxf(largest, fabsf(NORMED ? x[j] * w[j] : x[j]));
        }
    }
    if (NORMED || !GROUPED) reduce(shared, squares, largest);
    float spread = NORMED ? rsqrtf(squares / INPUTS + epsilon) : 1.0f;
    // Rounding keeps order, so the largest product is the largest number that is stored.
    float scale = FIXED ? *fixed : fmaxf(rounded(largest * spread), LEAST) / LARGEST;
    if (GROUPED) scale = 1.0f;
    float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int at = i * THREADS + thread;
        float x[8];
        norm_eight(given[i], norm[i], spread, x);
        if (GROUPED) {
            // Of 16 threads, which have a group.
            float own = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) own = fmaxf(own, fabsf(x[j]));
#pragma unroll
            for (int step = 8; step > 0; step /= 2)
                own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, step));
            own = fmaxf(own, LEAST) / LARGEST;
            inverse = 1.0f / own;
            if (at % 16 == 0 && at < INPUTS / 8) shared.scales[at / 16] = own;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] *= inverse;
        if (at < INPUTS / 8) {
            ((uint2*)shared.row)[at] = make_uint2(four(x[0], x[1], x[2], x[3]),
                                                  four(x[4], x[5], x[6], x[7]));
        }
    }
    __syncthreads();
    return scale;
}

// The weights and scales of a thread's outputs in a tile.
__device__ inline Place place(const unsigned char* weight, const float* scales, int tile, int tiles) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Of the matrix instruction: the output of a thread's operands, and its place among inputs.
    int upper = tile * (GATED ? 8 : 16) + lane / 4;
    int lower = upper + (GATED ? tiles * 8 : 8);
    int first = warp * (PIECES * PIECE) + lane % 4 * 16;
    int group = warp * PIECES / TOGETHER;
    return {weight + (long long)upper * INPUTS + first, weight + (long long)lower * INPUTS + first,
            scales + upper / GROUP * GROUPS + group, scales + lower / GROUP * GROUPS + group};
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_product(const uint4* row, const unsigned char* weight, const float* scales, const uint4* norm,
            const float* fixed, unsigned short* out, float epsilon, int tiles) {
    __shared__ Shared shared;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int tile = blockIdx.x;
    Place at = place(weight, scales, tile, tiles);
    Batch batch;
    load(batch, at, 0);
    uint4 norms[LOADS];
    if (NORMED) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int eight = i * THREADS + thread;
            norms[i] = eight < INPUTS / 8 ? norm[eight] : make_uint4(0, 0, 0, 0);
        }
    }
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    float scale = quantize(shared, row, norms, epsilon, fixed);

    const uint4* mine = shared.row + warp * (PIECES * PIECE / 16) + lane % 4;
    const float* row_scales = shared.scales + (GROUPED ? warp * PIECES / TOGETHER : 0);
    for (int turn = 0; tile < tiles; turn ^= 1) {
        int next = tile + gridDim.x;
        Place next_at = place(weight, scales, next, tiles);
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        // What is needed at the end of the tile.
        constexpr int OWN = GATED ? 8 : 16;
        int output = tile * OWN + thread % OWN;
        float of_output = 1.0f, old = 0.0f;
        if (thread < 16) {
            if (!GROUPED) of_output = scales[output + (thread < OWN ? 0 : tiles * 8)] * scale;
            if (ADDS) old = widen(out[output]);
        }
#pragma unroll 1
        for (int b = 0; b < BATCHES; b++) {
            Batch ahead;
            if (b + 1 < BATCHES) {
                load(ahead, at, b + 1);
            } else if (next < tiles) {
                load(ahead, next_at, 0);
            }
            add(sums, batch, mine + b * (BATCH * PIECE / 16), row_scales + b * (BATCH / TOGETHER));
            batch = ahead;
        }
        if (lane % 4 == 0) {
            shared.sums[turn][warp][lane / 4] = sums[0];
            shared.sums[turn][warp][lane / 4 + 8] = sums[2];
        }
        __syncthreads();
        if (warp == 0) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += shared.sums[turn][w][lane % 16];
            total *= of_output;
            if (GATED) {
                // Rounded as the output of a product would be.
                float gate = rounded(total);
                float up = rounded(__shfl_down_sync(0xffffffffu, total, 8));
                total = gate / (1.0f + __expf(-gate)) * up;
            }
            if (ADDS) total += old;
            if (lane < OWN) out[output] = narrow(total);
        }
        tile = next;
        at = next_at;
    }
}
