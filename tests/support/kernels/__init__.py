"""Scripts that run kernels in Triton's interpreter and compare them with a reference."""
