"""Images: embeddings by the vision encoder, and M-RoPE positions; and `input_embeds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.engine.backend import EncodedImage

if TYPE_CHECKING:
    from pie_driver_sglang._core import ImageSpan, Pass, PassImages
    from pie_driver_sglang.engine.backend import ModelBackend
    from pie_driver_sglang.ranks.commands import Forward
    from pie_driver_sglang.ranks.types import Images, Span


class ImageInputs:
    """Makes what images and multi-axis positions add to the inputs of a pass.

    Images are encoded here, whole and once, and handed to the backend as embeddings: SGLang's cache
    of embeddings, which trusts a hash of the pixels, stays unused. Nothing is kept but the one
    image that the end of a pass may cut, until its last rows are through.
    """

    def __init__(self, backend: ModelBackend, chunk_tokens: int) -> None:
        self._backend = backend
        self._positions: torch.Tensor | None = None
        if backend.info.uses_mrope:
            # One buffer, so that its strides, for which kernels are compiled, never change.
            self._positions = torch.zeros(
                (3, chunk_tokens), dtype=torch.int64, device=backend.device
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

    def encode(self, images: PassImages | Images) -> tuple[list[EncodedImage], list[EncodedImage]]:
        """The images of a pass, and its blocks of `input_embeds`."""
        found = [span for span in images.spans if span.number not in self._cut]
        self._encode([span for span in found if not _is_embeds(span)])
        info, device = self._backend.info, self._backend.device
        for span in found:
            if _is_embeds(span):
                numbers = _numbers(span).view(span.grid[1:])
                self._cut[span.number] = numbers.to(device, info.dtype)
        encoded: tuple[list[EncodedImage], list[EncodedImage]] = ([], [])
        for span in images.spans:
            image = EncodedImage(span.request, span.kv, self._cut[span.number])
            encoded[_is_embeds(span)].append(image)
        self._cut = {span.number: self._cut[span.number] for span in images.spans if span.continues}
        return encoded

    def _encode(self, spans: list[ImageSpan | Span]) -> None:
        """Encodes images together and adds their embeddings to those at hand."""
        if not spans:
            return
        embeddings = self._backend.encode_images([(_pixels(span), span.grid) for span in spans])
        rows = [span.kv[1] - span.kv[0] for span in spans]
        parts = torch.split(embeddings, rows)
        self._cut |= {span.number: part for span, part in zip(spans, parts, strict=True)}


def _is_embeds(span: ImageSpan | Span) -> bool:
    """Whether a span brings embeddings: its grid is 0, tokens, numbers of each."""
    return span.grid[0] == 0


def _pixels(span: ImageSpan | Span) -> torch.Tensor:
    """``[patches, patch values]`` float32 of an image."""
    time, height, width = span.grid
    return _numbers(span).view(time * height * width, -1)


def _numbers(span: ImageSpan | Span) -> torch.Tensor:
    """Float32 of the pixels or embeddings."""
    pixels = torch.frombuffer(span.pixels, dtype=torch.uint8)
    if pixels.data_ptr() % torch.float32.itemsize:
        pixels = pixels.clone()
    return pixels.view(torch.float32)
