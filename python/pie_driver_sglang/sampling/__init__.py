"""Sampling and probing of logit rows.

`groups.py` computes a slot group: tokens, distributions, logits, log-probabilities and entropies.
It is plain torch, in a few operations for all rows; on a GPU it calls `kernels/sampler.py` where
that has a kernel. `history.py` changes logits by penalties and biases, `places.py` finds
log-probabilities, and `types.py` has the outputs.
"""
