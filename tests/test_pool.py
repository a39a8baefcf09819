"""Page copies between device buffers and a host pool, against lists."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.engine.page_pools import PagePools, host_pages, page_bytes
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory import host
from support.process import drivers
from support.sglang_scripts import kv_pools

DEVICE, HOST = 9, 7
WIDTHS = (3, 1, 4, 2)
DIRECTIONS = ("D2D", "D2H", "H2D", "H2H")
LIMITS = {"D": DEVICE, "H": HOST}


def new_buffers(words: torch.dtype) -> list[torch.Tensor]:
    """Buffers of several widths; all of their elements differ, between buffers too."""
    count = DEVICE * sum(WIDTHS)
    values = torch.arange(count) if words == torch.int64 else torch.arange(count) % 251
    return [part.contiguous() for part in values.to(words).view(DEVICE, -1).split(WIDTHS, dim=1)]


class Copy(NamedTuple):
    """A call that keeps to the engine's contract."""

    direction: str
    sources: list[int]
    targets: list[int]


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    direction = draw(st.sampled_from(DIRECTIONS))
    source, target = (
        st.integers(0, LIMITS[direction[0]] - 1),
        st.integers(0, LIMITS[direction[2]] - 1),
    )
    sources: list[int] = []
    targets: list[int] = []
    for pair in draw(st.lists(st.tuples(source, target), min_size=1, max_size=12)):
        one_pool = direction[0] == direction[2]
        if pair[1] not in targets and not (one_pool and pair[0] in targets):
            sources.append(pair[0])
            targets.append(pair[1])
    return Copy(direction, sources, targets)


