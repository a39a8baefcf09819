"""The device memory of a snapshot's weights, from its safetensors headers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.checkpoint.tensors import DamagedError, FileRange, LoadSettings, Tensor
from pie_driver_sglang.memory.plan_types import REPLICATED, SHARDED, Part
from pie_driver_sglang.memory.sizes import Shape

ONLINE_BYTES: Final[Mapping[str, float]] = {
    "fp8": 1.0,
    "w8a8_fp8": 1.0,
    "mxfp8": 1.0 + 1 / 32,
    "bitsandbytes": 0.5 + 1 / 16,
}
"""Bytes per element of linear layers that SGLang quantizes online."""
VOCABULARY_ALIGNMENT: Final = 64
"""SGLang pads embeddings and LM heads to a multiple of this many rows."""

_MOST_HEADER_BYTES: Final = 100 << 20
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_BITS: Final = re.compile(r"\d+")
_OTHER_FILES: Final = ("*.bin", "*.pt", "*.gguf")
_NEXT_TOKENS: Final = re.compile(r"^(model\.)?mtp\.")
_LAYER: Final = re.compile(r"^(model\.|language_model\.|model\.language_model\.)*layers\.(\d+)\.")
_IN_A_LAYER: Final = re.compile(r"^(?!.*visual|.*vision).*\b(layers|h|blocks)\.\d+\.")
_MLP: Final = re.compile(r"^(.*\blayers\.\d+)\.(.*\.)?(gate|up|gate_up|down)_proj\.")
_EXPERTS: Final = ".experts."
_HEADS: Final = re.compile(r"\.(k_proj|v_proj)\.")
_COPIED: Final = re.compile(r"norm|\.gate\.|router|q_a_proj|kv_a_proj|visual|vision")
_VOCABULARY: Final = re.compile(r"(embed_tokens|lm_head|wte|word_embeddings)\.weight$")


def load_settings(
    shape: Shape, itemsize: int, *, quantized: bool, method: str | None
) -> LoadSettings:
    """The load settings of a model.

    Args:
        shape: Of the model.
        itemsize: Bytes of the activation dtype.
        quantized: Whether the checkpoint is quantized.
        method: The configured online quantization.
    """
    return LoadSettings(
        itemsize=itemsize,
        layers=shape.layers,
        kv_heads=max(1, shape.kv_heads),
        vocabulary=shape.vocabulary,
        tied=shape.tied,
        quantized=quantized,
        online=method if method in ONLINE_BYTES else None,
    )


def read_tensors(folder: Path, itemsize: int) -> list[Tensor]:
    """List the tensors of a snapshot from its headers; reads no weights.

    Args:
        folder: The snapshot.
        itemsize: Bytes of an element in files without headers, each of which counts as one tensor.

    Returns:
        All tensors; empty without weights.

    Raises:
        OSError: A file cannot be read.
        DamagedError: A header is wrong, or two files have different tensors of one name.
    """
    files = checkpoint_files(folder)
    if files:
        found = [(tensor, file_range) for path in files for tensor, file_range in _header(path)]
        _check_names(found)
        return [tensor for tensor, _ in found]
    others = [path for pattern in _OTHER_FILES for path in sorted(folder.glob(pattern))]
    return [_whole_file(path, itemsize) for path in others]


def weight_parts(tensors: Iterable[Tensor], loading: LoadSettings) -> tuple[Part, ...]:
    """Sizes of loaded tensors, by the number of ranks that shard them.

    By their names: keys and values are sharded by heads; norms, routers and vision encoders are
    replicated, which is too much where SGLang shards the latter.
    """
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        if is_loaded(tensor, loading):
            sizes[_most_ranks(tensor, loading)] += _loaded_bytes(tensor, loading)
    return tuple(Part(size, most) for most, size in sorted(sizes.items()))


def layer_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of the language model's layers."""
    return [tensor for tensor in tensors if _IN_A_LAYER.search(tensor.name)]


def dense_mlps(tensors: Iterable[Tensor]) -> int:
    """The number of layers with an MLP that is no part of a block with experts.

    Args:
        tensors: Those of the language model's layers, by the names that checkpoints have for them.
    """
    names = [tensor.name for tensor in tensors]
    blocks = {name.partition(_EXPERTS)[0] for name in names if _EXPERTS in name}
    found = set()
    for name in names:
        match = None if _EXPERTS in name else _MLP.match(name)
        if match is not None:
            layer, inside, _ = match.groups()
            # Shared experts are in the block, too.
            block = layer if inside is None else f"{layer}.{inside.partition('.')[0]}"
            if block not in blocks:
                found.add(layer)
    return len(found)


