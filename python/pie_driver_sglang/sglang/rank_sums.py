"""Sums over ranks on GPUs of one host, in the kernel that adds and normalizes them.

Each rank leaves its part where all others can read it. A program reads a row's parts as soon as all
ranks have said that theirs are there, and goes on as after any other layer: nothing is sent twice,
and no kernel does nothing but wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pie_driver_sglang.chained_triton import chained, follow
from pie_driver_sglang.sglang.dense_triton import Linear, Norm, Tiling, linear

TURNS = 2
"""Places for a rank's part, used in turn: one is read while the next one is written."""


class Shared(NamedTuple):
    """Memory of each rank, as one of them sees it."""

    of_ranks: list[torch.Tensor]
    """``[bytes]`` uint8 of each rank."""
    keeps: object = None
    """What it goes with."""


class RankSums:
    """Memory of all ranks for the rows of a step.

    All ranks must take the same turns in the same order, of as many rows, with each turn followed
    by the other. What a rank reads in a turn has been read when its next turn ends. What a rank has
    said of a row is the row's epoch: it counts the row's turns, and is published to all ranks.

    A program waits for those of the same row on the other ranks. That ends also where the rows are
    more than a device has room for at once, since programs start in the order of their rows.
    """

    def __init__(
        self, shared: Shared, rank: int, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        """Divides memory that all ranks share.

        Args:
            shared: At least :meth:`size` of each rank, zeros before any rank takes a turn. As many
                ranks as a power of two.
            rank: Which of them is this one's.
            rows: Most rows of a step.
            width: Numbers of a row.
            dtype: Of the numbers, as of residuals and norms.
        """
        self._shared, self._rank, self._rows = shared, rank, rows
        place = rows * width * dtype.itemsize
        own = shared.of_ranks[rank]
        self._own = [
            own[turn * place : (turn + 1) * place].view(dtype).view(rows, width)
            for turn in range(TURNS)
        ]
        self._parts = [
            tuple(memory[turn * place :].view(dtype) for memory in shared.of_ranks)
            for turn in range(TURNS)
        ]
        # Behind the parts lies what each rank has said of each row.
        flags = [memory.data_ptr() + TURNS * place for memory in shared.of_ranks]
        self._flags = torch.tensor(flags, device=own.device)
        self._said = torch.zeros(rows, dtype=torch.int32, device=own.device)

    @staticmethod
    def size(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of a rank's memory."""
        return TURNS * rows * width * dtype.itemsize + 4 * ranks * rows

    def multiply(
        self, turn: int, rows: torch.Tensor, matrix: Linear, tiling: Tiling | None
    ) -> None:
        """Leaves this rank's part of products: ``[rows, inputs]``. Can be captured."""
        own = self._own[turn][: len(rows)]
        if tiling is None:
            torch.mm(rows, matrix.weight.T, out=own)
        else:
            linear(rows, matrix, tiling, out=own[None])

    def add_norm(
        self, turn: int, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :func:`dense_triton.add_norm`, of all ranks' parts. Can be captured.

        Args:
            turn: In which the parts were left.
            residual: ``[rows, width]``, the same on all ranks, overwritten by the sums.
            norm: Of the residual's type.
        """
        rows, width = residual.shape
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(width)
        _sum_norm[(rows,)](
            self._parts[turn], self._flags, self._said, residual, norm.weight, out,
            self._rank, self._rows, width, norm.epsilon,
            RANKS=len(self._flags), BLOCK=block,
            num_warps=max(4, min(16, block // 512)), **chained(residual.device),
        )  # fmt: skip
        return out, residual


def share(group: dist.ProcessGroup, device: torch.device, size: int) -> Shared:
    """Memory of each rank that all of them can read and write; all call this at the same time.

    Args:
        group: The ranks, which talk on the CPU.
        device: This rank's.
        size: Bytes of each rank's.

    Returns:
        ``[size]`` of each rank, zeros.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    memory = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device, group.group_name)
    handle = _SymmetricMemory.rendezvous(memory)
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    ranks = range(dist.get_world_size(group))
    views = [handle.get_buffer(rank, [size], torch.uint8) for rank in ranks]
    return Shared(views, (memory, handle))


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def _sum_norm(  # type: ignore[no-untyped-def]
    parts, flags, said, residual, weight, out, rank, most_rows, width, epsilon,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A row: tells the others that this rank's part is there, and waits for theirs."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    place = row * width + lanes
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    # The kernel in front makes the parts, and does not know this.
    total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        follow()
    turn = tl.load(said + row) + 1
    ranks = tl.arange(0, RANKS)
    theirs = tl.load(flags + ranks).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + rank * most_rows + row, turn, sem="release", scope="sys")
    heard = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + ranks * most_rows + row
    behind = 1
    while behind > 0:
        # In this form the count may start again from the lowest number.
        behind = tl.max(turn - tl.atomic_add(heard, 0, sem="acquire", scope="sys"), 0)
    # In the same order on every rank, so that all go on with the same numbers.
    for other in tl.static_range(RANKS):
        # Past the first-level cache, which knows nothing of other devices.
        part = tl.load(parts[other] + place, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    # Not before all warps have read it, and they have waited for each other.
    tl.store(said + row, turn)
    tl.store(residual + place, total, mask=inside)
    spread = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    tl.store(out + place, total * spread * scale, mask=inside)
