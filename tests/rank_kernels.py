"""Sums over ranks under Triton's interpreter: a process for each rank, which share their memory.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder

from pie_driver_sglang import _core
from pie_driver_sglang.sglang.dense_triton import Linear, Norm, Tiling
from pie_driver_sglang.sglang.rank_sums import TURNS, RankSums, Shared

MOST_ROWS, WIDTH, INPUTS = 8, 80, 32
EPSILON = 1e-6
STEPS = 12
TOLERANCE = 1e-5
LIMIT_S = 100.0
LATE_S = 0.01
START = 2**31 - 5
"""What was said before: counts may pass the largest number."""


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Up to rounding in float32."""
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, error


def be_late(draw: random.Random) -> None:
    """Lets some programs sleep between hearing of the others' parts and reading them."""
    add = InterpreterBuilder.create_atomic_rmw

    def add_late(self: Any, operation: Any, *arguments: Any) -> Any:
        found = add(self, operation, *arguments)
        if operation == ir.ATOMIC_OP.ADD and draw.random() < 0.5:
            time.sleep(LATE_S)
        return found

    InterpreterBuilder.create_atomic_rmw = add_late


def play(rank: int, shared: list[torch.Tensor], leader: int) -> None:
    """One rank's steps of varying length; each is late at times. All know all ranks' parts."""
    _core.die_with_parent(leader)
    torch.set_num_threads(1)
    common, own = torch.Generator().manual_seed(3), random.Random(rank)
    be_late(own)
    sums = RankSums(Shared(shared), rank, MOST_ROWS, WIDTH, torch.float32)
    sums._said.fill_(START)
    for step in range(STEPS):
        rows = int(torch.randint(1, MOST_ROWS + 1, (1,), generator=common))
        residual = torch.randn(rows, WIDTH, generator=common)
        given = torch.randn(len(shared), rows, INPUTS, generator=common)
        weights = torch.randn(len(shared), WIDTH, INPUTS, generator=common)
        norm = Norm(torch.randn(WIDTH, generator=common), EPSILON)
        exact = residual.double() + (given.double() @ weights.double().mT).sum(0)
        time.sleep(own.choice((0.0, 0.0, 5 * LATE_S)))
        tiling = Tiling(16, 16, 16) if step % 3 else None
        turn = step % TURNS
        sums.multiply(turn, given[rank], Linear(weights[rank]), tiling)
        out, after = sums.add_norm(turn, residual, norm)
        close(after, exact)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
        close(out, exact * scale * norm.weight.double())


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


def main() -> None:
    """Two ranks, and more."""
    processes = multiprocessing.get_context("fork")
    for ranks in (2, 4):
        size = RankSums.size(ranks, MOST_ROWS, WIDTH, torch.float32)
        shared = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(ranks)]
        for memory in shared:
            memory[-4 * ranks * MOST_ROWS :].view(torch.int32).fill_(START)
        children: list[BaseProcess] = [
            processes.Process(target=play, args=(rank, shared, os.getpid()), daemon=True)
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        end_all(children)
    print("sums over ranks: all close")


if __name__ == "__main__":
    main()
