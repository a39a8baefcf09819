"""Images of prompts: opened, turned into patches by the model's processor, and put into tokens."""

from __future__ import annotations

import base64
import binascii
import io
import os
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pie_driver_sglang.errors import ConfigError, quoted, reason
from pie_driver_sglang.frontends.common.lora_adapters import require_count

if TYPE_CHECKING:
    import PIL.Image

IMAGES: Final = "image_data"
_FETCH_S: Final = 30.0
_MOST_BYTES: Final = 64 << 20
"""Bytes of an image that is fetched."""
_KINDS: Final = "a path, an http or data URL, base64, bytes or an image of PIL"

PromptImage = tuple[int, int, tuple[int, int, int], bytes, bytes]
"""What `_core.Runtime.submit` takes: the index of the first token, the number of tokens, the grid
(time, height, width in patches), the pixels (float32 ``[patches, values of a patch]``), and the
M-RoPE positions (uint32 ``[tokens, 3]``)."""


def parse_images(others: Mapping[str, Any], count: int, *, is_batch: bool) -> list[list[Any]]:
    """The images of each prompt, by the rules of SGLang's `image_data`.

    Args:
        others: Arguments of `generate` by their names.
        count: Prompts.
        is_batch: Whether the prompts are a list.

    Raises:
        ConfigError: There are more or fewer lists than prompts.
    """
    given = others.get(IMAGES)
    if given is None or (isinstance(given, list | tuple) and not given):
        return [[] for _ in range(count)]
    if not isinstance(given, list | tuple):
        return [[given] for _ in range(count)]
    if not is_batch:
        return [list(given)]
    require_count(IMAGES, list(given), count)
    listed = [[] if each is None else each for each in given]
    return [list(each) if isinstance(each, list | tuple) else [each] for each in listed]


class ImageProcessor:
    """The image processor of a model of the Qwen-VL families. Any thread may call it."""

    def __init__(self, folder: Path, hf_config: Mapping[str, Any], vocab_size: int) -> None:
        """Read nothing yet: transformers and torch are imported with the first image.

        Args:
            folder: The snapshot.
            hf_config: Its `config.json`.
            vocab_size: Rows of the embedding table.
        """
        self._folder, self._vocab_size = folder, vocab_size
        self._token = int(hf_config["image_token_id"])
        self._lock = threading.Lock()
        self._loaded: Any = None

    def insert(
        self, tokens: Sequence[int], sources: Sequence[Any]
    ) -> tuple[list[int], list[PromptImage]]:
        """The tokens of a prompt with as many placeholders as its images have tokens, and these.

        Args:
            tokens: With one placeholder for each image.
            sources: The images, in their order.

        Raises:
            ConfigError: An image cannot be read, or has no placeholder.
        """
        places = [index for index, token in enumerate(tokens) if token == self._token]
        if len(places) != len(sources):
            raise ConfigError(
                f"`{IMAGES}` has {len(sources)} images for a prompt with {len(places)} "
                f"placeholders (token {self._token})",
                "write <|vision_start|><|image_pad|><|vision_end|> once for each image",
            )
        if (largest := max(tokens)) >= self._vocab_size:
            raise ConfigError(
                f"token {largest} of `input_ids` is not in the vocabulary, which has "
                f"{self._vocab_size}",
                "send ids below that",
            )
        images = [_opened(number, source) for number, source in enumerate(sources)]
        found, merge = self._patches(images)
        expanded: list[int] = []
        inserted: list[PromptImage] = []
        begin = position = 0
        for place, (grid, pixels) in zip(places, found, strict=True):
            expanded += tokens[begin:place]
            # Text has one position for each token.
            position += place - begin
            axes = _positions(position, grid, merge)
            inserted.append((len(expanded), len(axes), grid, pixels, axes.tobytes()))
            expanded += [self._token] * len(axes)
            begin, position = place + 1, int(axes.max()) + 1
        return [*expanded, *tokens[begin:]], inserted

    def _patches(
        self, images: Sequence[PIL.Image.Image]
    ) -> tuple[list[tuple[tuple[int, int, int], bytes]], int]:
        """The grid and the pixels of each image, and the patches along a token's side."""
        with self._lock:
            if self._loaded is None:
                self._loaded = _load(self._folder)
            processor = self._loaded
        try:
            made = processor(images=list(images), return_tensors="np")
        except Exception as error:
            # Processors raise anything, as on an image that is too narrow.
            raise ConfigError(
                f"`{IMAGES}` cannot be processed: {reason(error)}", "send other images"
            ) from error
        grids = np.asarray(made["image_grid_thw"]).reshape(-1, 3)
        pixels = np.asarray(made["pixel_values"], dtype=np.float32)
        ends = np.cumsum(grids.prod(axis=1))
        parts = np.split(pixels, ends[:-1])
        listed = [
            ((int(time), int(height), int(width)), np.ascontiguousarray(part).tobytes())
            for (time, height, width), part in zip(grids, parts, strict=True)
        ]
        return listed, int(processor.merge_size)


def _load(folder: Path) -> Any:
    try:
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise ConfigError(
            f"images need transformers: {error}", "install pie-driver-sglang[sglang]"
        ) from error
    try:
        return AutoImageProcessor.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"the image processor of {folder} cannot be read: {reason(error)}",
            "download the snapshot again",
        ) from error


def _positions(start: int, grid: tuple[int, int, int], merge: int) -> Any:
    """M-RoPE positions of an image whose first token has the position `start`: ``[tokens, 3]``."""
    time, height, width = grid
    axes = np.indices((time, height // merge, width // merge)).reshape(3, -1)
    return np.ascontiguousarray(axes.T + start, dtype=np.uint32)


def _opened(number: int, source: Any) -> PIL.Image.Image:
    """An image in RGB."""
    import PIL.Image

    try:
        if isinstance(source, PIL.Image.Image):
            return source.convert("RGB")
        with PIL.Image.open(io.BytesIO(_bytes_of(source))) as image:
            return image.convert("RGB")
    except Exception as error:
        # Pillow's formats raise anything on a damaged file, and so do URLs.
        shown = quoted(source) if isinstance(source, str) else f"of type {type(source).__name__}"
        # Pillow names the object in memory that it has read from.
        is_other = isinstance(error, PIL.UnidentifiedImageError)
        why = "it is no image of a format that Pillow knows" if is_other else reason(error)
        raise ConfigError(
            f"image {number} of `{IMAGES}`, {shown}, cannot be read: {why}", f"give {_KINDS}"
        ) from error


def _bytes_of(source: Any) -> bytes:
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, Path):
        return source.read_bytes()
    if not isinstance(source, str):
        raise TypeError(f"expected {_KINDS}")
    if source.startswith(("http://", "https://")):
        return _fetched(source)
    if source.startswith("data:"):
        source = source.partition(",")[2]
    elif source.startswith("file://"):
        return Path(urllib.parse.unquote(source.removeprefix("file://"))).read_bytes()
    elif os.path.isfile(source):  # noqa: PTH113 (that of a path raises for a long text)
        return Path(source).read_bytes()
    try:
        return base64.b64decode(source, validate=True)
    except binascii.Error as error:
        raise ValueError(f"there is no such file, and it is no base64 ({error})") from error


def _fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:
        data: bytes = answer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data
