"""GEMM kernels of decode steps with fused epilogues, and the kernels between GEMMs.

`types` has weights, epilogues and tile configs. `small_m` is a GEMV and small-M GEMM in Triton,
`tiled` a TMA GEMM for more rows, `wgmma` a CUDA C++ GEMM for Hopper, `fp8_gemv` a CUDA C++ GEMV of
FP8 weights, `linear` a split-K GEMM for layers whose norms are not folded. `fp8_rows` quantizes
activations. `norm_rope` has norms, SwiGLU and rotary embedding, `lora` shrinks inputs for LoRA
adapters, and expands within GEMMs. `search_space` has the configs that a search measures; the
folder `tuned` has what it found on common GPUs, as JSON.
"""
