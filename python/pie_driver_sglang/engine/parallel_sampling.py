"""Which rank samples what of a step whose logits are spread over ranks.

Each rank computes a part of the vocabulary for all slots. Of few slots every rank gets all of the
logits and samples all. Of many, each rank gets and samples some, and only results go to all.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.kernels.sampling import sampler

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import RankGroup

MIN_DIVIDED_SLOTS = 64
"""Fewest slots of a step that ranks divide. Sharing the results is one more collective
operation: by estimate two GPUs save its time at some 30 slots of 150,000 tokens each."""


class SlotPartition(abc.ABC):
    """The slots of a step that this rank samples. All ranks must do the same in the same order."""

    own: slice
    """Of the step's slots."""
    divided: bool
    """Whether other ranks sample others."""

    @abc.abstractmethod
    def gather_logits(self, part: torch.Tensor) -> torch.Tensor:
        """Puts the ranks' parts of the vocabulary side by side. Can be captured.

        Args:
            part: ``[slots, width]``, this rank's.

        Returns:
            ``[own slots, ranks * width]``
        """

    @abc.abstractmethod
    def results_buffer(self, results: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Where this rank's own results go.

        Args:
            results: ``[slots]`` int64, where all slots' are wanted.
            device: The one that samples.

        Returns:
            ``[own slots]`` int64
        """

    @abc.abstractmethod
    def gather_results(self, own: torch.Tensor, results: torch.Tensor) -> None:
        """Completes the results, where they are those of other ranks, too. Can be captured.

        Args:
            own: As :meth:`results_buffer` gave it, filled.
            results: ``[slots]`` int64 to be filled, each of them at once; may be pinned memory of
                the host.
        """

    @abc.abstractmethod
    def sum_words(self, own: torch.Tensor) -> torch.Tensor:
        """Puts together words that ranks have found for their slots. Can be captured.

        Args:
            own: ``[words]`` int32, the same on all ranks except the words of each rank's slots,
                with zeros for those of other ranks.

        Returns:
            ``[words]`` int32
        """

    def publish(self, own: torch.Tensor, results: torch.Tensor) -> None:
        """As :meth:`gather_results`, of results that are not where they are wanted.

        Args:
            own: ``[own slots]`` int64 on the device that sampled.
            results: As for :meth:`gather_results`.
        """
        self.gather_results(own, results)


def partition_slots(slots: int, ranks: RankGroup | None) -> SlotPartition:
    """Which rank samples what of a step, the same on all ranks.

    Args:
        slots: Of the step.
        ranks: Those that have a part of the vocabulary each; None where one has all of it.
    """
    if ranks is None or slots < MIN_DIVIDED_SLOTS or slots % ranks.world_size:
        return _ReplicatedSlots(slots, ranks)
    return _ShardedSlots(slots, ranks)


class _ReplicatedSlots(SlotPartition):
    """Every rank samples all slots."""

    def __init__(self, slots: int, ranks: RankGroup | None) -> None:
        self.own = slice(0, slots)
        self.divided = False
        self._ranks = ranks

    def gather_logits(self, part: torch.Tensor) -> torch.Tensor:
        if self._ranks is None:
            return part
        return self._ranks.all_gather(part)

    def results_buffer(self, results: torch.Tensor, device: torch.device) -> torch.Tensor:
        return results

    def gather_results(self, own: torch.Tensor, results: torch.Tensor) -> None:
        """Nothing is missing."""

    def sum_words(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def publish(self, own: torch.Tensor, results: torch.Tensor) -> None:
        sampler.publish(own, results)


class _ShardedSlots(SlotPartition):
    """Every rank samples as many slots, in the order of the ranks."""

    def __init__(self, slots: int, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._count = slots // ranks.world_size
        start = ranks.rank_in_group * self._count
        self.own = slice(start, start + self._count)
        self.divided = True

    def gather_logits(self, part: torch.Tensor) -> torch.Tensor:
        # What goes to a rank lies in one piece, and so does what comes from it.
        sent = part.reshape(-1)
        received = torch.empty_like(sent)
        self._ranks.all_to_all(received, sent)
        parts = received.view(self._ranks.world_size, self._count, -1)
        return parts.movedim(0, 1).flatten(1)

    def results_buffer(self, results: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(self._count, dtype=results.dtype, device=device)

    def gather_results(self, own: torch.Tensor, results: torch.Tensor) -> None:
        every = self._ranks.all_gather(own, dim=0)
        if own.is_cuda:
            sampler.publish(every, results)
        else:
            results.copy_(every)

    def sum_words(self, own: torch.Tensor) -> torch.Tensor:
        every = self._ranks.all_gather(own, dim=0)
        # Of each word all ranks but one have zero.
        return every.view(self._ranks.world_size, -1).sum(0, dtype=own.dtype)
