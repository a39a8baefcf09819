"""Weights that a client sends: safetensors bytes, or pickles of SGLang where they are allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save
from sglang.srt.managers.io_struct import ChecksumInfo
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from pie_driver_sglang.errors import ConfigError, WeightsError, quoted
from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat

_SAFETENSORS: Final = "safetensors"
_FLATTENED: Final = "flattened_bucket"
_PICKLES: Final = (None, "direct", _FLATTENED)


def check_weights_format(message: Any, *, allow_pickles: bool) -> None:
    """Reject pickled weights, unless pickles are allowed.

    Args:
        message: An ``UpdateWeightsFromTensorReqInput``.
        allow_pickles: Whether the operator trusts the clients to run code.

    Raises:
        ConfigError: They are pickled, or of no known format.
    """
    if message.load_format == _SAFETENSORS:
        return
    if message.load_format not in _PICKLES:
        raise ConfigError(
            f"`load_format` is {quoted(message.load_format)}",
            'send the base64 of a safetensors file with `"load_format": "safetensors"`',
        )
    if not allow_pickles:
        raise ConfigError(
            f"`load_format` is {quoted(message.load_format)}, which is a pickle, and a pickle can "
            "run code",
            'send the base64 of a safetensors file with `"load_format": "safetensors"`, or start '
            "the server with `--allow-pickled-weights` if you trust every client",
        )


def safetensors_bytes(message: Any) -> bytes:
    """The weights of an ``UpdateWeightsFromTensorReqInput`` as a safetensors file.

    Raises:
        WeightsError: There is not one file, or a pickle cannot be read.
    """
    sent = message.serialized_named_tensors
    if message.load_format == _SAFETENSORS:
        if len(sent) != 1:
            raise WeightsError(
                f"`serialized_named_tensors` has {len(sent)} entries",
                "send one safetensors file; every rank reads it",
            )
        return bytes(sent[0])
    try:
        # One copy for each rank; the driver's ranks read the same file.
        data = MultiprocessingSerializer.deserialize(sent[0])
        if message.load_format == _FLATTENED:
            bucket = FlattenedTensorBucket(
                flattened_tensor=data["flattened_tensor"], metadata=data["metadata"]
            )
            data = bucket.reconstruct_tensors()
        return _saved(dict(data))
    except Exception as error:
        raise WeightsError(
            f"the tensors cannot be read: {type(error).__name__}: {error}",
            "send what `MultiprocessingSerializer.serialize` makes of a list of names and tensors",
        ) from error


def _saved(tensors: Mapping[str, torch.Tensor]) -> bytes:
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data: bytes = save(plain)
    return data


def check_group_format(message: Any) -> None:
    """Reject other formats of an ``UpdateWeightsFromDistributedReqInput`` than single tensors.

    Raises:
        WeightsError: It has another format.
    """
    if message.load_format is not None:
        raise WeightsError(
            f"`load_format` is {quoted(message.load_format)}",
            "leave it out, and broadcast tensor after tensor",
        )


def checksum_infos(ranks: Iterable[Mapping[str, Any]]) -> list[ChecksumInfo]:
    """SGLang's objects for the checksums of ranks."""
    place = scheduler_compat().parallelism_of
    return [
        msgspec.convert({**rank, "parallelism_info": place(rank["parallelism_info"])}, ChecksumInfo)
        for rank in ranks
    ]
