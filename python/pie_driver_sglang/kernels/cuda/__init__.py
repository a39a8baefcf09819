"""GPU kernels in CUDA C++, and how they are compiled.

For what Triton has no words for: clusters and their shared memory, and operands of a matrix
instruction that stay in the registers to which they were loaded. `compiled.py` has NVRTC compile a
source of this folder. Each source is called by one module of `kernels`: `wgmma_gemm.cu` by
`wgmma.py`, `fp8_gemv.cu` by `fp8_gemv.py`, `single_decode.cu` by `cluster_decode.py`.
All begin with `halves.cuh`.
"""
