"""Decode attention on a GPU: parity, times compared with peers and a copy, and tuning.

    python benches/gpu/attention_check.py [--parity] [--times] [--tune] [--prompts] [--fa3]
        [--seconds N] [--shapes A,B] [--batches 256,16] [--json FILE]

Without one of the five it does the first two.

--parity: the kernels against dense attention in float64: types, head sizes, groups, pages, windows,
    caps and sinks; each case twice, and the results equal.
--times: microseconds of one layer, in graphs of many layers whose KV exceeds the L2 cache. Next to
    the backend `pie`: SGLang's Triton kernel, flashinfer's paged decode and FlashAttention-3 where
    they can be imported, and a copy that moves as many bytes. What is made once a step is left out:
    plans, lists of slots, and our `shares`, which have a column. `of copy` is the share of the
    copy's bandwidth, `best` the time of the fastest peer in times of ours.
--tune: every parameter of the cut in turn, with the others at the best so far, until none helps.
--prompts: the same for steps in which every token of a prompt is a row.

With --fa3 such steps are timed by the kernel of decodes alone, and with prompts left to
FlashAttention-3, as in long steps. What both compute is compared first.

With `TRITON_INTERPRET=1 ... --device cpu` everything runs on tiny sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import frame
import torch
from frame import Report

sys.path.insert(0, str(frame.REPOSITORY / "tests"))

from paged_kernels import PADDING, Case, check_attention
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

PARTS = ("parity", "times", "tune", "prompts", "fa3")
PAGE = 16
LENGTHS = (128, 512, 1024, 2048, 8192, 32768)
RAGGED = (100, 2048)
ROTATED_BYTES = 256 << 20
"""KV of the layers of a graph, at least: several times the L2 cache."""
GRAPH_BYTES = 8 << 30
"""KV that a graph reads, where its layers are few."""
ROUND_SECONDS = 0.01
ROUNDS = 3
TUNED = {
    "block": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": (2, 3, 4, 5),
    "programs": (1, 2, 3, 4, 6, 8),
}
TUNED_FOR_PROMPTS = TUNED | {"queries": (16, 32, 64, 128), "programs": (1, 2, 3)}
DISAGREES = 0.02
"""Of the largest value, the most by which a peer may differ."""

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


def microseconds(step: Step, call: Call) -> float:
    """Of one layer: the median of some rounds."""
    layers = Layers(step, call)
    return statistics.median(layers.round() for _ in range(ROUNDS))


def first_line(error: BaseException) -> str:
    """A failure on one line."""
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}"


def time_step(step: Step, peers: list[str]) -> dict[str, Any]:
    """Every contender's microseconds; None for one that cannot run or computes something else.

    They take turns, so that a GPU that is slower after one of them slows all of them alike.
    """
    contenders: dict[str, Layers] = {}
    expected = None
    for name in ["pie", *peers, "shares", "copy"]:
        try:
            call = {"pie": pie, "shares": share_out, "copy": copy, **PEERS}[name](step)
            out = call(0).float()
            if name == "pie":
                expected = out
            elif name in PEERS and expected is not None:
                error = float((out.view_as(expected) - expected).abs().max() / expected.abs().max())
                if not error < DISAGREES:
                    raise ValueError(f"differs by {error:.1e}")
            contenders[name] = Layers(step, call)
        except Exception as error:
            print(f"    {step.work.shape.name} {step.work.name}, {name}: {first_line(error)}")
    times = frame.in_turns({name: each.round for name, each in contenders.items()}, ROUNDS)
    row: dict[str, Any] = {"work": step.work.name, "shape": step.work.shape.name}
    row |= {name: statistics.median(times[name]) if name in times else None
            for name in ["pie", *peers, "shares", "copy"]}  # fmt: skip
    row["pie_rounds"] = times.get("pie")
    return summed_up(row, step, peers)


def summed_up(row: dict[str, Any], step: Step, peers: list[str]) -> dict[str, Any]:
    """The row with bandwidth, share of the copy's, and the fastest peer's time in ours."""
    ours, times = row["pie"], [row[name] for name in peers if row[name]]
    if ours:
        row["gb_s"] = step.kv_bytes / ours / 1e3
        row["of_copy"] = row["copy"] / ours if row["copy"] else None
        row["best_peer"] = min(times) / ours if times else None
    return row


def spread(batch: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of many kinds."""
    draw = random.Random(seed)
    return tuple(draw.randint(*RAGGED) for _ in range(batch))


def grid(shape: Shape, tiny: bool, batches: Sequence[int]) -> Iterator[Work]:
    """Every step, what matters most first."""
    lengths = (40, 70) if tiny else LENGTHS
    for batch in sorted(batches, key=lambda batch: -batch):
        yield Work(shape, spread(batch) if not tiny else (5, 40, 17)[:batch], f"{batch} x ragged")
    for length in sorted(lengths, key=lambda length: (length not in (512, 2048), length)):
        for batch in sorted(batches, key=lambda batch: -batch):
            yield Work(shape, (length,) * batch, f"{batch} x {length}")


