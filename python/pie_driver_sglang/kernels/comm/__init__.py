"""Communication kernels between the GPUs of one host.

`all_reduce_norm` is an all-reduce fused with residual add and RMS norm.
"""
