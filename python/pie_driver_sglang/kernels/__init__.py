"""GPU kernels in Triton and CUDA C++, beside plain torch that computes the same.

=================  =================================================================================
``attention``      decode attention over paged KV, custom masks, copies of pages
``gemm``           GEMV and GEMM kernels with fused epilogues, FP8 quantization, norms and rotary
``moe``            routing, and the GEMMs of the chosen experts
``comm``           all-reduce fused with residual add and norm
``sampling``       sampler, top-k/top-p filters, penalties, log-probabilities, their torch reference
``cuda``           CUDA C++ sources, and their compilation by NVRTC
``pdl``            programmatic dependent launch
``constants``      those of several kernels
``compile_times``  the times of Triton's compilations
=================  =================================================================================

Imports torch, Triton, numpy and `cuda.core` only. `engine/layers/selection.py` decides
which GEMM and attention kernels a model gets.
"""
