"""Attention kernels: decode over paged KV, custom masks, and copies of pages.

`paged_decode` is stream-K decode attention for a batch, planned by `split_plan` and merged by
`partial_results`; `batch_invariant` attends with splits of `fixed_splits`. `single_decode` and
`cluster_decode` serve a batch of one. `prompt_rows` finds prefills within a captured step.
`masked_triton` is attention under a custom mask, and `masked_reference` its torch reference.
`page_copy` copies pages in all layers.
"""
