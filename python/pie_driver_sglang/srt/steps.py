"""The device side of the graph path: steps of fixed sizes as CUDA graphs, or as calls on the CPU.

A step is staging copy, block-table changes, attention metadata, model, LM head, logit masks,
sampling, and the tokens in the host's memory. Rust fills the block, starts the step and reads the
tokens (``rust/serve/src/graph_path.rs``); what a row is, see ``rust/batch/src/graph.rs``.
"""

from __future__ import annotations

import abc
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pie_driver_sglang._core import (
    STEP_EXTRA_WORDS,
    STEP_PLACE_WORDS,
    STEP_TOP,
    GraphPath,
    graph_layout,
)
from pie_driver_sglang.kernels.types import STEP_RECORD_WORDS, SlotParams
from pie_driver_sglang.memory.limits import lora_batch_sizes
from pie_driver_sglang.sampling.groups import apply_masks, sample_rows
from pie_driver_sglang.sampling.history import RECORD_WORDS, Records
from pie_driver_sglang.sampling.places import Places, place_words
from pie_driver_sglang.srt.block import views
from pie_driver_sglang.srt.progress import progress_type
from pie_driver_sglang.srt.rank_slots import RankSlots, rank_slots
from pie_driver_sglang.srt.seams.attention import attending, decode_backend
from pie_driver_sglang.srt.seams.passes import ForwardBatch, PassInputs, capturing, make_batch
from pie_driver_sglang.srt.seams.ranks import place_of

if TYPE_CHECKING:
    from pie_driver_sglang.srt.adapters import Adapters
    from pie_driver_sglang.srt.hidden import Hidden, StepModel

logger = logging.getLogger(__name__)

_ROW_FIELDS: Final = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
"""What a decode is, in the block of either path."""
CPU_ROWS_PER_REQUEST = 8
"""On the CPU each row attends by a call of its own: longer prompts do better as one."""


class _Kind(Enum):
    """What a graph does besides."""

    PLAIN = 0
    GROUPED = 1
    """Rows that begin with the same KV read that together."""
    EXTENDED = 2
    """Logits are changed before they are sampled, tokens noted, log-probabilities written."""


