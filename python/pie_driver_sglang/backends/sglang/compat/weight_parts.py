"""Where a tensor of a checkpoint lies in SGLang's parameters, several of which are merged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from pie_driver_sglang.engine.backend_features import WeightPart

_QKV: Final = ("q_proj", "k_proj", "v_proj")
_GATE_UP: Final = ("gate_proj", "up_proj")
_EXPERT: Final = re.compile(
    r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$"
)

Stored = Callable[[torch.Tensor], torch.Tensor]


def find_part(model: Any, name: str, stored: Stored) -> WeightPart | None:
    """This rank's part of a tensor of a checkpoint; None where the model has none.

    Args:
        model: SGLang's.
        name: The tensor's name in the checkpoint.
        stored: Gives the values as a checkpoint has them, for a parameter.
    """
    parameters = dict(model.named_parameters())
    if name == "lm_head.weight" and name not in parameters:
        # Tied: SGLang lists the embedding table only.
        name = "model.embed_tokens.weight"
    if match := _EXPERT.match(name):
        return _expert(model, match, stored)
    path, _, leaf = name.rpartition(".")
    parent, _, kind = path.rpartition(".")
    for merged, kinds in (("qkv_proj", _QKV), ("gate_up_proj", _GATE_UP)):
        whole = f"{parent}.{merged}.{leaf}"
        if kind in kinds and whole in parameters:
            module = model.get_submodule(f"{parent}.{merged}")
            values = stored(parameters[whole].data)
            return _merged(module, kinds.index(kind), values)
    if name not in parameters:
        return None
    return _plain(model.get_submodule(path), stored(parameters[name].data))


def _merged(module: Any, index: int, values: torch.Tensor) -> WeightPart | None:
    if isinstance(module, QKVParallelLinear):
        head = module.head_size
        sizes = [module.num_heads * head, *[module.num_kv_heads * head] * 2]
        copies = module.num_kv_head_replicas if index else 1
    elif isinstance(module, MergedColumnParallelLinear):
        sizes, copies = list(module.output_partition_sizes), 1
    else:
        return None
    return WeightPart(values.narrow(0, sum(sizes[:index]), sizes[index]), 0, copies=copies)


def _plain(module: Any, values: torch.Tensor) -> WeightPart:
    if isinstance(module, VocabParallelEmbedding):
        return WeightPart(values, 0, module.org_vocab_size)
    if isinstance(module, RowParallelLinear) and values.dim() == 2:
        return WeightPart(values, 1)
    if isinstance(module, ColumnParallelLinear):
        return WeightPart(values, 0)
    return WeightPart(values, None)


def _expert(model: Any, match: re.Match[str], stored: Stored) -> WeightPart | None:
    """Of experts that every rank has some columns of."""
    try:
        experts = model.get_submodule(match[1])
    except AttributeError:
        return None
    if not isinstance(experts, FusedMoE) or experts.moe_ep_size > 1:
        return None
    number, kind = int(match[2]), match[3]
    if kind in ("down_proj", "w2"):
        return WeightPart(stored(experts.w2_weight.data)[number], 1)
    halves = stored(experts.w13_weight.data)[number].chunk(2)
    return WeightPart(halves[kind in ("up_proj", "w3")], 0)