class Run:
    """What the arguments say, and the record."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self.arguments, self.report = arguments, report
        self.device = torch.device(arguments.device)
        self.tiny = self.device.type == "cpu"
        self.until = time.monotonic() + arguments.seconds

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def shapes(self) -> list[Shape]:
        """The models asked for."""
        names = self.arguments.shapes.split(",")
        if self.tiny:
            return [Shape("tiny", 4, 2, 16)]
        return [shape for shape in SHAPES if shape.name in names]

    def batches(self) -> list[int]:
        """The numbers of rows asked for."""
        return [1, 3] if self.tiny else [int(rows) for rows in self.arguments.batches.split(",")]

    def storage(self, shape: Shape) -> Storage:
        """As much as asked for and free."""
        gib = self.arguments.gib
        if self.tiny:
            gib = 2**-9
        else:
            gib = min(gib, 0.7 * torch.cuda.mem_get_info(self.device)[0] / 2**30)
        return Storage(shape, gib, self.device)


def parity_cases() -> list[Case]:
    """Types, head sizes, groups and pages of real models; some rows are cut into many parts."""
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    lengths = (2999, 0, 1, 64, 65, 700, 16, 1500, 3000, 31)
    return [
        Case(lengths, 16, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 40, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16, sinks=True),
        Case((5000,), 40, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 16, 8, 128, 128, 1, dtype=bfloat16, pool=bfloat16, window=1023),
        Case(lengths, 8, 2, 64, 64, 64, dtype=float16, pool=float16, window=40),
        Case(lengths, 4, 4, 80, 80, 8, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 8, 4, 256, 256, 32, dtype=bfloat16, pool=bfloat16, cap=5.0, window=500),
        Case(lengths, 16, 1, 192, 128, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 71, 1, 64, 64, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 8, 2, 128, 128, 16, dtype=float32, pool=float32, cap=5.0, sinks=True),
        Case(lengths, 16, 8, 128, 128, 16, dtype=bfloat16, pool=torch.float8_e4m3fn,
             value_scale=0.5),
        Case(lengths, 16, 8, 128, 128, 24, dtype=float16, pool=torch.float8_e5m2),
        Case((2999, 700, 2900, 0, 1500, 3000, 31, 2100, 650), 16, 8, 128, 128, 16, dtype=bfloat16,
             pool=bfloat16, groups=((0, 7, 2, 5), (1, 4, 8)), common=(2048, 640)),
        Case(tuple(range(1700, 1790)), 40, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16,
             sinks=True, groups=(tuple(range(90)),), common=(1664,)),
    ]  # fmt: skip


def check_parity(run: Run) -> int:
    """Returns how many cases are wrong."""
    generator = torch.Generator().manual_seed(1)
    wrong = 0
    cases = parity_cases()[:: 4 if run.tiny else 1]
    for case in cases:
        group = case.heads // case.kv_heads
        how = split_tuning(
            max(case.dim, case.value_dim), group, case.pool.itemsize, len(case.lengths) + PADDING
        )
        case = case._replace(multiprocessors=multiprocessors(run.device))
        if run.tiny:
            shorter = tuple(length // 40 for length in case.lengths)
            case = case._replace(lengths=shorter, dtype=torch.float32, pool=torch.float32)
            case = case._replace(groups=(), common=())
        try:
            right = check_attention(case, generator, str(run.device), how)
        except Exception as error:
            right = False
            print(f"WRONG {first_line(error)}: {case}")
        wrong += not right
        sys.stdout.flush()
    print(f"parity: {wrong} of {len(cases)} cases wrong", flush=True)
    return wrong


def time_grid(run: Run) -> None:
    """A table, row by row."""
    peers = importable([name for name in run.arguments.peers.split(",") if name])
    columns = ["pie", *peers, "shares", "copy"]
    print(f"{'shape':>6} {'step':>14}" + "".join(f"{name:>12}" for name in columns)
          + f"{'GB/s':>8}{'of copy':>9}{'best':>7}")  # fmt: skip
    for shape in run.shapes():
        storage = run.storage(shape)
        for work in grid(shape, run.tiny, run.batches()):
            if run.over():
                print("the time is up", flush=True)
                return
            try:
                row = time_step(Step(work, storage), peers)
            except MemoryError as error:
                print(f"{shape.name:>6} {work.name:>14}  {error}")
                continue
            figures = "".join(f"{row[name] or math.nan:12.1f}" for name in columns)
            last = (row.get("gb_s"), row.get("of_copy"), row.get("best_peer"))
            gb_s, of_copy, best = (math.nan if value is None else value for value in last)
            print(f"{shape.name:>6} {work.name:>14}{figures}{gb_s:8.0f}{of_copy:9.2f}{best:7.2f}",
                  flush=True)  # fmt: skip
            run.report.add(part="times", **row)
        del storage


def tuned_steps(shape: Shape, tiny: bool) -> list[Work]:
    """What a cut is chosen by."""
    if tiny:
        return [Work(shape, (40, 7), "2 x ragged")]
    steps = [(256, 512), (64, 2048), (16, 8192), (1, 512), (1, 8192)]
    uniform = [Work(shape, (length,) * batch, f"{batch} x {length}") for batch, length in steps]
    return [Work(shape, spread(256), "256 x ragged"), *uniform]


def prompt_steps(shape: Shape, tiny: bool) -> list[Work]:
    """What a cut for prompts is chosen by."""
    if tiny:
        return [Work(shape, (40, 7, 300), "2 and 300", prompt=True)]
    steps = [(64, 2048), (64, 512), (0, 2048), (0, 1024), (200, 1024)]
    return [
        Work(shape, (*(512 for _ in range(batch)), length), f"{batch} and {length}", prompt=True)
        for batch, length in steps
    ]


def time_prompts(run: Run) -> None:
    """Steps with prompts by one kernel and by two, once these agree."""
    for shape in run.shapes():
        storage = run.storage(shape)
        for work in prompt_steps(shape, run.tiny):
            step = Step(work, storage)
            calls = {"pie": pie(step), "fa3": with_fa3(step)}
            one, two = (call(0).float() for call in calls.values())
            off = float((two - one).abs().max() / one.abs().max())
            run.report.hold(f"{shape.name} {work.name}, fa3 differs", off, at_most=DISAGREES)
            layers = {name: Layers(step, call).round for name, call in calls.items()}
            times = frame.in_turns(layers, ROUNDS)
            us = {name: statistics.median(rounds) for name, rounds in times.items()}
            print(f"{shape.name:>8} {work.name:>14}  " + "".join(f"{us[x]:10.1f}" for x in us))
            run.report.add(part="fa3", shape=shape.name, work=work.name, us=us)
        del storage


class Tuner:
    """The search for the cut of a shape's steps."""

    def __init__(
        self, run: Run, shape: Shape, steps: list[Work], choices: dict[str, tuple[int, ...]]
    ) -> None:
        self.run, self.shape, self.choices = run, shape, choices
        storage = run.storage(shape)
        self.steps = [Step(work, storage) for work in steps]
        self.default = self.steps[0].default()
        self.tried: dict[SplitTuning, float] = {}
        print(f"{shape.name}: mean | {', '.join(step.work.name for step in self.steps)}")

    def score(self, how: SplitTuning) -> float:
        """Geometric mean of the times; infinite for a cut that does not run."""
        if how in self.tried or self.run.over():
            return self.tried.get(how, math.inf)
        self.tried[how] = math.inf
        started = time.monotonic()
        try:
            times = [microseconds_checked(step, how) for step in self.steps]
        except Exception as error:
            print(f"{how}: {first_line(error)}", flush=True)
            return math.inf
        self.tried[how] = statistics.geometric_mean(times)
        figures = " ".join(f"{each:8.1f}" for each in times)
        seconds = time.monotonic() - started
        print(f"{self.tried[how]:8.1f} |{figures} | {how} ({seconds:.1f} s)", flush=True)
        self.run.report.add(part="tune", shape=self.shape.name, **asdict(how), us=times)
        return self.tried[how]

    def descend(self) -> None:
        """Each parameter in turn, with the others at the best so far."""
        best, before = self.default, None
        while best != before and not self.run.over():
            before = best
            for name, choices in self.choices.items():
                best = min((replace(best, **{name: choice}) for choice in choices), key=self.score)
        gain = self.tried.get(self.default, math.nan) / self.tried.get(best, math.nan)
        over = ", the time is up" if self.run.over() else ""
        print(f"{self.shape.name}: best {best}, {gain:.3f} times the default's speed{over}")