class _Graph(NamedTuple):
    """The views of one graph over the common memory."""

    rows: int
    slots: int
    """Of the rows, how many can be sampled."""
    kind: _Kind
    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]
    bytes: int

    def sampled(self, fields: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """``[slots]`` int64: the row of each slot; None where it is that of the same number."""
        return fields["slot_rows"] if self.slots < self.rows else None

    @property
    def grouped(self) -> bool:
        """Whether it knows of groups."""
        return self.kind is _Kind.GROUPED

    @property
    def extended(self) -> bool:
        """Whether it changes logits."""
        return self.kind is _Kind.EXTENDED


class _Decode(NamedTuple):
    """A graph whose output is available before it is sampled."""

    graph: torch.cuda.CUDAGraph
    hidden: Hidden
    """Valid until the next graph runs."""


class GraphRunner(abc.ABC):
    """Runs steps of fixed numbers of rows over memory that is shared with Rust."""

    graph_bytes = 0
    """Device memory that captured graphs take."""

    def __init__(
        self,
        engine: StepModel,
        rows: list[int],
        slots: int,
        grouped: Sequence[int] = (),
        extended: Sequence[int] = (),
    ) -> None:
        """Allocates the memory for graphs of `rows`, each with up to `slots` sampled ones.

        Those of `grouped`, of which every row can be sampled, are for steps with groups of rows,
        those of `extended` for steps that change logits.
        """
        self._engine = engine
        runner, vocab = engine.runner, engine.facts.vocab_size
        self._device = torch.device(runner.device)
        self._has_axes = bool(runner.model_config.model_is_mrope)
        on_cuda = self._device.type == "cuda"
        self._slots = slots = min(slots, rows[-1])
        sizes_of = {_Kind.PLAIN: rows, _Kind.GROUPED: grouped, _Kind.EXTENDED: extended}
        kinds = [(count, kind) for kind, counts in sizes_of.items() for count in counts]
        layouts = [
            dict(graph_layout(count, slots, kind is _Kind.GROUPED, kind is _Kind.EXTENDED))
            for count, kind in kinds
        ]
        sizes = [_bytes(layout) for layout in layouts]
        self._host = torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=on_cuda)
        self._block = torch.zeros_like(self._host, device=self._device) if on_cuda else self._host
        # Besides, block-table changes of one context for which the block has no room.
        pages = engine.runner.req_to_token_pool.req_to_token.shape[1] // engine.facts.page_size
        words = slots * -(-vocab // 32) + 2 * pages + (STEP_EXTRA_WORDS if extended else 0)
        self._mask_words = torch.empty(words, dtype=torch.int32, pin_memory=on_cuda)
        self._results = torch.zeros(slots, dtype=torch.int64, pin_memory=on_cuda)
        words = STEP_PLACE_WORDS if extended else 1
        self._places = torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda)
        self._graphs = [
            _Graph(
                count,
                min(count, slots),
                kind,
                views(self._host, layout),
                views(self._block, layout),
                size,
            )
            for (count, kind), layout, size in zip(kinds, layouts, sizes, strict=True)
        ]
        self._most = rows[-1]

    @abc.abstractmethod
    def graph_path(self) -> GraphPath:
        """The graph path that runs these steps."""

    @abc.abstractmethod
    def padded(self, rows: int, *, with_lora: bool) -> int:
        """Rows that :meth:`decode` makes of so many."""

    @abc.abstractmethod
    def decode(self, staged: Mapping[str, torch.Tensor], rows: int, *, with_lora: bool) -> Hidden:
        """Runs a decode that the Python path has staged, for what its outputs are computed from.

        Args:
            staged: Host arrays of the pass, as the planner names them; its block-table changes are
                made already.
            rows: Requests, each of one row.
            with_lora: Whether adapters are bound, one or none for each of :meth:`padded` rows.
        """

    def _take(self, staged: Mapping[str, torch.Tensor], rows: int, padded: int) -> _Graph:
        """Stages a decode of which nothing is sampled, and returns its graph."""
        graph = self._plain(padded)
        _blank(graph)
        for name in _ROW_FIELDS:
            graph.host[name][:rows] = staged[name][:rows]
        return graph

    def require_staged(self, graph: _Graph) -> None:
        """Raises `ValueError` where the block cannot have been staged for `graph`.

        Graphs of different sizes have their fields at different places. A kernel that takes another
        field for a length reads an illegal address, and launches that follow before this is noticed
        crash in CUDA's own code (``benches/gpu/launch_fault_check.py``).
        """
        table = self._engine.runner.req_to_token_pool.req_to_token
        vocab = self._engine.facts.vocab_size
        ends = {"input_ids": vocab, "req_pool_indices": len(table), "seq_lens": table.shape[1] + 1}
        for name, end in ends.items():
            field = graph.host[name]
            outside = field[(field < 0) | (field >= end)]
            if len(outside):
                raise ValueError(
                    f"the block is not staged for the graph of {graph.rows} rows: {name} has "
                    f"{int(outside[0])}, outside 0 to {end - 1}; run a step of that size first"
                )

    def _plain(self, rows: int) -> _Graph:
        """The plain graph of so many rows."""
        return next(graph for graph in self._of(_Kind.PLAIN) if graph.rows == rows)

    def _of(self, kind: _Kind) -> list[_Graph]:
        return [graph for graph in self._graphs if graph.kind is kind]

    def _graph_path_memory(self) -> tuple[Any, Any, Any, Any]:
        words, results = self._mask_words.numpy(), self._results.numpy()
        places = self._places.numpy().data
        return self._host.numpy().data, words.data, results.view("uint64").data, places

    def _cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Without what pads the vocabulary."""
        return logits[:, : self._engine.facts.vocab_size]

    def _forward_batch(self, graph: _Graph) -> ForwardBatch:
        rows, fields = graph.rows, graph.device
        # Text has the same position on every axis.
        axes = fields["positions"].expand(3, -1) if self._has_axes else None
        inputs = PassInputs(
            input_ids=fields["input_ids"],
            positions=fields["positions"],
            mrope_positions=axes,
            out_cache_loc=fields["out_cache_loc"],
            req_pool_indices=fields["req_pool_indices"],
            seq_lens=fields["seq_lens"],
            seq_lens_cpu=graph.host["seq_lens"],
            # What sizes buffers; the device knows the sum.
            seq_lens_sum=rows,
        )
        return make_batch(inputs)

    def _sharing(self, graph: _Graph) -> AbstractContextManager[None]:
        """Within, attention knows what rows have in common, if the graph has groups."""
        if not graph.grouped:
            return nullcontext()
        from pie_driver_sglang.kernels.paged_splits import Prefixes

        fields: dict[str, torch.Tensor] = graph.device
        backend: Any = decode_backend(self._engine.runner)
        listed = {name: fields[f"prefix_{name}"] for name in ("lens", "places", "order", "starts")}
        prefixes = Prefixes(**listed, used=fields["header"][4:5])
        sharing: AbstractContextManager[None] = backend.sharing(prefixes)
        return sharing


class CpuSteps(GraphRunner):
    """Steps on the CPU: the staging block is the device's, and a graph is a call."""

    def graph_path(self) -> GraphPath:
        """The graph path that runs these steps."""
        plain, grouped, extended = ([graph.rows for graph in self._of(kind)] for kind in _Kind)
        memory = self._graph_path_memory()
        return GraphPath.call(
            *memory, plain, self._slots, CPU_ROWS_PER_REQUEST, self.run, grouped, extended
        )

    @torch.inference_mode()
    def run(self, number: int) -> None:
        """Runs the staged step of graph `number`; called by Rust."""
        graph, fields = self._graphs[number], self._graphs[number].host
        step, updates, _ = fields["header"][:3].tolist()
        changed = fields["table_updates"][: 2 * updates].view(-1, 2)
        self._engine.update_table(changed)
        further = self._mask_words[: 2 * (updates - len(changed))]
        self._engine.update_table(further.view(-1, 2).long())
        if graph.extended:
            self._note_tokens(fields)
        self._engine.unbind_adapters()
        self._run_model(graph)
        rows = self._engine.head_logits(graph.sampled(fields))
        slots = rank_slots(graph.slots, rows.ranks)
        logits = self._cut(slots.join(rows.part))
        if rows.softcap is not None:
            logits = rows.softcap * torch.tanh(logits / rows.softcap)
        logits = logits.float()
        if graph.extended:
            self._engine.history.adjust(logits, _records(fields, slots.own, self._mask_words))
        apply_masks(logits, _masks(fields, slots.own), self._mask_words)
        tokens = sample_rows(logits, _params(fields, slots.own))
        if graph.extended:
            self._look_up_places(fields, logits, tokens, slots)
        results = self._results[: graph.slots]
        own = slots.own_results(results, logits.device)
        own.copy_((step << 32) | tokens)
        slots.share(own, results)

    def padded(self, rows: int, *, with_lora: bool) -> int:
        """Rows of a step; see :meth:`GraphRunner.padded`."""
        return next(graph.rows for graph in self._of(_Kind.PLAIN) if graph.rows >= rows)

    def decode(self, staged: Mapping[str, torch.Tensor], rows: int, *, with_lora: bool) -> Hidden:
        """Runs a decode that the Python path has staged; see :meth:`GraphRunner.decode`."""
        self._run_model(self._take(staged, rows, self.padded(rows, with_lora=with_lora)))
        return self._engine.hidden

    def _note_tokens(self, fields: Mapping[str, torch.Tensor]) -> None:
        rows, first, count = fields["header"][[2, 5, 6]].tolist()
        history = self._engine.history
        pairs = self._mask_words[first : first + 2 * count].view(-1, 2).long()
        history.note(pairs[:, 0], pairs[:, 1])
        history.note(fields["out_cache_loc"][:rows], fields["input_ids"][:rows])

    def _look_up_places(
        self,
        fields: dict[str, torch.Tensor],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        slots: RankSlots,
    ) -> None:
        """Writes the words of the places of this rank's slots, and those of other ranks."""
        records = fields["places"].view(-1, STEP_RECORD_WORDS)
        if not bool(records[:, 0].any()):
            return
        own = Places.of_step(records[slots.own], self._mask_words)
        found = torch.zeros_like(self._places)
        if len(own.slots):
            first = int(records[slots.own][own.slots[0], 1])
            words = place_words(logits, own, tokens)
            found[first : first + len(words)] = words
        self._places.copy_(slots.join_words(found))

    def _run_model(self, graph: _Graph) -> None:
        batch = self._forward_batch(graph)
        batch.seq_lens_sum = int(graph.host["seq_lens"].sum())
        backend = self._engine.runner.attn_backend
        # SGLang's runner has room for a row of each request, and a step may have more.
        with attending(backend):
            with self._sharing(graph):
                backend.init_forward_metadata(batch)
            self._engine.run_model(batch)


