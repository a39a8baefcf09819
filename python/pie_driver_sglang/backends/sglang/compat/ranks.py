"""Ranks: their places, SGLang's groups, and collective operations between them.

Imports SGLang where a function needs it: what samples on ranks is tested without.
`GroupCoordinator` is passed on to annotations: `all_gather`, `world_size` and `rank_in_group` are
used elsewhere, and `cpu_group`, torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["GroupCoordinator"]


class Place(NamedTuple):
    """Which rank a process is."""

    number: int
    size: int


def parallel_state(place: Place, gpu_id: int) -> ParallelState:
    """A rank's place as SGLang's runner wants it; later versions have no such class."""
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState

    return ParallelState.trivial(
        gpu_id=gpu_id,
        tp_rank=place.number,
        tp_size=place.size,
        attn_tp_rank=place.number,
        attn_tp_size=place.size,
    )


def place_of(runner: ModelRunner) -> Place:
    """The rank of a runner, by its `ps`; later versions keep it in `get_parallel()`."""
    return Place(runner.ps.tp_rank, runner.ps.tp_size)


def tensor_group() -> GroupCoordinator:
    """The group of all ranks of the model, which SGLang has made with its runner."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()


def shares_memory(group: GroupCoordinator) -> bool:
    """Whether ranks reach each other's memory; SGLang's own all-reduce of that kind says so."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    reach = group.ca_comm
    return isinstance(reach, CustomAllReduceV2) and not reach.disabled


def exchange(group: GroupCoordinator, received: torch.Tensor, sent: torch.Tensor) -> None:
    """All-to-all of equal parts, on the CPU, too; the public form of it is for GPUs only."""
    group._all_to_all_single(received, sent)


def capturing_collectives(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Within it collective operations can be captured on a stream, by all ranks at once."""
    from sglang.srt.distributed.parallel_state import graph_capture

    captured: AbstractContextManager[Any] = graph_capture(stream=stream)
    return captured


@contextmanager
def without_device_communicators() -> Iterator[None]:
    """Within it groups on the CPU get no communicators for GPUs, as SGLang gives them."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    initialize = GroupCoordinator.__init__

    def initialize_plain(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})

    with mock.patch.object(GroupCoordinator, "__init__", initialize_plain):
        yield


@contextmanager
def on_one_host(size: int) -> Iterator[None]:
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
