"""Attention of the engine core, over the KV buffers of any backend.

`paged` is the decode attention over pages, for captured steps and for eager batches. Prefills are
the library's.
"""
