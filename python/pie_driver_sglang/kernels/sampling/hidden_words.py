"""Hidden states after log-probabilities, as the words of an answer."""

from __future__ import annotations

import torch


def insert_hidden_states(
    words: torch.Tensor, starts: torch.Tensor, states: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Puts the hidden state of each position that wants one after its log-probabilities.

    Args:
        words: ``[words]`` int32: log-probabilities of all positions, one after the other.
        starts: ``[positions + 1]`` int64: the first word of each position, and the end.
        states: ``[wanted positions, hidden]`` float32.
        wanted: ``[positions]`` bool.

    Returns:
        ``[words + wanted positions * hidden]`` int32 on the same device.
    """
    lengths = starts.diff()
    width = states.shape[1]
    longer = lengths + width * wanted
    firsts = longer.cumsum(0) - longer
    out = words.new_empty(len(words) + states.numel())
    at = torch.arange(len(words), device=words.device)
    out[at + (firsts - starts[:-1]).repeat_interleave(lengths)] = words
    places = (firsts + lengths)[wanted][:, None] + torch.arange(width, device=words.device)
    out[places] = states.contiguous().view(torch.int32)
    return out
