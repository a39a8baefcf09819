"""Process groups by which a trainer broadcasts weights to the ranks of a served model."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from pie_driver_sglang.checkpoint.tensors import Tensor
from pie_driver_sglang.errors import WeightsError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend_features import WeightBackend
    from pie_driver_sglang.engine.control_commands import GroupUpdate, JoinGroup

_WAIT_S: Final = 600.0
"""How long a rank waits for others in a new group, and for a tensor."""


class UpdateGroups:
    """The groups that a rank has joined; rank 0 of each is the trainer's."""

    def __init__(self, backend: WeightBackend, rank: int) -> None:
        """No groups.

        Args:
            backend: Makes groups, and has the device that receives tensors.
            rank: The number of this rank of the model.
        """
        self._backend, self._rank, self._device = backend, rank, backend.device
        self._groups: dict[str, Any] = {}

    def join(self, command: JoinGroup) -> None:
        """Join a group; blocks until all of its members have.

        Raises:
            WeightsError: The backend does not fit the device, or others do not come.
        """
        backend = "gloo" if self._device.type == "cpu" else command.backend
        if command.name in self._groups:
            raise WeightsError(
                f"the group {quoted(command.name)} exists",
                "destroy it before, by `/destroy_weights_update_group`",
            )
        rank = command.rank_offset + self._rank
        if not 0 < rank < command.world_size:
            raise WeightsError(
                f"this rank would be {rank} of {command.world_size} in the group",
                "set `rank_offset` and `world_size` so that the trainer is rank 0",
            )
        self._groups[command.name] = self._backend.new_group(
            backend, command._replace(rank_offset=rank), _WAIT_S
        )

    def leave(self, name: str) -> None:
        """Leave a group.

        Raises:
            WeightsError: There is none of this name.
        """
        group = self._groups.pop(name, None)
        if group is None:
            raise _unknown(name)
        dist.destroy_process_group(group)

    def listed(self, command: GroupUpdate) -> list[Tensor]:
        """The tensors of an update.

        Raises:
            WeightsError: Its lists do not fit each other, or its group does not exist.
        """
        if command.group not in self._groups:
            raise _unknown(command.group)
        sizes = {len(command.names), len(command.dtypes), len(command.shapes)}
        if len(sizes) != 1 or not command.names:
            raise WeightsError("`names`, `dtypes` and `shapes` must have one entry for each tensor")
        if len(set(command.names)) != len(command.names):
            raise WeightsError("`names` has a tensor twice", "send each tensor once")
        for name, shape in zip(command.names, command.shapes, strict=True):
            if not all(type(side) is int and side >= 0 for side in shape):
                raise WeightsError(
                    f"the shape of {quoted(name)} is {quoted(list(shape))}",
                    "send a list of integers from 0",
                )
        return [
            Tensor(name, tuple(shape), 0, _dtype(dtype).is_floating_point)
            for name, dtype, shape in zip(
                command.names, command.dtypes, command.shapes, strict=True
            )
        ]

    def receive(self, command: GroupUpdate) -> list[tuple[str, torch.Tensor]]:
        """Receive the tensors of an update from rank 0 of its group."""
        group = self._groups[command.group]
        received = [
            (name, torch.empty(tuple(shape), dtype=_dtype(dtype), device=self._device))
            for name, dtype, shape in zip(
                command.names, command.dtypes, command.shapes, strict=True
            )
        ]
        pending = [dist.broadcast(tensor, 0, group, async_op=True) for _, tensor in received]
        for work in pending:
            work.wait(datetime.timedelta(seconds=_WAIT_S))
        return received


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise WeightsError(f"the dtype {quoted(name)} is unknown", "use torch's names")
    return found


def _unknown(name: str) -> WeightsError:
    return WeightsError(
        f"there is no group {quoted(name)}", "make it before, by `/init_weights_update_group`"
    )
