"""Embedding models: what SGLang pools of a prefill, and what it makes of a head's checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from unittest import mock

import torch
from sglang.srt.layers.pooler import EmbeddingPoolerOutput, Pooler, PoolingType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

_HEADS = ("score", "classification_head", "v_head")
"""What SGLang's classes call the head that makes classes or a reward of a pooled row."""


def ends_with_pooler(runner: ModelRunner) -> bool:
    """Whether a runner's passes end with pooled rows."""
    return not runner.is_generation


def pooled_rows(pooled: EmbeddingPoolerOutput) -> torch.Tensor:
    """``[requests, embedding size]``, from what a pass of an embedding model returns."""
    # A list is what requests with different numbers of dimensions would get.
    rows: torch.Tensor = pooled.embeddings
    return rows


def run_decoder(model: torch.nn.Module, batch: ForwardBatch) -> torch.Tensor:
    """``[tokens, hidden]``: what a model pools, without pooling it. Can be captured."""
    states: torch.Tensor = _decoder(model)(batch.input_ids, batch.positions, batch)
    return states


def pool_states(
    model: torch.nn.Module, states: torch.Tensor, batch: ForwardBatch
) -> EmbeddingPoolerOutput:
    """What a model makes of hidden states ``[tokens, hidden]`` of :func:`run_decoder`."""
    decoder = _decoder(model)
    with mock.patch.object(decoder, "forward", lambda *_, **__: states):
        output: EmbeddingPoolerOutput = model(
            batch.input_ids, batch.positions, batch, get_embedding=True
        )
    return output


def has_decoder(model: torch.nn.Module) -> bool:
    """Whether :func:`run_decoder` can run a model."""
    return isinstance(getattr(model, "model", None), torch.nn.Module)


def _decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The part of an embedding model before its pooler, as all of SGLang's classes name it."""
    return model.get_submodule("model")


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
    scales = isinstance(pooler, Pooler | PassPooler) and pooler.normalize
    return bool(scales) and find_head(model) is None


def leave_unscaled(model: torch.nn.Module) -> None:
    """Has a model return its pooled rows as they are."""
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, Pooler):
        pooler.normalize = False


class PassPooler(torch.nn.Module):
    """Takes the place of SGLang's pooler where prompts are pooled over several passes.

    Args:
        pool: Hidden states ``[tokens, hidden]`` of a pass, tokens of each request and tokens before
            it, both on the host, and the row of the block table of each, ``[requests]`` -> rows
            ``[requests, embedding size]``.
        end: Takes the numbers of requests of the last pass whose prompts have ended.
        layers: What it reads, as parameters of the model.
        normalize: Whether rows are scaled to length 1 at last.
    """

    def __init__(
        self,
        pool: Callable[[torch.Tensor, Sequence[int], Sequence[int], torch.Tensor], torch.Tensor],
        end: Callable[[Sequence[int]], None],
        layers: torch.nn.Sequential,
        *,
        normalize: bool,
    ) -> None:
        super().__init__()
        self._pool, self.end = pool, end
        self.layers, self.normalize = layers, normalize

    def forward(self, states: torch.Tensor, batch: ForwardBatch) -> EmbeddingPoolerOutput:
        """As SGLang's `Pooler`."""
        lens, before = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        rows = self._pool(states, lens, before, batch.req_pool_indices)
        if self.normalize:
            rows = torch.nn.functional.normalize(rows, dim=-1)
        return EmbeddingPoolerOutput(embeddings=rows)


def ends_of_prompts(model: torch.nn.Module) -> Callable[[Sequence[int]], None] | None:
    """What a model's `PassPooler` is told the ends of prompts by; None for another pooler."""
    pooler = getattr(model, "pooler", None)
    return pooler.end if isinstance(pooler, PassPooler) else None


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
