"""The load of a model's weights: the functions of SGLang's loader that the driver watches.

`LoadConfig` is passed on for annotations only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn
from unittest import mock

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import loader, weight_utils

__all__ = ["LoadConfig"]

Initialize = Callable[[ModelConfig, LoadConfig, Any], torch.nn.Module]
"""SGLang's function that makes a model without weights, from a configuration, how it is loaded, and
how it is quantized."""
ReadFile = Callable[[str], dict[str, Any]]
"""SGLang's function that reads the tensors of a file of torch."""

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


def refuse_updates(runner: ModelRunner, reason: str) -> None:
    """Has SGLang refuse every update of a loaded model's weights: `WeightUpdater.update_weights*`.

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

    names = [name for name in dir(WeightUpdater) if name.startswith("update_weights")]
    frozen = type("FrozenWeights", (WeightUpdater,), dict.fromkeys(names, staticmethod(refuse)))
    own = runner.weight_updater
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    runner.weight_updater = frozen(**fields)
    runner.model.load_weights = fail
