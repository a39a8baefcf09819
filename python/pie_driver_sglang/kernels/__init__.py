"""GPU kernels in Triton, each with plain torch that computes the same, and some in CUDA C++.

`dense_layers.py` has the layers around attention, `few_rows.py` their products in steps of few
rows, `many_rows.py` products by tiles and `quantize.py` rows in FP8. Of mixtures of experts
`routing.py` chooses the experts and `experts.py` has their products. `lone_attend.py` is the
attention of a step of one row. Hopper has kernels of `cuda/`: of one row `cluster_attend.py`
attends and `row_products.py` multiplies FP8 weights, and of more rows `batch_products.py` has all
products. Decode attention over pages is `paged_splits.py` (which program computes what),
`paged_attend.py` (the kernel) and `paged_partials.py` (how partial results are merged).
`masked_attend.py` is attention under masks, and `masked_torch.py` its torch version.
`all_reduce_norm.py` sums over ranks, `sampler.py` samples, `page_copy.py` copies pages, and
`chained.py` launches kernels early. `types.py` has shared arguments. Imports torch, Triton, numpy
and `cuda.core` only.
"""
