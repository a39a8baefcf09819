"""Sampling kernels, and the torch code that computes the same on a CPU.

======================  ============================================================================
``sampler``             samples the token of each slot; other small kernels of a captured step
``small_filters``       top-k, top-p and min-p where few tokens are kept
``top_p_search``        top-k and top-p where many are kept, without a sort
``penalties``           penalties and logit biases
``token_logprobs``      log-probabilities: of a token, of the most probable, of given ones
``logit_rows``          device functions that these kernels share
``reference``           torch: sampling and probing of logit rows; calls `sampler` on a GPU
``token_history``       torch: penalties, biases, and the tokens that penalties count
``logprobs_reference``  torch: log-probabilities
``hidden_words``        torch: hidden states after the log-probabilities of an answer
``slot_params``         sampling parameters of slots, as tensors
``outputs``             outputs of a group of slots
======================  ============================================================================

A slot is one sampler of a request, with one row of logits.
"""
