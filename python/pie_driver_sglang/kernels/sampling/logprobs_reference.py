"""Log-probabilities of places: of a token, of the most probable ones, of given ones.

A place is a row of logits and a token: the one that was drawn from it, or the next one of a prompt.
Its values are words of 32 bits, as they are answered: the log-probability of the token, the most
probable tokens, best first, their log-probabilities, and those of given tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pie_driver_sglang._core import STEP_TOP
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS

PLACE_WORDS = 4
"""Numbers of a place in a staged group, as `rust/planner/src/slot/group.rs` writes them."""
LEAST = torch.finfo(torch.float32).min
"""In place of -inf, as SGLang has it."""


class Places(NamedTuple):
    """What is asked of the slots of a step or a group."""

    slots: torch.Tensor
    """``[places]`` int64: rows of the logits, ascending."""
    tokens: torch.Tensor
    """``[places]`` int64: the token of each; -1 for the one that is drawn."""
    tops: torch.Tensor
    """``[places]`` int64: most probable tokens that are wanted."""
    divisors: torch.Tensor
    """``[places]`` float32: what the logits are divided by."""
    given: torch.Tensor
    """``[tokens, 2]`` int64: place, ascending, and a token whose log-probability is wanted."""

    @staticmethod
    def of_step(records: torch.Tensor, words: torch.Tensor) -> Places:
        """Those of the records of a step's slots.

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
        return Places(slots, torch.full_like(slots, -1), tops, divisors, given)

    def counts(self) -> torch.Tensor:
        """``[places]`` int64: tokens that are given for each."""
        return torch.bincount(self.given[:, 0], minlength=len(self.slots))

    def starts(self) -> torch.Tensor:
        """``[places + 1]`` int64: the first word of each place, and the end of the last one."""
        lengths = 1 + 2 * self.tops + self.counts()
        return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def place_words(logits: torch.Tensor, places: Places, drawn: torch.Tensor) -> torch.Tensor:
    """The words of all places, one after the other.

    Args:
        logits: ``[slots, vocabulary]`` float32, as tokens are drawn from them.
        places: What is asked, at least one; on the same device.
        drawn: ``[slots]`` int64, or of the first slots only if no others are drawn from: their
            tokens. One outside of the vocabulary has any words.

    Returns:
        ``[words]`` int32 on the same device.
    """
    starts = places.starts()
    out = torch.zeros(int(starts[-1]), dtype=torch.int32, device=logits.device)
    drawn = torch.nn.functional.pad(drawn, (0, len(logits) - len(drawn)))
    own = torch.where(places.tokens < 0, drawn[places.slots], places.tokens)
    if logits.is_cuda and int(places.tops.max()) <= STEP_TOP:
        _find(logits, places, own, out)
    else:
        _look_up(logits, places, own, out)
    return out


def _find(logits: torch.Tensor, places: Places, own: torch.Tensor, out: torch.Tensor) -> None:
    """By the kernels of `kernels/sampling/token_logprobs.py`."""
    # Imported here: a machine without a GPU may have no Triton.
    from pie_driver_sglang.kernels.sampling import token_logprobs as kernels

    counts = places.counts()
    columns = (
        torch.ones_like(places.tops),
        places.starts()[:-1],
        places.tops,
        counts,
        counts.cumsum(0) - counts,
        places.divisors.view(torch.int32),
    )
    records = torch.zeros(len(logits), STEP_RECORD_WORDS, dtype=torch.int32, device=logits.device)
    records[places.slots] = torch.stack([column.to(torch.int32) for column in columns], dim=1)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    tokens[places.slots] = own
    given = places.given[:, 1].to(torch.int32)
    kernels.find(logits, tokens, records, given, out, int(places.tops.max()))


def _look_up(logits: torch.Tensor, places: Places, own: torch.Tensor, out: torch.Tensor) -> None:
    """In plain torch."""
    starts = places.starts()[:-1]
    last = logits.shape[-1] - 1
    values = logits[places.slots].float() / places.divisors[:, None]
    norms = values.logsumexp(dim=-1)

    def write(at: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        found = (values[rows, tokens] - norms[rows]).clamp(min=LEAST)
        out[at] = found.view(torch.int32)

    write(starts, torch.arange(len(starts), device=logits.device), own.clamp(max=last))
    widest = int(places.tops.max())
    if widest:
        best = values.topk(widest, dim=-1).indices
        rows, ranks = (torch.arange(widest, device=best.device) < places.tops[:, None]).nonzero(
            as_tuple=True
        )
        ids = best[rows, ranks]
        at = starts[rows] + 1 + ranks
        out[at] = ids.to(torch.int32)
        write(at + places.tops[rows], rows, ids)
    rows, tokens = places.given.unbind(1)
    counts = places.counts()
    ranks = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    write(starts[rows] + 1 + 2 * places.tops[rows] + ranks, rows, tokens)
