"""GPU kernels in CUDA C++, and how they are compiled.

For what Triton has no words for: clusters and their shared memory, and operands of a matrix
instruction that stay in the registers to which they were loaded. `compiled.py` has NVRTC compile a
source of this folder. Each source is called by one module of `kernels`: `batch_product.cu` by
`batch_products.py`, `row_product.cu` by `row_products.py`, `lone_attend.cu` by `cluster_attend.py`.
All begin with `halves.cuh`.
"""
