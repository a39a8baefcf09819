"""Embedding models: what SGLang pools of a prefill, and what it makes of a head's checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from sglang.srt.layers.pooler import EmbeddingPoolerOutput, Pooler, PoolingType
from sglang.srt.model_executor.model_runner import ModelRunner

_HEADS = ("score", "classification_head", "v_head")
"""What SGLang's classes call the head that makes classes or a reward of a pooled row."""


def ends_with_pooler(runner: ModelRunner) -> bool:
    """Whether a runner's passes end with pooled rows."""
    return not runner.is_generation


def pooled_rows(output: Any) -> torch.Tensor:
    """``[requests, embedding size]``, from what `ModelRunner.forward` returns."""
    pooled: EmbeddingPoolerOutput = output.logits_output
    # A list is what requests with different numbers of dimensions would get.
    rows: torch.Tensor = pooled.embeddings
    return rows


def takes_embeddings(model: torch.nn.Module) -> bool:
    """Whether a class of SGLang can return embeddings."""
    return "get_embedding" in inspect.signature(model.forward).parameters


def pools_last_token(model: torch.nn.Module) -> bool:
    """Whether a model pools the last token's row, which needs no rows of earlier passes."""
    pooler = getattr(model, "pooler", None)
    return not isinstance(pooler, Pooler) or pooler.pooling_type == PoolingType.LAST


def normalizes(model: torch.nn.Module) -> bool:
    """Whether a model's pooled rows have norm 1. What a head makes of them has not."""
    pooler = getattr(model, "pooler", None)
    return isinstance(pooler, Pooler) and pooler.normalize and find_head(model) is None


def leave_unscaled(model: torch.nn.Module) -> None:
    """Has a model return its pooled rows as they are."""
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, Pooler):
        pooler.normalize = False


def find_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """The head that makes classes or a reward of a pooled row, if a model has one."""
    return next((getattr(model, name) for name in _HEADS if hasattr(model, name)), None)


def drop_absent_bias(model: torch.nn.Module, stored: Collection[str]) -> None:
    """Takes the bias of a head away that the checkpoint has none for: SGLang leaves it random.

    Args:
        model: Just made.
        stored: Names of the checkpoint's tensors.
    """
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, torch.nn.Linear) and f"{name}.bias" not in stored:
            head.register_parameter("bias", None)
