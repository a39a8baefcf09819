"""Ranks: how vLLM makes the groups of several on this host, and its collective operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from vllm.distributed import get_tp_group, parallel_state
from vllm.distributed.device_communicators import cpu_communicator
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.logits_processor import LogitsProcessor

if TYPE_CHECKING:
    from pie_driver_sglang.kernels.comm.all_reduce_norm import PeerMemory


class VllmGroup:
    """Implements `RankGroup` by vLLM's group of tensor-parallel ranks."""

    shares_memory = False

    def __init__(self) -> None:
        """Takes the group that this process has made."""
        self._group: Any = get_tp_group()
        self.world_size: int = self._group.world_size
        self.rank_in_group: int = self._group.rank_in_group

    def map_memory(self, device: torch.device, size: int) -> PeerMemory:
        """See `RankGroup.map_memory`."""
        raise RuntimeError("ranks of vLLM share no memory")

    def all_gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See `RankGroup.all_gather`."""
        gathered: torch.Tensor = self._group.all_gather(part, dim)
        return gathered

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """See `RankGroup.all_reduce`."""
        summed: torch.Tensor = self._group.all_reduce(part)
        return summed

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """See `RankGroup.all_to_all`."""
        torch.distributed.all_to_all_single(received, sent, group=self._group.device_group)


def compute_head_part(model: Any, states: torch.Tensor) -> torch.Tensor:
    """``[rows, width]``: this rank's part of the logits, with the model's cap and scale.

    The ranks' parts side by side are the vocabulary, with padding at its end. Classes that set
    single logits would want whole rows; those that have an encoder for media do, and are refused.
    """
    with mock.patch.object(LogitsProcessor, "_gather_logits", lambda _, logits: logits):
        part: torch.Tensor = model.compute_logits(states)
    return part


def group_backend(size: int, device: str) -> str:
    """The backend of torch's groups for so many ranks, on ``cpu`` or ``cuda``.

    NCCL would reserve memory of a GPU that one rank never uses.
    """
    return "nccl" if size > 1 and device == "cuda" else "gloo"


def capturing_tp_group(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Within it collective operations can be captured on a stream, by all ranks at once."""
    group: Any = get_tp_group()
    captured: AbstractContextManager[Any] = group.graph_capture(
        parallel_state.GraphCaptureContext(stream)
    )
    return captured


@contextmanager
def without_named_memory() -> Iterator[None]:
    """Within it vLLM makes groups without shared memory that has a name.

    It would stay when a rank is killed. vLLM makes some to find out which ranks are on one host, to
    broadcast objects, which the leader does by itself, and for operations on CPUs.
    """
    initialize = GroupCoordinator.__init__

    def initialize_plain(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **{**kwargs, "use_message_queue_broadcaster": False})

    def all_here(group: Any, *_args: Any, **_kwargs: Any) -> list[bool]:
        return [True] * torch.distributed.get_world_size(group)

    with (
        mock.patch.object(GroupCoordinator, "__init__", initialize_plain),
        mock.patch.object(parallel_state, "in_the_same_node_as", all_here),
        mock.patch.object(
            cpu_communicator.CpuCommunicator,
            "_all_group_ranks_share_shm_group_name",
            lambda _: False,
        ),
    ):
        yield
