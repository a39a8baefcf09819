"""The graph path on the CPU: each step is a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang._core import GraphPath
from pie_driver_sglang.engine.graph_runner import (
    CPU_ROWS_PER_REQUEST,
    GraphRunner,
    StepGraph,
    slot_masks,
    slot_params,
    slot_records,
)
from pie_driver_sglang.engine.parallel_sampling import SlotPartition, partition_slots
from pie_driver_sglang.kernels.sampling.logprobs_reference import LogprobRequests, logprob_words
from pie_driver_sglang.kernels.sampling.reference import apply_masks, sample_rows
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS
from pie_driver_sglang.memory.graphs import STEP_KINDS, GraphKind

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import Hidden


class CpuGraphRunner(GraphRunner):
    """Steps on the CPU: the staging block is the device's, and a graph is a call."""

    def graph_path(self) -> GraphPath:
        """The graph path that runs these steps."""
        graphs: dict[str, Any] = {
            kind.name.lower(): [graph.rows for graph in self._of(kind)] for kind in STEP_KINDS
        }
        plain, most = graphs.pop("plain"), CPU_ROWS_PER_REQUEST
        further = graphs | self._draft_memory()
        return GraphPath.call(
            *self._graph_path_memory(), plain, self._slots, most, self.run, **further
        )

    @torch.inference_mode()
    def run(self, number: int) -> None:
        """Runs the staged step of graph `number`; called by Rust."""
        graph, fields = self._graphs[number], self._graphs[number].host
        step, updates, _ = fields["header"][:3].tolist()
        changed = fields["table_updates"][: 2 * updates].view(-1, 2)
        self._engine.block_table.update(changed)
        further = self._mask_words[: 2 * (updates - len(changed))]
        self._engine.block_table.update(further.view(-1, 2).long())
        if graph.extended:
            self._note_tokens(fields)
        self._engine.unbind_adapters()
        self._run_model(graph)
        rows = self._engine.head_logits(graph.sampled(fields))
        slots = partition_slots(graph.slots, rows.ranks)
        logits = self._unpadded(slots.gather_logits(rows.part))
        if rows.softcap is not None:
            logits = rows.softcap * torch.tanh(logits / rows.softcap)
        logits = logits.float()
        if graph.extended:
            self._engine.history.apply_penalties(
                logits, slot_records(fields, slots.own, self._mask_words)
            )
        apply_masks(logits, slot_masks(fields, slots.own), self._mask_words)
        tokens = sample_rows(logits, slot_params(fields, slots.own))
        if graph.extended:
            self._look_up_logprobs(fields, logits, tokens, slots)
        self._draft(graph, fields, tokens, self._backend.plan_decode)
        results = self._results[: graph.slots]
        own = slots.results_buffer(results, logits.device)
        own.copy_((step << 32) | tokens)
        slots.gather_results(own, results)

    def takes(self, lens: Sequence[int]) -> bool:
        """Whether short enough prompts are asked for; see `GraphRunner.takes`."""
        return super().takes(lens) and max(lens) <= CPU_ROWS_PER_REQUEST

    def padded(self, rows: int, *, with_lora: bool) -> int:
        """Rows of a step; see `GraphRunner.padded`."""
        return next(graph.rows for graph in self._of(GraphKind.PLAIN) if graph.rows >= rows)

    def decode(self, staged: Mapping[str, torch.Tensor], rows: int, *, with_lora: bool) -> Hidden:
        """Runs a decode that the Python path has staged; see `GraphRunner.decode`."""
        self._run_model(self._stage(staged, rows, self.padded(rows, with_lora=with_lora)))
        return self._engine.hidden

    def _note_tokens(self, fields: Mapping[str, torch.Tensor]) -> None:
        rows, first, count = fields["header"][[2, 5, 6]].tolist()
        history = self._engine.history
        pairs = self._mask_words[first : first + 2 * count].view(-1, 2).long()
        history.record(pairs[:, 0], pairs[:, 1])
        history.record(fields["out_cache_loc"][:rows], fields["input_ids"][:rows])

    def _look_up_logprobs(
        self,
        fields: dict[str, torch.Tensor],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        slots: SlotPartition,
    ) -> None:
        """Writes the log-probability words of this rank's slots, and those of other ranks."""
        records = fields["logprobs"].view(-1, STEP_RECORD_WORDS)
        if not bool(records[:, 0].any()):
            return
        own = LogprobRequests.of_step(records[slots.own], self._mask_words)
        found = torch.zeros_like(self._logprobs)
        if len(own.slots):
            first = int(records[slots.own][own.slots[0], 1])
            words = logprob_words(logits, own, tokens)
            found[first : first + len(words)] = words
        self._logprobs.copy_(slots.sum_words(found))

    def _run_model(self, graph: StepGraph) -> None:
        context = self._context(graph, int(graph.host["seq_lens"].sum()))
        with self._sharing(graph), self._backend.plan_decode(context):
            self._engine.run_model(context)
