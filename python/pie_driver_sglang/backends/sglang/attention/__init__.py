"""Attention backends that SGLang's layers call.

`paged` has the decodes of `engine.attention.paged`; `masked` serves custom attention masks.
"""
