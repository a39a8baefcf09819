"""Steps of `attention_check.py`, and what attends in them: `pie`, its peers, and a copy."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import frame
import torch

sys.path.insert(0, str(frame.REPOSITORY / "tests"))

from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
from pie_driver_sglang.kernels.attention.paged_decode import attend_paged
from pie_driver_sglang.kernels.attention.prompt_rows import find_prompts
from pie_driver_sglang.kernels.attention.split_plan import (
    DecodeRows,
    SplitPlan,
    SplitTuning,
    plan_splits,
    split_tuning,
)

PAGE = 16


ROUND_SECONDS = 0.01
ROTATED_BYTES = 256 << 20
"""KV of the layers of a graph, at least: several times the L2 cache."""


GRAPH_BYTES = 8 << 30
"""KV that a graph reads, where its layers are few."""


Call = Callable[[int], torch.Tensor]
"""Attends in one layer, by number."""


class Shape(NamedTuple):
    """Attention of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    def tuning(self, itemsize: int, rows: int, prompts: bool) -> SplitTuning:
        """The default cut."""
        return split_tuning(self.dim, self.heads // self.kv_heads, itemsize, rows, prompts=prompts)


SHAPES = (
    Shape("0.6B", 16, 8, 128),
    Shape("8B", 32, 8, 128),
    Shape("14B", 40, 8, 128),
    Shape("30B-A3B", 32, 4, 128),
)


class Work(NamedTuple):
    """A decode step."""

    shape: Shape
    lengths: tuple[int, ...]
    name: str
    prompt: bool = False
    """Whether every token of the last context is a row; of the others the last one is."""


class Storage:
    """Keys and values that all layers of all steps are cut from."""

    def __init__(self, shape: Shape, gib: float, device: torch.device) -> None:
        # The interpreter multiplies no matrices of bfloat16.
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.token_bytes = 2 * shape.kv_heads * shape.dim * self.dtype.itemsize
        self.slots = int(gib * 2**30) // self.token_bytes
        size = (self.slots, shape.kv_heads, shape.dim)
        self.keys = torch.empty(size, dtype=self.dtype, device=device).normal_()
        self.values = torch.empty(size, dtype=self.dtype, device=device).normal_()


class Step:
    """A step in pages that lie anywhere, and the layers that it runs through."""

    def __init__(self, work: Work, storage: Storage) -> None:
        shape, device = work.shape, storage.keys.device
        pages = [-(-length // PAGE) for length in work.lengths]
        slots = (sum(pages) + 1) * PAGE
        if slots > storage.slots:
            raise MemoryError(f"{slots} slots of KV, {storage.slots} at hand")
        self.work = work
        self.kv_bytes = sum(work.lengths) * storage.token_bytes
        self.lengths = torch.tensor(work.lengths, device=device)
        layers = min(storage.slots // slots, math.ceil(ROTATED_BYTES / self.kv_bytes), 512)
        parts = [slice(layer * slots, (layer + 1) * slots) for layer in range(layers)]
        self.keys = [storage.keys[part] for part in parts]
        self.values = [storage.values[part] for part in parts]
        self.calls = max(layers, min(20, GRAPH_BYTES // self.kv_bytes), 2)
        if device.type == "cpu":
            self.calls = 1
        order = 1 + torch.randperm(sum(pages), device=device).int()
        self.page_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
        for row, own in enumerate(torch.split(order, pages)):
            self.page_table[row, : len(own)] = own
        offsets = torch.arange(PAGE, dtype=torch.int32, device=device)
        self.table = (self.page_table[:, :, None] * PAGE + offsets).flatten(1)
        self.rows = self._rows()
        self.queries = torch.randn(
            len(self.rows.kv_lens), shape.heads, shape.dim, device=device
        ).to(storage.dtype)
        self.scale = shape.dim**-0.5

    def _rows(self) -> DecodeRows:
        contexts, lengths = torch.arange(len(self.lengths), device=self.table.device), self.lengths
        if self.work.prompt:
            count = int(lengths[-1])
            contexts = torch.cat([contexts[:-1], contexts[-1:].expand(count)])
            own = torch.arange(1, count + 1, device=lengths.device)
            lengths = torch.cat([lengths[:-1], own])
        return DecodeRows(self.table, contexts, lengths)

    def default(self) -> SplitTuning:
        """The cut that the driver takes."""
        return self.work.shape.tuning(self.queries.itemsize, len(self.queries), self.work.prompt)

    def used(self, table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The first entries of each row of a table, row after row."""
        return table[torch.arange(table.shape[1], device=table.device) < counts[:, None]]

    def starts(self, counts: torch.Tensor) -> torch.Tensor:
        """``[rows + 1]`` int32: sums of the rows before."""
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def multiprocessors(device: torch.device) -> int:
    """Of the device; the interpreter has a few."""
    if device.type == "cpu":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def pie(step: Step, how: SplitTuning | None = None) -> Call:
    """This driver's kernels."""
    shape, device = step.work.shape, step.queries.device
    rows, how = step.rows, how or step.default()
    cut = SplitPlan(how, shape.kv_heads, shape.heads // shape.kv_heads, -1)
    shares = plan_splits(rows, cut, multiprocessors(device))
    if device.type == "cuda":
        # What attends would not wait for it.
        torch.cuda.synchronize(device)
    rule = AttentionParams(step.scale)

    def call(layer: int) -> torch.Tensor:
        out = torch.empty_like(step.queries)
        keys, values = step.keys[layer], step.values[layer]
        attend_paged(step.queries, keys, values, out, rows, shares, rule, PAGE)
        return out

    return call


def with_fa3(step: Step) -> Call:
    """The same with prompts left to FlashAttention-3."""
    from pie_driver_sglang.backends.sglang.compat.attention import attend_prompts

    shape, device = step.work.shape, step.queries.device
    # The first row of a block table is of padding.
    table = torch.nn.functional.pad(step.table, (0, 0, 1, 0))
    owned = DecodeRows(table, step.rows.table_rows + 1, step.rows.kv_lens)
    prompts, rows = find_prompts(owned, len(step.lengths), PAGE)
    how = shape.tuning(step.queries.itemsize, len(step.queries), prompts=False)
    cut = SplitPlan(how, shape.kv_heads, shape.heads // shape.kv_heads, -1)
    shares, rule = plan_splits(rows, cut, multiprocessors(device)), AttentionParams(step.scale)
    torch.cuda.synchronize(device)

    def call(layer: int) -> torch.Tensor:
        out = torch.empty_like(step.queries)
        keys, values = step.keys[layer], step.values[layer]
        attend_prompts(step.queries, keys, values, out, prompts, rule, PAGE)
        attend_paged(step.queries, keys, values, out, rows, shares, rule, PAGE)
        return out

    return call


def share_out(step: Step) -> Call:
    """What this driver's kernels need once a step."""
    shape, device = step.work.shape, step.queries.device
    cut = SplitPlan(step.default(), shape.kv_heads, shape.heads // shape.kv_heads, -1)
    return lambda _: plan_splits(step.rows, cut, multiprocessors(device)).totals


def sglang_triton(step: Step) -> Call:
    """SGLang's Triton kernel, as its backend calls it."""
    import triton
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    shape, rows, device = step.work.shape, len(step.lengths), step.queries.device
    most = 8
    logits = torch.empty(rows, shape.heads, most, shape.dim, device=device)
    sums = torch.empty(rows, shape.heads, most, device=device)
    splits = torch.empty(rows, dtype=torch.int32, device=device)
    get_num_kv_splits_triton[(1,)](
        splits, step.lengths, rows, 1, shape.heads, shape.kv_heads, most, multiprocessors(device),
        MAX_NUM_SEQ=max(256, triton.next_power_of_2(rows)),
    )  # fmt: skip
    starts = step.starts(step.lengths)
    indices = step.used(step.table, step.lengths).long()

    def call(layer: int) -> torch.Tensor:
        out = torch.empty_like(step.queries)
        decode_attention_fwd(
            step.queries, step.keys[layer], step.values[layer], out, starts, indices, logits, sums,
            splits, most, step.scale, 1.0, 1.0, use_pdl=device.type == "cuda", page_size=PAGE,
        )  # fmt: skip
        return out

    return call


def flashinfer(step: Step) -> Call:
    """The paged decode of flashinfer: the kernel that SGLang chooses, but with real pages."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    shape, device = step.work.shape, step.queries.device
    counts = (step.lengths + PAGE - 1) // PAGE
    starts, last = step.starts(counts), ((step.lengths - 1) % PAGE + 1).int()
    indices = step.used(step.page_table, counts)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(512 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
        use_tensor_cores=shape.heads // shape.kv_heads >= 4, paged_kv_indptr_buffer=starts.clone(),
        paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    wrapper.plan(
        starts, indices, last, shape.heads, shape.kv_heads, shape.dim, PAGE,
        q_data_type=step.queries.dtype, kv_data_type=step.queries.dtype, sm_scale=step.scale,
    )  # fmt: skip

    def call(layer: int) -> torch.Tensor:
        pages = (-1, PAGE, shape.kv_heads, shape.dim)
        keys, values = step.keys[layer].view(pages), step.values[layer].view(pages)
        return wrapper.run(step.queries, (keys, values))

    return call


def fa3(step: Step) -> Call:
    """FlashAttention-3, as SGLang's backend calls it."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    shape, rows, device = step.work.shape, len(step.lengths), step.queries.device
    lengths = step.lengths.int()
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    plan = get_scheduler_metadata(
        batch_size=rows, max_seqlen_q=1, max_seqlen_k=step.page_table.shape[1] * PAGE,
        num_heads=shape.heads, num_heads_k=shape.kv_heads, headdim=shape.dim,
        cache_seqlens=lengths, qkv_dtype=step.queries.dtype, cu_seqlens_q=starts, page_size=PAGE,
        causal=True,
    )  # fmt: skip

    def call(layer: int) -> torch.Tensor:
        pages = (-1, PAGE, shape.kv_heads, shape.dim)
        return flash_attn_with_kvcache(
            q=step.queries, k_cache=step.keys[layer].view(pages),
            v_cache=step.values[layer].view(pages), page_table=step.page_table,
            cache_seqlens=lengths, cu_seqlens_q=starts, max_seqlen_q=1, softmax_scale=step.scale,
            causal=True, scheduler_metadata=plan,
        )  # fmt: skip

    return call


PEERS: dict[str, Callable[[Step], Call]] = {
    "triton": sglang_triton,
    "flashinfer": flashinfer,
    "fa3": fa3,
}


MODULES = {
    "triton": "sglang.kernels.ops.attention.decode_attention",
    "flashinfer": "flashinfer",
    "fa3": "sgl_kernel.flash_attn",
}


def first_line(error: BaseException) -> str:
    """A failure on one line."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}"


def importable(names: list[str]) -> list[str]:
    """The peers that are there."""
    found = []
    for name in names:
        try:
            importlib.import_module(MODULES[name])
            found.append(name)
        except Exception as error:
            print(f"without {name}: {first_line(error)}")
    return found


def copy(step: Step) -> Call:
    """Moves as many bytes as attention reads: half of them are read, half written."""
    tokens = sum(step.work.lengths)

    def call(layer: int) -> torch.Tensor:
        return step.values[layer][:tokens].copy_(step.keys[layer][:tokens])

    return call


class Layers:
    """A contender's layers, one after the other, captured as a graph."""

    def __init__(self, step: Step, call: Call) -> None:
        self._call, self._layers, self._calls = call, len(step.keys), step.calls
        self._graph = None
        if step.queries.device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._run()

    def _run(self) -> None:
        for number in range(self._calls):
            self._call(number % self._layers)

    def round(self) -> float:
        """Microseconds of a layer, of replays that follow a first one."""
        if self._graph is None:
            started = time.perf_counter()
            self._run()
            return (time.perf_counter() - started) / self._calls * 1e6
        self._replays(1)
        count = max(1, int(ROUND_SECONDS * 1e6 / (self._replays(1) * self._calls)))
        return self._replays(count)

    def _replays(self, count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count * 1000 / self._calls
