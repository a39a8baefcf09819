"""Every parameter of a loaded model was written by the checkpoint.

vLLM itself counts the parameters of its linear layers as loaded, and does not notice a fused one
(`qkv_proj`) of which the checkpoint has a part. So all are NaN before, and none may be after. A
tensor that the model has no place for ends vLLM's own loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.errors import StartError

_MOST_NAMED = 3
"""Parameters that the error names."""


def load_completely(model: Any, load: Callable[[], None], *, checked: bool) -> None:
    """Loads weights, and refuses a model of which some are left out; all ranks do so at once.

    Args:
        model: The built model, on the CPU.
        load: Loads its weights.
        checked: Whether its parameters are plain: quantized ones have marks of their own for what
            was not loaded.

    Raises:
        StartError: A parameter of a rank has numbers that the checkpoint did not set, or that are
            none.
    """
    parameters = {name: value for name, value in model.named_parameters() if _is_float(value)}
    if checked:
        with torch.no_grad():
            for value in parameters.values():
                value.fill_(torch.nan)
    load()
    # A parameter may have been replaced.
    parameters = {name: value for name, value in model.named_parameters() if _is_float(value)}
    own = [name for name, value in parameters.items() if bool(value.sum().isnan())]
    ranks = process_groups.gathered(own if checked else [])
    if missing := list(dict.fromkeys(name for found in ranks for name in found)):
        shown = ", ".join(f"`{name}`" for name in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise StartError(
            f"the checkpoint leaves numbers of {shown}{more} unset, or sets them to NaN",
            "download the snapshot again, or use one that is whole",
        )


def parameter_bytes(model: Any) -> int:
    """What parameters and buffers take; vLLM packs them for its kernels later."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.itemsize > 1
