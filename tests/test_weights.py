"""What checkpoints take, by the headers of their files."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.checkpoint.tensors import DamagedError, LoadSettings, Tensor
from pie_driver_sglang.checkpoint.weights import (
    read_tensor_ranges,
    read_tensors,
    torch_file,
    weight_parts,
)
from pie_driver_sglang.memory.plan_types import REPLICATED, SHARDED, Part

LOADING = LoadSettings(
    itemsize=2, layers=2, kv_heads=2, vocabulary=100, tied=False, quantized=False
)
_ITEMSIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I64": 8}


def write(path: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> None:
    """A file of empty tensors in the format of safetensors."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = _ITEMSIZES[dtype]
        for length in shape:
            size *= length
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)


def parts_of(tensors: Mapping[str, tuple[str, list[int]]], **changes: Any) -> tuple[Part, ...]:
    made = [
        Tensor(name, tuple(shape), _bytes(dtype, shape), dtype in ("F32", "BF16"))
        for name, (dtype, shape) in tensors.items()
    ]
    return weight_parts(made, LOADING._replace(**changes))


def _bytes(dtype: str, shape: list[int]) -> int:
    size = _ITEMSIZES[dtype]
    for length in shape:
        size *= length
    return size


def test_headers_are_read(tmp_path: Path) -> None:
    write(
        tmp_path / "model.safetensors", {"a": ("F32", [3, 5]), "b": ("U8", [7]), "c": ("F32", [])}
    )
    assert read_tensors(tmp_path, 4) == [
        Tensor("a", (3, 5), 60, floating=True),
        Tensor("b", (7,), 7, floating=False),
        Tensor("c", (), 4, floating=True),
    ]


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "old.safetensors"):
        write(tmp_path / name, {name: ("BF16", [8])})
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = [tensor.name for tensor in read_tensors(tmp_path, 4)]
    assert names == ["model-1.safetensors", "model-2.safetensors"]


