"""GPU kernels in Triton, each with plain torch that computes the same, and some in CUDA C++.

Layers. `srt/fused.py` says when each is used:

===================  ===============================================================================
``dense_layers``     the layers around attention
``few_rows``         products of steps of few rows; ``many_rows`` by tiles
``quantize``         rows in FP8
``routing``          the choice of experts; ``experts`` has their products
``batch_products``   products of 2 to 224 rows, on Hopper, in CUDA C++
``row_products``     products of one row and FP8 weights, on Hopper, in CUDA C++
``all_reduce_norm``  the sum over ranks, with the norm after it
===================  ===============================================================================

Kernels of attention:

=================  =================================================================================
``paged_splits``   decodes over pages: which program computes what
``paged_attend``   the kernel; ``paged_partials`` merges its partial results
``prompt_rows``    which rows of a step are prompts
``lone_attend``    of a step of one row; ``cluster_attend`` on Hopper, in CUDA C++
``masked_attend``  under masks; ``masked_torch`` is the same in torch
=================  =================================================================================

Sampling:

==============  ====================================================================================
``sampler``     the token of each slot
``filters``     top-k and top-p; ``few_kept`` where they keep few tokens
``adjust``      penalties and biases
``places``      log-probabilities
``logit_rows``  what these share
==============  ====================================================================================

`page_copy` copies pages, `chained` launches kernels early, `cuda` compiles what is CUDA C++, and
`types` has shared arguments. Imports torch, Triton, numpy and `cuda.core` only.
"""