def tensors_of_shape(shape: Shape, itemsize: int) -> Iterator[Tensor]:
    """The usual matrices of a model of this shape, as an estimate; vectors are negligible."""

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(name, (rows, columns), rows * columns * itemsize, floating=True)

    hidden = shape.hidden_size
    yield matrix("model.embed_tokens.weight", shape.vocabulary, hidden)
    yield matrix("lm_head.weight", shape.vocabulary, hidden)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    count, inner, mlp = 1, shape.inner, "mlp"
    if shape.experts:
        count, inner, mlp = shape.experts, shape.expert_inner, "mlp.experts"
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield matrix(f"{prefix}.self_attn.q_proj.weight", queries, hidden)
        yield matrix(f"{prefix}.self_attn.k_proj.weight", keys, hidden)
        yield matrix(f"{prefix}.self_attn.v_proj.weight", keys, hidden)
        yield matrix(f"{prefix}.self_attn.o_proj.weight", hidden, queries)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield matrix(f"{prefix}.{mlp}.{name}.weight", count * inner, hidden)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a snapshot: those of the index, if there is one, as in SGLang."""
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


def _check_names(found: Iterable[tuple[Tensor, FileRange]]) -> None:
    """Reject different tensors of one name: which one is loaded depends on the order of files."""
    ranges: dict[str, FileRange] = {}
    for tensor, file_range in found:
        other = ranges.setdefault(tensor.name, file_range)
        if other is not file_range and not have_equal_bytes(other, file_range):
            raise DamagedError(
                f"{other.path.name} and {file_range.path.name} have different tensors of the name "
                f"{tensor.name}"
            )


def have_equal_bytes(one: FileRange, other: FileRange) -> bool:
    """Whether samples of two tensors are equal."""
    return one.length == other.length and all(
        mine == theirs for mine, theirs in zip(one.samples(), other.samples(), strict=True)
    )


def read_tensor_ranges(folder: Path) -> dict[str, FileRange]:
    """Ranges of the tensors in a snapshot's safetensors files, by name."""
    return {
        tensor.name: file_range
        for path in checkpoint_files(folder)
        for tensor, file_range in _header(path)
    }


def torch_file(folder: Path, name: str) -> str | None:
    """The torch file of a tensor, if it is known without reading it."""
    index = folder / "pytorch_model.bin.index.json"
    if index.is_file():
        file = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
        return None if file is None else str(file)
    others = [path.name for path in folder.glob("*.bin")]
    return others[0] if len(others) == 1 else None


def _header(path: Path) -> list[tuple[Tensor, FileRange]]:
    """Read a safetensors header (https://huggingface.co/docs/safetensors): a length, and JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise DamagedError(f"{path.name} has a header of {length} bytes")
        header = file.read(length)
    if len(header) < length or size < 8:
        raise DamagedError(f"{path.name} ends within its header")
    try:
        table = json.loads(header).items()
        found = [_entry(path, 8 + length, *x) for x in table if x[0] != "__metadata__"]
    except DamagedError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"{path.name} has a header that lists no tensors: {error}") from error
    end = max(
        (file_range.offset + file_range.length for _, file_range in found), default=8 + length
    )
    if size != end:
        raise DamagedError(f"{path.name} is {size} bytes long, but {end} by its header")
    return found


def _entry(path: Path, start: int, name: str, entry: dict[str, Any]) -> tuple[Tensor, FileRange]:
    first, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    bits = _BITS.search(dtype)
    needed = math.prod(shape) * (int(bits[0]) if bits else 8) // 8
    if needed != end - first or first < 0:
        raise DamagedError(
            f"{path.name} has {end - first} bytes for {name}, whose shape {shape} of {dtype} needs "
            f"{needed}"
        )
    return Tensor(name, shape, end - first, dtype in _FLOATS), FileRange(
        path, start + first, end - first
    )


def is_loaded(tensor: Tensor, loading: LoadSettings) -> bool:
    """Whether a tensor of a checkpoint is loaded; a tied LM head and layers for drafts are not."""
    layer = _LAYER.match(tensor.name)
    return not (
        (loading.tied and tensor.name.endswith("lm_head.weight"))
        or _NEXT_TOKENS.match(tensor.name) is not None
        or (layer is not None and int(layer[2]) >= loading.layers)
    )


def _most_ranks(tensor: Tensor, loading: LoadSettings) -> int:
    if _COPIED.search(tensor.name):
        return REPLICATED
    return loading.kv_heads if _HEADS.search(tensor.name) else SHARDED


def _loaded_bytes(tensor: Tensor, loading: LoadSettings) -> int:
    if loading.quantized or not tensor.floating:
        return tensor.bytes
    numbers = tensor.numel
    if _VOCABULARY.search(tensor.name):
        rows = -(-loading.vocabulary // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
        if tensor.shape[0] == loading.vocabulary:
            numbers = numbers // loading.vocabulary * rows
    elif loading.online and len(tensor.shape) > 1 and not _COPIED.search(tensor.name):
        return int(numbers * ONLINE_BYTES[loading.online])
    return numbers * loading.itemsize
