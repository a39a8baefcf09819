"""What a loaded model is told besides passes: new weights, sleep and wake, adapters, profiles.

Commands travel as JSON between the processes of one host, and among the ranks of a model. Weights
travel as files that every rank reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

KV_CACHE_TAG: Final = "kv_cache"
WEIGHTS_TAG: Final = "weights"
CUDA_GRAPH_TAG: Final = "cuda_graph"
"""What can be released; SGLang's names."""


class DiskUpdate(NamedTuple):
    """Replace all weights by those of a folder."""

    folder: str


class TensorUpdate(NamedTuple):
    """Replace some weights by the tensors of a safetensors file, which may be one of memory."""

    file: str


class ReadWeight(NamedTuple):
    """Read the first rows of a tensor, by its name in checkpoints."""

    name: str
    rows: int


class CheckWeights(NamedTuple):
    """Compute checksums of all weights, or keep, change or compare them; SGLang's actions."""

    action: str


class ReleaseMemory(NamedTuple):
    """Give the memory of weights or KV back to the system."""

    tags: Sequence[str]


class ResumeMemory(NamedTuple):
    """Take it again, with the weights that were there."""

    tags: Sequence[str]


class JoinGroup(NamedTuple):
    """Join a process group by which a trainer sends weights."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    name: str
    backend: str


class LeaveGroup(NamedTuple):
    """Leave such a group."""

    name: str


class GroupUpdate(NamedTuple):
    """Receive tensors from rank 0 of such a group, and replace weights by them."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    group: str


class UnloadAdapter(NamedTuple):
    """Reuse the memory of a LoRA adapter first: no request names it any more."""

    adapter_id: int


class StartProfile(NamedTuple):
    """Record operators and kernels by torch's profiler: the activities `CPU` and `GPU`."""

    activities: Sequence[str]
    with_stack: bool
    record_shapes: bool


class StopProfile(NamedTuple):
    """Write what was recorded into a folder, a Chrome trace for each rank."""

    folder: str


ControlCommand = (
    DiskUpdate
    | TensorUpdate
    | ReadWeight
    | CheckWeights
    | ReleaseMemory
    | ResumeMemory
    | JoinGroup
    | LeaveGroup
    | GroupUpdate
    | UnloadAdapter
    | StartProfile
    | StopProfile
)

_KINDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            DiskUpdate,
            TensorUpdate,
            ReadWeight,
            CheckWeights,
            ReleaseMemory,
            ResumeMemory,
            JoinGroup,
            LeaveGroup,
            GroupUpdate,
            UnloadAdapter,
            StartProfile,
            StopProfile,
        )
    }
)


def command_message(command: ControlCommand) -> dict[str, Any]:
    """A command as an object of JSON."""
    return {"command": type(command).__name__, **command._asdict()}


def read_command(message: Mapping[str, Any]) -> ControlCommand:
    """The command of :func:`command_message`."""
    fields = dict(message)
    command: ControlCommand = _KINDS[fields.pop("command")](**fields)
    return command
