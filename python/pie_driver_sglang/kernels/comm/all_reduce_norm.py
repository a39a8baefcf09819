"""All-reduce over the GPUs of one host, fused with residual add and RMS norm.

Each rank writes its part into memory of the ranks that sum it up: their inboxes. A word that has
not arrived holds a sentinel, so the data are their own flags (the Lamport protocol). No rank reads
across the link, and no fence is needed: a word has arrived or it has not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.dense_layers import Norm
from pie_driver_sglang.kernels.pdl import chained, follow

TURNS = 2
"""Inboxes per rank, used alternately: double buffering."""
SENTINEL_BYTE = 0xFF
"""The byte that fills all inboxes before the first turn."""
_WORD_BYTES = 4
_SENTINEL = tl.constexpr(-1)
"""A word that has not arrived. Its values are NaNs."""
_SENT_INSTEAD = tl.constexpr(0x7FFF7FFF)
"""What a rank sends instead of the sentinel: other NaNs, in all dtypes."""


class AllReduceTuning(NamedTuple):
    """Settings of the all-reduce; ``benches/gpu/sums_check.py --times`` measures them."""

    most_rows: int
    """Most rows of a step."""
    one_shot_rows: int
    """Up to this many rows every rank sums all rows; above, each rank sums a shard."""
    warps: int
    """Warps of a program."""


TUNINGS = {2: AllReduceTuning(256, 256, 8), 4: AllReduceTuning(256, 32, 16)}
"""Tuning by the number of ranks; other numbers were not measured."""
_REGISTERS = 1 << 16
"""Registers of an SM, which must have room for two programs, so that all rows are resident."""


PROGRAMS_AT_ONCE = 2
"""Programs that are resident on an SM, by their registers."""


def find_obstacle(multiprocessors: int, tuning: AllReduceTuning) -> str:
    """Why the programs of a GPU could deadlock; empty if they cannot.

    Programs wait for other ranks' programs, so all rows of a step must be resident at once.

    Args:
        multiprocessors: SMs of the GPU.
        tuning: The settings of the all-reduce.
    """
    room = PROGRAMS_AT_ONCE * multiprocessors
    if room >= tuning.most_rows:
        return ""
    return f"{multiprocessors} SMs have room for {room} rows of {tuning.most_rows} at once"


class PeerMemory(NamedTuple):
    """Memory of all ranks, mapped into one of them."""

    of_ranks: list[torch.Tensor]
    """``[bytes]`` uint8 for each rank."""
    keeps: object = None
    """An object that keeps the mapping alive."""


class LamportAllReduceNorm:
    """An all-reduce with residual add and RMS norm, by the Lamport protocol.

    All ranks must take the same turns in the same order, with equal rows and tuning, and turns
    alternate. The number of rows and the tuning may change between turns.

    **One shot**: a rank sends its part of each row to all others, and sums all rows. **Two shots**:
    it sends its part of a row to the row's owner, which sends the sum to all others. In both cases
    a place of an inbox, for one rank and one row, is written at most once in a turn.

    **A place is empty before it is written again.** Double buffering suffices. Rank `s` writes a
    place of rank `r` in turn `t`; `r` reads and empties it in its kernel of turn `t`. The kernel of
    `s` that writes it next, in turn `t + 2`, sends nothing before its kernel of turn `t + 1` has
    ended. That kernel had received the sum of some row, so `r` had sent its part of that row: to
    `s`, or to the row's owner, which sends no sum without it. And `r` sends nothing in turn `t + 1`
    before its kernel of turn `t` has ended, with all places emptied. So a late rank delays the
    others, and graphs may follow each other in any order.

    **Waiting programs do not deadlock.** They start in the order of their rows, and send their part
    before they wait. Let `k` be the first row that is not done on some rank. All rows before it are
    done, so its programs are resident on every rank, all its parts are sent, and its owner waits
    for nothing else.
    """

    def __init__(
        self,
        shared: PeerMemory,
        rank: int,
        width: int,
        dtype: torch.dtype,
        tuning: AllReduceTuning,
    ) -> None:
        """Divides shared memory into inboxes.

        Args:
            shared: At least :meth:`size` bytes of each rank, filled with :data:`SENTINEL_BYTE`
                before any rank takes a turn.
            rank: The index of this rank.
            width: Elements of a row; an even number if they have 2 bytes.
            dtype: Dtype of parts, residuals and norms, of 2 or 4 bytes.
            tuning: The settings, equal on all ranks.
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
        """Most rows of a step."""
        return self._tuning.most_rows

    @staticmethod
    def size(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of each rank's memory."""
        return TURNS * ranks * rows * width * dtype.itemsize

    def add_norm(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :func:`dense_layers.add_norm`, for the parts of all ranks. Can be captured.

        Args:
            turn: 0 and 1, alternating.
            part: ``[rows, width]``, contiguous: this rank's part.
            residual: ``[rows, width]``, equal on all ranks, overwritten by the sums.
            norm: Of the residual's dtype.

        Returns:
            ``[rows, width]`` normalized sums, and the sums; the same on all ranks.

        Raises:
            ValueError: The part has another shape or dtype, or too many rows.
        """
        (rows, width), tuning = residual.shape, self._tuning
        known = part.shape == residual.shape and part.dtype == residual.dtype
        if not (known and part.is_contiguous() and rows <= tuning.most_rows):
            text = f"a part of {tuple(part.shape)} {part.dtype} for {tuple(residual.shape)}"
            raise ValueError(f"{text} {residual.dtype}, at most {tuning.most_rows} rows")
        out = torch.empty_like(residual)
        # At least one word per thread: two threads could see the same word at different times.
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
    """Allocates memory on each rank, and maps that of all ranks; a collective call.

    Args:
        group: A CPU process group of the ranks.
        device: This rank's device.
        size: Bytes per rank.

    Returns:
        ``[size]`` bytes of each rank, filled with :data:`SENTINEL_BYTE`.
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
    """The values of words, in float32."""
    if dtype.primitive_bitwidth == 32:
        numbers = words.to(dtype, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.reshape(tl.join(low, high), [2 * words.shape[0]])
    return numbers.to(tl.float32)


@triton.jit
def _words(numbers):
    """Values packed into words."""
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
    """Sends to all other ranks; each rank begins with a different one."""
    for step in tl.static_range(1, RANKS):
        _send(outboxes[(RANK + step) % RANKS] + word, words, inside)


@triton.jit
def _look(places, words, inside):
    return [tl.load(place + words, mask=inside, other=0, volatile=True) for place in places]


@triton.jit
def _missing(found):
    """Whether some words have not arrived; all threads get the same answer."""
    missing = found[0] == _SENTINEL
    for number in tl.static_range(1, len(found)):
        missing |= found[number] == _SENTINEL
    return tl.max(missing.to(tl.int32), 0) > 0


@triton.jit
def _received(places, words, inside):
    """Waits for the words of some places, and empties the places."""
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
    """Waits for all ranks' parts of a row, and adds them to `total`."""
    theirs = _received(inboxes, words, inside)
    # In the same order on every rank, so that all ranks get equal sums.
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
    """All-reduces, adds and normalizes one row."""
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
    # The previous kernel writes the part and does not touch the residual.
    total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        follow()
    own = tl.load(part + word, mask=known, other=0)
    if TWO_SHOT:
        owner = row % RANKS
        if owner == RANK:
            total = _summed(total, own, inboxes, word, known, dtype, RANK, RANKS)
            # Rounded as the other ranks receive it.
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
