"""Decoder layers in fused kernels.

`selection` chooses them, `small_batch` runs decodes of small batches, `dense` larger steps of
16-bit weights, `fp8` models with FP8 weights. `attention` runs attention after a QKV projection;
`weights` is what they read of a model.
"""
