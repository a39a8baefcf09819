"""Log-probabilities of tokens, top k and given tokens: request types and torch reference.

A request is a row of logits and a token: the one that was sampled from it, or the next one of a
prompt. Its values are 32-bit words, as in the answer: the log-probability of the token, the ids of
the top k tokens, their log-probabilities, and those of given tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pie_driver_sglang._core import STEP_TOP
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS

LOGPROB_REQUEST_WORDS = 5
"""Words of a request in a staged group, as `rust/planner/src/slot/group.rs` writes them."""
MIN_LOGPROB = torch.finfo(torch.float32).min
"""Instead of -inf, as in SGLang."""


class LogprobRequests(NamedTuple):
    """Log-probability requests of a step or a sampling group."""

    slots: torch.Tensor
    """``[requests]`` int64: rows of the logits, ascending."""
    tokens: torch.Tensor
    """``[requests]`` int64: the token of each; -1 for the sampled one."""
    tops: torch.Tensor
    """``[requests]`` int64: k of the top k tokens."""
    divisors: torch.Tensor
    """``[requests]`` float32: what the logits are divided by."""
    given: torch.Tensor
    """``[tokens, 2]`` int64: request, ascending, and a token whose log-probability is wanted."""

    @staticmethod
    def of_step(records: torch.Tensor, words: torch.Tensor) -> LogprobRequests:
        """Reads the records of a step's slots.

        Args:
            records: ``[slots, 6]`` int32: 1 if something is asked; first one of the words that are
                answered; most probable tokens; given tokens; the first one of these in `words`;
                divisor (bits of float32).
            words: ``[words]`` int32.
        """
        slots = records[:, 0].nonzero()[:, 0]
        _, _, tops, counts, first, _ = records[slots].long().unbind(1)
        divisors = records[slots, 5].contiguous().view(torch.float32)
        rows = torch.arange(len(slots), device=slots.device).repeat_interleave(counts)
        ranks = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        tokens = words[first[rows] + ranks].long()
        given = torch.stack((rows, tokens), dim=1)
        return LogprobRequests(slots, torch.full_like(slots, -1), tops, divisors, given)

    def counts(self) -> torch.Tensor:
        """``[requests]`` int64: given tokens of each."""
        return torch.bincount(self.given[:, 0], minlength=len(self.slots))

    def starts(self) -> torch.Tensor:
        """``[requests + 1]`` int64: the first word of each request, and the end of the last one."""
        lengths = 1 + 2 * self.tops + self.counts()
        return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def logprob_words(
    logits: torch.Tensor, requests: LogprobRequests, sampled: torch.Tensor
) -> torch.Tensor:
    """Computes the words of all requests, one after the other.

    Args:
        logits: ``[slots, vocabulary]`` float32, as tokens are sampled from them.
        requests: At least one; on the same device.
        sampled: ``[slots]`` int64, or of the first slots only if no others are sampled: their
            tokens. The words of one outside of the vocabulary are undefined.

    Returns:
        ``[words]`` int32 on the same device.
    """
    starts = requests.starts()
    out = torch.zeros(int(starts[-1]), dtype=torch.int32, device=logits.device)
    sampled = torch.nn.functional.pad(sampled, (0, len(logits) - len(sampled)))
    tokens = torch.where(requests.tokens < 0, sampled[requests.slots], requests.tokens)
    if logits.is_cuda and int(requests.tops.max()) <= STEP_TOP:
        _compute_on_gpu(logits, requests, tokens, out)
    else:
        _compute_in_torch(logits, requests, tokens, out)
    return out


def _compute_on_gpu(
    logits: torch.Tensor, requests: LogprobRequests, tokens: torch.Tensor, out: torch.Tensor
) -> None:
    """By the kernels of `token_logprobs`."""
    # Imported here: a machine without a GPU may have no Triton.
    from pie_driver_sglang.kernels.sampling import token_logprobs as kernels

    counts = requests.counts()
    columns = (
        torch.ones_like(requests.tops), requests.starts()[:-1], requests.tops, counts,
        counts.cumsum(0) - counts, requests.divisors.view(torch.int32),
    )  # fmt: skip
    records = torch.zeros(len(logits), STEP_RECORD_WORDS, dtype=torch.int32, device=logits.device)
    records[requests.slots] = torch.stack([column.to(torch.int32) for column in columns], dim=1)
    slot_tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    slot_tokens[requests.slots] = tokens
    given = requests.given[:, 1].to(torch.int32)
    kernels.compute_logprobs(logits, slot_tokens, records, given, out, int(requests.tops.max()))


def _compute_in_torch(
    logits: torch.Tensor, requests: LogprobRequests, tokens: torch.Tensor, out: torch.Tensor
) -> None:
    """Torch reference."""
    starts = requests.starts()[:-1]
    last = logits.shape[-1] - 1
    values = logits[requests.slots].float() / requests.divisors[:, None]
    norms = values.logsumexp(dim=-1)

    def write(at: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        found = (values[rows, tokens] - norms[rows]).clamp(min=MIN_LOGPROB)
        out[at] = found.view(torch.int32)

    write(starts, torch.arange(len(starts), device=logits.device), tokens.clamp(max=last))
    widest = int(requests.tops.max())
    if widest:
        best = values.topk(widest, dim=-1).indices
        rows, ranks = (torch.arange(widest, device=best.device) < requests.tops[:, None]).nonzero(
            as_tuple=True
        )
        ids = best[rows, ranks]
        at = starts[rows] + 1 + ranks
        out[at] = ids.to(torch.int32)
        write(at + requests.tops[rows], rows, ids)
    rows, tokens = requests.given.unbind(1)
    counts = requests.counts()
    ranks = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    write(starts[rows] + 1 + 2 * requests.tops[rows] + ranks, rows, tokens)
