// What kernels with LoRA adapters share: rows by device slot, and mma.sync. Macros: BF16 (else FP16).

constexpr int NO_SLOT = 0x7fffffff;

#ifndef HOST_LANES
// acc += a x b of 16 outputs, 8 rows and 16 inputs.
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
__device__ inline u32 warp_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }

__device__ inline void prefetch_line(const unsigned short* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ inline void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ inline void fence() { __threadfence(); }

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int warp_id() { return threadIdx.x / 32; }
#endif

// The slots of the lane's rows, -1 for none.
template <int LANE_ROWS>
__device__ inline void load_slots(int (&own)[LANE_ROWS], const int* slots, int count) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        int row = i * 32 + lane_id();
        own[i] = row < count ? slots[row] : -1;
    }
}

// The smallest slot of the warp's rows after `slot`.
template <int LANE_ROWS>
__device__ inline int next_slot(const int (&own)[LANE_ROWS], int slot) {
    int found = NO_SLOT;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        if (own[i] > slot && own[i] < found) found = own[i];
    }
    return warp_min(found);
}
