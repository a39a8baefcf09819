"""GEMM kernels of decode steps, with fused epilogues.

`small_m` is a GEMV and small-M GEMM in Triton, `tiled` a TMA GEMM for more rows, `wgmma` a CUDA C++
GEMM for Hopper, `fp8_gemv` a CUDA C++ GEMV of FP8 weights. `fp8_rows` quantizes rows.
`dense_layers` has what runs between library GEMMs.
"""
