"""Sums over ranks on GPUs of one host, in the kernel that adds and normalizes them.

Each rank leaves its part where all others can read it. A program reads a row's parts as soon as all
ranks have said that theirs are there, and goes on as after any other layer: nothing is sent twice,
and no kernel does nothing but wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pie_driver_sglang.chained_triton import chained, follow
from pie_driver_sglang.sglang.dense_triton import Linear, Norm, Tiling, linear

TURNS = 2
"""Places for a rank's part, used in turn: one is read while the next one is written."""


class RankSums:
    """Memory of all ranks for the rows of a step.

    All ranks must take the same turns in the same order, of as many rows, with each turn followed
    by the other. What a rank reads in a turn has been read when its next turn ends.
    """

    def __init__(
        self, shared: list[torch.Tensor], rank: int, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        """Divides memory that all ranks share.

        Args:
            shared: ``[bytes]`` uint8 of each rank, at least :meth:`size`, as seen from this one,
                zeros before any rank takes a turn.
            rank: Which of them is this one's.
            rows: Most rows of a step.
            width: Numbers of a row.
            dtype: Of the numbers, as of residuals and norms.
        """
        self._rank, self._rows = rank, rows
        place = rows * width * dtype.itemsize
        self._own = [
            shared[rank][turn * place : (turn + 1) * place].view(dtype).view(rows, width)
            for turn in range(TURNS)
        ]
        device = shared[rank].device
        places = [
            [memory.data_ptr() + turn * place for memory in shared] for turn in range(TURNS + 1)
        ]
        # The last places are the flags: what each rank has said of each row.
        *self._parts, self._flags = torch.tensor(places, dtype=torch.int64, device=device)
        self._said = torch.zeros(rows, dtype=torch.int32, device=device)

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
        """As :func:`dense_triton.add_norm`, of all ranks' parts. Can be captured."""
        rows, width = residual.shape
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(width)
        _sum_norm[(rows,)](
            self._parts[turn], self._flags, self._said, self._own[turn], residual, norm.weight,
            out, self._rank, self._rows, width, norm.epsilon,
            RANKS=len(self._flags), BLOCK=block, num_warps=max(4, min(16, block // 512)),
            **chained(residual.device),
        )  # fmt: skip
        return out, residual


def share(group: dist.ProcessGroup, device: torch.device, size: int) -> list[torch.Tensor]:
    """Memory of each rank that all of them can read and write; all call this at the same time.

    Args:
        group: The ranks, which talk on the CPU.
        device: This rank's.
        size: Bytes of each rank's.

    Returns:
        ``[size]`` uint8 of each rank, zeros.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    memory = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device, group.group_name)
    handle = _SymmetricMemory.rendezvous(memory)
    memory.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    ranks = range(dist.get_world_size(group))
    return [handle.get_buffer(rank, [size], torch.uint8) for rank in ranks]


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def _sum_norm(  # type: ignore[no-untyped-def]
    parts, flags, said, own, residual, weight, out, rank, most_rows, width, epsilon,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A row: tells the others that this rank's part is there, and waits for theirs."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        follow()
    turn = tl.load(said + row) + 1
    tl.store(said + row, turn)
    for other in tl.static_range(RANKS):
        theirs = tl.load(flags + other).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank * most_rows + row, turn, sem="release", scope="sys")
    heard = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + row
    for other in tl.static_range(RANKS):
        last = tl.atomic_add(heard + other * most_rows, 0, sem="acquire", scope="sys")
        # In this form the count may start again from the lowest number.
        while turn - last > 0:
            last = tl.atomic_add(heard + other * most_rows, 0, sem="acquire", scope="sys")
    place = row * width + lanes
    total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    # In the same order on every rank, so that all go on with the same numbers.
    for other in tl.static_range(RANKS):
        theirs = tl.load(parts + other).to(tl.pointer_type(own.dtype.element_ty))
        theirs = tl.multiple_of(theirs, 16)
        # Past the first-level cache, which knows nothing of other devices.
        part = tl.load(theirs + place, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(residual + place, total, mask=inside)
    spread = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    tl.store(out + place, total * spread * scale, mask=inside)
