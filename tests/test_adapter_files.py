"""LoRA files of untrusted origin: which are read, and with how much memory."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

from pie_driver_sglang._core import LayerPatterns
from pie_driver_sglang.checkpoint.regular_file import CHUNK_BYTES, RegularFile
from pie_driver_sglang.engine.lora.files import (
    CONFIG,
    MOST_CONFIG_BYTES,
    MOST_HEADER_BYTES,
    WEIGHTS,
    Adapter,
    Linear,
    Source,
    read,
)
from pie_driver_sglang.errors import AdapterError
from pie_driver_sglang.memory import host
from pie_driver_sglang.memory.host import Budget

SIZE, RANK = 64, 4
Q, K = "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"
LAYERS = {name: Linear(f"model.{name}", SIZE, SIZE, (Q, K)) for name in (Q, K)}
SETTINGS = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8}


def tensors(layer: str = Q, rank: int = RANK, size: int = SIZE) -> dict[str, torch.Tensor]:
    """Both sides of a layer, as PEFT names them."""
    prefix = f"base_model.model.model.{layer}"
    down, up = torch.randn(rank, size), torch.randn(size, rank)
    return {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}


def save(folder: Path, weights: Mapping[str, torch.Tensor], **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({**SETTINGS, **settings}))
    safetensors.torch.save_file(dict(weights), folder / WEIGHTS)
    return folder


def load(
    folder: Path,
    layers: Mapping[str, Linear] = LAYERS,
    dtype: torch.dtype = torch.float32,
    budget: Budget | None = None,
) -> tuple[Source, Adapter]:
    with read(folder, layers, 16, dtype, budget or Budget()) as found:
        return found


def refusal(folder: Path, **arguments: Any) -> str:
    """Why an adapter is refused, which must not take long."""
    said: list[str] = []

    def attempt() -> None:
        with pytest.raises(AdapterError) as error:
            load(folder, **arguments)
        said.append(f"{error.value.message}; {error.value.hint}")

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60.0)
    assert said, "it is still being read"
    return said[0]


class TestRoot:
    """The folder that all files must lie in."""

    def test_what_lies_below_is_read(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "adapter", tensors())
        (tmp_path / "link").symlink_to(folder)
        for path in (folder, folder / WEIGHTS, tmp_path / "link"):
            with read(path, LAYERS, 16, torch.float32, Budget(), None, tmp_path) as (source, _):
                assert source.weights.name == WEIGHTS

    @pytest.mark.parametrize("name", ["", CONFIG, WEIGHTS])
    def test_what_lies_elsewhere_is_not(self, tmp_path: Path, name: str) -> None:
        root, outside = tmp_path / "root", tmp_path / "outside"
        root.mkdir()
        save(outside, tensors())
        inside = save(root / "adapter", tensors())
        if name:
            (inside / name).unlink()
            (inside / name).symlink_to(outside / name)
        paths = [inside] if name else [outside, root / ".." / "outside", tmp_path / "nothing"]
        for path in paths:
            with (
                pytest.raises(AdapterError, match="`lora_root`"),
                read(path, LAYERS, 16, torch.float32, Budget(), None, root),
            ):
                pass


class TestFiles:
    """What is opened, and how far it is read."""

    @pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
    @pytest.mark.parametrize(
        ("target", "reason"),
        [
            ("/proc/kmsg", "is empty"),
            ("/proc/self/status", "is empty"),
            ("/dev/zero", "not a regular file"),
            ("/dev/tty", "not a regular file"),
            ("/proc/self/cwd", "not a regular file"),
            ("pipe", "not a regular file"),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "before its size"),
            ("nothing", "is missing"),
            (CONFIG, "symbolic links"),
        ],
    )
    def test_links_to_what_is_no_file(
        self, tmp_path: Path, name: str, target: str, reason: str
    ) -> None:
        if target.startswith("/") and not os.path.lexists(target):
            pytest.skip(f"{target} is not here")
        save(tmp_path, tensors())
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(target if target != CONFIG else name)
        assert reason in refusal(tmp_path)

    def test_a_link_to_a_file_is_one(self, tmp_path: Path) -> None:
        """Hugging Face's cache is made of them."""
        save(tmp_path / "blobs", tensors())
        (tmp_path / "snapshot").mkdir()
        for name in (CONFIG, WEIGHTS):
            (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
        source, _ = load(tmp_path / "snapshot")
        assert source.digest == load(tmp_path / "blobs")[0].digest

    def test_large_sparse_files_are_not_read(self, tmp_path: Path) -> None:
        save(tmp_path, tensors())
        os.truncate(tmp_path / WEIGHTS, 1 << 40)
        text = refusal(tmp_path)
        assert "needs 1,099,511,627,776 bytes" in text
        assert "free memory on the host" in text
        save(tmp_path, tensors())
        os.truncate(tmp_path / CONFIG, MOST_CONFIG_BYTES + 1)
        assert f"has {MOST_CONFIG_BYTES + 1} bytes, more than {MOST_CONFIG_BYTES}" in refusal(
            tmp_path
        )

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda path: os.truncate(path, 2 * CHUNK_BYTES), "ends 1000 bytes before its size"),
            (lambda path: os.truncate(path, 4 * CHUNK_BYTES), "has changed while it was read"),
            (lambda path: os.utime(path, (1, 1)), "has changed while it was read"),
        ],
    )
    def test_a_file_that_changes_while_it_is_read(
        self, tmp_path: Path, change: Callable[[Path], None], reason: str
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(2 * CHUNK_BYTES + 1000))
        with RegularFile(path) as file:
            chunks = file.chunks()
            assert len(next(chunks)) == CHUNK_BYTES
            change(path)
            with pytest.raises(OSError, match=reason):
                list(chunks)

    def test_every_byte_counts_once(self, tmp_path: Path) -> None:
        data = random.Random(3).randbytes(CHUNK_BYTES + 12345)
        path = tmp_path / "file"
        path.write_bytes(data)
        with RegularFile(path) as file:
            assert b"".join(bytes(chunk) for chunk in file.chunks()) == data
        save(tmp_path, tensors())
        source, _ = load(tmp_path)
        both = b"".join((tmp_path / name).read_bytes() for name in (CONFIG, WEIGHTS))
        assert source.digest == hashlib.sha256(both).digest()

    def test_a_header_is_bounded(self, tmp_path: Path) -> None:
        save(tmp_path, tensors())
        data = (tmp_path / WEIGHTS).read_bytes()
        size = MOST_HEADER_BYTES + 1
        header = data[8 : 8 + struct.unpack("<Q", data[:8])[0]].ljust(size)
        (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", size) + header + data[-2048:])
        assert f"its header has {size} bytes" in refusal(tmp_path)


class TestMemory:
    """What a load takes is promised before it is taken."""

    def test_budgets_are_shared(self) -> None:
        budget = Budget()
        with mock.patch.object(host, "available_bytes", return_value=2000):
            with budget.take(600, "one"):
                text = "three needs 1 bytes in addition to 1,000 that others take"
                with budget.take(400, "two"), pytest.raises(MemoryError, match=text):
                    budget.take(1, "three").__enter__()
                with budget.take(400, "three"):
                    pass
            with pytest.raises(MemoryError, match="needs 1,001 bytes, more than half"):
                budget.take(1001, "one").__enter__()
            with budget.take(1000, "one"):
                pass

    def test_reserved_memory_is_sufficient(self, tmp_path: Path) -> None:
        """The largest memory of this process while it reads, over what it had before."""
        size, rank = 1 << 20, 8
        layers = {Q: Linear(f"model.{Q}", size, size, (Q,))}
        save(tmp_path, tensors(size=size, rank=rank), r=rank)
        load(save(tmp_path / "small", tensors()))
        file, weights = (tmp_path / WEIGHTS).stat().st_size, 2 * size * rank * 4
        promised = file + 2 * weights
        budget = Budget()
        with mock.patch.object(host, "available_bytes", return_value=2 * promised):
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            load(tmp_path, layers=layers, budget=budget)
            assert _status("VmHWM") - before < promised + (16 << 20)
        for least in (promised, file):
            with mock.patch.object(host, "available_bytes", return_value=2 * least - 2):
                assert "does not fit the host's memory" in refusal(tmp_path, layers=layers)

    def test_memory_is_given_back_after_a_refusal(self, tmp_path: Path) -> None:
        budget = Budget()
        save(tmp_path, tensors(), r=5)
        assert "has rank 4, but adapter_config.json says 5" in refusal(tmp_path, budget=budget)
        load(save(tmp_path, tensors()), budget=budget)
        with (
            mock.patch.object(host, "available_bytes", return_value=2),
            budget.take(1, "all of it"),
        ):
            pass


def _status(name: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) << 10


class TestNames:
    """What an adapter calls its layers."""

    def test_a_layer_under_two_names(self, tmp_path: Path) -> None:
        both = tensors() | {
            name.replace("model.model.", "model."): tensor for name, tensor in tensors().items()
        }
        assert f"it has `{Q}` under two names" in refusal(save(tmp_path, both))

    def test_long_names(self, tmp_path: Path) -> None:
        long = {
            name.replace("model.layers", "model." * 100 + "layers"): tensor
            for name, tensor in tensors().items()
        }
        assert "has a name of 6" in refusal(save(tmp_path, long))

    @pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
    def test_a_pattern_that_backtracks_for_ever(self, tmp_path: Path, key: str) -> None:
        """It does not match, and the adapter is taken."""
        long = {
            name.replace("model.layers", "model." * 60 + "layers"): tensor
            for name, tensor in tensors().items()
        }
        save(tmp_path, long, **{key: {"(?:.|.)*!": 4, "(.*)*!": 5}})
        loaded: list[object] = []
        thread = threading.Thread(target=lambda: loaded.append(load(tmp_path)), daemon=True)
        thread.start()
        thread.join(60.0)
        assert loaded

    def test_too_many_patterns(self, tmp_path: Path) -> None:
        patterns = {f"layer{number}": 4 for number in range(5000)}
        text = refusal(save(tmp_path, tensors(), rank_pattern=patterns))
        assert "`rank_pattern` that is not taken: there are 5000 patterns" in text

    def test_a_name_that_its_own_pattern_does_not_match(self, tmp_path: Path) -> None:
        """PEFT takes it as it stands."""
        name = f"model.{Q}"
        _, adapter = load(save(tmp_path, tensors(), alpha_pattern={name: 16, "q_proj": 4}))
        _, other = load(save(tmp_path, tensors(), alpha_pattern={"q_proj": 16, name: 4}))
        assert adapter.rank == other.rank == RANK


ATOMS = [
    "q_proj", "layers", "self_attn", "a", "q", "_", "3", ".", r"\.", r"\d", r"\w", r"\b", "[a-z]",
    "[^q]", "[0-9_]", "[.]", "[]a]", "[--a]", "[[a]", "[a&&q]", "[a-]", "(a|q)", "(?:x|q)", "^",
    "$", "|", "(", ")", "(?i)", "(?=q)", "(?P<n>q)", r"\1", r"\Z", r"\A", "{2}", "{,2}", "{1,}",
]  # fmt: skip
REPEATS = ["", "", "", "", "*", "+", "?", "{2}", "*?", "*+", "{0, 1}"]
NAMES = [
    "model.layers.3.self_attn.q_proj",
    "layers.33.self_attn.q_proj",
    "self_attn.q_proj",
    "q_proj",
    "a.q",
    "aq_3",
    "qq",
    "lm_head",
]


def test_patterns_mean_what_they_mean_to_peft() -> None:
    """Random ones: each is refused, or matches the same names as PEFT says."""
    from peft.utils.other import get_pattern_key

    rng = random.Random(7)
    taken = matched = 0
    for _ in range(20000):
        parts = [rng.choice(ATOMS) + rng.choice(REPEATS) for _ in range(rng.randint(1, 4))]
        pattern = "".join(parts)
        try:
            patterns = LayerPatterns([pattern])
        except ValueError:
            continue
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            # PEFT cannot have made an adapter of it.
            continue
        taken += 1
        for name in NAMES:
            expected = get_pattern_key([pattern], name) == pattern
            assert (patterns.first(name) is not None) == expected, (pattern, name)
            matched += expected
    assert taken > 2000
    assert matched > 2000
