"""Sampling and probing of logit rows, in torch; on a GPU by the kernels."""
