"""What the weights of a snapshot take on a device, from the headers of its files."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pie_driver_sglang.memory_plan import ANY_RANKS, EVERYWHERE, Part

ONLINE_BYTES: Final[Mapping[str, float]] = {
    "fp8": 1.0,
    "w8a8_fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "bitsandbytes": 0.5 + 1 / 16,
}
"""Bytes of a number of a linear layer that SGLang quantizes while it loads it."""
VOCABULARY_ALIGNMENT: Final = 64
"""SGLang rounds embeddings and LM heads up to a multiple of so many rows."""

_MOST_HEADER_BYTES: Final = 100 << 20
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_OTHER_FILES: Final = ("*.bin", "*.pt", "*.gguf")
_NEXT_TOKENS: Final = re.compile(r"^(model\.)?mtp\.")
_LAYER: Final = re.compile(r"^(model\.|language_model\.|model\.language_model\.)*layers\.(\d+)\.")
_HEADS: Final = re.compile(r"\.(k_proj|v_proj)\.")
_COPIED: Final = re.compile(r"norm|\.gate\.|router|q_a_proj|kv_a_proj|visual|vision")
_VOCABULARY: Final = re.compile(r"(embed_tokens|lm_head|wte|word_embeddings)\.weight$")


class Tensor(NamedTuple):
    """One array of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    """As it is stored."""
    floating: bool
    """Whether it is loaded in the type of the activations, unless the checkpoint is quantized."""

    @property
    def numbers(self) -> int:
        """How many there are."""
        count = 1
        for length in self.shape:
            count *= length
        return count


class Loading(NamedTuple):
    """How a checkpoint is loaded."""

    itemsize: int
    """Bytes of an activation."""
    layers: int
    """Layers that the model has; a checkpoint may have more of them."""
    kv_heads: int
    vocabulary: int
    tied: bool
    """Whether the LM head is the embedding table."""
    quantized: bool
    """Whether the checkpoint is, so that its numbers stay what they are."""
    online: str | None = None
    """A method of `ONLINE_BYTES`, which quantizes linear layers."""


def read_tensors(folder: Path, itemsize: int) -> list[Tensor]:
    """The tensors of a snapshot by its headers; no weights are read.

    Args:
        folder: The snapshot.
        itemsize: Bytes of a number, in files without such headers. Each counts as one tensor.

    Returns:
        All tensors; none where there are no weights.

    Raises:
        OSError: A file cannot be read.
        ValueError: A header is damaged.
    """
    files = _checkpoint_files(folder)
    if files:
        return [tensor for path in files for tensor in _header(path)]
    others = [path for pattern in _OTHER_FILES for path in sorted(folder.glob(pattern))]
    return [_whole_file(path, itemsize) for path in others]


def weight_parts(tensors: Iterable[Tensor], loading: Loading) -> tuple[Part, ...]:
    """What SGLang makes of tensors, by the ranks that divide it.

    Names decide about that: keys and values go by heads, norms and routers are copied, and so are
    vision encoders, which is too much where SGLang divides them.
    """
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        if not _is_left_out(tensor, loading):
            sizes[_most_ranks(tensor, loading)] += _loaded_bytes(tensor, loading)
    return tuple(Part(size, most) for most, size in sorted(sizes.items()))


def _checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that SGLang reads: those of the index, if there is one."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [path for path in files if path.name in named] or files
    plain = [path for path in files if not path.name.startswith("consolidated")]
    return plain or files


def _whole_file(path: Path, itemsize: int) -> Tensor:
    size = path.stat().st_size
    return Tensor(path.name, (size // itemsize,), size, floating=path.suffix != ".gguf")


def _header(path: Path) -> Iterator[Tensor]:
    """See https://huggingface.co/docs/safetensors: a length, and a table in JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {length} bytes")
        table = json.loads(file.read(length))
    for name, entry in table.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield Tensor(name, tuple(entry["shape"]), end - start, entry["dtype"] in _FLOATS)


def _is_left_out(tensor: Tensor, loading: Loading) -> bool:
    layer = _LAYER.match(tensor.name)
    return (
        (loading.tied and tensor.name.endswith("lm_head.weight"))
        or _NEXT_TOKENS.match(tensor.name) is not None
        or (layer is not None and int(layer[2]) >= loading.layers)
    )


def _most_ranks(tensor: Tensor, loading: Loading) -> int:
    if _COPIED.search(tensor.name):
        return EVERYWHERE
    return loading.kv_heads if _HEADS.search(tensor.name) else ANY_RANKS


def _loaded_bytes(tensor: Tensor, loading: Loading) -> int:
    if loading.quantized or not tensor.floating:
        return tensor.bytes
    numbers = tensor.numbers
    if _VOCABULARY.search(tensor.name):
        rows = -(-loading.vocabulary // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
        if tensor.shape[0] == loading.vocabulary:
            numbers = numbers // loading.vocabulary * rows
    elif loading.online and len(tensor.shape) > 1 and not _COPIED.search(tensor.name):
        return int(numbers * ONLINE_BYTES[loading.online])
    return numbers * loading.itemsize
