"""All-reduce over the GPUs of one host, fused with residual add and RMSNorm, in Triton.

``out = rms_norm(residual + sum over ranks of part)``, one- or two-shot by the Lamport protocol:
each rank pushes its part into the inboxes of the ranks that reduce it, and a word that has not
arrived holds a sentinel, so data are their own flags. No rank reads over NVLink, and no fence is
needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.types import Norm
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

NUM_BUFFERS = 2
"""Inboxes of a rank, used alternately: double buffering."""
SENTINEL_BYTE = 0xFF
"""The byte that fills all inboxes before the first round."""
_WORD_BYTES = 4
_SENTINEL = tl.constexpr(-1)
"""A word that has not arrived: NaNs in all dtypes."""
_SENTINEL_ESCAPE = tl.constexpr(0x7FFF7FFF)
"""Sent instead of the sentinel: other NaNs in all dtypes."""


class AllReduceTuning(NamedTuple):
    """Settings of the all-reduce; ``benches/gpu/sums_check.py --times`` measures them."""

    max_rows: int
    """Most rows of a step."""
    one_shot_rows: int
    """Up to this many rows every rank sums all rows; above, each rank sums a shard."""
    warps: int
    """Warps of a program."""


TUNINGS = {2: AllReduceTuning(256, 256, 8), 4: AllReduceTuning(256, 32, 16)}
"""Tuning by the number of ranks; other numbers were not measured."""
_REGISTERS = 1 << 16
"""Registers of an SM, which must have room for two programs, so that all rows are resident."""


PROGRAMS_PER_SM = 2
"""Programs that are resident on an SM, by their registers."""


def residency_error(multiprocessors: int, tuning: AllReduceTuning) -> str:
    """Why the kernel could deadlock on a GPU; empty if it cannot.

    Programs wait for other ranks' programs, so all rows of a step must be resident at once.

    Args:
        multiprocessors: SMs of the GPU.
        tuning: The settings of the all-reduce.
    """
    resident = PROGRAMS_PER_SM * multiprocessors
    if resident >= tuning.max_rows:
        return ""
    return f"{multiprocessors} SMs hold {resident} of {tuning.max_rows} rows at once"


class PeerMemory(NamedTuple):
    """Memory of all ranks, mapped into one of them."""

    buffers: list[torch.Tensor]
    """``[bytes]`` uint8 for each rank."""
    handle: object = None
    """An object that keeps the mapping alive."""


class LamportAllReduceNorm:
    """An all-reduce with residual add and RMS norm, by the Lamport protocol.

    All ranks must run the same rounds in the same order, with equal rows and tuning, and buffers
    alternate. The number of rows and the tuning may change between rounds.

    **One-shot**: a rank sends its part of each row to all others, and reduces all rows.
    **Two-shot**: it sends its part of a row to the row's owner, which sends the sum to all others.
    In both cases a slot of an inbox, for one rank and one row, is written at most once in a round.

    **A slot is empty before it is written again.** Double buffering suffices. Rank `s` writes a
    slot of rank `r` in round `t`; `r` reads and empties it in its kernel of round `t`. The kernel
    of `s` that writes it next, in round `t + 2`, sends nothing before its kernel of round `t + 1`
    has ended. That kernel had received the sum of some row, so `r` had sent its part of that row:
    to `s`, or to the row's owner, which sends no sum without it. And `r` sends nothing in round `t
    + 1` before its kernel of round `t` has ended, with all slots emptied. So a late rank delays the
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
                before the first round of any rank.
            rank: The index of this rank.
            width: Elements of a row; an even number if they have 2 bytes.
            dtype: Dtype of parts, residuals and norms, of 2 or 4 bytes.
            tuning: The settings, equal on all ranks.
        """
        ranks = len(shared.buffers)
        rows = tuning.max_rows
        self._shared, self._rank, self._tuning = shared, rank, tuning
        size, words = self.size(ranks, rows, width, dtype), width * dtype.itemsize // _WORD_BYTES
        inboxes = [
            memory[:size].view(torch.int32).view(NUM_BUFFERS, ranks, rows, words)
            for memory in shared.buffers
        ]
        self._inbox = inboxes[rank]
        others = [other for other in range(ranks) if other != rank]
        self._inboxes = [tuple(inbox[other] for other in others) for inbox in self._inbox]
        self._outboxes = [
            tuple(inbox[buffer, rank] for inbox in inboxes) for buffer in range(NUM_BUFFERS)
        ]

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""
        return self._tuning.max_rows

    @staticmethod
    def size(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of each rank's memory."""
        return NUM_BUFFERS * ranks * rows * width * dtype.itemsize

    def add_rms_norm(
        self, buffer: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :func:`norm_rope.add_rms_norm`, for the parts of all ranks. Can be captured.

        Args:
            buffer: 0 and 1, alternating.
            part: ``[rows, width]``, contiguous: this rank's part.
            residual: ``[rows, width]``, equal on all ranks, overwritten by the sums.
            norm: Of the residual's dtype.

        Returns:
            ``[rows, width]`` normalized sums, and the sums; the same on all ranks.

        Raises:
            ValueError: The part has another shape or dtype, or too many rows.
        """
        (rows, width), tuning = residual.shape, self._tuning
        word_mask = part.shape == residual.shape and part.dtype == residual.dtype
        if not (word_mask and part.is_contiguous() and rows <= tuning.max_rows):
            text = f"a part of {tuple(part.shape)} {part.dtype} for {tuple(residual.shape)}"
            raise ValueError(f"{text} {residual.dtype}, at most {tuning.max_rows} rows")
        out = torch.empty_like(residual)
        # At least one word per thread: two threads could see the same word at different times.
        block = max(
            triton.next_power_of_2(width), 32 * tuning.warps * _WORD_BYTES // residual.itemsize
        )
        _all_reduce_rms_norm[(rows,)](
            part.view(torch.int32), self._inbox[buffer], self._inboxes[buffer],
            self._outboxes[buffer], residual, norm.weight, out, self._inbox.stride(1), width,
            norm.epsilon,
            RANK=self._rank, RANKS=len(self._outboxes[buffer]),
            TWO_SHOT=rows > tuning.one_shot_rows, BLOCK=block, num_warps=tuning.warps,
            maxnreg=min(255, _REGISTERS // (64 * tuning.warps)), **pdl_options(residual.device),
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
def _to_float32(words, dtype: tl.constexpr):
    """Unpacks words to float32."""
    if dtype.primitive_bitwidth == 32:
        numbers = words.to(dtype, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.reshape(tl.join(low, high), [2 * words.shape[0]])
    return numbers.to(tl.float32)


@triton.jit
def _to_words(numbers):
    """Packs values into words."""
    if numbers.dtype.primitive_bitwidth == 32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        halves = tl.reshape(numbers.to(tl.int16, bitcast=True), [numbers.shape[0] // 2, 2])
        low, high = tl.split(halves)
        words = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return words


@triton.jit
def _send(offsets, words, mask):
    tl.store(offsets, tl.where(words == _SENTINEL, _SENTINEL_ESCAPE, words), mask=mask)


@triton.jit
def _send_all(outboxes, word, words, mask, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Sends to all other ranks, each rank in another order."""
    for offset in tl.static_range(1, RANKS):
        _send(outboxes[(RANK + offset) % RANKS] + word, words, mask)


@triton.jit
def _load_words(places, words, mask):
    return [tl.load(offsets + words, mask=mask, other=0, volatile=True) for offsets in places]


@triton.jit
def _any_missing(found):
    """Whether some words have not arrived; all threads get the same answer."""
    missing = found[0] == _SENTINEL
    for number in tl.static_range(1, len(found)):
        missing |= found[number] == _SENTINEL
    return tl.max(missing.to(tl.int32), 0) > 0


@triton.jit
def _receive(places, words, mask):
    """Waits for words to arrive, and empties their slots."""
    found = _load_words(places, words, mask)
    while _any_missing(found):
        found = _load_words(places, words, mask)
    for number in tl.static_range(len(places)):
        tl.store(places[number] + words, _SENTINEL, mask=mask)
    return found


@triton.jit
def _reduce(
    total, own_words, inboxes, words, mask,
    dtype: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Waits for all ranks' parts of a row, and adds them to `total`."""
    received = _receive(inboxes, words, mask)
    # In the same order on every rank, so that all ranks get equal sums.
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += _to_float32(own_words, dtype)
        else:
            total += _to_float32(received[rank if rank < RANK else rank - 1], dtype)
    return total


@triton.jit
def _all_reduce_rms_norm(
    part, inbox, inboxes, outboxes, residual, weight, out, inbox_stride, width, epsilon,
    RANK: tl.constexpr, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All-reduce, residual add and RMSNorm of one row."""
    dtype: tl.constexpr = residual.dtype.element_ty
    WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    offsets = row * width + columns
    row_words = width // WORD
    word = tl.arange(0, BLOCK // WORD)
    word_mask = word < row_words
    word += row * row_words
    norm_weight = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        pdl_wait_trigger()
    # Not before: the kernel between this all-reduce and the previous one, which writes it, may have
    # let this one start before that one has ended.
    total = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    own_words = tl.load(part + word, mask=word_mask, other=0)
    if TWO_SHOT:
        owner = row % RANKS
        if owner == RANK:
            total = _reduce(total, own_words, inboxes, word, word_mask, dtype, RANK, RANKS)
            # Rounded as the other ranks receive it.
            rounded = total.to(dtype)
            _send_all(outboxes, word, _to_words(rounded), word_mask, RANK, RANKS)
            total = rounded.to(tl.float32)
        else:
            for other in tl.static_range(RANKS):
                if other != RANK:
                    _send(outboxes[other] + word, own_words, word_mask & (owner == other))
            sender = (inbox + owner * inbox_stride,)
            total = _to_float32(_receive(sender, word, word_mask)[0], dtype)
    else:
        _send_all(outboxes, word, own_words, word_mask, RANK, RANKS)
        total = _reduce(total, own_words, inboxes, word, word_mask, dtype, RANK, RANKS)
    tl.store(residual + offsets, total, mask=mask)
    rstd = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    tl.store(out + offsets, total * rstd * norm_weight, mask=mask)
