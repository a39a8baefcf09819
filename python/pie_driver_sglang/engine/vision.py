"""Images and the rotary positions that come with them, in SGLang's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pie_driver_sglang.backends.sglang.compat.passes import (
    MultimodalDataItem,
    MultimodalInputs,
    image_embeddings,
    image_inputs,
    image_pixels,
)
from pie_driver_sglang.config.arch import takes_images

if TYPE_CHECKING:
    from pie_driver_sglang._core import ImageSpan, Pass, PassImages
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.ranks.commands import Forward
    from pie_driver_sglang.ranks.types import Images, Span


class Vision(NamedTuple):
    """What the model's vision encoder takes."""

    patch_values: int
    """Numbers of one patch."""
    merge_size: int
    """Side of the square of patches that one row stands for."""
    max_side: int
    """Longest side of an image, in patches."""


def find_vision(runner: ModelRunner) -> Vision | None:
    """The model's vision encoder; None when the driver cannot serve images with this model."""
    if not takes_images(runner.model_config.hf_config.to_dict()):
        return None
    encoder = runner.model.visual
    return Vision(
        patch_values=encoder.patch_embed.proj.weight[0].numel(),
        merge_size=encoder.spatial_merge_size,
        max_side=encoder.rotary_pos_emb.max_position_embeddings,
    )


class ImageInputs:
    """Fills the fields of a `ForwardBatch` that images and multi-axis positions need.

    Images are encoded here, whole and once, and handed to SGLang as finished embeddings: its cache
    of embeddings, which trusts a hash of the pixels, stays unused. Nothing is kept but the one
    image that the end of a pass may cut, until its last rows are through.
    """

    def __init__(self, runner: ModelRunner, chunk_tokens: int, placeholder: int) -> None:
        self._model = runner.model
        self._placeholder = placeholder
        self._positions: torch.Tensor | None = None
        if runner.model_config.model_is_mrope:
            # One buffer, so that its strides, for which kernels are compiled, never change.
            self._positions = torch.zeros(
                (3, chunk_tokens), dtype=torch.int64, device=runner.device
            )
        self._cut: dict[int, torch.Tensor] = {}

    def positions(self, batch: Pass | Forward, plain: torch.Tensor) -> torch.Tensor | None:
        """Rotary positions ``[3, tokens]`` int64 for the pass, None for a model with one axis.

        Args:
            batch: The pass.
            plain: Its positions, ``[tokens]`` int64, which text has on every axis.
        """
        if self._positions is None:
            return None
        if batch.images is None:
            return plain.expand(3, -1)
        staged = torch.frombuffer(batch.images.positions, dtype=torch.int64).view(3, -1)
        return self._positions[:, : batch.tokens].copy_(staged)

    def inputs(self, images: PassImages | Images, requests: int) -> list[MultimodalInputs | None]:
        """Embeddings of the images of a pass, by request."""
        self._encode([span for span in images.spans if span.number not in self._cut])
        items: dict[int, list[MultimodalDataItem]] = {}
        for span in images.spans:
            item = image_embeddings(self._cut[span.number], span.kv, self._placeholder)
            items.setdefault(span.request, []).append(item)
        self._cut = {span.number: self._cut[span.number] for span in images.spans if span.continues}
        return [
            image_inputs(items[request]) if request in items else None
            for request in range(requests)
        ]

    def _encode(self, spans: list[ImageSpan | Span]) -> None:
        """Encodes images together and adds their embeddings to those at hand."""
        if not spans:
            return
        embeddings = self._model.get_image_feature([_features(span) for span in spans])
        rows = [span.kv[1] - span.kv[0] for span in spans]
        parts = torch.split(embeddings, rows)
        self._cut |= {span.number: part for span, part in zip(spans, parts, strict=True)}


def _features(span: ImageSpan | Span) -> MultimodalDataItem:
    """The pixels of an image as SGLang's encoder takes them."""
    time, height, width = span.grid
    pixels = torch.frombuffer(span.pixels, dtype=torch.uint8)
    if pixels.data_ptr() % torch.float32.itemsize:
        pixels = pixels.clone()
    return image_pixels(pixels.view(torch.float32).view(time * height * width, -1), span.grid)
