"""Checkpoints of compressed-tensors, as llm-compressor writes them and vLLM reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from support.models.tiny_models import POCKET

_TOKEN: Final = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_CHANNEL: Final = {"strategy": "channel", "dynamic": False, "symmetric": True}
_GROUP: Final = {"strategy": "group", "group_size": 32, "dynamic": False, "symmetric": True}
SCHEMES: Final[dict[str, dict[str, Any]]] = {
    "W8A8": {
        "format": "int-quantized",
        "weights": {"num_bits": 8, "type": "int", **_CHANNEL},
        "input_activations": {**_TOKEN, "type": "int"},
    },
    "W4A16": {
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "type": "int", **_GROUP},
        "input_activations": None,
    },
    "FP8": {
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", **_CHANNEL},
        "input_activations": {**_TOKEN, "type": "float"},
    },
}
"""By vLLM's names."""
_INTS: Final = 8
"""Numbers of 4 bits in a word."""


def write(folder: Path, scheme: str) -> Path:
    """The embedded model with the linear layers of its blocks quantized."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(POCKET, folder)
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(POCKET / "model.safetensors").items():
        if name.endswith("proj.weight"):
            tensors |= _quantized(name.removesuffix("weight"), tensor.float(), scheme)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    given = {**SCHEMES[scheme]}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": given.pop("format"),
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **given}},
    }
    path.write_text(json.dumps(config))
    return folder


def _quantized(name: str, weight: Any, scheme: str) -> dict[str, Any]:
    """What a matrix is stored as."""
    import torch

    if scheme == "W4A16":
        grouped = weight.unflatten(1, (-1, _GROUP["group_size"]))
        scale = grouped.abs().amax(2, keepdim=True).clamp(min=1e-8) / 7
        codes = ((grouped / scale).round().clamp(-8, 7) + 8).to(torch.int32).flatten(1)
        shifts = 4 * torch.arange(_INTS, dtype=torch.int32)
        packed = (codes.unflatten(1, (-1, _INTS)) << shifts).sum(2).to(torch.int32)
        return {
            f"{name}weight_packed": packed,
            f"{name}weight_scale": scale.squeeze(2).bfloat16(),
            f"{name}weight_shape": torch.tensor(weight.shape),
        }
    most = 127.0 if scheme == "W8A8" else 448.0
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / most
    codes = weight / scale
    stored = codes.round().to(torch.int8) if scheme == "W8A8" else codes.to(torch.float8_e4m3fn)
    return {f"{name}weight": stored, f"{name}weight_scale": scale}
