"""GPU kernels in CUDA C++, and how they are compiled.

For what Triton has no words for: clusters and their shared memory, and operands of a matrix
instruction that stay in the registers to which they were loaded.
"""