class Model:
    """The pools as arrays, copied pair by pair."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        device: npt.NDArray[np.int64] = torch.cat(list(buffers), dim=1).numpy().copy()
        self.pools = {"D": device, "H": np.zeros((HOST, device.shape[1]), device.dtype)}

    def copy(self, copy: Copy) -> None:
        for source, target in zip(copy.sources, copy.targets, strict=True):
            self.pools[copy.direction[2]][target] = self.pools[copy.direction[0]][source]


@given(
    calls=st.lists(copies(), max_size=12),
    words=st.sampled_from([torch.int64, torch.uint8]),
    staging=st.sampled_from([1, 200, 1 << 20]),
)
def test_copies_do_what_lists_do(calls: list[Copy], words: torch.dtype, staging: int) -> None:
    buffers = new_buffers(words)
    model = Model(buffers)
    pools = PagePools(buffers, HOST, staging_bytes=staging)
    # What the host holds at first is anybody's guess.
    pools.copy("D2H", [0] * HOST, list(range(HOST)))
    model.copy(Copy("D2H", [0] * HOST, list(range(HOST))))
    for call in calls:
        pools.copy(*call)
        model.copy(call)
        np.testing.assert_array_equal(torch.cat(buffers, dim=1).numpy(), model.pools["D"])
    for first in range(HOST):
        pools.copy("H2D", [first], [0])
        np.testing.assert_array_equal(torch.cat(buffers, dim=1)[0].numpy(), model.pools["H"][first])


def test_a_pool_that_is_larger_than_the_staging_area() -> None:
    """200 pages, three at a time, in an order that is neither the slots' nor the pages'."""
    buffers = [torch.randint(2**60, (200, width)) for width in WIDTHS]
    expected = torch.cat(buffers, dim=1)
    pools = PagePools(buffers, 200, staging_bytes=3 * page_bytes(buffers))
    pages, slots = torch.randperm(200).tolist(), torch.randperm(200).tolist()
    pools.copy("D2H", pages, slots)
    for buffer in buffers:
        buffer.zero_()
    moved = torch.randperm(200).tolist()
    pools.copy("H2D", slots, moved)
    assert torch.equal(torch.cat(buffers, dim=1)[moved], expected[pages])


@pytest.mark.interpreted("tests/support/kernels/page_copies.py")
def test_one_kernel_copies_what_single_buffers_do(interpreted: str) -> None:
    """The GPU's kernel, in Triton's interpreter."""
    assert interpreted.count("ok  ") == 2


def test_a_direction_that_does_not_exist() -> None:
    pools = PagePools(new_buffers(torch.int64), HOST)
    with pytest.raises(ValueError, match="'d2h' is not one of D2D, D2H, H2D, H2H"):
        pools.copy("d2h", [0], [0])


def test_without_a_host_pool_nothing_is_allocated() -> None:
    buffers = new_buffers(torch.int64)
    pools = PagePools(buffers, 0)
    assert pools.host_pages == 0
    pools.copy("D2D", [1], [2])
    assert torch.equal(buffers[0][2], buffers[0][1])


class TestSize:
    """How many pages a budget holds."""

    BUFFERS = (torch.empty((4, 3 << 20), device="meta"), torch.empty((4, 1 << 20), device="meta"))

    @pytest.mark.parametrize(("gib", "pages"), [(0, 0), (1, 64), (3, 192)])
    def test_whole_pages(self, gib: int, pages: int) -> None:
        assert page_bytes(self.BUFFERS) == 16 << 20
        assert host_pages(gib << 30, self.BUFFERS) == pages

    def test_the_last_page_must_fit_whole(self) -> None:
        width = (1 << 18) - 1
        assert host_pages(1 << 30, [torch.empty((4, width + 2), device="meta")]) == 1023
        assert host_pages(1 << 30, [torch.empty((4, width), device="meta")]) == 1024

    def test_a_page_larger_than_the_budget(self) -> None:
        buffers = [torch.empty((4, 3 << 28), device="meta")]
        with pytest.raises(
            StartError, match=r"`cpu_mem_budget_in_gb` gives 2 GiB .* one page of 3\.0 GiB"
        ):
            host_pages(2 << 30, buffers)
        assert host_pages(0, buffers) == 0

    def test_memory_that_cannot_be_had(self) -> None:
        buffers = [torch.zeros((1, 1), dtype=torch.int64)]
        with pytest.raises(StartError, match=r"1073741824\.0 GiB of host memory") as caught:
            PagePools(buffers, 1 << 57)
        assert "cpu_mem_budget_in_gb" in caught.value.hint


class TestBudget:
    """Budgets that the machine or its container cannot give."""

    @pytest.fixture
    def limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "memory.max"
        monkeypatch.setattr(host, "_CONTAINER_LIMITS", (tmp_path / "missing", path))
        return path

    def test_the_machine(self, limit: Path) -> None:
        limit.write_text("max\n")
        with pytest.raises(
            StartError, match=r"`cpu_mem_budget_in_gb` is 1048576, .* only"
        ) as caught:
            host.check_budget(2**20)
        (largest,) = re.findall(r"at most (\d+)$", caught.value.hint)
        assert 0 <= int(largest) <= psutil.virtual_memory().total >> 30

    def test_the_container(self, limit: Path) -> None:
        limit.write_text(f"{(1 << 30) + 5}\n")
        assert host.available_bytes() == (1 << 30) + 5
        host.check_budget(1)
        with pytest.raises(StartError, match=r"is 2, but the host has only 1\.0 GiB") as caught:
            host.check_budget(2)
        assert "at most 1" in caught.value.hint
        limit.write_text(f"{2 << 30}\n")
        host.check_budget(2)
        limit.write_text(f"{(2 << 30) - 1}\n")
        with pytest.raises(StartError):
            host.check_budget(2)

    def test_weights_of_each_rank_count(self, limit: Path) -> None:
        limit.write_text(f"{9 << 30}\n")
        host.check_budget(1, 4, 2)
        with pytest.raises(
            StartError, match=r"`cpu_offload_gb` is 5 for each of 2 ranks"
        ) as caught:
            host.check_budget(1, 5, 2)
        # The hint is a value of the option.
        (most,) = re.findall(r"at most (\d+)$", caught.value.hint)
        host.check_budget(1, int(most), 2)

    def test_no_budget_is_always_there(self, limit: Path) -> None:
        limit.write_text("0\n")
        host.check_budget(0)
        with pytest.raises(StartError):
            host.check_budget(1)


def from_sglang(function: Callable[[Connection, str], None], log: Path) -> Any:
    """What a function sends from a process that has SGLang."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = drivers.fork_call(function, (sender, str(log)))
    sender.close()
    with receiver:
        assert receiver.poll(60.0), log.read_text()
        try:
            results = receiver.recv()
        except EOFError:
            pytest.fail(log.read_text())
    assert process.wait(20.0) == 0
    return results


@pytest.mark.engine
def test_recurrent_state_of_sglang(tmp_path: Path) -> None:
    slots, slot_bytes, rows, holds = from_sglang(kv_pools.states_in_pool, tmp_path / "log")
    # Two layers: a window of 3 x (16 + 2 x 4) bfloat16, and 2 x 8 x 4 float32.
    assert (slots, slot_bytes) == (3, 2 * (3 * 24 * 2 + 2 * 8 * 4 * 4))
    # Row 0 is for padding, and so is slot 0.
    assert rows == [0, 1, 0, 0, 0, 3]
    # Slot 1 was cleared; the runtime's slot 2 was copied to its slot 1.
    assert holds == [0, -1, 3, 3]


@pytest.mark.engine
def test_pools_of_sglang(tmp_path: Path) -> None:
    results = from_sglang(kv_pools.copy_in_pools, tmp_path / "log")
    expected = list(range(kv_pools.PAGES))
    expected[11], expected[7], expected[10] = 0, 2, 9
    assert len(results) == 8
    assert results == [(name, expected) for name, _ in results]
