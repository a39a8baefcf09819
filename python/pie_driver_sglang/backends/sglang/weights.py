"""`SglangWeights`: the parameters of a model that SGLang has loaded, for updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from pie_driver_sglang.backends.sglang.compat.loading import (
    load_weights,
    new_update_group,
    weights_unsupported_reason,
)
from pie_driver_sglang.backends.sglang.compat.weight_parts import find_part
from pie_driver_sglang.checkpoint.weights import checkpoint_files
from pie_driver_sglang.engine.backend_features import WeightPart
from pie_driver_sglang.errors import WeightsError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.engine.control_commands import JoinGroup


class SglangWeights:
    """Implements `WeightBackend`."""

    def __init__(self, runner: ModelRunner, device: torch.device) -> None:
        self._runner = runner
        self.device = device
        self.update_refusal: str | None = weights_unsupported_reason(runner)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightBackend.named_parameters`."""
        for name, parameter in self._runner.model.named_parameters():
            yield name, parameter.data

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightBackend.named_tensors`."""
        yield from self.named_parameters()
        yield from self._runner.model.named_buffers()

    def name_of(self, tensor: torch.Tensor) -> str:
        """See `WeightBackend.name_of`."""
        pointer = tensor.data_ptr()
        return next(name for name, found in self.named_parameters() if found.data_ptr() == pointer)

    def read_folder(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightBackend.read_folder`."""
        for path in checkpoint_files(folder):
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                    yield name, opened.get_tensor(name)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `WeightBackend.load`."""
        load_weights(self._runner, tensors)

    def read_part(self, name: str, stored: Callable[[torch.Tensor], torch.Tensor]) -> WeightPart:
        """See `WeightBackend.read_part`."""
        part = find_part(self._runner.model, name, stored)
        if part is None:
            raise WeightsError(
                f"the model has no tensor {quoted(name)} that can be read",
                "use a name of the checkpoint, as model.norm.weight",
            )
        return part

    def joined(self, parts: Sequence[WeightPart]) -> torch.Tensor:
        """See `WeightBackend.joined`."""
        first = parts[0]
        if first.dim is None:
            return first.values
        different = [part.values for part in parts[:: first.copies]]
        return torch.cat(different, first.dim)[: first.rows]

    def new_group(self, backend: str, command: JoinGroup, timeout_s: float) -> Any:
        """See `WeightBackend.new_group`."""
        return new_update_group(backend, command, timeout_s)
