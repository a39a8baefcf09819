"""Attention kernels: decode over paged KV, custom masks, and copies of pages.

`paged_decode` is the kernel of a batch, planned by `split_plan` and merged by `partial_results`;
`single_decode` and `cluster_decode` serve a batch of one. `prompt_rows` finds prompts within a
step. `masked_triton` and `masked_reference` serve custom masks. `page_copy` copies rows of the
pages of all layers.
"""
