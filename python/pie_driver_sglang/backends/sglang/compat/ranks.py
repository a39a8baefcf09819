"""Ranks: SGLang's groups, and collective operations between them.

Imports SGLang where a function needs it: its process groups are made before anything else of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from pie_driver_sglang.backends.sglang.compat import selection

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.model_executor.model_runner import ModelRunner

    from pie_driver_sglang.kernels.comm.all_reduce_norm import PeerMemory


class TpRank(NamedTuple):
    """Which rank a process is."""

    number: int
    size: int


def runner_arguments(rank: TpRank, gpu_id: int) -> dict[str, Any]:
    """What tells a runner its rank, where that is not published with the settings."""
    return selection.ranks().runner_arguments(rank.number, rank.size, gpu_id)


def rank_of(runner: ModelRunner) -> TpRank:
    """The rank of a runner."""
    return TpRank(*selection.ranks().rank_and_size(runner))


class TensorGroup:
    """Implements `RankGroup` by the group of all ranks that SGLang has made with its runner."""

    def __init__(self, group: GroupCoordinator | None = None) -> None:
        """Takes a group; None for that of the process."""
        from sglang.srt.distributed.parallel_state import get_tp_group

        self._group: GroupCoordinator = group or get_tp_group()
        self.world_size: int = self._group.world_size
        self.rank_in_group: int = self._group.rank_in_group

    @property
    def shares_memory(self) -> bool:
        """Whether ranks reach each other's memory; SGLang's own all-reduce of that kind says so."""
        from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

        reach = self._group.ca_comm
        return isinstance(reach, custom_all_reduce_v2.CustomAllReduceV2) and not reach.disabled

    def map_memory(self, device: torch.device, size: int) -> PeerMemory:
        """See `RankGroup.map_memory`."""
        from pie_driver_sglang.kernels.comm.all_reduce_norm import map_peer_memory

        return map_peer_memory(self._group.cpu_group, device, size)

    def all_gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the ranks' tensors in a dimension."""
        gathered: torch.Tensor = self._group.all_gather(part, dim=dim)
        return gathered

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Adds up the ranks' tensors, by the kernel that SGLang chooses for their size."""
        summed: torch.Tensor = self._group.all_reduce(part)
        return summed

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchanges equal parts, on the CPU, too; the public form of it is for GPUs only."""
        self._group._all_to_all_single(received, input=sent)


def capturing_collectives(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Within it collective operations can be captured on a stream, by all ranks at once."""
    from sglang.srt.distributed.parallel_state import graph_capture

    captured: AbstractContextManager[Any] = graph_capture(stream=stream)
    return captured


@contextmanager
def making_groups(ranks: int, device: str) -> Iterator[None]:
    """Within it SGLang makes the groups of so many ranks on this host, on ``cpu`` or ``cuda``."""
    if ranks == 1:
        yield
        return
    with _without_device_communicators() if device == "cpu" else _on_one_host(ranks):
        yield


@contextmanager
def _without_device_communicators() -> Iterator[None]:
    """Within it groups on the CPU get no communicators for GPUs, as SGLang gives them."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    initialize = GroupCoordinator.__init__

    def initialize_plain(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})

    with mock.patch.object(GroupCoordinator, "__init__", initialize_plain):
        yield


@contextmanager
def _on_one_host(size: int) -> Iterator[None]:
    """Within it ranks are on one host; SGLang asks by a region with a name, which might stay."""
    from sglang.srt.distributed.device_communicators import (
        custom_all_reduce_utils,
        custom_all_reduce_v2,
    )

    def all_here(*_args: Any, **_kwargs: Any) -> list[bool]:
        return [True] * size

    with (
        mock.patch.object(custom_all_reduce_utils, "in_the_same_node_as", all_here),
        mock.patch.object(custom_all_reduce_v2, "in_the_same_node_as", all_here),
    ):
        yield
