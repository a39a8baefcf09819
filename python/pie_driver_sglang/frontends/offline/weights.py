"""`WeightMethods`: methods of the engine for weights that change and memory that is released."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.errors import WeightsError, quoted
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates, UpdateResult
from pie_driver_sglang.frontends.offline.error_notes import with_hint
from pie_driver_sglang.frontends.offline.requests import OpenRequests

if TYPE_CHECKING:
    import torch


class WeightMethods:
    """Methods of `Engine`; each waits for the requests under way, and holds back new ones."""

    _runtime: Any
    _updates: ModelUpdates
    _requests: OpenRequests

    @property
    def _own_updates(self) -> ModelUpdates:
        """The updates; raises in a forked process, which shares the drivers' sockets."""
        with_hint(self._requests.require_own_process)
        return self._updates

    def flush_cache(self) -> bool:
        """Empty the prefix cache. False, with nothing done, while requests run."""
        return bool(self._runtime.flush_cache())

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None
    ) -> tuple[bool, str]:
        """Replace all weights by those of another checkpoint of the same model.

        They are checked before the first one is written; what does not fit changes nothing.

        Args:
            model_path: A folder with safetensors files, or a repository, which is downloaded.
            load_format: `safetensors`, `auto` or None.

        Returns:
            Whether they were replaced, and SGLang's message or the reason.
        """
        return _pair(self._own_updates.update_from_disk(model_path, load_format))

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        """Replace some weights.

        A driver that is restarted cannot read tensors again: requests are refused then, until all
        weights were updated.

        Args:
            named_tensors: Tensors of torch by their names in checkpoints.
            load_format: None.
            flush_cache: Without effect: no request has KV of the former weights.

        Returns:
            Whether they were replaced, and SGLang's message or the reason.
        """
        if load_format is not None:
            return _one_by_one(load_format)
        try:
            data = serialized(dict(named_tensors))
        except WeightsError as error:
            return False, error.with_hint
        return _pair(self._own_updates.update_from_tensors(data, flush=flush_cache))

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        """Have the drivers join a process group, by which rank 0 sends weights.

        Args:
            master_address: Of rank 0, a trainer.
            master_port: Of rank 0.
            rank_offset: The rank of the first rank of the model.
            world_size: The trainer, and all ranks of the model.
            group_name: Names the group in later calls.
            backend: `nccl`; on the CPU it is `gloo` in any case.

        Returns:
            Whether they have, and SGLang's message or the reason.
        """
        fields = {
            "address": master_address,
            "port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "name": group_name,
            "backend": backend,
        }
        return _pair(self._own_updates.join_group(fields))

    def destroy_weights_update_group(self, group_name: str) -> tuple[bool, str]:
        """Have the drivers leave a process group."""
        return _pair(self._own_updates.leave_group(group_name))

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        load_format: str | None = None,
    ) -> tuple[bool, str]:
        """Replace weights by tensors that rank 0 of a group broadcasts, in this order.

        `load_format` is None: the tensors come one by one.

        Returns:
            Whether they were replaced, and SGLang's message or the reason.
        """
        if load_format is not None:
            return _one_by_one(load_format)
        fields = {
            "names": list(names),
            "dtypes": [str(dtype) for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "group": group_name,
        }
        return _pair(self._own_updates.update_from_group(fields, flush=flush_cache))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a weight, by its name in checkpoints.

        Raises:
            WeightsError: The model has none of this name, or it cannot be read.
        """
        return self._own_updates.read(name, truncate_size)

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give memory of the device back: `kv_cache`, `weights`, `cuda_graph`, or all.

        Requests are refused until :meth:`resume_memory_occupation`. The memory of a GPU needs the
        argument `enable_memory_saver`.

        Raises:
            WeightsError: A tag is unknown, or the memory cannot be released.
        """
        self._own_updates.release(tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, with the weights that were there.

        Raises:
            WeightsError: A tag is unknown, or there is too little memory.
        """
        self._own_updates.resume_memory(tags)


def _one_by_one(load_format: str) -> tuple[bool, str]:
    text = f"`load_format` is {quoted(load_format)}: tensors are sent one by one"
    return False, f"{text}; leave it out"


def _pair(result: UpdateResult) -> tuple[bool, str]:
    return result.success, result.message


def serialized(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors as a safetensors file, by the torch that the caller has imported.

    Raises:
        WeightsError: One is no tensor of torch.
    """
    own: Any = sys.modules.get("torch")
    for name, tensor in tensors.items():
        if own is None or not isinstance(tensor, own.Tensor):
            raise WeightsError(f"{name} is a {type(tensor).__name__}", "send tensors of torch")
    # It imports torch.
    from safetensors.torch import save

    # Copies, because a file has no tensors that share memory.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data: bytes = save(copies)
    return data
