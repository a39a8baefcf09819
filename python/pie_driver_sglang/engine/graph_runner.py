"""The device side of the graph path: steps of fixed sizes as CUDA graphs, or as calls on the CPU.

A step is staging copy, block-table changes, attention metadata, model, LM head, logit masks,
sampling, and the tokens in the host's memory. Rust fills the block, starts the step and reads the
tokens (``rust/driver/src/graph_path.rs``); what a row is, see
``rust/planner/src/staging/graph.rs``.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from pie_driver_sglang._core import (
    STEP_EXTRA_WORDS,
    STEP_LOGPROB_WORDS,
    GraphPath,
    graph_layout,
)
from pie_driver_sglang.engine.backend import PassContext, PassInputs
from pie_driver_sglang.engine.staging import views
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams
from pie_driver_sglang.kernels.sampling.token_history import RECORD_WORDS, Records
from pie_driver_sglang.memory.graphs import (
    DRAFTING_KINDS,
    LORA_KINDS,
    STEP_KINDS,
    GraphKind,
    GraphSpec,
)

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import Extends, Hidden, ModelBackend, RowLogits
    from pie_driver_sglang.engine.block_table import BlockTable
    from pie_driver_sglang.engine.layers.selection import FusedLayers
    from pie_driver_sglang.engine.model_drafts import DraftPlan, ModelDrafter
    from pie_driver_sglang.kernels.sampling.token_history import TokenHistory

logger = logging.getLogger(__name__)

_ROW_FIELDS: Final = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
"""What a decode is, in the block of either path."""
_EXTENDED: Final = (
    GraphKind.EXTENDED,
    GraphKind.EXTENDED_ADAPTERS,
    GraphKind.EXTENDED_DRAFTING,
)
CPU_ROWS_PER_REQUEST = 8
"""On the CPU each row attends by a call of its own: longer prompts do better as one."""


class StepModel(Protocol):
    """A model as the graph path runs it: `BackendExecutor` implements it."""

    backend: ModelBackend
    block_table: BlockTable
    drafter: ModelDrafter | None
    """Drafts of a draft model."""
    history: TokenHistory
    """What was produced by requests with penalties."""
    fused: FusedLayers | None
    """Fused layers, where the model has them."""

    @property
    def hidden(self) -> Hidden:
        """What the logits of the last pass can be computed from."""

    def unbind_adapters(self) -> None:
        """Makes the model one without adapters until the next forward pass."""

    def run_model(self, context: PassContext) -> None:
        """Runs a decode up to the final norm, as a graph captures it."""

    def head_logits(self, rows: torch.Tensor | None) -> RowLogits:
        """Applies the LM head to rows of the last pass, ``[rows]`` int64; None for all."""


class StepGraph(NamedTuple):
    """The views of one graph over the common memory."""

    rows: int
    slots: int
    """Of the rows, how many can be sampled."""
    kind: GraphKind
    host: dict[str, torch.Tensor]
    device: dict[str, torch.Tensor]
    bytes: int

    def sampled(self, fields: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """``[slots]`` int64: the row of each slot; None where it is that of the same number."""
        return fields["slot_rows"] if self.slots < self.rows else None

    @property
    def grouped(self) -> bool:
        """Whether it knows of groups."""
        return self.kind is GraphKind.GROUPED

    @property
    def extended(self) -> bool:
        """Whether it changes logits."""
        return self.kind in _EXTENDED

    @property
    def drafts(self) -> bool:
        """Whether it runs a draft model."""
        return self.kind in DRAFTING_KINDS

    @property
    def binds_adapters(self) -> bool:
        """Whether it applies adapters."""
        return self.kind in LORA_KINDS


class CapturedDecode(NamedTuple):
    """A graph whose output is available before it is sampled."""

    graph: torch.cuda.CUDAGraph
    hidden: Hidden
    """Valid until the next graph runs."""


class GraphRunner(abc.ABC):
    """Runs steps of fixed numbers of rows over memory that is shared with Rust."""

    graph_bytes = 0
    """Device memory that captured graphs take."""

    def __init__(self, engine: StepModel, specs: Sequence[GraphSpec], slots: int) -> None:
        """Allocates the memory for the steps of graphs.

        Args:
            engine: Runs the model.
            specs: The graphs, by kind and ascending; some are plain.
            slots: Rows of a step that can be sampled, at most.
        """
        self._engine = engine
        self._backend = engine.backend
        self._vocab = vocab = engine.backend.info.vocab_size
        self._device = engine.backend.device
        on_cuda = self._device.type == "cuda"
        steps = [spec for kind in STEP_KINDS for spec in specs if spec.kind is kind]
        extended = any(spec.kind is GraphKind.EXTENDED for spec in steps)
        self.applies_adapters = any(spec.kind is GraphKind.ADAPTERS for spec in steps)
        """Whether some steps apply adapters."""
        self._most = max(spec.rows for spec in steps if spec.kind is GraphKind.PLAIN)
        self._slots = slots = min(slots, self._most)
        layouts = [
            dict(
                graph_layout(
                    count,
                    slots,
                    grouped=kind is GraphKind.GROUPED,
                    extended=kind in _EXTENDED,
                    adapters=kind in LORA_KINDS,
                )
            )
            for kind, count in steps
        ]
        sizes = [_bytes(layout) for layout in layouts]
        self._host = torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=on_cuda)
        self._block = torch.zeros_like(self._host, device=self._device) if on_cuda else self._host
        # Besides, block-table changes of one context for which the block has no room.
        words = slots * -(-vocab // 32) + 2 * engine.block_table.row_pages
        words += STEP_EXTRA_WORDS if extended else 0
        self._mask_words = torch.empty(words, dtype=torch.int32, pin_memory=on_cuda)
        self._results = torch.zeros(slots, dtype=torch.int64, pin_memory=on_cuda)
        drafter = engine.drafter
        self._num_drafts = 0 if drafter is None else drafter.num_drafts
        drafts = (slots, self._num_drafts)
        self._drafts = torch.full(drafts, -1, dtype=torch.int32, pin_memory=on_cuda)
        words = STEP_LOGPROB_WORDS if extended else 1
        self._logprobs = torch.zeros(words, dtype=torch.int32, pin_memory=on_cuda)
        self._graphs = [
            StepGraph(
                count,
                min(count, slots),
                kind,
                views(self._host, layout),
                views(self._block, layout),
                size,
            )
            for (kind, count), layout, size in zip(steps, layouts, sizes, strict=True)
        ]

    @abc.abstractmethod
    def graph_path(self) -> GraphPath:
        """The graph path that runs these steps."""

    def takes(self, lens: Sequence[int]) -> bool:
        """Whether :meth:`decode` takes a pass of prompts, or parts of them, of so many tokens."""
        return sum(lens) <= self._most

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

    def _stage(self, staged: Mapping[str, torch.Tensor], rows: int, padded: int) -> StepGraph:
        """Stages a decode of which nothing is sampled, and returns its graph."""
        graph = self._plain(padded)
        stage_blank(graph)
        for name in _ROW_FIELDS:
            graph.host[name][:rows] = staged[name][:rows]
        return graph

    def require_staged(self, graph: StepGraph) -> None:
        """Raises `ValueError` where the block cannot have been staged for `graph`.

        Graphs of different sizes have their fields at different offsets. A kernel that takes
        another field for a length reads an illegal address, and launches that follow before this is
        noticed crash in CUDA's own code.
        """
        table = self._engine.block_table.slots
        ends = {
            "input_ids": self._vocab,
            "req_pool_indices": len(table),
            "seq_lens": table.shape[1] + 1,
        }
        for name, end in ends.items():
            field = graph.host[name]
            outside = field[(field < 0) | (field >= end)]
            if len(outside):
                raise ValueError(
                    f"the block is not staged for the graph of {graph.rows} rows: {name} has "
                    f"{int(outside[0])}, outside 0 to {end - 1}; run a step of that size first"
                )

    def _plain(self, rows: int) -> StepGraph:
        """The plain graph of so many rows."""
        return next(graph for graph in self._of(GraphKind.PLAIN) if graph.rows == rows)

    def _of(self, kind: GraphKind) -> list[StepGraph]:
        return [graph for graph in self._graphs if graph.kind is kind]

    def _graph_path_memory(self) -> tuple[Any, Any, Any, Any]:
        words, results = self._mask_words.numpy(), self._results.numpy()
        logprobs = self._logprobs.numpy().data
        return self._host.numpy().data, words.data, results.view("uint64").data, logprobs

    def _draft_memory(self) -> dict[str, Any]:
        """The arguments of `GraphPath` for a draft model."""
        drafts = self._drafts.flatten().numpy().data if self._num_drafts else None
        return {"drafts": drafts, "num_drafts": self._num_drafts}

    def _draft(
        self,
        graph: StepGraph,
        fields: dict[str, torch.Tensor],
        results: torch.Tensor,
        plan: DraftPlan,
    ) -> None:
        """Writes the drafts of a computed step, if its graph drafts, before results are published.

        Args:
            graph: Of the step.
            fields: Of its block, on the device.
            results: ``[slots]`` int64 with the sampled tokens in the lower halves.
            plan: Plans a decode, which runs within.
        """
        drafter = self._engine.drafter
        if drafter is None or not graph.drafts:
            return
        tokens = results & 0xFFFF_FFFF
        drafts = drafter.draft(fields, graph.sampled(fields), tokens, plan)
        self._drafts[: graph.slots].copy_(drafts, non_blocking=True)

    def _unpadded(self, logits: torch.Tensor) -> torch.Tensor:
        """Without what pads the vocabulary."""
        return logits[:, : self._vocab]

    def _context(self, graph: StepGraph, seq_lens_sum: int) -> PassContext:
        """The decode of a graph; `seq_lens_sum` only sizes buffers, the device has the lengths."""
        fields = graph.device
        # Text has the same position on every axis.
        axes = fields["positions"].expand(3, -1) if self._backend.info.uses_mrope else None
        inputs = PassInputs(
            input_ids=fields["input_ids"],
            positions=fields["positions"],
            mrope_positions=axes,
            out_cache_loc=fields["out_cache_loc"],
            req_pool_indices=fields["req_pool_indices"],
            seq_lens=fields["seq_lens"],
            seq_lens_cpu=graph.host["seq_lens"],
            seq_lens_sum=seq_lens_sum,
        )
        return self._backend.make_context(inputs)

    def _sharing(self, graph: StepGraph) -> AbstractContextManager[None]:
        """Within, a decode that is planned reads shared prefixes once, if the graph has groups."""
        if not graph.grouped:
            return nullcontext()
        attention = self._backend.decode_attention
        if attention is None:
            raise RuntimeError("a graph with groups needs paged decode attention")
        from pie_driver_sglang.kernels.attention.split_plan import Prefixes

        fields: dict[str, torch.Tensor] = graph.device
        listed = {name: fields[f"prefix_{name}"] for name in ("lens", "indices", "order", "starts")}
        return attention.sharing(Prefixes(**listed, used=fields["header"][4:5]))


def prompt_rows(staged: Mapping[str, torch.Tensor], extends: Extends) -> dict[str, torch.Tensor]:
    """An extend as :meth:`GraphRunner.decode` takes it: a decode that has a row for each token.

    Args:
        staged: Host arrays of the pass, as the planner names them.
        extends: Its requests.
    """
    lens = torch.tensor(extends.seq_lens_cpu)
    tokens, starts = int(lens.sum()), lens.cumsum(0) - lens
    # Of a row: the tokens before its request's part, and its number in it.
    before = torch.tensor(extends.prefix_lens_cpu) - starts
    rows = {name: staged[name][:tokens] for name in ("input_ids", "positions", "out_cache_loc")}
    rows["req_pool_indices"] = staged["req_pool_indices"][: len(lens)].repeat_interleave(lens)
    rows["seq_lens"] = before.repeat_interleave(lens) + torch.arange(1, tokens + 1)
    return rows


def stage_blank(graph: StepGraph) -> None:
    """Stages rows that are not sampled and touch only the padding page."""
    for name, field in graph.host.items():
        field.fill_({"seq_lens": 1, "temperatures": -1, "adapter_slots": -1}.get(name, 0))


def slot_params(fields: dict[str, torch.Tensor], slots: slice) -> SlotParams:
    """The parameters of some slots."""
    names = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
    return SlotParams(*(fields[name][slots] for name in names))


def slot_masks(fields: dict[str, torch.Tensor], slots: slice) -> torch.Tensor:
    """Where each slot's mask is, as :func:`apply_masks` wants it."""
    return fields["slot_masks"].view(-1, 2)[slots]


def slot_records(fields: Mapping[str, torch.Tensor], slots: slice, words: torch.Tensor) -> Records:
    """What slots ask for beyond Pie's samplers, whose lists are in `words`."""
    return Records(fields["records"].view(-1, RECORD_WORDS)[slots], words)


def _bytes(layout: dict[str, tuple[str, int, int]]) -> int:
    sizes = {"int64": 8, "int32": 4, "float32": 4}
    return max(offset + capacity * sizes[dtype] for dtype, offset, capacity in layout.values())
