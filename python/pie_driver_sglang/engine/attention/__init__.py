"""Attention of the engine core, over the KV buffers of any backend.

`paged` is the decode attention over pages, for captured steps and for eager batches; prefills are
the library's. `batch_invariant` is that of decodes and prefills whose rows do not depend on their
batch, `batch_invariant_cpu` the same on the CPU.
"""
