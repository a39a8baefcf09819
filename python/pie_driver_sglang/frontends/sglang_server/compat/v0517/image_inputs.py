"""Reads the images that SGLang's processors leave in a request, as a pickle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.mm_utils import _unwrap_tensor_or_list
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput

from pie_driver_sglang.frontends.sglang_server import unsupported
from pie_driver_sglang.frontends.sglang_server.compat.protocols import ReadImage


def read_images(pickle: bytes) -> list[ReadImage]:
    """The images of a request, in the order of the prompt.

    Shared memory of SGLang's processors is copied and freed, also after an error.

    Args:
        pickle: Of a ``MultimodalProcessorOutput``.

    Raises:
        ValueError: The driver does not support an item.
    """
    output = io_struct.unwrap_from_pickle(io_struct.PickleWrapper(pickle))
    features = [_unwrap_tensor_or_list(item.feature) for item in output.mm_items]
    for item in output.mm_items:
        _unwrap_tensor_or_list(item.precomputed_embeddings)
    images: list[ReadImage] = []
    for item, feature in zip(output.mm_items, features, strict=True):
        _check(item, feature)
        images += _read_item(item, feature, output)
    return sorted(images, key=lambda image: image[0])


def _check(item: MultimodalDataItem, feature: Any) -> None:
    if not item.is_image():
        raise ValueError(unsupported.unsupported_media(f"`{item.modality.name.lower()}_data`"))
    if not isinstance(feature, torch.Tensor) or not item.offsets:
        why = "the driver computes embeddings itself"
        raise ValueError(unsupported.unsupported_media("an image without pixels", why))


def _read_item(
    item: MultimodalDataItem, feature: torch.Tensor, output: MultimodalProcessorOutput
) -> Iterator[ReadImage]:
    """The images of an item, each with its grid and its range of tokens."""
    grids: list[list[int]] = item.image_grid_thw.reshape(-1, 3).tolist()
    patches = [time * height * width for time, height, width in grids]
    pixels = torch.split(feature.float().contiguous(), patches)
    for grid, part, (first, last) in zip(grids, pixels, item.offsets, strict=True):
        time, height, width = grid
        positions = _positions(output, first, last + 1)
        yield first, last + 1 - first, (time, height, width), part.numpy().tobytes(), positions


def _positions(output: MultimodalProcessorOutput, start: int, end: int) -> bytes:
    """M-RoPE positions of an image's tokens; empty for a model with one axis.

    Raises:
        ValueError: The text does not continue after the image's largest position.
    """
    axes = output.mrope_positions
    if axes is None:
        return b""
    image = axes[:, start:end]
    if end < axes.shape[1] and bool((axes[:, end] != image.max() + 1).any()):
        why = "its positions are of another kind"
        raise ValueError(unsupported.unsupported_media("an image of this model", why))
    data: bytes = image.T.contiguous().to(torch.int32).numpy().tobytes()
    return data
