"""Weights that were changed for the driver's kernels: no update may be mixed with them."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

REASON = (
    "weights cannot be updated: the weights of norms were multiplied into the layers behind them; "
    "start with `fuse_layers = false` to update weights"
)


def freeze(runner: Any) -> None:
    """Has SGLang refuse every update of a loaded model's weights, with :data:`REASON`.

    SGLang's own ways (from a disk, a tensor, a process group, by IPC) answer that they failed, as
    they do for other reasons. What calls the model's loader itself gets an exception.

    Args:
        runner: SGLang's `ModelRunner`, or what has its `weight_updater` and `model`.
    """

    def refuse(*_arguments: object, **_named: object) -> tuple[bool, str]:
        return False, REASON

    def fail(*_arguments: object, **_named: object) -> NoReturn:
        raise RuntimeError(REASON)

    names = [name for name in dir(WeightUpdater) if name.startswith("update_weights")]
    frozen = type("FrozenWeights", (WeightUpdater,), dict.fromkeys(names, staticmethod(refuse)))
    own = runner.weight_updater
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    runner.weight_updater = frozen(**fields)
    runner.model.load_weights = fail