class CudaSteps(GraphRunner):
    """Steps as CUDA graphs, all in one memory pool and on the engine's stream."""

    def __init__(
        self,
        engine: StepModel,
        rows: list[int],
        slots: int,
        grouped: Sequence[int] = (),
        adapters: Adapters | None = None,
        extended: Sequence[int] = (),
    ) -> None:
        """Captures a graph for each of `rows`, `grouped` and `extended`, largest first.

        With `adapters` there are some more, for decodes that bind these.
        """
        attends = decode_backend(engine.runner)
        # No other backend knows of groups.
        known = getattr(attends, "knows_groups", False)
        super().__init__(engine, rows, slots, grouped if known else (), extended)
        self._stream = torch.cuda.current_stream(self._device)
        self._captured: dict[tuple[int, _Kind], torch.cuda.CUDAGraph] = {}
        self._decodes: dict[tuple[int, bool], _Decode] = {}
        """By rows, and whether adapters are bound."""
        self._device_mask_words = torch.empty_like(self._mask_words, device=self._device)
        with uncollected(), adapters.captured(slots) if adapters else nullcontext() as bind:
            self._capture_all(bind)

    def graph_path(self) -> GraphPath:
        """The graph path that launches these graphs."""
        plain, grouped, extended = (
            [
                (graph.rows, self._captured[graph.rows, kind].raw_cuda_graph_exec())
                for graph in self._of(kind)
            ]
            for kind in _Kind
        )
        stream = self._stream.cuda_stream
        return GraphPath.cuda(
            *self._graph_path_memory(),
            plain,
            self._slots,
            stream,
            self._most,
            self,
            grouped,
            extended,
        )

    def time(self, rows: int, repeats: int = 50, *, extended: bool = False) -> float:
        """Microseconds that the last step of up to `rows` rows takes, launched back to back.

        The first of `repeats` launches, in which ranks wait for each other, is not counted.

        Args:
            rows: Of the step.
            repeats: Launches.
            extended: Whether it changed logits.

        Raises:
            ValueError: The block is staged for a graph of another size.
        """
        # The header is the same in all blocks: whether there are groups says which graph ran.
        kind = _Kind.GROUPED if self._graphs[0].host["header"][4] else _Kind.PLAIN
        kind = _Kind.EXTENDED if extended else kind
        graph = next(graph for graph in self._of(kind) if graph.rows >= rows)
        self.require_staged(graph)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        replay = self._captured[graph.rows, kind].replay
        with torch.cuda.stream(self._stream):
            replay()
            start.record()
            for _ in range(repeats - 1):
                replay()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / (repeats - 1) * 1000

    @torch.inference_mode()
    def _capture_all(self, bind: Callable[[int], None] | None) -> None:
        """Captures all graphs; `bind` makes rows such that adapters are applied to."""
        runner, started = self._engine.runner, time.monotonic()
        free = torch.cuda.mem_get_info(self._device)[0]
        most = self._most
        self._engine.unbind_adapters()
        runner.attn_backend.init_cuda_graph_state(most, most)
        pool = torch.cuda.graph_pool_handle()
        # Other ranks capture the same collective operations at the same time.
        with capturing(runner.attn_backend, self._stream):
            # Shown by one rank.
            hidden = place_of(runner).number != 0
            graphs = sorted(self._graphs, key=lambda graph: graph.rows, reverse=True)
            bar = progress_type()(graphs, desc="capturing graphs", disable=hidden)
            for graph in bar:
                captured = self._capture(graph, pool, self._step)
                self._captured[graph.rows, graph.kind] = captured
                if graph.kind is _Kind.PLAIN and graph.slots == graph.rows:
                    self._decodes[graph.rows, False] = _Decode(captured, self._engine.hidden)
                left = torch.cuda.mem_get_info(self._device)[0] / 2**30
                bar.set_description(f"captured {graph.rows} rows, {left:.1f} GiB free")
            if bind is not None:
                self._capture_with_lora(bind, pool)
        # Only now do collective operations know the memory that graphs use.
        for graph in self._graphs:
            _blank(graph)
            self._captured[graph.rows, graph.kind].replay()
            self._stream.synchronize()
        for (rows, with_lora), (captured, _) in self._decodes.items():
            if with_lora:
                _blank(self._plain(rows))
                captured.replay()
                self._stream.synchronize()
        self.graph_bytes = free - torch.cuda.mem_get_info(self._device)[0]
        logger.info(
            "captured %d graphs of up to %d rows in %.1f s, %.2f GiB",
            len(self._captured) + sum(with_lora for _, with_lora in self._decodes),
            most,
            time.monotonic() - started,
            self.graph_bytes / 2**30,
        )

    def _capture_with_lora(self, bind: Callable[[int], None], pool: Any) -> None:
        """Captures decodes that bind adapters. SGLang's layers apply them, and Python samples."""
        for rows in reversed(lora_batch_sizes(self._slots)):
            bind(rows)
            captured = self._capture(self._plain(rows), pool, self._run_with_lora)
            self._decodes[rows, True] = _Decode(captured, self._engine.hidden)

    def _run_with_lora(self, graph: _Graph) -> None:
        self._engine.run_model(self._begin(graph))

    def _capture(
        self, graph: _Graph, pool: Any, step: Callable[[_Graph], None]
    ) -> torch.cuda.CUDAGraph:
        _blank(graph)
        started = time.monotonic()
        # Kernels that the first run compiles or tunes cannot be compiled in a capture.
        step(graph)
        self._stream.synchronize()
        ran = time.monotonic()
        captured = torch.cuda.CUDAGraph()
        captured.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step(graph)
        finally:
            captured.capture_end()
        seconds = time.monotonic() - ran
        logger.debug("%d rows: %.2f s to run, %.2f to capture", graph.rows, ran - started, seconds)
        return captured

    def _begin(self, graph: _Graph) -> ForwardBatch:
        """What comes before the model, and its input."""
        from pie_driver_sglang.kernels import sampler

        engine, backend, fields = self._engine, self._engine.runner.attn_backend, graph.device
        used = slice(0, graph.bytes)
        self._block[used].copy_(self._host[used], non_blocking=True)
        header = fields["header"]
        words = self._device_mask_words
        sampler.fetch(self._mask_words, words, header[3:4])
        # Changes for which the block has no room come before the masks.
        changed = fields["table_updates"].view(-1, 2)
        sampler.update_table(engine.table_pages, changed, words, header[1:2])
        batch = self._forward_batch(graph)
        with self._sharing(graph):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
        return batch

    def _step(self, graph: _Graph) -> None:
        from pie_driver_sglang.kernels import sampler

        engine, fields, batch = self._engine, graph.device, self._begin(graph)
        with self._way(graph.rows):
            engine.run_model(batch)
        rows = engine.head_logits(graph.sampled(fields))
        slots = rank_slots(graph.slots, rows.ranks)
        logits, softcap = self._cut(slots.join(rows.part)), rows.softcap
        if graph.extended:
            logits, softcap = self._adjusted(logits, softcap, fields, slots.own), None
        masks, params = _masks(fields, slots.own), _params(fields, slots.own)
        sampler.mask_logits(logits, masks, self._device_mask_words)
        results = self._results[: graph.slots]
        if graph.extended:
            # Log-probabilities are of the tokens, and must be there before these are seen.
            own = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        else:
            own = slots.own_results(results, logits.device)
        sampler.sample_step(logits, params, own, fields["header"][:1], softcap)
        if graph.extended:
            self._find_places(fields, logits, own, slots)
            slots.publish(own, results)
        else:
            slots.share(own, results)

    def _adjusted(
        self,
        logits: torch.Tensor,
        softcap: float | None,
        fields: Mapping[str, torch.Tensor],
        own: slice,
    ) -> torch.Tensor:
        """The logits in float32, with the tokens of the step noted before, as requests ask."""
        from pie_driver_sglang.kernels.adjust import note

        history, words = self._engine.history, self._device_mask_words
        slots, ids = fields["out_cache_loc"], fields["input_ids"]
        note(history.tokens, slots, ids, words, fields["header"][5:7])
        logits = logits.float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        history.adjust(logits, _records(fields, own, words))
        return logits

    def _find_places(
        self,
        fields: Mapping[str, torch.Tensor],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        slots: RankSlots,
    ) -> None:
        """Writes the words of the places of this rank's slots, and those of other ranks."""
        from pie_driver_sglang.kernels import places

        records = fields["places"].view(-1, STEP_RECORD_WORDS)[slots.own]
        words = self._device_mask_words
        if not slots.divided:
            places.find(logits, tokens, records, words, self._places, STEP_TOP)
            return
        found = torch.zeros_like(self._places, device=logits.device)
        places.find(logits, tokens, records, words, found, STEP_TOP)
        self._places.copy_(slots.join_words(found), non_blocking=True)

    def padded(self, rows: int, *, with_lora: bool) -> int:
        """Rows of a step; see :meth:`GraphRunner.padded`."""
        return min(count for count, binds in self._decodes if binds == with_lora and count >= rows)

    def decode(self, staged: Mapping[str, torch.Tensor], rows: int, *, with_lora: bool) -> Hidden:
        """Runs a decode that the Python path has staged; see :meth:`GraphRunner.decode`."""
        padded = self.padded(rows, with_lora=with_lora)
        self._take(staged, rows, padded)
        captured, hidden = self._decodes[padded, with_lora]
        captured.replay()
        return hidden

    def _way(self, rows: int) -> AbstractContextManager[None]:
        """How the model runs: as few kernels, where it can."""
        dense = self._engine.dense
        return dense.applied() if dense is not None and dense.takes(rows) else nullcontext()


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, nothing is collected: an event or a graph that ends invalidates a running capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _blank(graph: _Graph) -> None:
    """Stages rows that are not sampled and touch only the padding page."""
    for name, field in graph.host.items():
        field.fill_({"seq_lens": 1, "temperatures": -1}.get(name, 0))


def _params(fields: dict[str, torch.Tensor], slots: slice) -> SlotParams:
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
    return SlotParams(*(fields[name][slots] for name in names))


def _masks(fields: dict[str, torch.Tensor], slots: slice) -> torch.Tensor:
    """Where each slot's mask is, as :func:`apply_masks` wants it."""
    return fields["slot_masks"].view(-1, 2)[slots]


def _records(fields: Mapping[str, torch.Tensor], slots: slice, words: torch.Tensor) -> Records:
    return Records(fields["records"].view(-1, RECORD_WORDS)[slots], words)


def _bytes(layout: dict[str, tuple[str, int, int]]) -> int:
    sizes = {"int64": 8, "int32": 4, "float32": 4}
    return max(offset + capacity * sizes[dtype] for dtype, offset, capacity in layout.values())
