"""Penalties and logit biases: torch reference, and the tokens that penalties count.

For each KV slot `TokenHistory` has the token whose key and value it holds, recorded with every pass
of requests with penalties, and read by the block table. So the history is right wherever the KV
cache is: after preemption, for forks of a context, and when rejected drafts are overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

RECORD_WORDS = 8
"""Words of a slot's record, as `rust/planner/src/sampler/logits_processors.rs` writes them."""
ROWS_AT_ONCE = 64
"""Sampling slots whose tokens a GPU counts at once, each in a row of int32 counts."""


class Records(NamedTuple):
    """Penalties and biases of sampling slots."""

    slots: torch.Tensor
    """``[slots, 8]`` int32: row of the block table, KV indices of the first token that counts and
    after the last one, frequency, presence and repetition penalty (bits of float32), first word of
    biases, how many they are."""
    words: torch.Tensor
    """``[words]`` int32: biases, each a token and what is added to its logit (bits of float32)."""

    def floats(self, column: int) -> torch.Tensor:
        """``[slots]`` float32: a column of numbers."""
        return self.slots[:, column].contiguous().view(torch.float32)


class TokenHistory:
    """The token of each KV slot, for penalties."""

    def __init__(self, table: torch.Tensor, storage_slots: int, vocab_size: int) -> None:
        """Makes an empty history.

        Args:
            table: ``[rows, context]`` int32: the storage slots of each row of the block table.
            storage_slots: Of the whole pool.
            vocab_size: Columns of the logits.
        """
        self._table = table
        self._vocab_size = vocab_size
        self._counts: torch.Tensor | None = None
        self.tokens = torch.zeros(storage_slots, dtype=torch.int32, device=table.device)
        """``[storage slots]`` int32."""

    def record(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Records tokens.

        Args:
            slots: ``[count]`` int64: their storage slots. Of equal ones any may stay.
            tokens: ``[count]`` int64.
        """
        self.tokens[slots] = tokens.to(torch.int32)

    def apply_penalties(self, logits: torch.Tensor, records: Records) -> None:
        """Applies penalties, then biases, in place.

        Args:
            logits: ``[slots, vocabulary]`` float32, rows contiguous.
            records: Of the same slots.
        """
        if not logits.is_cuda:
            self._penalize(logits, records)
            _add_biases(logits, records)
            return
        # Imported here: a machine without a GPU may have no Triton.
        from pie_driver_sglang.kernels.sampling.penalties import apply_penalties

        apply_penalties(
            logits, self._table, self.tokens, records.slots, records.words, self.counts()
        )

    def counts(self) -> torch.Tensor:
        """``[64, vocabulary]`` int32 zeros, scratch for counts; the kernel restores zeros."""
        if self._counts is None:
            shape = (ROWS_AT_ONCE, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._table.device)
        return self._counts

    def _penalize(self, logits: torch.Tensor, records: Records) -> None:
        first, end = records.slots[:, 1].long(), records.slots[:, 2].long()
        rows, positions = _expand_ranges(first, end)
        table_rows = records.slots[:, 0].long()[rows]
        tokens = self.tokens[self._table[table_rows, positions].long()].long()
        counts = torch.zeros_like(logits)
        one = torch.ones((), dtype=logits.dtype, device=logits.device)
        counts.index_put_((rows, tokens), one, accumulate=True)
        frequency, presence, repetition = (records.floats(column)[:, None] for column in (3, 4, 5))
        seen = counts > 0
        lowered = logits - frequency * counts - presence
        scaled = torch.where(lowered < 0, lowered * repetition, lowered / repetition)
        torch.where(seen, scaled, logits, out=logits)


def _add_biases(logits: torch.Tensor, records: Records) -> None:
    first, count = records.slots[:, 6].long(), records.slots[:, 7].long()
    rows, positions = _expand_ranges(torch.zeros_like(count), count)
    at = first[rows] + 2 * positions
    tokens = records.words[at].long()
    values = records.words[at + 1].contiguous().view(torch.float32)
    logits.index_put_((rows, tokens), values, accumulate=True)


def _expand_ranges(first: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expands ranges: the range index and the number of each element, ``[numbers]`` int64."""
    lengths = (end - first).clamp(min=0)
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return rows, torch.arange(len(rows), device=rows.device) - starts[rows] + first[rows]
