// Numbers of 16 bits: bfloat16, or float16 where BF16 is 0. Every source of this folder begins with it.

typedef unsigned int u32;

__device__ inline float widen(unsigned short x) {
    float out;
#if BF16
    out = __uint_as_float((u32)x << 16);
#else
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
#endif
    return out;
}

// Two numbers; `low` comes first in memory.
__device__ inline u32 narrow(float low, float high) {
    u32 out;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
#endif
    return out;
}
