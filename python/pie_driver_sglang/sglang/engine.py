"""The engine: SGLang's `ModelRunner`, fed from the planner's staging block."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sglang.kernels.ops.grammar.bitmask_ops import apply_token_bitmask_inplace_triton
from sglang.srt.layers.logits_processor import (
    LogitsMetadata,
    LogitsProcessor,
    LogitsProcessorOutput,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from pie_driver_sglang.engine import Facts
from pie_driver_sglang.sampling import Outputs, SlotParams, apply_masks, run_group
from pie_driver_sglang.sglang.masked_attention import MaskedAttention

if TYPE_CHECKING:
    from pie_driver_sglang._core import Pass, Planner, SlotGroup
    from pie_driver_sglang.sglang.boot import Booted
    from pie_driver_sglang.sglang.pool import PagePools
    from pie_driver_sglang.sglang.state import StatePool

_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


class _Hidden(NamedTuple):
    """What the logits of a finished pass can be computed from."""

    processor: LogitsProcessor
    states: torch.Tensor
    """``[tokens, hidden]`` after the final norm."""
    input_ids: Any
    lm_head: Any
    metadata: LogitsMetadata


class _Block:
    """A staging block and, for each field, a view over its whole capacity."""

    def __init__(self, memory: torch.Tensor, layout: Mapping[str, tuple[str, int, int]]) -> None:
        self.memory = memory
        self.fields = {
            name: memory[offset : offset + capacity * _TORCH_DTYPES[dtype].itemsize].view(
                _TORCH_DTYPES[dtype]
            )
            for name, (dtype, offset, capacity) in layout.items()
        }
        # The slot fields lie first, table updates and masks last: an upload ends with what is used.
        self.slots_end = layout["req_pool_indices"][1]
        self.updates_offset = layout["table_updates"][1]
        self.masks_offset = layout["mask_words"][1]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]


class SglangEngine:
    """Implements :class:`pie_driver_sglang.engine.Engine`."""

    def __init__(
        self,
        booted: Booted,
        planner: Planner,
        facts: Facts,
        pools: PagePools,
        states: StatePool | None,
    ) -> None:
        self._runner = booted.runner
        self._pools = pools
        self._states = states
        self.facts = facts
        device = torch.device(self._runner.device)
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
        table = self._runner.req_to_token_pool.req_to_token
        self._table_pages = table.view(-1, facts.page_size)
        self._page_offsets = torch.arange(facts.page_size, dtype=table.dtype, device=device)
        self._mask_width = -(-facts.vocab_size // 32)
        self._masked_attention = MaskedAttention(self._runner)
        self._hidden: _Hidden | None = None
        self._h2d_ns = self._sync_ns = 0
        for module in self._runner.model.modules():
            if isinstance(module, LogitsProcessor):
                self._divert(module)

    def _divert(self, processor: LogitsProcessor) -> None:
        """Stops the forward pass before the LM head: logits are computed for sampled rows only."""

        def keep_hidden(
            input_ids: Any, states: torch.Tensor, lm_head: Any, metadata: Any, *_: Any, **__: Any
        ) -> Any:
            if isinstance(metadata, ForwardBatch):
                metadata = LogitsMetadata.from_forward_batch(metadata)
            self._hidden = _Hidden(processor, states, input_ids, lm_head, metadata)
            return LogitsProcessorOutput(next_token_logits=None)

        processor.forward = keep_hidden

    @torch.inference_mode()
    def forward(self, batch: Pass) -> None:
        """Runs the staged pass; see :meth:`pie_driver_sglang.engine.Engine.forward`."""
        self._upload(batch)
        self._update_table(batch.updates)
        self._hidden = None
        forward_batch = self._forward_batch(batch)
        if self._states is not None and batch.states is not None:
            self._states.assign(forward_batch.req_pool_indices, batch.states)
        if batch.mask is None:
            self._runner.forward(forward_batch)
        else:
            with self._masked_attention.applied(batch.mask, forward_batch):
                self._runner.forward(forward_batch)
        if self._copied is not None:
            # The planner may write the next pass once the device has read this one.
            started = time.perf_counter_ns()
            self._copied.synchronize()
            self._sync_ns += time.perf_counter_ns() - started

    @torch.inference_mode()
    def sample(self, group: SlotGroup) -> Outputs:
        """Computes the staged slot group; see :meth:`pie_driver_sglang.engine.Engine.sample`."""
        slots = len(group)
        self._upload_slots(group)
        fields = self._device
        logits = self.logits(fields["slot_rows"][:slots])
        if group.masks:
            self._mask(logits, slots)
        names = ("temperatures", "top_ks", "top_ps", "min_ps", "uniforms")
        params = SlotParams(*(fields[name][:slots] for name in names))
        labels = None
        if group.logprobs:
            pairs = np.frombuffer(group.labels, np.int64).reshape(-1, 2).copy()
            labels = torch.from_numpy(pairs).to(logits.device)
        outputs = run_group(logits, group, params, labels)
        started = time.perf_counter_ns()
        outputs = Outputs._make(part if part is None else part.cpu() for part in outputs)
        if self._copied is not None:
            self._sync_ns += time.perf_counter_ns() - started
        return outputs

    def _mask(self, logits: torch.Tensor, slots: int) -> None:
        """Sets the logits that the slots' masks forbid to -inf."""
        # The host knows which slots have one, so that nobody waits for the device.
        masked = torch.from_numpy(np.flatnonzero(self._host["slot_masks"][:slots].numpy() >= 0))
        rows = self._host["slot_masks"][:slots][masked].long().to(logits.device)
        masked = masked.to(logits.device)
        words = self._device["mask_words"].view(-1, self._mask_width)
        apply = apply_masks if self._copied is None else apply_token_bitmask_inplace_triton
        chosen = logits[masked]
        apply(chosen, words[rows])
        logits[masked] = chosen

    def take_waits(self) -> tuple[int, int]:
        """Copy and wait times; see :meth:`pie_driver_sglang.engine.Engine.take_waits`."""
        waits = (self._h2d_ns, self._sync_ns)
        self._h2d_ns = self._sync_ns = 0
        return waits

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of rows of the last pass: ``[rows]`` int64 -> ``[rows, vocabulary]`` float32."""
        hidden = self._hidden
        if hidden is None:
            raise RuntimeError("no pass has run: stage and run one before sampling")
        # In decode mode the processor keeps every row that it is given.
        metadata = replace(hidden.metadata, forward_mode=ForwardMode.DECODE)
        run = LogitsProcessor.forward
        output = run(
            hidden.processor, hidden.input_ids, hidden.states[rows], hidden.lm_head, metadata
        )
        logits: torch.Tensor = output.next_token_logits
        return logits.float()

    @torch.inference_mode()
    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages; see :meth:`pie_driver_sglang.engine.Engine.copy_pages`."""
        self._pools.copy(direction, sources, targets)

    @torch.inference_mode()
    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies state; see :meth:`pie_driver_sglang.engine.Engine.copy_states`."""
        if self._states is None:
            raise RuntimeError("the model has no recurrent state")
        self._states.copy(sources, targets)

    def _upload(self, batch: Pass) -> None:
        if self._copied is not None:
            self._upload_bytes(self._host.updates_offset + 16 * batch.updates)
            self._copied.record()

    def _upload_slots(self, group: SlotGroup) -> None:
        if self._copied is not None:
            self._upload_bytes(self._host.slots_end)
            if group.masks:
                start = self._host.masks_offset
                self._upload_bytes(start + 4 * self._mask_width * group.masks, start)

    def _upload_bytes(self, end: int, start: int = 0) -> None:
        started = time.perf_counter_ns()
        used = slice(start, end)
        self._device.memory[used].copy_(self._host.memory[used], non_blocking=True)
        self._h2d_ns += time.perf_counter_ns() - started

    def _update_table(self, updates: int) -> None:
        if not updates:
            return
        changed = self._device["table_updates"][: 2 * updates].view(updates, 2)
        slots = changed[:, 1:].to(self._page_offsets.dtype) + self._page_offsets
        self._table_pages[changed[:, 0]] = slots

    def _forward_batch(self, batch: Pass) -> ForwardBatch:
        device, host = self._device, self._host
        tokens, requests = batch.tokens, batch.requests
        seq_lens_cpu = host["seq_lens"][:requests]
        fields: dict[str, Any] = {
            "forward_mode": ForwardMode.DECODE,
            "batch_size": requests,
            "input_ids": device["input_ids"][:tokens],
            "positions": device["positions"][:tokens],
            "out_cache_loc": device["out_cache_loc"][:tokens],
            "req_pool_indices": device["req_pool_indices"][:requests],
            "seq_lens": device["seq_lens"][:requests],
            "seq_lens_cpu": seq_lens_cpu,
            "seq_lens_sum": batch.seq_lens_sum,
            "orig_seq_lens": device["seq_lens"][:requests],
            "capture_hidden_mode": CaptureHiddenMode.NULL,
        }
        if not batch.decode:
            fields |= {
                "forward_mode": ForwardMode.EXTEND,
                "extend_num_tokens": tokens,
                "extend_seq_lens": device["extend_seq_lens"][:requests],
                "extend_prefix_lens": device["extend_prefix_lens"][:requests],
                "extend_start_loc": device["extend_start_loc"][:requests],
                "extend_seq_lens_cpu": host["extend_seq_lens"][:requests].tolist(),
                "extend_prefix_lens_cpu": host["extend_prefix_lens"][:requests].tolist(),
            }
        return ForwardBatch(**fields)
