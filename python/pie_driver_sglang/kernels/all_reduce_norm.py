"""Sums over ranks on GPUs of one host, in the kernel that adds and normalizes them.

Each rank writes its part into memory of the ranks that add it up: their inboxes. What has not come
yet is a sentinel there, so the numbers are their own flags. Nobody asks across the link, and
nothing is ordered by fences: a number is there or it is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pie_driver_sglang.kernels.chained import chained, follow
from pie_driver_sglang.kernels.dense_layers import Norm

TURNS = 2
"""Inboxes of a rank, used in turn."""
SENTINEL_BYTE = 0xFF
"""What an inbox is full of before any rank takes a turn."""
_WORD_BYTES = 4
_SENTINEL = tl.constexpr(-1)
"""A word that has not come yet. Its numbers are NaNs."""
_SENT_INSTEAD = tl.constexpr(0x7FFF7FFF)
"""What a rank sends for it: other NaNs, of all types."""


class AllReduceTuning(NamedTuple):
    """How sums are made; ``benches/gpu/sums_check.py --times`` measures it."""

    most_rows: int
    """Of a step."""
    one_shot_rows: int
    """Up to so many rows every rank sums all of them; of more each rank sums a share."""
    warps: int
    """Warps of a program."""


TUNINGS = {2: AllReduceTuning(256, 256, 8), 4: AllReduceTuning(256, 32, 16)}
"""By ranks; of others none was measured."""
_REGISTERS = 1 << 16
"""Of a multiprocessor, which shall have room for two programs: then all rows are there at once."""


PROGRAMS_AT_ONCE = 2
"""Of a multiprocessor, which has registers for so many."""


def find_obstacle(multiprocessors: int, tuning: AllReduceTuning) -> str:
    """Why a GPU's programs could lock each other out; empty if they cannot.

    Programs wait for other ranks' programs, so all rows of a step must have room at once.

    Args:
        multiprocessors: Of the GPU.
        tuning: How sums are made.
    """
    room = PROGRAMS_AT_ONCE * multiprocessors
    if room >= tuning.most_rows:
        return ""
    return f"{multiprocessors} SMs have room for {room} rows of {tuning.most_rows} at once"


class PeerMemory(NamedTuple):
    """Memory of each rank, as one of them sees it."""

    of_ranks: list[torch.Tensor]
    """``[bytes]`` uint8 of each rank."""
    keeps: object = None
    """What it goes with."""


class LamportAllReduceNorm:
    """Inboxes of all ranks for the rows of a step.

    All ranks must take the same turns in the same order, of as many rows and by the same tuning,
    with each turn followed by the other; numbers of rows and tunings may change between turns.

    **In one shot** a rank sends its part of each row to all others, and sums all rows. **In two
    shots** it sends its part of a row to the row's owner, which sends the sum to all others. So a
    place of an inbox, for one rank and one row, is written once in a turn at most.

    **A place is empty before it is written again.** Rank `s` writes a place of rank `r` in turn
    `t`; `r` reads and empties it in its kernel of turn `t`. The kernel of `s` that writes it next,
    of turn `t + 2`, sends nothing before that of `t + 1` has ended on `s`. That one had some row's
    sum, of whichever rows and shots, and so `r` had sent its part of that row, to `s` or to the
    row's owner, which sends no sum without it. And `r` sends nothing in turn `t + 1` before its
    kernel of `t` has ended, places emptied. So a late rank holds the others up, and graphs may
    follow each other in any order.

    **Programs that wait do not lock each other out.** They start in the order of their rows, and
    send their part before they wait. Of all rows that are not done on some rank let the first be
    `k`: all rows before it are, so its programs have room on every rank, all parts of it are sent,
    and its owner waits for nothing else.
    """

    def __init__(
        self,
        shared: PeerMemory,
        rank: int,
        width: int,
        dtype: torch.dtype,
        tuning: AllReduceTuning,
    ) -> None:
        """Divides memory that all ranks share.

        Args:
            shared: At least :meth:`size` of each rank, all :data:`SENTINEL_BYTE` before any rank
                takes a turn.
            rank: Which of them is this one's.
            width: Numbers of a row; of 2 bytes there must be an even number.
            dtype: Of the numbers, as of residuals and norms: of 2 or 4 bytes.
            tuning: The same on all ranks.
        """
        ranks = len(shared.of_ranks)
        rows = tuning.most_rows
        self._shared, self._rank, self._tuning = shared, rank, tuning
        size, words = self.size(ranks, rows, width, dtype), width * dtype.itemsize // _WORD_BYTES
        inboxes = [
            memory[:size].view(torch.int32).view(TURNS, ranks, rows, words)
            for memory in shared.of_ranks
        ]
        self._inbox = inboxes[rank]
        others = [other for other in range(ranks) if other != rank]
        self._inboxes = [tuple(inbox[other] for other in others) for inbox in self._inbox]
        self._outboxes = [tuple(inbox[turn, rank] for inbox in inboxes) for turn in range(TURNS)]

    @property
    def most_rows(self) -> int:
        """Of a step."""
        return self._tuning.most_rows

    @staticmethod
    def size(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of a rank's memory."""
        return TURNS * ranks * rows * width * dtype.itemsize

    def add_norm(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :func:`dense_layers.add_norm`, of all ranks' parts. Can be captured.

        Args:
            turn: 0 and 1 by turns.
            part: ``[rows, width]``, contiguous: this rank's.
            residual: ``[rows, width]``, the same on all ranks, overwritten by the sums.
            norm: Of the residual's type.

        Returns:
            ``[rows, width]`` normalized sums, and the sums; the same on all ranks.

        Raises:
            ValueError: The part would not fit its places.
        """
        (rows, width), tuning = residual.shape, self._tuning
        known = part.shape == residual.shape and part.dtype == residual.dtype
        if not (known and part.is_contiguous() and rows <= tuning.most_rows):
            text = f"a part of {tuple(part.shape)} {part.dtype} for {tuple(residual.shape)}"
            raise ValueError(f"{text} {residual.dtype}, at most {tuning.most_rows} rows")
        out = torch.empty_like(residual)
        # A word for each thread, at least: two would look at the same one at different times.
        block = max(
            triton.next_power_of_2(width), 32 * tuning.warps * _WORD_BYTES // residual.itemsize
        )
        _sum_norm[(rows,)](
            part.view(torch.int32), self._inbox[turn], self._inboxes[turn], self._outboxes[turn],
            residual, norm.weight, out, self._inbox.stride(1), width, norm.epsilon,
            RANK=self._rank, RANKS=len(self._outboxes[turn]), TWO_SHOT=rows > tuning.one_shot_rows,
            BLOCK=block, num_warps=tuning.warps,
            maxnreg=min(255, _REGISTERS // (64 * tuning.warps)), **chained(residual.device),
        )  # fmt: skip
        return out, residual


def map_peer_memory(group: dist.ProcessGroup, device: torch.device, size: int) -> PeerMemory:
    """Memory of each rank that all of them can read and write; all call this at the same time.

    Args:
        group: The ranks, which talk on the CPU.
        device: This rank's.
        size: Bytes of each rank's.

    Returns:
        ``[size]`` of each rank, all :data:`SENTINEL_BYTE`.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    memory = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device, group.group_name)
    handle = _SymmetricMemory.rendezvous(memory)
    memory.fill_(SENTINEL_BYTE)
    torch.cuda.synchronize(device)
    dist.barrier(group)
    ranks = range(dist.get_world_size(group))
    views = [handle.get_buffer(rank, [size], torch.uint8) for rank in ranks]
    return PeerMemory(views, (memory, handle))


