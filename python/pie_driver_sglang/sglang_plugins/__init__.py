"""Plugins of SGLang's own server, which runs without Pie.

`ngram.py` puts the driver's n-gram drafter in the place of SGLang's, and `radix.py` the prefix
index (`radix_cache.py`) in the place of its radix cache. The driver imports none of them.
"""
