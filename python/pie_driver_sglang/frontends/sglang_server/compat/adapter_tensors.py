"""LoRA adapters that a client sends as tensors, written to files for the driver."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from pie_driver_sglang.errors import ConfigError, quoted

SAFETENSORS: Final = "safetensors"
"""The `load_format` of a client that sends the bytes of a safetensors file."""
_FLATTENED: Final = "flattened_bucket"
_MOST_CONFIG_BYTES: Final = 1 << 20


def is_pickled(message: Any) -> bool:
    """Whether a ``LoadLoRAAdapterFromTensorsReqInput`` has pickles, which can run code."""
    return bool(message.load_format != SAFETENSORS)


def check_format(message: Any, *, allow_pickles: bool) -> None:
    """Reject a pickled adapter, unless pickles are allowed.

    Args:
        message: A ``LoadLoRAAdapterFromTensorsReqInput``.
        allow_pickles: Whether the operator trusts the clients to run code.

    Raises:
        ConfigError: It is pickled, or is not exactly one file.
    """
    if is_pickled(message):
        if not allow_pickles:
            raise ConfigError(
                f"`load_format` is {quoted(message.load_format)}, which is a pickle, and a pickle "
                "can run code",
                'send the base64 of a safetensors file with `"load_format": "safetensors"`, or '
                "start the server with `--allow-pickled-adapters` if you trust every client",
            )
        return
    if (count := len(message.serialized_named_tensors)) != 1:
        raise ConfigError(
            f"`serialized_named_tensors` has {count} entries",
            "send one safetensors file; every rank reads it",
        )


def write_adapter(message: Any, folder: Path) -> None:
    """Write the adapter of a ``LoadLoRAAdapterFromTensorsReqInput`` in PEFT's format.

    Raises:
        ConfigError: It adds tokens, its tensors cannot be read, or a checksum differs.
    """
    if message.added_tokens_config:
        raise ConfigError(
            f"the adapter adds {len(message.added_tokens_config)} tokens to the vocabulary",
            "use an adapter without `added_tokens.json`",
        )
    config = json.dumps(message.config_dict)
    if len(config) > _MOST_CONFIG_BYTES:
        raise ConfigError(
            f"`config_dict` has {len(config)} bytes, and at most {_MOST_CONFIG_BYTES} are read",
            "send PEFT's `adapter_config.json`",
        )
    folder.joinpath("adapter_config.json").write_text(config, encoding="utf-8")
    target = folder / "adapter_model.safetensors"
    if is_pickled(message):
        tensors = _unpickled(message)
        _check(tensors, message.expected_checksums)
        save_file(tensors, target)
        return
    data = bytes(message.serialized_named_tensors[0])
    if message.expected_checksums is not None:
        _check(_loaded(data), message.expected_checksums)
    # The driver checks the file before it reads it.
    target.write_bytes(data)


def _loaded(data: bytes) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, ValueError) as error:
        raise ConfigError(
            f"the adapter is not a safetensors file: {error}",
            "send the base64 of `adapter_model.safetensors`",
        ) from error
    return tensors


def _unpickled(message: Any) -> dict[str, torch.Tensor]:
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
