"""Logits: how a pass ends before the LM head, and how the LM head is run on chosen rows.

`LogitsProcessor` and `LogitsMetadata` are passed on for annotations only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from sglang.srt.layers.logits_processor import (
    LogitsMetadata,
    LogitsProcessor,
    LogitsProcessorOutput,
)
from sglang.srt.lora.layers import ParallelLMHeadWithLoRA
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

__all__ = ["LogitsMetadata", "LogitsProcessor"]


class Keep(Protocol):
    """Takes what logits can be computed from."""

    def __call__(
        self,
        processor: LogitsProcessor,
        states: torch.Tensor,
        input_ids: Any,
        lm_head: Any,
        metadata: LogitsMetadata,
        aux: Sequence[torch.Tensor] | None,
    ) -> None:
        """Keeps it: the model's processor, ``[tokens, hidden]`` after the final norm, and so on.

        `aux` has as many of each layer that an EAGLE-3 head takes.
        """


def divert(model: torch.nn.Module, keep: Keep) -> None:
    """Has a model's passes end before the LM head, by a `forward` of its own for the processor.

    Also takes `_logits_gatherer._state` away: its gathering of logits needs NVLink's multicast. A
    version with another gathering, or with work after the LM head, does not run that any more.
    """

    def stop_at(processor: LogitsProcessor) -> Callable[..., LogitsProcessorOutput]:
        def forward(
            input_ids: Any,
            states: torch.Tensor,
            lm_head: Any,
            metadata: Any,
            aux_hidden_states: Sequence[torch.Tensor] | None = None,
            *_: Any,
            **__: Any,
        ) -> LogitsProcessorOutput:
            if isinstance(metadata, ForwardBatch):
                metadata = LogitsMetadata.from_forward_batch(metadata)
            keep(processor, states, input_ids, lm_head, metadata, aux_hidden_states)
            return LogitsProcessorOutput(next_token_logits=None)

        return forward

    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module._logits_gatherer._state = None
            module.forward = stop_at(module)


def compute_logits(
    processor: LogitsProcessor,
    states: torch.Tensor,
    input_ids: Any,
    lm_head: Any,
    metadata: LogitsMetadata,
) -> torch.Tensor:
    """``[rows, vocabulary]`` logits by the class's `forward`, which :func:`divert` has replaced.

    Args:
        processor: The model's.
        states: ``[rows, hidden]``, those whose logits are wanted.
        input_ids: Of the whole pass.
        lm_head: As :func:`plain_head` gives it, or SGLang's wrapper with adapters.
        metadata: Of the whole pass.
    """
    # In decode mode the processor keeps every row that it is given.
    metadata = replace(metadata, forward_mode=ForwardMode.DECODE)
    # Of its own class: a subclass may compute more.
    output = type(processor).forward(processor, input_ids, states, lm_head, metadata)
    logits: torch.Tensor = output.next_token_logits
    return logits


def compute_part(
    processor: LogitsProcessor, states: torch.Tensor, lm_head: Any
) -> tuple[torch.Tensor, bool, float | None]:
    """This rank's part of the logits, by `_compute_lm_head`, as a graph captures it.

    Returns:
        ``[rows, width]`` in the model's dtype; whether all ranks have a part each; and the limit
        that is still to be applied, None for none.
    """
    logits = processor._compute_lm_head(states, lm_head=lm_head)
    if processor.logit_scale is not None:
        logits.mul_(processor.logit_scale)
    in_parts = bool(processor.do_tensor_parallel_all_gather)
    return logits, in_parts, processor.final_logit_softcapping or None


def replace_gemm(
    processor: LogitsProcessor,
    gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    supports: Callable[[torch.Tensor], bool],
) -> None:
    """Has `_compute_lm_head`, of which both functions above make use, multiply by `gemm`.

    Args:
        processor: The model's.
        gemm: ``[rows, hidden]`` and ``[vocabulary, hidden]`` -> ``[rows, vocabulary]``.
        supports: Whether it does so by a weight.
    """
    otherwise: Callable[..., torch.Tensor] = processor._compute_lm_head

    def compute(
        states: torch.Tensor, lm_head: Any, bias: torch.Tensor | None = None, **others: Any
    ) -> torch.Tensor:
        plain = plain_head(lm_head)
        if bias is not None or not supports(plain.weight):
            return otherwise(states, lm_head, bias, **others)
        # A newer version passes a buffer, and copies into it what was not written there.
        return gemm(states.contiguous(), plain.weight)

    processor._compute_lm_head = compute


def plain_head(lm_head: Any) -> Any:
    """An LM head without the wrapper that applies adapters, which has it as `base_layer`."""
    return getattr(lm_head, "base_layer", lm_head)


def applies_adapters(lm_head: Any) -> bool:
    """Whether an LM head is SGLang's wrapper that applies adapters."""
    return isinstance(lm_head, ParallelLMHeadWithLoRA)
