"""The two lines that the runtime waits for."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pie_driver_sglang.driver.capabilities import UNLIMITED, Capabilities
from pie_driver_sglang.driver.handshake import Handshake
from pie_driver_sglang.errors import ConfigError, StartError

#: The example of the protocol, word for word.
EXAMPLE = (
    '{"group_id":0,"shmem_name":"/pie_shmem_g0","caps":{"total_pages":24000,"kv_page_size":16,'
    '"swap_pool_size":0,"max_forward_tokens":40960,"max_forward_requests":256,'
    '"max_page_refs":900000,"max_logit_rows":4294967295,"max_prob_rows":4294967295,'
    '"max_custom_mask_bytes":4294967295,"max_sampler_rows":4294967295,'
    '"max_logprob_labels":4294967295,"arch_name":"qwen3","vocab_size":151936,'
    '"max_model_len":40960,"activation_dtype":"bfloat16","snapshot_dir":"/models/qwen3",'
    '"shmem_name":"/pie_shmem_g0"}}\n{"ready":true,"num_groups":1}\n'
)


def capabilities(**changed: Any) -> Capabilities:
    fields: dict[str, Any] = {
        "total_pages": 24000,
        "kv_page_size": 16,
        "swap_pool_size": 0,
        "max_forward_tokens": 40960,
        "max_forward_requests": 256,
        "max_page_refs": 900000,
        "max_logit_rows": UNLIMITED,
        "max_prob_rows": UNLIMITED,
        "max_custom_mask_bytes": UNLIMITED,
        "max_sampler_rows": UNLIMITED,
        "max_logprob_labels": UNLIMITED,
        "arch_name": "qwen3",
        "vocab_size": 151936,
        "max_model_len": 40960,
        "activation_dtype": "bfloat16",
        "snapshot_dir": "/models/qwen3",
    }
    return Capabilities(**(fields | changed))


@dataclass
class Pipe:
    reader: int
    writer: int

    def read(self) -> str:
        with open(self.reader, encoding="utf-8", closefd=False) as file:
            return file.read()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield Pipe(reader, writer)
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_example_of_the_protocol(pipe: Pipe) -> None:
    Handshake(pipe.writer).announce(0, "/pie_shmem_g0", capabilities())
    assert not is_open(pipe.writer)
    assert pipe.read() == EXAMPLE


def test_optional_fields_are_sent_when_they_say_something(pipe: Pipe) -> None:
    caps = capabilities(system_speculation_supported=True, rs_cache_slot_bytes=2**64 - 1)
    Handshake(pipe.writer).announce(7, "/pie_shmem_g7", caps)
    group, sentinel = pipe.read().splitlines()
    line = json.loads(group)
    assert line["group_id"] == 7
    assert "ready" not in line
    assert line["caps"]["system_speculation_supported"] is True
    assert line["caps"]["rs_cache_slot_bytes"] == 2**64 - 1
    assert "ready" in json.loads(sentinel)


def test_capabilities_decode_to_themselves() -> None:
    caps = capabilities(rs_cache_slots=3)
    assert msgspec.json.decode(msgspec.json.encode(caps), type=Capabilities) == caps


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"total_pages": 0}, ("total_pages", "from 1 to 4294967295", "mem_fraction_static")),
        ({"total_pages": -1}, ("total_pages",)),
        ({"total_pages": 2**32}, ("total_pages", "4294967296")),
        ({"kv_page_size": 16.0}, ("kv_page_size", "16.0", "int")),
        ({"vocab_size": True}, ("vocab_size", "int")),
        ({"vocab_size": None}, ("vocab_size", "None")),
        ({"arch_name": 3}, ("arch_name", "str")),
        ({"rs_cache_required": 1}, ("rs_cache_required", "bool")),
        ({"rs_cache_slot_bytes": 2**64}, ("rs_cache_slot_bytes",)),
        ({"snapshot_dir": "/\udcff"}, ("snapshot_dir", "UTF-8")),
    ],
)
def test_values_that_do_not_fit(changed: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(StartError) as caught:
        capabilities(**changed)
    for part in parts:
        assert part in f"{caught.value} {caught.value.hint}"


def test_a_line_longer_than_the_pipe(pipe: Pipe) -> None:
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read()))
    os.set_blocking(pipe.writer, False)
    reader.start()
    caps = capabilities(snapshot_dir="/" + "x" * 300_000)
    Handshake(pipe.writer).announce(0, "/pie_shmem_g0", caps)
    reader.join()
    assert len(json.loads(read[0].splitlines()[0])["caps"]["snapshot_dir"]) == 300_001


def test_the_runtime_is_gone(pipe: Pipe) -> None:
    handshake = Handshake(pipe.writer)
    os.close(pipe.reader)
    with pytest.raises(StartError, match="Broken pipe") as caught:
        handshake.announce(0, "/pie_shmem_g0", capabilities())
    assert "gone" in caught.value.hint
    assert not is_open(pipe.writer)


def test_the_region_must_be_the_groups(pipe: Pipe) -> None:
    handshake = Handshake(pipe.writer)
    with pytest.raises(StartError, match="not the region of group 1"):
        handshake.announce(1, "/pie_shmem_g0", capabilities())
    handshake.close()
    assert pipe.read() == ""


def test_only_one_announcement(pipe: Pipe) -> None:
    handshake = Handshake(pipe.writer)
    handshake.announce(0, "/pie_shmem_g0", capabilities())
    handshake.close()
    with pytest.raises(StartError, match="already over"):
        handshake.announce(0, "/pie_shmem_g0", capabilities())


def test_a_failed_start_keeps_the_pipe_until_it_is_closed(pipe: Pipe) -> None:
    """The runtime terminates the driver when the pipe closes: the reason is printed before."""
    handshake = Handshake(pipe.writer)
    assert is_open(pipe.writer)
    handshake.close()
    assert not is_open(pipe.writer)
    assert pipe.read() == ""


def test_children_do_not_inherit_it(pipe: Pipe) -> None:
    os.set_inheritable(pipe.writer, True)
    Handshake(pipe.writer)
    assert not os.get_inheritable(pipe.writer)
    probe = f"import os, sys\ntry: os.fstat({pipe.writer})\nexcept OSError: sys.exit(3)"
    child = subprocess.run([sys.executable, "-c", probe], close_fds=False, check=False)
    assert child.returncode == 3


@pytest.mark.parametrize("fd", [-1, 987_654, 2**80])
def test_descriptors_that_are_not_open(fd: int) -> None:
    with pytest.raises(ConfigError, match="not an open descriptor") as caught:
        Handshake(fd)
    assert "3>" in caught.value.hint


def test_descriptors_that_cannot_be_written(pipe: Pipe) -> None:
    with pytest.raises(ConfigError, match="not open for writing"):
        Handshake(pipe.reader)


def test_a_file_will_do(tmp_path: Path) -> None:
    path = tmp_path / "handshake.json"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    Handshake(fd).announce(0, "/pie_shmem_g0", capabilities())
    assert path.read_text() == EXAMPLE
