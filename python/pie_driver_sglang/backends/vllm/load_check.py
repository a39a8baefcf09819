"""Every parameter of a loaded model was written by the checkpoint, and no tensor of it was cut.

vLLM itself counts the parameters of its linear layers as loaded, and does not notice a fused one
(`qkv_proj`) of which the checkpoint has a part. So all are NaN before, and none may be after. It
takes from a tensor that is too large what it needs, so the reads are watched. A tensor that the
model has no place for ends vLLM's own loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pie_driver_sglang.backends.load_trace import LoadTrace, unread_parts
from pie_driver_sglang.backends.vllm.compat.model import loading_by
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.errors import StartError

_MOST_NAMED = 3
"""Parameters that the error names."""


def load_completely(model: Any, load: Callable[[], None], *, checked: bool) -> None:
    """Loads weights, and refuses a model that they do not fit; all ranks do so at once.

    Args:
        model: The built model.
        load: Loads its weights.
        checked: Whether its parameters are plain: quantized ones have marks of their own for what
            was not loaded.

    Raises:
        StartError: Of a tensor all ranks together have taken a part. Or a parameter of a rank has
            numbers that the checkpoint did not set, or that are none.
    """
    if not checked:
        load()
        return
    with torch.no_grad():
        for value in _parameters(model).values():
            value.fill_(torch.nan)
    trace = LoadTrace(model.parameters())
    load_weights = model.load_weights

    def load_traced(weights: Any, *args: Any, **kwargs: Any) -> Any:
        with trace.running():
            return load_weights(trace.take(weights), *args, **kwargs)

    with loading_by(model, load_traced):
        load()
    _check_reads(trace)
    # A parameter may have been replaced.
    own = [name for name, value in _parameters(model).items() if bool(value.sum().isnan())]
    every = process_groups.gathered(own)
    if missing := list(dict.fromkeys(name for found in every for name in found)):
        shown = ", ".join(f"`{name}`" for name in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise StartError(
            f"the checkpoint leaves numbers of {shown}{more} unset, or sets them to NaN",
            "download the snapshot again, or use one that is whole",
        )


def _check_reads(trace: LoadTrace) -> None:
    """Refuses a checkpoint with a tensor that is larger than the model's."""
    every = process_groups.gathered(trace.partial_reads())
    for name, reads in unread_parts(every):
        raise StartError(
            f"the weights do not fit the model's `config.json`: {name} is {reads.shape}, but the "
            f"model's {reads.taken}",
            "use the `config.json` that belongs to these weights, or download the snapshot again",
        )


def parameter_bytes(model: Any) -> int:
    """What parameters and buffers take; vLLM packs them for its kernels later."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    """Those of plain numbers."""
    return {
        name: value
        for name, value in model.named_parameters()
        if value.is_floating_point() and value.itemsize > 1
    }