def test_a_second_copy_does_not_count(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors"):
        write(tmp_path / name, {name: ("BF16", [8])})
    assert [tensor.name for tensor in read_tensors(tmp_path, 4)] == ["model.safetensors"]


def test_files_without_headers_count_whole(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    (tensor,) = read_tensors(tmp_path, 4)
    # 250 numbers of four bytes are loaded in two.
    assert weight_parts([tensor], LOADING) == (Part(500, SHARDED),)
    (tmp_path / "pytorch_model.bin").unlink()
    assert read_tensors(tmp_path, 4) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abcd",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":7}',
        struct.pack("<Q", 8) + b'{"a":{}}',
    ],
)
def test_a_damaged_header_is_an_error(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors .* header"):
        read_tensors(tmp_path, 4)


def test_a_file_is_as_long_as_its_header_says(tmp_path: Path) -> None:
    path = tmp_path / "model-1.safetensors"
    write(path, {"a": ("F32", [3, 5]), "b": ("BF16", [7])})
    whole = path.read_bytes()
    assert len(read_tensors(tmp_path, 4)) == 2
    for data in (whole[:-1], whole + b"x"):
        path.write_bytes(data)
        sizes = rf"is {len(data)} bytes long, but {len(whole)} by its header"
        with pytest.raises(DamagedError, match=rf"model-1\.safetensors {sizes}"):
            read_tensors(tmp_path, 4)


def test_a_tensor_has_the_bytes_of_its_shape(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 56]}
    header = json.dumps({"a": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(56)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(DamagedError, match=r"has 56 bytes for a, whose shape .* needs 60"):
        read_tensors(tmp_path, 4)


def test_numbers_of_less_than_a_byte(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [3, 6], "data_offsets": [0, 9]}
    header = json.dumps({"a": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(9)
    (tmp_path / "model.safetensors").write_bytes(data)
    [tensor] = read_tensors(tmp_path, 4)
    assert (tensor.shape, tensor.bytes) == ((3, 6), 9)


def test_two_values_of_one_tensor(tmp_path: Path) -> None:
    for name in ("one.safetensors", "other.safetensors"):
        write(tmp_path / name, {"a": ("F32", [3000, 5])})
    assert len(read_tensors(tmp_path, 4)) == 2
    path = tmp_path / "other.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedError, match=r"one\.safetensors and other\.safetensors have .* a"):
        read_tensors(tmp_path, 4)


def test_where_a_tensor_is(tmp_path: Path) -> None:
    assert torch_file(tmp_path, "a") is None
    (tmp_path / "pytorch_model-1.bin").touch()
    assert torch_file(tmp_path, "a") == "pytorch_model-1.bin"
    (tmp_path / "pytorch_model-2.bin").touch()
    assert torch_file(tmp_path, "a") is None
    index = {"weight_map": {"a": "pytorch_model-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert torch_file(tmp_path, "a") == "pytorch_model-2.bin"
    write(tmp_path / "x.safetensors", {"a": ("F32", [3]), "b": ("BF16", [5])})
    [one, other] = read_tensor_ranges(tmp_path).values()
    assert (one.path.name, one.length, other.length) == ("x.safetensors", 12, 10)
    assert other.offset == one.offset + 12 == (tmp_path / "x.safetensors").stat().st_size - 10


def test_numbers_are_loaded_in_the_type_of_the_activations() -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": ("F32", [10, 10])}
    assert parts_of(tensors) == (Part(200, SHARDED),)
    assert parts_of(tensors, itemsize=4) == (Part(400, SHARDED),)


def test_what_is_quantized_stays() -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": ("U8", [10, 5]),
        "model.layers.0.mlp.up_proj.scale": ("F32", [10]),
    }
    assert parts_of(tensors, quantized=True) == (Part(90, SHARDED),)


def test_linear_layers_alone_are_quantized_while_they_are_loaded() -> None:
    tensors = {
        "model.embed_tokens.weight": ("BF16", [64, 4]),
        "model.layers.0.mlp.up_proj.weight": ("BF16", [10, 10]),
        "model.layers.0.mlp.gate.weight": ("BF16", [10, 10]),
        "model.norm.weight": ("BF16", [10]),
    }
    found = parts_of(tensors, online="fp8", vocabulary=64)
    assert found == (Part(200 + 20, REPLICATED), Part(512 + 100, SHARDED))


def test_ranks_copy_norms_and_divide_keys_by_heads() -> None:
    tensors = {
        "model.layers.0.self_attn.k_proj.weight": ("BF16", [8, 8]),
        "model.layers.0.self_attn.q_proj.weight": ("BF16", [16, 8]),
        "model.layers.0.input_layernorm.weight": ("BF16", [8]),
    }
    assert parts_of(tensors) == (Part(16, REPLICATED), Part(128, 2), Part(256, SHARDED))


def test_layers_that_the_model_lacks_are_left_out() -> None:
    used = {"model.layers.1.mlp.up_proj.weight": ("BF16", [4, 4])}
    unused = {
        "model.layers.2.mlp.up_proj.weight": ("BF16", [4, 4]),
        "mtp.layers.0.mlp.up_proj.weight": ("BF16", [4, 4]),
    }
    assert parts_of({**used, **unused}) == parts_of(used)
    # A vision encoder counts its layers by itself.
    vision = {"vision_tower.encoder.layers.7.fc.weight": ("BF16", [4, 4])}
    assert parts_of(vision) == (Part(32, REPLICATED),)


def test_a_tied_head_counts_once() -> None:
    tensors = {
        "model.embed_tokens.weight": ("BF16", [100, 8]),
        "lm_head.weight": ("BF16", [100, 8]),
    }
    # SGLang rounds 100 rows up to 128.
    assert parts_of(tensors) == (Part(2 * 128 * 8 * 2, SHARDED),)
    assert parts_of(tensors, tied=True) == (Part(128 * 8 * 2, SHARDED),)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["q_proj", "k_proj", "v_proj", "input_layernorm", "up_proj", "router"]),
            st.lists(st.integers(1, 512), min_size=1, max_size=3),
        )
    ),
    st.integers(1, 16),
)
def test_ranks_together_have_every_number(tensors: list[tuple[str, list[int]]], ranks: int) -> None:
    made = [
        Tensor(f"model.layers.0.{name}.{index}", tuple(shape), 0, floating=True)
        for index, (name, shape) in enumerate(tensors)
    ]
    total = 2 * sum(tensor.numel for tensor in made)
    parts = weight_parts(made, LOADING)
    assert sum(part.per_rank(1) for part in parts) == total
    rank = sum(part.per_rank(ranks) for part in parts)
    assert total <= rank * ranks
    assert rank <= total
