// Conversions of 16-bit floats: bfloat16, or float16 if BF16 is 0. Prepended to every source of this folder.

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
