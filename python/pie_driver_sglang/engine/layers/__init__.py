"""Decoder layers in fused kernels.

`selection` chooses them, `small_batch` runs decodes of small batches, `dense` larger steps of
16-bit weights, `fp8` models with FP8 weights, `batch_invariant` dense models whose rows must not
depend on their batch, for which `batch_invariant_cpu` has the GEMMs on the CPU. `lora` runs dense
layers with adapters. `attention` runs attention after a QKV projection; `weights` is what they read
of a model, and `reading` reads what the classes of both libraries have in common.

`gemm_runner` runs GEMMs with folded norms, and `rank_gemms` those of a tensor parallel rank, by the
configs of `gemm_table`, which `gemm_search` fills, and `invariant_search` for `batch_invariant`;
`random_layers` has the shape of a model for a search without one.
"""
