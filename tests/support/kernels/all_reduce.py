"""The all-reduce kernels in Triton's interpreter: a process for each rank, with shared memory.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from triton.runtime.interpreter import InterpreterBuilder

from pie_driver_sglang import _core
from pie_driver_sglang.kernels.comm.all_reduce_norm import (
    NUM_BUFFERS,
    SENTINEL_BYTE,
    AllReduceTuning,
    LamportAllReduceNorm,
    PeerMemory,
)
from pie_driver_sglang.kernels.gemm.types import Norm

MOST_ROWS, WIDTH = 6, 40
EPSILON = 1e-6
STEPS = 24
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TUNINGS = [AllReduceTuning(MOST_ROWS, rows, 4) for rows in (0, 2, MOST_ROWS)]
LIMIT_S = 100.0
LATE_S, TURN_S = 0.002, 0.06


class Case(NamedTuple):
    """Ranks that share their memory."""

    shared: list[torch.Tensor]
    dtype: torch.dtype
    results: torch.Tensor
    """``[ranks, STEPS, MOST_ROWS, WIDTH]``: what each rank continues with."""


def be_late(draw: random.Random) -> None:
    """Lets some programs sleep before they look, send or clear a slot, some for a turn."""
    for name in ("create_masked_load", "create_masked_store"):
        touch = getattr(InterpreterBuilder, name)

        def touch_late(*arguments: Any, touch: Any = touch) -> Any:
            lot = draw.random()
            if lot < 0.1:
                time.sleep(LATE_S if lot > 0.01 else TURN_S)
            return touch(*arguments)

        setattr(InterpreterBuilder, name, touch_late)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error, as a share of the largest number; all others are there as they are."""
    plain = exact.isfinite()
    assert torch.equal(found.double()[~plain].nan_to_num(), exact[~plain].nan_to_num())
    assert torch.equal(found.isnan(), exact.isnan())
    if not plain.any():
        return 0.0
    return float((found.double() - exact)[plain].abs().max() / exact[plain].abs().max())


def random_parts(common: torch.Generator, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """All ranks' parts of a step; some of them with numbers that are none."""
    rows = int(torch.randint(1, MOST_ROWS + 1, (1,), generator=common))
    if torch.rand(1, generator=common) < 0.5:
        # Of one row a rank may begin the next turn while another one still looks.
        rows = 1
    parts = torch.randn(ranks, rows, WIDTH, generator=common).to(dtype)
    if torch.rand(1, generator=common) < 0.2:
        parts[0, 0, 3] = torch.inf
        parts[-1, 0, 4] = torch.nan
        # As slots are before anything comes.
        parts[-1, -1, 8:12].view(torch.uint8).fill_(SENTINEL_BYTE)
    return parts


def play(case: Case, rank: int, leader: int) -> None:
    """One rank's steps of varying length; each is late at times. All know all ranks' parts."""
    _core.die_with_parent(leader)
    torch.set_num_threads(1)
    common, own = torch.Generator().manual_seed(3), random.Random(rank)
    be_late(own)
    variants = [
        LamportAllReduceNorm(PeerMemory(case.shared), rank, WIDTH, case.dtype, tuning)
        for tuning in TUNINGS
    ]
    for step in range(STEPS):
        parts = random_parts(common, len(case.shared), case.dtype)
        residual = torch.randn(parts.shape[1:], generator=common).to(case.dtype)
        norm = Norm(torch.randn(WIDTH, generator=common).to(case.dtype), EPSILON)
        exact = residual.double() + parts.double().sum(0)
        time.sleep(own.choice((0.0, 0.0, 10 * LATE_S)))
        sums = variants[int(torch.randint(len(variants), (1,), generator=common))]
        out, after = sums.add_rms_norm(step % NUM_BUFFERS, parts[rank], residual, norm)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
        assert off(after, exact) < TOLERANCES[case.dtype], (step, off(after, exact))
        normed = exact * scale * norm.weight.double()
        assert off(out, normed) < TOLERANCES[case.dtype], (step, off(out, normed))
        case.results[rank, step, : len(out)] = out


def end_all(children: list[BaseProcess]) -> None:
    """Waits for all, or for the first that fails: the others would wait for it."""
    until = time.monotonic() + LIMIT_S
    try:
        while any(child.exitcode is None for child in children) and time.monotonic() < until:
            if any(child.exitcode for child in children):
                break
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.join()
    codes = [child.exitcode for child in children]
    assert codes == [0] * len(children), codes


def check(ranks: int, dtype: torch.dtype) -> None:
    """Some ranks take turns; all continue with the same numbers."""
    size = LamportAllReduceNorm.size(ranks, MOST_ROWS, WIDTH, dtype)
    shared = [
        torch.full((size,), SENTINEL_BYTE).to(torch.uint8).share_memory_() for _ in range(ranks)
    ]
    case = Case(
        shared, dtype, torch.zeros(ranks, STEPS, MOST_ROWS, WIDTH, dtype=dtype).share_memory_()
    )
    processes = multiprocessing.get_context("fork")
    run = functools.partial(play, case)
    children: list[BaseProcess] = [
        processes.Process(target=run, args=(rank, os.getpid()), daemon=True)
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    end_all(children)
    for results in case.results[1:]:
        assert torch.equal(results.nan_to_num(), case.results[0].nan_to_num())


def main() -> None:
    """Two ranks, and more, which sum numbers of all types."""
    for ranks, dtype in (
        (2, torch.float32),
        (2, torch.float16),
        (4, torch.float32),
        (4, torch.bfloat16),
    ):
        started = time.monotonic()
        check(ranks, dtype)
        print(f"{ranks} ranks, {dtype}: {time.monotonic() - started:.1f} s", flush=True)
    print("sums over ranks: all close")


if __name__ == "__main__":
    main()
