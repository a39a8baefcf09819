"""GPU kernels in Triton, with their plain torch counterparts. Imports torch and Triton alone."""
