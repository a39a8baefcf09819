"""CUDA C++ sources of GPU kernels, and their compilation by NVRTC (`compiled`).

They use what Triton cannot express: clusters and distributed shared memory, warp specialization,
and MMA operands loaded from global memory into registers. Each source has one kernel, of its name,
launched by one module of `kernels`: `wgmma_gemm.cu` by `wgmma`, `fp8_gemv.cu` by `fp8_gemv`,
`cluster_decode.cu` by `cluster_decode`, `lora_shrink.cu` by `lora`. `halves.cuh` is prepended to
all; `lora.cuh` is the part of `wgmma_gemm.cu` that applies LoRA adapters, and `lora_mma.cuh` what
it shares with the shrink.
"""
