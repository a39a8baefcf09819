// LoRA in the sums of a GEMM: B x (A x row) of each row's adapter, by mma.sync on the accumulators of WGMMA,
// whose layout is the same. Included by wgmma_gemm.cu; macros are its own.
//
// A warp has 16 outputs, `upper` and `lower` 8 of them, and all rows of the tile, of any adapters: it finds
// the slots of its rows, each once, and multiplies the shrunk inputs of the rows of each, zeros for others.
// CTAs that divide the inputs (SPLIT_K) divide the slots.

constexpr int NO_SLOT = 0x7fffffff;
// Slots whose weights are loaded at once.
constexpr int LORA_SLOTS = SWIGLU ? 2 : 4;
constexpr int LORA_LANE_ROWS = (BLOCK_M + 31) / 32;

#ifndef HOST_LANES
// acc += a x b of 16 outputs, 8 rows and 16 ranks.
__device__ inline void mma_m16n8k16(float* acc, const u32 (&a)[4], const u32 (&b)[2]) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
#endif
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline int warp_min(int x) { return __reduce_min_sync(0xffffffffu, x); }

// Two numbers that the previous kernel has written: not from L1, which may be older.
__device__ inline u32 load_values(const unsigned short* from) {
    u32 out;
    asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(out) : "l"(from) : "memory");
    return out;
}

__device__ inline void prefetch_line(const unsigned short* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ inline int lane_id() { return threadIdx.x % 32; }
#endif

// Two neighbouring weights of an output, zeros from `rank` on. Without branches: MMAs follow.
__device__ inline u32 load_weights(const unsigned short* from, int k, int rank) {
    u32 both = *(const u32*)(from + (k < rank ? k : 0));
    return k + 1 < rank ? both : k < rank ? both & 0xffff : 0u;
}

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

    // The slots of the lane's rows, and the smallest one of the warp's after `slot`.
    __device__ inline void load_slots(int (&own)[LORA_LANE_ROWS]) const {
#pragma unroll
        for (int i = 0; i < LORA_LANE_ROWS; i++) {
            int row = i * 32 + lane_id();
            own[i] = row < count && row < BLOCK_M ? slots[row] : -1;
        }
    }

    __device__ static inline int next_slot(const int (&own)[LORA_LANE_ROWS], int slot) {
        int found = NO_SLOT;
#pragma unroll
        for (int i = 0; i < LORA_LANE_ROWS; i++) {
            if (own[i] > slot && own[i] < found) found = own[i];
        }
        return warp_min(found);
    }

    __device__ inline const unsigned short* weights_of(int slot, int output) const {
        return up + slot * slot_stride + (long long)output * row_stride;
    }

    // Brings the weights of the warp's outputs into L2.
    __device__ inline void prefetch() const {
        int own[LORA_LANE_ROWS], lane = lane_id();
        load_slots(own);
        for (int slot = next_slot(own, -1); slot != NO_SLOT; slot = next_slot(own, slot)) {
            int rank = ranks[slot];
            if (lane < 16) {
                const unsigned short* from = weights_of(slot, (lane < 8 ? upper : lower - 8) + lane);
                for (int k = 0; k < rank; k += 64) prefetch_line(from + k);
            }
            __syncwarp();
        }
    }

    // Adds the adapters of all rows to the sums of the warp.
    __device__ inline void add(float (&acc)[BLOCK_M / 2], int split) const {
        int own[LORA_LANE_ROWS], last = -1;
        load_slots(own);
        for (int group = 0; last != NO_SLOT; group++) {
            int found[LORA_SLOTS], rank[LORA_SLOTS], most = 0;
#pragma unroll
            for (int i = 0; i < LORA_SLOTS; i++) {
                found[i] = last = next_slot(own, last);
                rank[i] = last == NO_SLOT ? 0 : ranks[last];
                if (rank[i] > most) most = rank[i];
            }
            if (group % SPLIT_K != split) continue;
            for (int k = 0; k < most; k += 16) add_ranks(acc, found, rank, k);
        }
    }

    // The same for 16 ranks of some slots.
    __device__ inline void add_ranks(float (&acc)[BLOCK_M / 2], const int (&found)[LORA_SLOTS],
                                     const int (&rank)[LORA_SLOTS], int k) const {
        int lane = lane_id(), pair = k + lane % 4 * 2;
        int upper_part = part_of(upper), lower_part = part_of(lower);
        u32 weights[LORA_SLOTS][4];
#pragma unroll
        for (int i = 0; i < LORA_SLOTS; i++) {
            int slot = found[i] == NO_SLOT ? 0 : found[i];
            const unsigned short *high = weights_of(slot, upper + lane / 4),
                                 *low = weights_of(slot, lower + lane / 4);
            weights[i][0] = load_weights(high, pair, rank[i]);
            weights[i][1] = load_weights(low, pair, rank[i]);
            weights[i][2] = load_weights(high, pair + 8, rank[i]);
            weights[i][3] = load_weights(low, pair + 8, rank[i]);
        }
#pragma unroll
        for (int block = 0; block < BLOCK_M / 8; block++) {
            int row = block * 8 + lane / 4;
            int slot = row < count ? slots[row] : -1;
            const unsigned short* from = values + (long long)(slot >= 0 ? row : 0) * value_stride + pair;
            const unsigned short* of_part = from + upper_part * padded_rank;
            u32 high[2] = {load_values(of_part), load_values(of_part + 8)}, low[2] = {};
            if (SWIGLU) {
                of_part = from + lower_part * padded_rank;
                low[0] = load_values(of_part);
                low[1] = load_values(of_part + 8);
            }
#pragma unroll
            for (int i = 0; i < LORA_SLOTS; i++) {
                if (rank[i] <= k) continue;
                bool mine = slot == found[i];
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
