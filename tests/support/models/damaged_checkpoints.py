"""Copies of a snapshot with a fault that a start must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from support.models import tiny_models

FILE: Final = "model.safetensors"
Tensors = dict[str, Any]


def damaged(
    snapshot: Path,
    folder: Path,
    change: Callable[[Tensors], object] = lambda _: None,
    **config: Any,
) -> Path:
    """A copy of a snapshot below `folder`, with other tensors or another configuration.

    Args:
        snapshot: With one file of weights.
        folder: Where to put it.
        change: Gets the tensors by name, and changes them in place.
        config: Entries of the `config.json` that are replaced.
    """
    import safetensors.torch

    target = folder / "damaged"
    shutil.copytree(snapshot, target)
    tensors = safetensors.torch.load_file(target / FILE)
    change(tensors)
    save(tensors, target / FILE)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


def save(tensors: Tensors, path: Path) -> None:
    """Writes a file of weights."""
    import safetensors.torch

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(whole, path, {"format": "pt"})


def without(*parts: str) -> Callable[[Tensors], None]:
    """Leaves out tensors by parts of their names."""

    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if any(part in name for part in parts)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def cut(name: str, *sizes: int) -> Callable[[Tensors], None]:
    """Gives a tensor another size: cuts it, or adds zeros."""
    import torch

    def change(tensors: Tensors) -> None:
        changed = torch.zeros(sizes, dtype=tensors[name].dtype)
        shared = tuple(slice(min(x)) for x in zip(sizes, tensors[name].shape, strict=True))
        changed[shared] = tensors[name][shared]
        tensors[name] = changed

    return change


def added(name: str, *sizes: int) -> Callable[[Tensors], None]:
    """Adds a tensor."""
    import torch

    return lambda tensors: tensors.update({name: torch.ones(sizes)})


def converted(name: str, dtype: str) -> Callable[[Tensors], None]:
    """Gives a tensor numbers of another type."""
    import torch

    return lambda tensors: tensors.update({name: (tensors[name] * 100).to(getattr(torch, dtype))})


def transposed(name: str) -> Callable[[Tensors], None]:
    """Swaps rows and columns."""
    return lambda tensors: tensors.update({name: tensors[name].T})


def quantized(folder: Path, method: str, architecture: str = "Qwen3") -> Path:
    """A small model whose linear layers are as `method` (fp8 in blocks, gptq) stores them."""
    import torch
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    if architecture.endswith("Moe"):
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    config = getattr(transformers, f"{architecture}Config")(**{**tiny_models.COMMON, **sizes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    target = folder / method
    model.to(torch.float16 if method == "gptq" else torch.bfloat16).save_pretrained(target)
    tiny_models.add_tokenizer(target)
    settings, make = _METHODS[method]

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors.update(make(name.removesuffix(".weight"), tensors.pop(name)))

    return damaged(target, folder, change, quantization_config=settings)


def _fp8(layer: str, weight: Any) -> Tensors:
    import torch

    blocks = [-(-size // 128) for size in weight.shape]
    return {
        f"{layer}.weight": weight.to(torch.float8_e4m3fn),
        f"{layer}.weight_scale_inv": torch.ones(blocks),
    }


def _gptq(layer: str, weight: Any) -> Tensors:
    import torch

    outputs, inputs = weight.shape
    groups = inputs // 128
    return {
        f"{layer}.qweight": torch.zeros(inputs // 8, outputs, dtype=torch.int32),
        f"{layer}.qzeros": torch.zeros(groups, outputs // 8, dtype=torch.int32),
        f"{layer}.scales": torch.ones(groups, outputs, dtype=torch.float16),
        f"{layer}.g_idx": torch.arange(inputs, dtype=torch.int32) // 128,
    }


_METHODS: Final[dict[str, tuple[dict[str, Any], Callable[[str, Any], Tensors]]]] = {
    "fp8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
        _fp8,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        _gptq,
    ),
}
