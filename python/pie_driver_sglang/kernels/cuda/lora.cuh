// LoRA in the sums of a GEMM: B x (A x row) of each row's adapter, by mma.sync on the accumulators of WGMMA,
// whose layout is the same. Included by wgmma_gemm.cu; macros are its own.
//
// A warp has 16 outputs, `upper` and `lower` 8 of them, and all rows of the tile, of any adapters: it finds
// the slots of its rows, each once, and multiplies the shrunk inputs of the rows of each, zeros for others.
// The first slots and their weights are loaded before the loop over K. CTAs that divide the inputs (SPLIT_K)
// divide the slots.

#include "lora_mma.cuh"

// Slots whose weights are loaded at once. Fewer with SwiGLU, where two CTAs share the registers of an SM.
constexpr int LORA_SLOTS = !SWIGLU ? 4 : BLOCK_M < 64 ? 2 : 1;
constexpr int LORA_LANE_ROWS = (BLOCK_M + 31) / 32;

#ifndef HOST_LANES
// Two numbers that the previous kernel has written: not from L1, which may be older.
__device__ inline u32 load_values(const unsigned short* from) {
    u32 out;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(out) : "l"(from) : "memory");
    return out;
}
#endif

// The first `count` of two numbers, zeros for others.
__device__ inline u32 first_numbers(u32 both, int count) {
    return count > 1 ? both : count == 1 ? both & 0xffff : 0u;
}

// Some slots, NO_SLOT behind the last one, and the warp's part of 16 ranks of each one's weights.
struct LoraGroup {
    int slots[LORA_SLOTS], ranks[LORA_SLOTS];
    u32 weights[LORA_SLOTS][4];
};

struct LoraTile {
    const unsigned short *values, *up;  // [rows, parts * padded rank], [slots, outputs, row_stride].
    const int *slots, *ranks;
    long long slot_stride;
    int row_stride, value_stride, padded_rank;
    int count;         // Rows of the tile that there are.
    int upper, lower;  // The first of each 8 outputs of the warp.
    int first_end, second_end;

    __device__ inline int part_of(int output) const {
        return (output >= first_end) + (output >= second_end);
    }

    __device__ inline const unsigned short* weights_of(int slot, int output) const {
        return up + slot * slot_stride + (long long)output * row_stride;
    }

    // Brings the weights of the warp's outputs into L2.
    __device__ inline void prefetch() const {
        int own[LORA_LANE_ROWS], lane = lane_id();
        load_slots(own, slots, min(count, BLOCK_M));
        for (int slot = next_slot(own, -1); slot != NO_SLOT; slot = next_slot(own, slot)) {
            if (lane < 16) {
                const unsigned short* from = weights_of(slot, (lane < 8 ? upper : lower - 8) + lane);
                int rank = ranks[slot];
                for (int k = 0; k < rank; k += 64) prefetch_line(from + k);
            }
            __syncwarp();
        }
    }

    // Loads the group that follows `skipped` ones after a slot. Does not wait for the ranks: columns from the
    // rank on are loaded, too, and masked later.
    __device__ inline LoraGroup load_group(int slot, int skipped) const {
        LoraGroup group;
        int own[LORA_LANE_ROWS];
        load_slots(own, slots, min(count, BLOCK_M));
#pragma unroll 1
        for (; skipped >= 0; skipped--) {
#pragma unroll
            for (int i = 0; i < LORA_SLOTS; i++) group.slots[i] = slot = next_slot(own, slot);
        }
#pragma unroll
        for (int i = 0; i < LORA_SLOTS; i++)
            group.ranks[i] = group.slots[i] == NO_SLOT ? 0 : ranks[group.slots[i]];
        load_weights(group, 0);
        return group;
    }

    // Weights of the ranks from `k` on: two neighbours of each of two outputs, and the same 8 ranks further.
    __device__ inline void load_weights(LoraGroup& group, int k) const {
        int lane = lane_id(), pair = k + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < LORA_SLOTS; i++) {
            int slot = group.slots[i] == NO_SLOT ? 0 : group.slots[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const unsigned short* from = weights_of(slot, (j % 2 ? lower : upper) + lane / 4);
                int at = pair + j / 2 * 8;
                group.weights[i][j] = *(const u32*)(from + (at < row_stride ? at : 0));
            }
        }
    }

    // Adds the adapters of all rows to the sums of the warp, beginning with the first group of the split.
    __device__ inline void add(float (&acc)[BLOCK_M / 2], LoraGroup group) const {
        while (group.slots[0] != NO_SLOT) {
            // Its loads run beside the products of this group.
            LoraGroup next = load_group(group.slots[LORA_SLOTS - 1], SPLIT_K - 1);
            int most = 0;
#pragma unroll
            for (int i = 0; i < LORA_SLOTS; i++) most = max(most, group.ranks[i]);
            for (int k = 0; k < most; k += 16) {
                if (k > 0) load_weights(group, k);
                add_ranks(acc, group, k);
            }
            group = next;
        }
    }

    // The same for 16 ranks of a group.
    __device__ inline void add_ranks(float (&acc)[BLOCK_M / 2], const LoraGroup& group, int k) const {
        int lane = lane_id(), pair = k + lane % 4 * 2;
        int upper_part = part_of(upper), lower_part = part_of(lower);
        u32 weights[LORA_SLOTS][4];
#pragma unroll
        for (int i = 0; i < LORA_SLOTS; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                weights[i][j] = first_numbers(group.weights[i][j], group.ranks[i] - (pair + j / 2 * 8));
        }
#pragma unroll
        for (int block = 0; block < BLOCK_M / 8; block++) {
            int row = block * 8 + lane / 4;
            int slot = row < count ? slots[row] : -1;
            const unsigned short* from = values + (long long)(row < count ? row : 0) * value_stride + pair;
            const unsigned short* of_part = from + upper_part * padded_rank;
            u32 high[2] = {load_values(of_part), load_values(of_part + 8)}, low[2] = {};
            if (SWIGLU) {
                of_part = from + lower_part * padded_rank;
                low[0] = load_values(of_part);
                low[1] = load_values(of_part + 8);
            }
#pragma unroll
            for (int i = 0; i < LORA_SLOTS; i++) {
                if (group.ranks[i] <= k) continue;
                bool mine = slot == group.slots[i];
                u32 rows[2] = {mine ? high[0] : 0, mine ? high[1] : 0};
                if (SWIGLU) {
                    // The outputs of gate and up have other inputs.
                    u32 of_gate[4] = {weights[i][0], 0, weights[i][2], 0};
                    u32 of_up[4] = {0, weights[i][1], 0, weights[i][3]};
                    u32 up_rows[2] = {mine ? low[0] : 0, mine ? low[1] : 0};
                    mma_m16n8k16(acc + block * 4, of_gate, rows);
                    mma_m16n8k16(acc + block * 4, of_up, up_rows);
                } else {
                    mma_m16n8k16(acc + block * 4, weights[i], rows);
                }
            }
        }
    }
};
