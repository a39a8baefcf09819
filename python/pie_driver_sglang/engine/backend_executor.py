"""`BackendExecutor`: a `ModelBackend` that is fed from the planner's staging block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pie_driver_sglang.engine.backend import Extends, Hidden, PassContext, PassInputs, RowLogits
from pie_driver_sglang.engine.control_commands import StartProfile, StopProfile, UnloadAdapter
from pie_driver_sglang.engine.custom_processors import CustomProcessors
from pie_driver_sglang.engine.device import find_loss, free_bytes
from pie_driver_sglang.engine.executor import ModelInfo
from pie_driver_sglang.engine.graph_runner import prompt_rows
from pie_driver_sglang.engine.input_embeds import pass_rows, replaced_embeddings
from pie_driver_sglang.engine.kernel_profile import KernelProfiler
from pie_driver_sglang.engine.layers.batch_invariant import BatchInvariantLayers
from pie_driver_sglang.engine.staging import views
from pie_driver_sglang.engine.vision import ImageInputs
from pie_driver_sglang.errors import WeightsError
from pie_driver_sglang.kernels.sampling.hidden_words import insert_hidden_states
from pie_driver_sglang.kernels.sampling.logprobs_reference import (
    LOGPROB_REQUEST_WORDS,
    LogprobRequests,
    logprob_words,
)
from pie_driver_sglang.kernels.sampling.outputs import Outputs
from pie_driver_sglang.kernels.sampling.reference import apply_masks, run_group
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams
from pie_driver_sglang.kernels.sampling.token_history import RECORD_WORDS, Records, TokenHistory
from pie_driver_sglang.memory.plan_types import Loaded

if TYPE_CHECKING:
    from pie_driver_sglang._core import GraphPath, Pass, Planner, SlotGroup
    from pie_driver_sglang.engine.backend import EncodedImage, ModelBackend
    from pie_driver_sglang.engine.block_table import BlockTable
    from pie_driver_sglang.engine.control_commands import ControlCommand
    from pie_driver_sglang.engine.graph_runner import GraphRunner
    from pie_driver_sglang.engine.layers.selection import FusedLayers
    from pie_driver_sglang.engine.lora.adapters import Adapters
    from pie_driver_sglang.engine.model_drafts import ModelDrafter
    from pie_driver_sglang.engine.page_pools import PagePools
    from pie_driver_sglang.engine.state_pool import StatePool
    from pie_driver_sglang.engine.weight_control import WeightControl
    from pie_driver_sglang.memory.plan_types import Plan
    from pie_driver_sglang.ranks.commands import Forward


class _Block:
    """A staging block and, for each field, a view over its whole capacity."""

    def __init__(self, memory: torch.Tensor, layout: Mapping[str, tuple[str, int, int]]) -> None:
        self.memory = memory
        self.fields = views(memory, layout)
        # The slot fields lie first, table updates and masks last: an upload ends with what is used.
        self.slots_end = layout["req_pool_indices"][1]
        self.updates_offset = layout["table_updates"][1]
        self.masks_offset = layout["mask_words"][1]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]


class BackendExecutor:
    """Implements `ModelExecutor`, or a rank's part of one."""

    recovers = True

    def __init__(
        self,
        backend: ModelBackend,
        block_table: BlockTable,
        plan: Plan,
        planner: Planner,
        info: ModelInfo,
        pools: PagePools,
        adapters: Adapters | None,
        states: StatePool | None,
    ) -> None:
        self.backend = backend
        self.block_table = block_table
        self.plan = plan
        self._pools = pools
        self._adapters = adapters
        self._states = states
        self._row_adapters: list[int] | None = None
        self.model_info = info
        device = backend.device
        layout = dict(planner.layout)
        on_cuda = device.type == "cuda"
        host = torch.zeros(planner.block_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self.block: npt.NDArray[np.uint8] = host.numpy()
        self._host = _Block(host, layout)
        # On the CPU the staging block is the device block.
        self._device = (
            _Block(torch.zeros_like(host, device=device), layout) if on_cuda else self._host
        )
        self._copied: torch.cuda.Event | None = None
        if on_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        slots = (info.total_pages + 1) * info.page_size
        self.history = TokenHistory(block_table.slots, slots, info.vocab_size)
        """What was produced by requests with penalties."""
        self.processors = CustomProcessors()
        self._images = ImageInputs(backend, chunk_tokens=layout["input_ids"][2])
        self.steps: GraphRunner | None = None
        self.prompts: GraphRunner | None = None
        """Of an embedding model, what runs short passes as graphs."""
        self.drafter: ModelDrafter | None = None
        """Of a model with an EAGLE head."""
        self.fused: FusedLayers | None = None
        """Of a model that few kernels can run."""
        self.active: Mapping[str, Any] = {}
        self.weights: WeightControl | None = None
        """Of a library that can replace weights while it serves."""
        self._profiler = KernelProfiler(device, backend.rank.number)
        self._hidden: Hidden | None = None
        self._h2d_ns = self._sync_ns = 0

    def find_loss(self) -> str | None:
        """Asks the device; see `ModelExecutor.find_loss`."""
        return find_loss(self.plan.device.name)

    def make_graph_path(self) -> GraphPath | None:
        """Makes the graph path; see `ModelExecutor.make_graph_path` in `engine/executor.py`."""
        return None if self.steps is None else self.steps.graph_path()

    @torch.inference_mode()
    def forward(self, batch: Pass | Forward) -> None:
        """Runs the staged pass; see `ModelExecutor.forward`."""
        self._upload_bytes(self.pass_bytes(batch))
        self.block_table.update(self._device["table_updates"][: 2 * batch.updates].view(-1, 2))
        if batch.token_history is not None:
            self._note_tokens(batch.token_history, batch.tokens)
        self._hidden = None
        if self.steps is not None and batch.decode and batch.mask is None and batch.images is None:
            self._run_step(self.steps, batch)
        elif self.prompts is None or not self._run_prompts(self.prompts, batch):
            self._run_eagerly(batch)
        self._await_copy()

    def _note_tokens(self, further: bytes, tokens: int) -> None:
        """Notes the tokens of the staged pass, and further pairs of storage slot and token."""
        fields = self._device
        if further:
            pairs = torch.from_numpy(_numbers(further).reshape(-1, 2).copy())
            slots, ids = pairs.to(fields.memory.device).unbind(1)
            self.history.record(slots, ids)
        self.history.record(fields["out_cache_loc"][:tokens], fields["input_ids"][:tokens])

    def _run_step(self, steps: GraphRunner, batch: Pass | Forward) -> None:
        """Runs a decode as the graph path does, except for its outputs."""
        if batch.adapters is None:
            self.unbind_adapters()
        else:
            adapters, numbers = self._with_adapters(), _numbers(batch.adapters).tolist()
            padding = steps.padded(len(numbers), with_lora=True) - len(numbers)
            # By an adapter of the pass: those that it has may fill all slots.
            adapters.bind_rows([*numbers, *(numbers[-1:] * padding)])
            self._row_adapters = numbers if adapters.embed(numbers) else None
        hidden = steps.decode(
            self._host.fields, batch.requests, with_lora=batch.adapters is not None
        )
        self._hidden = hidden._replace(adapters=self._row_adapters)
        if self._copied is not None and not batch.slots:
            # Nothing waits for its outputs, but the next step is staged where it reads.
            self._copied.record()

    def _run_prompts(self, graphs: GraphRunner, batch: Pass | Forward) -> bool:
        """Runs a pass of an embedding model by a graph, and pools; False where none can."""
        pooling, extends = self.backend.pooling, self._extends(batch.requests)
        special = (batch.images, batch.mask, batch.adapters)
        plain = all(part is None for part in special)
        if pooling is None or not plain or not graphs.takes(extends.seq_lens_cpu):
            return False
        self.unbind_adapters()
        rows = prompt_rows(self._host.fields, extends)
        states = graphs.decode(rows, batch.tokens, with_lora=False).states[: batch.tokens]
        self._hidden = pooling.pool(self._context(batch, extends, None), states)
        if self._copied is not None and not batch.slots:
            # As in `_run_step`.
            self._copied.record()
        return True

    def _run_eagerly(self, batch: Pass | Forward) -> None:
        # SGLang pools what is a prefill only; an image or embeddings may be of one token.
        plain = batch.images is None and not self.model_info.embedding_size
        extends = None if batch.decode and plain else self._extends(batch.requests)
        images, embeds = (None, []) if batch.images is None else self._images.encode(batch.images)
        context = self._context(batch, extends, images)
        if self._adapters is not None:
            self._row_adapters = _bind(self._adapters, context, extends, batch.adapters)
        if self._states is not None and batch.states is not None:
            self._states.assign(self._device["req_pool_indices"][: batch.requests], batch.states)
        with self._layers_of(batch), self._embeddings(embeds, extends):
            hidden = self.backend.forward(context, batch.mask)
        self._hidden = hidden._replace(adapters=self._row_adapters)

    def _embeddings(
        self, embeds: Sequence[EncodedImage], extends: Extends | None
    ) -> AbstractContextManager[None]:
        """Puts the `input_embeds` of a pass into the place of those of its tokens."""
        if not embeds or extends is None:
            return contextlib.nullcontext()
        table, rows = self.backend.embedding_table(), pass_rows(embeds, extends)
        return replaced_embeddings(table, rows, self.model_info.vocab_size)

    def _layers_of(self, batch: Pass | Forward) -> AbstractContextManager[None]:
        """Which layers run a pass: fused ones, or the backend's own."""
        if self.fused is None or batch.mask is not None or batch.adapters is not None:
            return contextlib.nullcontext()
        if batch.decode and not isinstance(self.fused, BatchInvariantLayers):
            return contextlib.nullcontext()
        return self.fused.patched_prefill()

    def control(self, command: ControlCommand) -> dict[str, Any]:
        """Controls the weights, adapters or profiles; see `ModelExecutor.control`."""
        if isinstance(command, StartProfile):
            return self._profiler.start(command)
        if isinstance(command, StopProfile):
            return self._profiler.stop(command)
        if isinstance(command, UnloadAdapter):
            return self._with_adapters().unload(command)
        if self.weights is None:
            text = f"{self.backend.info.name} does not replace weights while it serves"
            raise WeightsError(text, "restart with the new weights")
        return self.weights.run(command)

    def unbind_adapters(self) -> None:
        """Makes the model one without adapters until the next :meth:`forward`."""
        if self._adapters is not None:
            self._adapters.unbind()
            self._row_adapters = None

    def sample(self, group: SlotGroup) -> Outputs:
        """Computes the staged group; see `ModelExecutor.sample`."""
        return self.sample_logits(group, self.slot_logits(group))

    @torch.inference_mode()
    def slot_logits(self, group: SlotGroup) -> torch.Tensor:
        """The logits of the staged slots: ``[slots, vocabulary]`` float32."""
        self._upload_slots(group)
        return self.logits(self._device["slot_rows"][: len(group)])

    @torch.inference_mode()
    def sample_logits(self, group: SlotGroup, logits: torch.Tensor) -> Outputs:
        """Computes the staged slot group from its logits, which may be changed."""
        slots, fields = len(group), self._device
        if group.records:
            self.history.apply_penalties(logits, _records(group, logits.device))
        if group.mask_words:
            apply_masks(logits, fields["slot_masks"][: 2 * slots].view(-1, 2), fields["mask_words"])
        failures = self.processors.apply(logits, group)
        names = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
        params = SlotParams(*(fields[name][:slots] for name in names))
        labels = None
        if group.logprobs:
            pairs = np.frombuffer(group.labels, np.int64).reshape(-1, 2).copy()
            labels = torch.from_numpy(pairs).to(logits.device)
        outputs = run_group(logits, group, params, labels)
        if group.logprob_positions:
            requests, wanted = _logprob_requests(group, params.temperatures)
            words = logprob_words(logits, requests, outputs.tokens)
            if bool(wanted.any()):
                rows = fields["slot_rows"][:slots][requests.slots[wanted]]
                states = self.hidden.states[rows].float()
                words = insert_hidden_states(words, requests.starts(), states, wanted)
            outputs = outputs._replace(logprob_words=words)
        started = time.perf_counter_ns()
        outputs = Outputs._make(
            part.cpu() if isinstance(part, torch.Tensor) else part for part in outputs
        )._replace(failures=failures)
        for slot, _ in failures:
            outputs.tokens[slot] = self.model_info.vocab_size
        if self._copied is not None:
            self._sync_ns += time.perf_counter_ns() - started
        # A group may have no outputs, and the next step is staged where its graph reads.
        self._await_copy()
        return outputs

    @torch.inference_mode()
    def compute_logits(self, slots: int) -> None:
        """Computes the logits of the staged slots for the other ranks, which have a part each."""
        self._upload_bytes(self._host.slots_end)
        self.logits(self._device["slot_rows"][:slots])
        self._await_copy()

    def pass_bytes(self, batch: Pass | Forward) -> int:
        """Length of the staging block's beginning that the pass is in."""
        return self._host.updates_offset + 16 * batch.updates

    @property
    def slot_bytes(self) -> int:
        """Length of the staging block's beginning that slots are in, without their masks."""
        return self._host.slots_end

    def take_waits(self) -> tuple[int, int]:
        """Copy and wait times; see `ModelExecutor.take_waits`."""
        waits = (self._h2d_ns, self._sync_ns)
        self._h2d_ns = self._sync_ns = 0
        return waits

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of rows of the last pass: ``[rows]`` int64 -> ``[rows, vocabulary]`` float32.

        Of an embedding model the pooled rows of their requests: ``[rows, embedding size]``.
        """
        hidden = self.hidden
        if hidden.request_ends is not None:
            return hidden.pooled(rows)
        if self._adapters is not None and hidden.adapters is not None:
            self._adapters.bind_rows([hidden.adapters[row] for row in rows.tolist()])
        return self.backend.logits(hidden, hidden.states[rows]).float()

    def run_model(self, context: PassContext) -> None:
        """Runs a planned decode by the model alone, as a graph captures it."""
        self._hidden = None
        self._hidden = self.backend.run_model(context)

    def head_logits(self, rows: torch.Tensor | None) -> RowLogits:
        """The LM head of the last pass, as a graph captures it.

        Args:
            rows: ``[rows]`` int64, those whose logits are wanted; None for all.
        """
        hidden = self.hidden
        states = hidden.states if rows is None else hidden.states[rows]
        return self.backend.lm_head(hidden, states)

    @property
    def hidden(self) -> Hidden:
        """What the logits of the last pass can be computed from."""
        if self._hidden is None:
            raise RuntimeError("no pass has run: stage and run one before sampling")
        return self._hidden

    @torch.inference_mode()
    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages; see `ModelExecutor.copy_pages`."""
        self._pools.copy(direction, sources, targets)

    def measure_memory(self) -> Loaded:
        """What the model takes; to be asked after a pass."""
        states = self._states
        return Loaded(
            weights=self.backend.weight_bytes(),
            adapters=self._adapters.slot_bytes if self._adapters else 0,
            state=states.slot_bytes * (states.slots + 1) if states else 0,
            graphs=self.steps.graph_bytes if self.steps else 0,
            tokens=self.model_info.total_pages * self.model_info.page_size,
            kv=self._pools.device_bytes,
            free=free_bytes(self.backend.device),
        )

    def begin_load(
        self, number: int, adapter_id: int, path: str, done: Callable[[], object]
    ) -> None:
        """Begins to read one; see `ModelExecutor.begin_load`."""
        self._with_adapters().begin_load(number, adapter_id, path, done)

    def finish_load(self, number: int) -> bool:
        """Continues the load; see `ModelExecutor.finish_load`."""
        return self._with_adapters().finish_load(number)

    def discard_load(self, number: int) -> None:
        """Forgets it; see `ModelExecutor.discard_load`."""
        self._with_adapters().discard_load(number)

    def fetch_adapters(self, adapter_ids: Sequence[int]) -> dict[int, str]:
        """Fetches adapters; see `ModelExecutor.fetch_adapters`."""
        return self._with_adapters().fetch(adapter_ids)

    def graph_adapter_slots(self) -> list[tuple[int, int]]:
        """Adapters that graphs apply; see `ModelExecutor.graph_adapter_slots`."""
        if self._adapters is None or self.steps is None or not self.steps.applies_adapters:
            return []
        return self._adapters.graph_slots()

    def load_warm_up_adapter(self) -> None:
        """For warm-up; see `ModelExecutor.load_warm_up_adapter`."""
        self._with_adapters().load_warm_up()

    def drop_warm_up_adapter(self) -> None:
        """After it; see `ModelExecutor.drop_warm_up_adapter`."""
        self._with_adapters().drop_warm_up()

    def _with_adapters(self) -> Adapters:
        if self._adapters is None:
            raise RuntimeError("adapters are off")
        return self._adapters

    @torch.inference_mode()
    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies state; see `ModelExecutor.copy_states`."""
        if self._states is None:
            raise RuntimeError("the model has no recurrent state")
        self._states.copy(sources, targets)

    def _upload_slots(self, group: SlotGroup) -> None:
        self._upload_bytes(self._host.slots_end)
        if group.mask_words:
            start = self._host.masks_offset
            self._upload_bytes(start + 4 * group.mask_words, start)

    def _upload_bytes(self, end: int, start: int = 0) -> None:
        if self._copied is None:
            return
        started = time.perf_counter_ns()
        used = slice(start, end)
        self._device.memory[used].copy_(self._host.memory[used], non_blocking=True)
        self._copied.record()
        self._h2d_ns += time.perf_counter_ns() - started

    def _await_copy(self) -> None:
        """The staging block may be written again once the device has read it."""
        if self._copied is None:
            return
        started = time.perf_counter_ns()
        self._copied.synchronize()
        self._sync_ns += time.perf_counter_ns() - started

    def _context(
        self, batch: Pass | Forward, extends: Extends | None, images: list[EncodedImage] | None
    ) -> PassContext:
        """Describes the staged pass to the backend."""
        device, tokens, requests = self._device, batch.tokens, batch.requests
        inputs = PassInputs(
            input_ids=device["input_ids"][:tokens],
            positions=device["positions"][:tokens],
            mrope_positions=self._images.positions(batch, device["positions"][:tokens]),
            out_cache_loc=device["out_cache_loc"][:tokens],
            req_pool_indices=device["req_pool_indices"][:requests],
            seq_lens=device["seq_lens"][:requests],
            seq_lens_cpu=self._host["seq_lens"][:requests],
            seq_lens_sum=batch.seq_lens_sum,
        )
        return self.backend.make_context(inputs, extends, images or None)

    def _extends(self, requests: int) -> Extends:
        device, host = self._device, self._host
        return Extends(
            seq_lens=device["extend_seq_lens"][:requests],
            prefix_lens=device["extend_prefix_lens"][:requests],
            start_loc=device["extend_start_loc"][:requests],
            seq_lens_cpu=host["extend_seq_lens"][:requests].tolist(),
            prefix_lens_cpu=host["extend_prefix_lens"][:requests].tolist(),
        )


def _bind(
    adapters: Adapters, context: PassContext, extends: Extends | None, adapter_ids: bytes | None
) -> list[int] | None:
    """Binds the requests of a pass; returns the adapter of each row if the LM head needs it."""
    if adapter_ids is None:
        adapters.unbind()
        return None
    ids = _numbers(adapter_ids)
    numbers: list[int] = ids.tolist()
    adapters.bind(context, numbers)
    if not adapters.embed(numbers):
        return None
    return numbers if extends is None else np.repeat(ids, extends.seq_lens_cpu).tolist()


def _records(group: SlotGroup, device: torch.device) -> Records:
    slots, words = (
        torch.from_numpy(np.frombuffer(part, np.int32).copy()).to(device)
        for part in (group.records, group.bias_words)
    )
    return Records(slots.view(-1, RECORD_WORDS), words)


def _logprob_requests(
    group: SlotGroup, temperatures: torch.Tensor
) -> tuple[LogprobRequests, torch.Tensor]:
    """The log-probability requests of a group, whose slots have these temperatures.

    Returns:
        The requests, and which of them want hidden states: ``[requests]`` bool.
    """
    device = temperatures.device
    columns, given = (
        torch.from_numpy(np.frombuffer(part, np.int64).reshape(-1, width).copy()).to(device)
        for part, width in ((group.logprob_positions, LOGPROB_REQUEST_WORDS), (group.given, 2))
    )
    slots, tokens, tops, scaled, hidden = columns.unbind(1)
    # Of slots that are greedy it is 1.
    divisors = torch.where(scaled > 0, temperatures[slots], 1.0)
    return LogprobRequests(slots, tokens, tops, divisors, given), hidden > 0


def _numbers(adapter_ids: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(adapter_ids, np.int64)
