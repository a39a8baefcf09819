"""What a step needs from a model, and what a pass leaves for its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pie_driver_sglang.backends.sglang.compat.logits import (
    LogitsMetadata,
    LogitsProcessor,
    applies_adapters,
    plain_head,
)

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.backends.sglang.compat.ranks import GroupCoordinator
    from pie_driver_sglang.engine.executor import ModelInfo
    from pie_driver_sglang.engine.layers.selection import FusedLayers
    from pie_driver_sglang.kernels.sampling.token_history import TokenHistory


class Hidden(NamedTuple):
    """What the logits of a finished pass can be computed from."""

    processor: LogitsProcessor
    states: torch.Tensor
    """``[tokens, hidden]`` after the final norm."""
    input_ids: Any
    lm_head: Any
    """The model's, or SGLang's wrapper of it, which applies adapters."""
    metadata: LogitsMetadata
    adapters: list[int] | None
    """The adapter of each row, -1 for none; None when the LM head applies none."""

    @property
    def head(self) -> Any:
        """What computes the logits."""
        if self.adapters is None:
            return plain_head(self.lm_head)
        if not applies_adapters(self.lm_head):
            raise RuntimeError(
                "the model takes its logits past its LM head; set `lora_target_modules` "
                "without embed_tokens and lm_head"
            )
        return self.lm_head


class RowLogits(NamedTuple):
    """Logits of rows, as far as this rank has computed them."""

    part: torch.Tensor
    """``[rows, width]`` in the model's dtype: the whole vocabulary, or this rank's part of it. At
    its end it may be padded."""
    ranks: GroupCoordinator | None
    """The ranks that have a part each, in the order of the vocabulary; None if this is all."""
    softcap: float | None
    """Limit of the logits' size that is still to be applied, by ``cap * tanh(logit / cap)``."""


class StepModel(Protocol):
    """A model as the graph path runs it: see `GraphRunner`."""

    runner: ModelRunner
    model_info: ModelInfo
    table_pages: torch.Tensor
    """``[block-table entries, page size]``: the storage slots of each page of each row."""
    history: TokenHistory
    """What was produced by requests with penalties."""
    fused: FusedLayers | None
    """Fused layers, where the model has them."""

    @property
    def hidden(self) -> Hidden:
        """What the logits of the last pass can be computed from."""

    def update_table(self, changed: torch.Tensor) -> None:
        """Writes changed block-table entries: ``[updates, 2]`` int64 of entry and first slot."""

    def unbind_adapters(self) -> None:
        """Makes the model one without adapters until the next forward pass."""

    def run_model(self, batch: ForwardBatch) -> None:
        """Runs a decode batch up to the final norm, as a graph captures it."""

    def head_logits(self, rows: torch.Tensor | None) -> RowLogits:
        """Applies the LM head to rows of the last pass, ``[rows]`` int64; None for all."""
