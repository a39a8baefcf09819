"""Adapters that a client sends as tensors, written to files, which is how the driver reads them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from pie_driver_sglang.errors import ConfigError

_FLATTENED: Final = "flattened_bucket"


def write_adapter(message: Any, folder: Path) -> None:
    """Writes the adapter of a ``LoadLoRAAdapterFromTensorsReqInput`` as PEFT saves one.

    Raises:
        ConfigError: It adds tokens, or its tensors cannot be read or are not those that were sent.
    """
    if message.added_tokens_config:
        raise ConfigError(
            f"the adapter adds {len(message.added_tokens_config)} tokens to the vocabulary",
            "use an adapter without `added_tokens.json`",
        )
    tensors = _tensors(message)
    _check(tensors, message.expected_checksums)
    config = json.dumps(message.config_dict)
    folder.joinpath("adapter_config.json").write_text(config, encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")


def _tensors(message: Any) -> dict[str, torch.Tensor]:
    try:
        # One copy for each rank; the driver's ranks read the same files.
        data = MultiprocessingSerializer.deserialize(message.serialized_named_tensors[0])
        if message.load_format == _FLATTENED:
            bucket = FlattenedTensorBucket(
                flattened_tensor=data["flattened_tensor"], metadata=data["metadata"]
            )
            data = dict(bucket.reconstruct_tensors())
        found = dict(data)
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in found.items()}
    except Exception as error:
        raise ConfigError(
            f"the adapter's tensors cannot be read: {type(error).__name__}: {error}",
            "send what `MultiprocessingSerializer.serialize` makes of a dictionary by name",
        ) from error


def _check(tensors: dict[str, torch.Tensor], sums: dict[str, str] | None) -> None:
    if sums is None:
        return
    found = {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in tensors.items()}
    wrong = sorted(name for name in found.keys() | sums.keys() if found.get(name) != sums.get(name))
    if wrong:
        raise ConfigError(
            f"{len(wrong)} of the adapter's {len(sums)} tensors are not what `expected_checksums` "
            f"says, {wrong[0]} the first",
            "send the adapter again",
        )


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return data
