"""Attention backends.

`paged` decodes over pages, in graphs and eager batches; `masked` serves custom attention masks.
"""
