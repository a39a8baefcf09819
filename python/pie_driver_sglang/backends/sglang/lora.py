"""LoRA of a model of SGLang: which layers take adapters, and the slots of its LoRA manager."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.backends.sglang.compat import lora
from pie_driver_sglang.backends.sglang.compat.lora import LoraSlots, WrappedLinear, WrappedTable
from pie_driver_sglang.backends.sglang.compat.model import uses_latent_attention
from pie_driver_sglang.backends.sglang.compat.settings import lora_targets, lora_targets_changed
from pie_driver_sglang.config.options import FUSED_LORA
from pie_driver_sglang.engine.lora.files import EMBEDDINGS, Base, Linear, checkpoint_name
from pie_driver_sglang.errors import StartError

if TYPE_CHECKING:
    import torch

    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.config.options import DriverOptions

logger = logging.getLogger(__name__)

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What checkpoints call the parts of SGLang's fused layers, in their order."""


class SglangLora(LoraSlots):
    """Implements `LoraBackend`."""

    def layers(self) -> dict[str, Linear]:
        """The layers that take adapters, by the names that checkpoints have for them."""
        wrapped = lora.wrapped_linears(self.manager)
        linears = [linear for layer in wrapped for linear in _linears(layer)]
        linears += [_table(name, table) for name, table in lora.wrapped_tables(self.manager)]
        return {checkpoint_name(linear.name): linear for linear in linears}

    @property
    def adapter_slots(self) -> SglangLora:
        """Implements `AdapterSlots`, too."""
        return self

    def inputs_of(self, weight: torch.Tensor) -> list[str]:
        """The layers that are parts of this matrix; see `AdapterSlots.inputs_of`."""
        wrapped = lora.wrapped_linears(self.manager)
        same = (layer for layer in wrapped if layer.weight.data_ptr() == weight.data_ptr())
        return [linear.name for layer in same for linear in _linears(layer)]


def server_args(options: DriverOptions) -> dict[str, Any]:
    """The fields of `ServerArgs` about adapters."""
    if not options.enable_lora:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": options.max_lora_rank,
        "lora_target_modules": list(options.lora_target_modules),
        "max_loras_per_batch": options.max_loras_per_batch,
        "max_loaded_loras": options.max_loaded_loras,
        "lora_backend": "triton" if options.lora_backend == FUSED_LORA else options.lora_backend,
    }


@contextlib.contextmanager
def fitting(runner: ModelRunner) -> Iterator[None]:
    """Within it the runner, which has loaded its model, can make its LoRA manager.

    Raises:
        StartError: There are no adapters for the model, or for one of the layers asked for.
    """
    targets = _targets(runner, lora_targets())
    logger.debug("adapters may change %s", ", ".join(sorted(targets)))
    on_the_host = lora.on_the_host() if runner.device == "cpu" else contextlib.nullcontext()
    with lora_targets_changed(targets), on_the_host:
        yield


def _targets(runner: ModelRunner, wanted: Iterable[str]) -> set[str]:
    """SGLang's names of the layers to wrap."""
    architecture = type(runner.model).__name__
    if uses_latent_attention(runner.model_config):
        raise StartError(
            f"{architecture} uses multi-head latent attention, for which there are no adapters yet",
            hint="remove `enable_lora`",
        )
    found = lora.detect_targets(runner.model) - set(EMBEDDINGS)
    if lora.has_experts(runner.model):
        # SGLang would wrap the experts, which checkpoints spell differently.
        found -= {"gate_up_proj", "down_proj"}
    if lora.has_tables(runner.model):
        found |= set(EMBEDDINGS)
    targets = found if "all" in wanted else lora.normalized_targets(wanted)
    if not targets or targets - found:
        named = ", ".join(sorted(targets - found)) or "no layer"
        raise StartError(
            f"option `lora_target_modules` asks for {named}, "
            f"but adapters of {architecture} can change {', '.join(sorted(found)) or 'nothing'}",
            hint="remove `lora_target_modules`, or `enable_lora` where nothing can be changed",
        )
    return targets


def _table(name: str, table: WrappedTable) -> Linear:
    base = Base(table.weight, table.first, table.vocabulary)
    return Linear(name, table.inputs, table.outputs, (name,), base)


def _linears(layer: WrappedLinear) -> list[Linear]:
    """The parts of a wrapped layer; none of a kind that this driver has no adapters for."""
    parent, _, last = layer.name.rpartition(".")
    parts = _FUSED.get(last, ()) if layer.is_fused else (last,)
    if len(parts) != len(layer.outputs):
        return []
    names = [f"{parent}.{part}" for part in parts]
    fused = tuple(checkpoint_name(part) for part in names)
    return [
        Linear(part, layer.inputs, size, fused)
        for part, size in zip(names, layer.outputs, strict=True)
    ]
