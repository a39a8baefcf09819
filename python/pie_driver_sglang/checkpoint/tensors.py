"""Types of checkpoints: tensors, their ranges in files and memory, and how a model loads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_PIECES: Final = 64
_PIECE_BYTES: Final = 4096


class Tensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    """Bytes in the file."""
    floating: bool
    """Whether it is loaded in the activation dtype, unless the checkpoint is quantized."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class FileRange(NamedTuple):
    """The byte range of a tensor in a file."""

    path: Path
    offset: int
    length: int

    def samples(self) -> Iterator[bytes]:
        """Pieces of the bytes, evenly distributed."""
        step = max(_PIECE_BYTES, self.length // _PIECES)
        with self.path.open("rb") as file:
            for start in range(0, self.length, step):
                file.seek(self.offset + start)
                yield file.read(min(_PIECE_BYTES, self.length - start))


class DamagedError(ValueError):
    """A weights file is damaged, or contradicts another one."""


class LoadSettings(NamedTuple):
    """The settings that the loaded size of a checkpoint depends on."""

    itemsize: int
    """Bytes of the activation dtype."""
    layers: int
    """Layers of the model; a checkpoint may have more."""
    kv_heads: int
    vocabulary: int
    tied: bool
    """Whether the LM head is the embedding table."""
    quantized: bool
    """Whether the checkpoint is quantized, so that its tensors keep their dtype."""
    online: str | None = None
    """The online quantization of linear layers, a key of `ONLINE_BYTES`."""


class Region(NamedTuple):
    """The memory of a strided tensor."""

    offset: int
    """Address of the first byte."""
    dims: tuple[tuple[int, int], ...]
    """Length and stride in bytes of each dimension, by stride; contiguous ones are merged."""

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.offset + sum((length - 1) * stride for length, stride in self.dims) + 1


class CheckpointModel(NamedTuple):
    """The settings of a model that explain unread tensors."""

    layers: int
    next_layers: int = 0
    """Additional layers for multi-token prediction (MTP)."""
    tied: bool = False
    """Whether the LM head is the embedding table."""
    quantization: str | None = None
    """The checkpoint's method."""
    ignored: Sequence[str] = ()
    """Regular expressions of tensors that transformers ignores as well."""
