// LoRA shrink of up to 256 rows: values[row] = A x row, with the A of each row's adapter, by mma.sync on
// operands that are loaded from global memory into registers.
//
// A CTA has 16 ranks of a part of the layer and up to 16 rows of one adapter, wherever in the batch these
// are, so that A is read once for 16 rows. Its warps divide the inputs. Its 8 KiB of shared memory are free
// beside a CTA of the GEMM, which runs at the same time if registers suffice: the GEMM is launched behind the wait for the
// previous kernel, may read that kernel's output at once, and waits for this one before it expands.
//
// Grid: (parts * padded rank / 16, most tiles of rows that any adapters of so many rows have).
// Macros: BF16 (dtype; FP16 if 0).

#include "lora_mma.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int TILE_RANKS = 16, TILE_ROWS = 16, MAX_ROWS = 256;
// 16 bytes of each row by each of four lanes.
constexpr int CHUNK = 32;
// Chunks of a warp that are loaded at once.
constexpr int CHUNKS = 2;

static_assert(THREADS == TILE_RANKS * TILE_ROWS, "a thread stores a rank of a row");

// Up to 16 rows of a slot.
struct RowTile {
    int slot, count;
};

// Finds a tile among those of all slots, one slot after the other; the first warp stores which rows it has.
__device__ inline RowTile find_tile(const int* slots, int count, int tile, int* rows) {
    int own[MAX_ROWS / 32], slot = -1, of_slot = 0;
    load_slots(own, slots, count);
    for (;; tile -= (of_slot + TILE_ROWS - 1) / TILE_ROWS) {
        slot = next_slot(own, slot);
        if (slot == NO_SLOT) return {NO_SLOT, 0};
        of_slot = 0;
#pragma unroll
        for (int i = 0; i < MAX_ROWS / 32; i++) of_slot += __popc(warp_ballot(own[i] == slot));
        if (tile * TILE_ROWS < of_slot) break;
    }
    int at = -tile * TILE_ROWS;  // In the tile, of the next row of the slot.
#pragma unroll
    for (int i = 0; i < MAX_ROWS / 32; i++) {
        u32 same = warp_ballot(own[i] == slot);
        int mine = at + __popc(same & ((1u << lane_id()) - 1));
        if (warp_id() == 0 && own[i] == slot && mine >= 0 && mine < TILE_ROWS) rows[mine] = i * 32 + lane_id();
        at += __popc(same);
    }
    return {slot, min(of_slot - tile * TILE_ROWS, TILE_ROWS)};
}

// Loads of a lane: rows lane / 4 and lane / 4 + 8 of a matrix, of whose inputs a warp has every eighth chunk.
struct Lines {
    const unsigned short* rows[2];
    bool used[2];
    int inputs;

    __device__ inline void load(uint4 (&to)[CHUNKS][2], int step) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            int k = ((step * CHUNKS + i) * WARPS + warp_id()) * CHUNK + lane_id() % 4 * 8;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                to[i][half] = make_uint4(0, 0, 0, 0);
                if (used[half] && k < inputs) to[i][half] = *(const uint4*)(rows[half] + k);
            }
        }
    }
};

// Adds the products of a step: acc[half] has 16 ranks of 8 rows. The inputs of a chunk are in the order in
// which lanes load them, the same in both operands.
__device__ inline void multiply(float (&acc)[2][4], const uint4 (&a)[CHUNKS][2], const uint4 (&x)[CHUNKS][2]) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 first[4] = {a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y};
        u32 second[4] = {a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 low[2] = {x[i][half].x, x[i][half].y}, high[2] = {x[i][half].z, x[i][half].w};
            mma_m16n8k16(acc[half], first, low);
            mma_m16n8k16(acc[half], second, high);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
lora_shrink(const unsigned short* x, const unsigned short* down, unsigned short* values, const int* slots,
            const int* ranks, long long slot_stride, long long row_stride, int count, int inputs,
            int padded_rank) {
    __shared__ int rows[TILE_ROWS];
    __shared__ float sums[WARPS][8][32];
    int lane = lane_id();
    int columns = gridDim.x * TILE_RANKS, column = blockIdx.x * TILE_RANKS;
    int part = column / padded_rank, first_rank = column % padded_rank;
    // Slots, ranks and adapters were written before the first kernel of the step.
    RowTile tile = find_tile(slots, count, blockIdx.y, rows);
    bool found = tile.slot != NO_SLOT;
    int rank = found ? ranks[tile.slot] : 0;
    const unsigned short* weights = down + (found ? tile.slot * slot_stride : 0);
    Lines a = {}, b = {};
    a.inputs = b.inputs = inputs;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int dim = first_rank + lane / 4 + half * 8;
        a.used[half] = dim < rank;
        a.rows[half] = weights + (long long)(part * rank + (dim < rank ? dim : 0)) * inputs;
        // The weights of further steps come into L2.
        for (int k = (warp_id() * 4 + lane % 4) * 64; a.used[half] && k < inputs; k += WARPS * 4 * 64)
            prefetch_line(a.rows[half] + k);
    }
    uint4 weight[CHUNKS][2], input[CHUNKS][2], next_weight[CHUNKS][2], next_input[CHUNKS][2];
    a.load(weight, 0);
    __syncthreads();
    pdl_wait();
    // The GEMM, which does not wait for the previous kernel, sees what that has written.
    fence();
    pdl_trigger();
    if (!found) return;
    int steps = first_rank < rank ? (inputs + CHUNK * CHUNKS * WARPS - 1) / (CHUNK * CHUNKS * WARPS) : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = lane / 4 + half * 8;
        b.used[half] = steps > 0 && at < tile.count;
        b.rows[half] = x + (b.used[half] ? rows[at] : 0) * row_stride;
    }
    float acc[2][4] = {};
    b.load(input, 0);
#pragma unroll 2
    for (int step = 0; step < steps; step++) {
        a.load(next_weight, step + 1);
        b.load(next_input, step + 1);
        multiply(acc, weight, input);
#pragma unroll
        for (int i = 0; i < CHUNKS * 2; i++) {
            weight[i / 2][i % 2] = next_weight[i / 2][i % 2];
            input[i / 2][i % 2] = next_input[i / 2][i % 2];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sums[warp_id()][i][lane] = acc[i / 4][i % 4];
    __syncthreads();
    int dim = threadIdx.x % TILE_RANKS, at = threadIdx.x / TILE_RANKS;
    if (at >= tile.count) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++)
        total += sums[warp][at / 8 * 4 + dim / 8 * 2 + at % 2][dim % 8 * 4 + at % 8 / 2];
    values[(long long)rows[at] * columns + column + dim] = (unsigned short)narrow(total, 0.0f);
}
