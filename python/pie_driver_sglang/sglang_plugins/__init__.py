"""Plugins of SGLang's own server, which runs without Pie.

`ngram.py` puts the driver's n-gram drafter in the place of SGLang's, and `radix.py` the prefix
index (`paged_slots.py`) in the place of its radix tree: `radix_cache.py` as a prefix cache of
0.5.17, `tree_core.py` as a tree core of 0.5.23. The driver imports none of them.
"""