@triton.jit
def _numbers(words, dtype: tl.constexpr):
    """The numbers of words, in float32."""
    if dtype.primitive_bitwidth == 32:
        numbers = words.to(dtype, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.reshape(tl.join(low, high), [2 * words.shape[0]])
    return numbers.to(tl.float32)


@triton.jit
def _words(numbers):
    """Words of numbers."""
    if numbers.dtype.primitive_bitwidth == 32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        halves = tl.reshape(numbers.to(tl.int16, bitcast=True), [numbers.shape[0] // 2, 2])
        low, high = tl.split(halves)
        words = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return words


@triton.jit
def _send(place, words, inside):
    tl.store(place, tl.where(words == _SENTINEL, _SENT_INSTEAD, words), mask=inside)


@triton.jit
def _send_all(outboxes, word, words, inside, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Each rank begins with another one."""
    for step in tl.static_range(1, RANKS):
        _send(outboxes[(RANK + step) % RANKS] + word, words, inside)


@triton.jit
def _look(places, words, inside):
    return [tl.load(place + words, mask=inside, other=0, volatile=True) for place in places]


@triton.jit
def _missing(found):
    """Whether some words are; all threads get the same answer."""
    missing = found[0] == _SENTINEL
    for number in tl.static_range(1, len(found)):
        missing |= found[number] == _SENTINEL
    return tl.max(missing.to(tl.int32), 0) > 0


@triton.jit
def _received(places, words, inside):
    """Words of some places when all of them are there; empties the places."""
    found = _look(places, words, inside)
    while _missing(found):
        found = _look(places, words, inside)
    for number in tl.static_range(len(places)):
        tl.store(places[number] + words, _SENTINEL, mask=inside)
    return found


@triton.jit
def _summed(
    total, own, inboxes, words, inside,
    dtype: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """All ranks' parts of a row and what they are added to, when all are there."""
    theirs = _received(inboxes, words, inside)
    # In the same order on every rank, so that all go on with the same numbers.
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += _numbers(own, dtype)
        else:
            total += _numbers(theirs[rank if rank < RANK else rank - 1], dtype)
    return total


@triton.jit
def _sum_norm(
    part, inbox, inboxes, outboxes, residual, weight, out, inbox_stride, width, epsilon,
    RANK: tl.constexpr, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A row."""
    dtype: tl.constexpr = residual.dtype.element_ty
    WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    place = row * width + lanes
    row_words = width // WORD
    word = tl.arange(0, BLOCK // WORD)
    known = word < row_words
    word += row * row_words
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    # The kernel in front makes the part, and does not know this.
    total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        follow()
    own = tl.load(part + word, mask=known, other=0)
    if TWO_SHOT:
        owner = row % RANKS
        if owner == RANK:
            total = _summed(total, own, inboxes, word, known, dtype, RANK, RANKS)
            # As the others get them.
            rounded = total.to(dtype)
            _send_all(outboxes, word, _words(rounded), known, RANK, RANKS)
            total = rounded.to(tl.float32)
        else:
            for other in tl.static_range(RANKS):
                if other != RANK:
                    _send(outboxes[other] + word, own, known & (owner == other))
            sender = (inbox + owner * inbox_stride,)
            total = _numbers(_received(sender, word, known)[0], dtype)
    else:
        _send_all(outboxes, word, own, known, RANK, RANKS)
        total = _summed(total, own, inboxes, word, known, dtype, RANK, RANKS)
    tl.store(residual + place, total, mask=inside)
    spread = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    tl.store(out + place, total * spread * scale, mask=inside)
