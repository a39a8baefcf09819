"""The load of a model's weights: the functions of SGLang's loader that the driver watches.

`LoadConfig` is passed on for annotations only.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn
from unittest import mock

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.unquant import (
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import loader, weight_utils
from sglang.srt.utils import cpu_has_amx_support, init_custom_process_group
from sglang.srt.utils.network import NetworkAddress

from pie_driver_sglang.backends.sglang.compat.pooling import PassPooler

if TYPE_CHECKING:
    from pie_driver_sglang.engine.control_commands import JoinGroup

__all__ = ["LoadConfig"]

Initialize = Callable[[ModelConfig, LoadConfig, Any], torch.nn.Module]
"""SGLang's function that makes a model without weights, from a configuration, how it is loaded, and
how it is quantized."""
ReadFile = Callable[[str], dict[str, Any]]
"""SGLang's function that reads the tensors of a file of torch."""

_PLAIN: Final = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod)
_UPDATES: Final = ("update_weights", "load_weights")
"""How the names of SGLang's methods begin that update weights."""
_AS_STORED: Final = frozenset(
    {
        LoadFormat.AUTO,
        LoadFormat.SAFETENSORS,
        LoadFormat.FASTSAFETENSORS,
        LoadFormat.MISTRAL,
        LoadFormat.PT,
        LoadFormat.NPCACHE,
    }
)


def loads_as_stored(load_config: LoadConfig) -> bool:
    """Whether files hold the tensors of a checkpoint as they are; other formats bring their own."""
    return load_config.load_format in _AS_STORED


@contextmanager
def watched_loader(
    initialize: Callable[[Initialize, ModelConfig, LoadConfig, Any], torch.nn.Module],
    read_file: Callable[[ReadFile, str], dict[str, Any]],
    progress: type[Any],
) -> Iterator[None]:
    """Within it these take the place of `_initialize_model` and `_load_pt_file`, given these first.

    A version that makes models or reads files elsewhere loads without the driver's checks. Bars are
    of the type `progress`.
    """
    own, own_read = loader._initialize_model, weight_utils._load_pt_file

    def initialize_watched(
        model_config: ModelConfig, load_config: LoadConfig, quant_config: Any = None
    ) -> torch.nn.Module:
        return initialize(own, model_config, load_config, quant_config)

    with (
        mock.patch.object(loader, "_initialize_model", initialize_watched),
        mock.patch.object(weight_utils, "_load_pt_file", partial(read_file, own_read)),
        mock.patch.object(weight_utils, "tqdm", progress),
    ):
        yield


def load_instead(model: torch.nn.Module, load: Callable[..., Any]) -> Callable[..., Any]:
    """Has SGLang's loader call `load` on a model; returns the model's own `load_weights`."""
    own: Callable[..., Any] = model.load_weights  # type: ignore[assignment]
    model.load_weights = load  # type: ignore[assignment]
    return own


def load_itself(model: torch.nn.Module) -> None:
    """Gives a model its own `load_weights` back."""
    del model.load_weights


def weights_unsupported_reason(runner: ModelRunner) -> str | None:
    """Why weights cannot be written into a loaded model; None if they can."""
    reason: str | None = weight_updater._unsupported_derived_weight_cache_error()
    if reason is not None:
        return reason
    if runner.device == "cpu" and cpu_has_amx_support():
        return "SGLang has packed them for the CPU's AMX units"
    for module in runner.model.modules():
        if isinstance(module, BaseLayerWithLoRA):
            return "adapters are added to them (`enable_lora`)"
        if hasattr(module, "w_kc"):
            return "SGLang keeps products of them (multi-head latent attention)"
        if isinstance(module, PassPooler) and len(module.layers):
            return "its Dense modules are in files of their own"
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase | FusedMoE) and not isinstance(method, _PLAIN):
            return f"they are quantized ({type(method).__name__})"
        if isinstance(module, FusedMoE) and get_moe_runner_backend().is_flashinfer_trtllm_routed():
            return "SGLang has reordered those of the experts"
    return None


def load_weights(runner: ModelRunner, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Has a model write tensors of a checkpoint into its parameters.

    Past :func:`refuse_updates`, whose callers fold norms and would find them unfolded.
    """
    model = runner.model
    with loader.set_default_torch_dtype(runner.model_config.dtype):
        type(model).load_weights(model, tensors)


def new_update_group(backend: str, command: JoinGroup, timeout_s: float) -> Any:
    """Joins a process group by SGLang's function, which trainers call, too."""
    address = NetworkAddress(command.address, port=command.port)
    return init_custom_process_group(
        backend=backend,
        init_method=address.to_tcp(),
        timeout=datetime.timedelta(seconds=timeout_s),
        world_size=command.world_size,
        rank=command.rank_offset,
        group_name=command.name,
    )


def refuse_updates(runner: ModelRunner, reason: str) -> None:
    """Has SGLang refuse every update of a loaded model's weights, by methods of `WeightUpdater`.

    SGLang's own update methods (from a disk, a tensor, a process group, by IPC) answer that they
    failed, as they do for other reasons. What calls the model's loader itself gets an exception.

    Args:
        runner: With its model.
        reason: What the answers say.
    """

    def refuse(*_arguments: object, **_named: object) -> tuple[bool, str]:
        return False, reason

    def fail(*_arguments: object, **_named: object) -> NoReturn:
        raise RuntimeError(reason)

    names = [name for name in dir(WeightUpdater) if name.startswith(_UPDATES)]
    frozen = type("FrozenWeights", (WeightUpdater,), dict.fromkeys(names, staticmethod(refuse)))
    own = runner.weight_updater
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    runner.weight_updater = frozen(**fields)
    runner.model.load_weights = fail
