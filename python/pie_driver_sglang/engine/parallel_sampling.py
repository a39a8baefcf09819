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

FEWEST_DIVIDED = 64
"""Fewest slots of a step that ranks divide. Sharing the results is one more collective
operation: by estimate two GPUs save its time at some 30 slots of 150,000 tokens each."""


class RankSlots(abc.ABC):
    """The slots of a step that this rank samples. All ranks must do the same in the same order."""

    own: slice
    """Of the step's slots."""
    divided: bool
    """Whether other ranks sample others."""

    @abc.abstractmethod
    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Puts the ranks' parts of the vocabulary side by side. Can be captured.

        Args:
            part: ``[slots, width]``, this rank's.

        Returns:
            ``[own slots, ranks * width]``
        """

    @abc.abstractmethod
    def own_results(self, results: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Where this rank's own results go.

        Args:
            results: ``[slots]`` int64, where all slots' are wanted.
            device: The one that samples.

        Returns:
            ``[own slots]`` int64
        """

    @abc.abstractmethod
    def share(self, own: torch.Tensor, results: torch.Tensor) -> None:
        """Completes the results, where they are those of other ranks, too. Can be captured.

        Args:
            own: As :meth:`own_results` gave it, filled.
            results: ``[slots]`` int64 to be filled, each of them at once; may be pinned memory of
                the host.
        """

    @abc.abstractmethod
    def join_words(self, own: torch.Tensor) -> torch.Tensor:
        """Puts together words that ranks have found for their slots. Can be captured.

        Args:
            own: ``[words]`` int32, the same on all ranks except the words of each rank's slots,
                with zeros for those of other ranks.

        Returns:
            ``[words]`` int32
        """

    def publish(self, own: torch.Tensor, results: torch.Tensor) -> None:
        """As :meth:`share`, of results that are not where they are wanted.

        Args:
            own: ``[own slots]`` int64 on the device that sampled.
            results: As for :meth:`share`.
        """
        self.share(own, results)


def rank_slots(slots: int, ranks: RankGroup | None) -> RankSlots:
    """Which rank samples what of a step, the same on all ranks.

    Args:
        slots: Of the step.
        ranks: Those that have a part of the vocabulary each; None where one has all of it.
    """
    if ranks is None or slots < FEWEST_DIVIDED or slots % ranks.world_size:
        return _AllSlots(slots, ranks)
    return _SomeSlots(slots, ranks)


class _AllSlots(RankSlots):
    """Every rank samples all slots."""

    def __init__(self, slots: int, ranks: RankGroup | None) -> None:
        self.own = slice(0, slots)
        self.divided = False
        self._ranks = ranks

    def join(self, part: torch.Tensor) -> torch.Tensor:
        if self._ranks is None:
            return part
        return self._ranks.all_gather(part)

    def own_results(self, results: torch.Tensor, device: torch.device) -> torch.Tensor:
        return results

    def share(self, own: torch.Tensor, results: torch.Tensor) -> None:
        """Nothing is missing."""

    def join_words(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def publish(self, own: torch.Tensor, results: torch.Tensor) -> None:
        sampler.publish(own, results)


class _SomeSlots(RankSlots):
    """Every rank samples as many slots, in the order of the ranks."""

    def __init__(self, slots: int, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._count = slots // ranks.world_size
        start = ranks.rank_in_group * self._count
        self.own = slice(start, start + self._count)
        self.divided = True

    def join(self, part: torch.Tensor) -> torch.Tensor:
        # What goes to a rank lies in one piece, and so does what comes from it.
        sent = part.reshape(-1)
        received = torch.empty_like(sent)
        self._ranks.all_to_all(received, sent)
        parts = received.view(self._ranks.world_size, self._count, -1)
        return parts.movedim(0, 1).flatten(1)

    def own_results(self, results: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(self._count, dtype=results.dtype, device=device)

    def share(self, own: torch.Tensor, results: torch.Tensor) -> None:
        every = self._ranks.all_gather(own, dim=0)
        if own.is_cuda:
            sampler.publish(every, results)
        else:
            results.copy_(every)

    def join_words(self, own: torch.Tensor) -> torch.Tensor:
        every = self._ranks.all_gather(own, dim=0)
        # Of each word all ranks but one have zero.
        return every.view(self._ranks.world_size, -1).sum(0, dtype=own.dtype)