def microseconds_checked(step: Step, how: SplitTuning) -> float:
    """Of one layer, once its result is that of the default cut."""
    call = pie(step, how)
    found, expected = call(0).float(), pie(step)(0).float()
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < DISAGREES:
        raise ValueError(f"differs by {error:.1e}")
    return microseconds(step, call)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    for part in PARTS:
        made.add_argument(f"--{part}", action="store_true")
    made.add_argument("--batches", default="1,4,16,64,128,256", help="rows of a step")
    made.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    made.add_argument("--peers", default=",".join(PEERS))
    made.add_argument("--gib", type=float, default=40.0, help="memory for KV")
    made.add_argument("--seconds", type=float, default=500.0, help="nothing begins later")
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        check(Run(arguments, report))


def check(run: Run) -> None:
    """Parity, then the searches and times that are asked for."""
    arguments = run.arguments
    name = "Triton's interpreter" if run.tiny else torch.cuda.get_device_name(run.device)
    print(f"{name}, torch {torch.__version__}")
    wanted = [getattr(arguments, part) for part in PARTS]
    default = not any(wanted)
    if arguments.parity or default:
        run.report.hold("wrong cases", check_parity(run), at_most=0)
    with torch.inference_mode():
        for shape in run.shapes():
            if arguments.tune:
                Tuner(run, shape, tuned_steps(shape, run.tiny), TUNED).descend()
            if arguments.prompts:
                Tuner(run, shape, prompt_steps(shape, run.tiny), TUNED_FOR_PROMPTS).descend()
        if arguments.fa3:
            time_prompts(run)
        if arguments.times or default:
            time_grid(run)


if __name__ == "__main__":
    main()
