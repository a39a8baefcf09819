"""The graph path on a GPU: CUDA graphs, captured at the start and launched by Rust."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang._core import STEP_TOP, GraphPath
from pie_driver_sglang.engine.backend import Hidden
from pie_driver_sglang.engine.graph_runner import (
    CapturedDecode,
    GraphRunner,
    StepGraph,
    slot_masks,
    slot_params,
    slot_records,
    stage_blank,
)
from pie_driver_sglang.engine.layers.dense import DenseLayers
from pie_driver_sglang.engine.parallel_sampling import SlotPartition, partition_slots
from pie_driver_sglang.engine.progress import progress_type
from pie_driver_sglang.kernels.gemm.lora import LoraRows
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS
from pie_driver_sglang.memory.graphs import STEP_KINDS, GraphKind, GraphSpec
from pie_driver_sglang.memory.units import GIB
from pie_driver_sglang.observability import start_spans

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import PassContext
    from pie_driver_sglang.engine.graph_runner import StepModel
    from pie_driver_sglang.engine.lora.adapters import Adapters
    from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows


logger = logging.getLogger(__name__)


class CudaGraphRunner(GraphRunner):
    """Steps as CUDA graphs, all in one memory pool and on the engine's stream."""

    def __init__(
        self,
        engine: StepModel,
        specs: Sequence[GraphSpec],
        slots: int,
        adapters: Adapters | None = None,
    ) -> None:
        """Captures the graphs, largest first; those that apply adapters last.

        Args:
            engine: Runs the model.
            specs: The graphs, by kind and ascending.
            slots: Rows of a step that can be sampled, at most.
            adapters: The driver's; some of `specs` apply them.
        """
        super().__init__(engine, specs, slots)
        self._lora_rows = [spec.rows for spec in specs if spec.kind is GraphKind.LORA]
        self._stream = torch.cuda.current_stream(self._device)
        self._captured: dict[tuple[int, GraphKind], torch.cuda.CUDAGraph] = {}
        self._decodes: dict[tuple[int, bool], CapturedDecode] = {}
        """By rows, and whether adapters are bound."""
        self._device_mask_words = torch.empty_like(self._mask_words, device=self._device)
        binding = adapters.captured(slots) if adapters else nullcontext()
        with without_garbage_collection(), binding as bind:
            self._capture_all(bind)

    def graph_path(self) -> GraphPath:
        """The graph path that launches these graphs."""
        graphs: dict[str, Any] = {
            kind.name.lower(): [
                (graph.rows, self._captured[graph.rows, kind].raw_cuda_graph_exec())
                for graph in self._of(kind)
            ]
            for kind in STEP_KINDS
        }
        plain, stream = graphs.pop("plain"), self._stream.cuda_stream
        further = graphs | self._draft_memory()
        return GraphPath.cuda(
            *self._graph_path_memory(), plain, self._slots, stream, self._most, self, **further
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
        kind = GraphKind.GROUPED if self._graphs[0].host["header"][4] else GraphKind.PLAIN
        kind = GraphKind.EXTENDED if extended else kind
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
        started = time.monotonic()
        free = torch.cuda.mem_get_info(self._device)[0]
        most = self._most
        self._engine.unbind_adapters()
        pool = torch.cuda.graph_pool_handle()
        # Other ranks capture the same collective operations at the same time.
        with self._backend.capturing(self._stream, most):
            # Shown by one rank.
            hidden = self._backend.rank.number != 0
            graphs = sorted(self._graphs, key=lambda graph: graph.rows, reverse=True)
            bar = progress_type()(graphs, desc="capturing graphs", disable=hidden)
            for graph in bar:
                captured = self._capture(graph, pool, self._step)
                self._captured[graph.rows, graph.kind] = captured
                self._keep(graph, captured)
                left = torch.cuda.mem_get_info(self._device)[0] / GIB
                bar.set_description(f"captured {graph.rows} rows, {left:.1f} GiB free")
            if bind is not None:
                self._capture_with_lora(bind, pool)
        # Only now do collective operations know the memory that graphs use.
        for graph in self._graphs:
            stage_blank(graph)
            self._captured[graph.rows, graph.kind].replay()
            self._stream.synchronize()
        for (rows, with_lora), (captured, _) in self._decodes.items():
            if with_lora:
                stage_blank(self._plain(rows))
                captured.replay()
                self._stream.synchronize()
        self.graph_bytes = free - torch.cuda.mem_get_info(self._device)[0]
        logger.info(
            "captured %d graphs of up to %d rows in %.1f s, %.2f GiB",
            len(self._captured) + sum(with_lora for _, with_lora in self._decodes),
            most,
            time.monotonic() - started,
            self.graph_bytes / GIB,
        )

    def _keep(self, graph: StepGraph, captured: torch.cuda.CUDAGraph) -> None:
        """Keeps the graph just captured for the Python path, with its hidden states."""
        if graph.kind is GraphKind.PLAIN and graph.slots == graph.rows:
            self._decodes[graph.rows, False] = CapturedDecode(captured, self._engine.hidden)

    def _capture_with_lora(self, bind: Callable[[int], None], pool: Any) -> None:
        """Captures decodes that bind adapters: the backend's layers apply them, Python samples."""
        for rows in reversed(self._lora_rows):
            bind(rows)
            captured = self._capture(self._plain(rows), pool, self._run_with_lora)
            self._decodes[rows, True] = CapturedDecode(captured, self._engine.hidden)

    def _run_with_lora(self, graph: StepGraph) -> None:
        self._engine.run_model(self._begin_step(graph))

    def _capture(
        self, graph: StepGraph, pool: Any, step: Callable[[StepGraph], None]
    ) -> torch.cuda.CUDAGraph:
        stage_blank(graph)
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
        name = f"{graph.rows} rows, {graph.kind.name.lower()}"
        start_spans.add(f"first run of {name}", started, ran)
        start_spans.add(f"capture of {name}", ran, time.monotonic())
        return captured

    def _begin_step(self, graph: StepGraph) -> PassContext:
        """What comes before the model, and its input."""
        from pie_driver_sglang.kernels.sampling import sampler

        fields = graph.device
        used = slice(0, graph.bytes)
        self._block[used].copy_(self._host[used], non_blocking=True)
        header = fields["header"]
        words = self._device_mask_words
        # A mask for each slot; few steps have more words, for a long prefix or many biases.
        expected = graph.slots * -(-self._vocab // 32)
        sampler.fetch(self._mask_words, words, header[3:4], expected)
        # Changes for which the block has no room come before the masks.
        changed = fields["table_updates"].view(-1, 2)
        sampler.update_table(self._engine.block_table.pages, changed, words, header[1:2])
        context = self._context(graph, graph.rows)
        with self._sharing(graph):
            self._backend.plan_in_graph(context)
        return context

    def _step(self, graph: StepGraph) -> None:
        from pie_driver_sglang.kernels.sampling import sampler
        from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows

        engine, fields, context = self._engine, graph.device, self._begin_step(graph)
        with self._layers_of(graph):
            engine.run_model(context)
        rows = engine.head_logits(graph.sampled(fields))
        slots = partition_slots(graph.slots, rows.ranks)
        logits, softcap = self._unpadded(slots.gather_logits(rows.part)), rows.softcap
        if graph.extended:
            changed, softcap = self._adjusted(logits, softcap, fields, slots.own), None
        else:
            changed = LogitRows(logits)
        masks, params = slot_masks(fields, slots.own), slot_params(fields, slots.own)
        sampler.mask_logits(changed, masks, self._device_mask_words)
        results = self._results[: graph.slots]
        publishes = graph.extended or graph.drafts
        if publishes:
            # Log-probabilities and drafts must be there before the tokens are seen.
            own = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        else:
            own = slots.results_buffer(results, logits.device)
        sampler.sample_step(changed, params, own, fields["header"][:1], softcap)
        if graph.extended:
            self._find_logprobs(fields, changed, own, slots)
        self._draft(graph, fields, own, self._planned)
        if publishes:
            slots.publish(own, results)
        else:
            slots.gather_results(own, results)

    @contextmanager
    def _planned(self, context: PassContext) -> Iterator[None]:
        """Plans a decode of drafts in the graph; it runs within."""
        self._backend.plan_in_graph(context)
        yield

    def _adjusted(
        self,
        logits: torch.Tensor,
        softcap: float | None,
        fields: Mapping[str, torch.Tensor],
        own: slice,
    ) -> LogitRows:
        """The logits as requests ask for them, after the tokens of the step are recorded."""
        from pie_driver_sglang.kernels.sampling.penalties import cast_modified_rows, record_tokens

        history, words = self._engine.history, self._device_mask_words
        slots, ids = fields["out_cache_loc"], fields["input_ids"]
        record_tokens(history.tokens, slots, ids, words, fields["header"][5:7])
        records = slot_records(fields, own, words)
        rows = cast_modified_rows(logits, records.slots, _place_records(fields, own), softcap)
        history.apply_penalties(rows.latest(), records)
        return rows

    def _find_logprobs(
        self,
        fields: Mapping[str, torch.Tensor],
        rows: LogitRows,
        tokens: torch.Tensor,
        slots: SlotPartition,
    ) -> None:
        """Writes the log-probability words of this rank's slots, and those of other ranks."""
        from pie_driver_sglang.kernels.sampling import token_logprobs

        # Rows of which this is asked were changed, if only to float32.
        records, logits = _place_records(fields, slots.own), rows.latest()
        words = self._device_mask_words
        if not slots.divided:
            token_logprobs.compute_logprobs(
                logits, tokens, records, words, self._logprobs, STEP_TOP
            )
            return
        found = torch.zeros_like(self._logprobs, device=logits.device)
        token_logprobs.compute_logprobs(logits, tokens, records, words, found, STEP_TOP)
        self._logprobs.copy_(slots.sum_words(found), non_blocking=True)

    def padded(self, rows: int, *, with_lora: bool) -> int:
        """Rows of a step; see `GraphRunner.padded`."""
        return min(count for count, binds in self._decodes if binds == with_lora and count >= rows)

    def decode(self, staged: Mapping[str, torch.Tensor], rows: int, *, with_lora: bool) -> Hidden:
        """Runs a decode that the Python path has staged; see `GraphRunner.decode`."""
        padded = self.padded(rows, with_lora=with_lora)
        self._stage(staged, rows, padded)
        captured, hidden = self._decodes[padded, with_lora]
        captured.replay()
        return hidden

    def _layers_of(self, graph: StepGraph) -> AbstractContextManager[None]:
        """Which layers run: fused ones, if they take so many rows, or the backend's own."""
        fused = self._engine.fused
        if graph.binds_adapters:
            lora = self._backend.lora
            slots = None if lora is None else lora.adapter_slots
            if slots is None or not isinstance(fused, DenseLayers):
                raise RuntimeError("graphs with adapters need fused dense layers and their slots")
            rows = LoraRows(graph.device["adapter_slots"], slots.slot_ranks)
            return fused.patched_lora_decode(rows)
        if fused is None or not fused.supports(graph.rows):
            return nullcontext()
        return fused.patched_decode()


class CudaPromptRunner(CudaGraphRunner):
    """Passes of an embedding model, each token being a row, as CUDA graphs up to the final norm.

    What its pooler does with the hidden states follows eagerly.
    """

    def __init__(self, engine: StepModel, specs: Sequence[GraphSpec]) -> None:
        """Captures the graphs; see `CudaGraphRunner`."""
        self._states: torch.Tensor | None = None
        super().__init__(engine, specs, slots=1)

    def _step(self, graph: StepGraph) -> None:
        context = self._begin_step(graph)
        with self._layers_of(graph):
            self._engine.run_model(context)
        states = self._engine.hidden.states
        if self._states is None:
            # In the first run of the largest graph, outside of a capture.
            self._states = torch.empty_like(states)
        self._states[: graph.rows].copy_(states)

    def _keep(self, graph: StepGraph, captured: torch.cuda.CUDAGraph) -> None:
        # A copy in memory that all graphs share: each would keep its own otherwise.
        assert self._states is not None
        hidden = Hidden(self._states[: graph.rows], None)
        self._decodes[graph.rows, False] = CapturedDecode(captured, hidden)


def _place_records(fields: Mapping[str, torch.Tensor], slots: slice) -> torch.Tensor:
    """``[slots, 6]`` int32: which log-probabilities are asked of slots."""
    return fields["logprobs"].view(-1, STEP_RECORD_WORDS)[slots]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
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
