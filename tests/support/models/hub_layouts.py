"""Names of weights in checkpoints whose code is on the Hugging Face hub, not in transformers.

Each computes what a class of transformers computes, with other names for the same weights. A small
model of that class is the reference, and its weights are stored under the published names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from support.models import tiny_models

State = dict[str, Any]
"""Tensors by name."""
Layout = Callable[[State], State]

LAYERS: Final = 2
_HEADS, _KV_HEADS, _HEAD_DIM = (
    tiny_models.COMMON[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
)


def renamed(*pairs: tuple[str, str]) -> Layout:
    """A layout that differs by names alone: each pattern and its replacement."""

    def layout(state: State) -> State:
        return {_replaced(name, pairs): tensor for name, tensor in state.items()}

    return layout


def _replaced(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in pairs:
        name = re.sub(pattern, replacement, name)
    return name


def internlm2(state: State) -> State:
    """Queries, keys and values in one matrix, by groups that share keys and values."""
    import torch

    state = dict(state)
    for layer in range(LAYERS):
        query, key, value = _take_qkv(state, layer, "weight")
        grouped = [
            part.view(_KV_HEADS, -1, _HEAD_DIM, query.shape[1]) for part in (query, key, value)
        ]
        fused = torch.cat(grouped, dim=1).reshape(-1, query.shape[1])
        state[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    return _INTERNLM2_NAMES(state)


_INTERNLM2_NAMES: Final = renamed(
    ("embed_tokens", "tok_embeddings"),
    ("lm_head", "output"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
)

exaone: Final = renamed(
    ("^model.embed_tokens", "transformer.wte"),
    ("^model.norm", "transformer.ln_f"),
    ("^model.layers", "transformer.h"),
    (r"self_attn\.([qkv])_proj", r"attn.attention.\1_proj"),
    (r"self_attn\.o_proj", "attn.attention.out_proj"),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
)


def fused_qkv(
    name: str, *pairs: tuple[str, str], bias: bool = True, layers: int = LAYERS
) -> Layout:
    """Queries, keys and values in one matrix, the other names as of :func:`renamed`."""
    kinds = ("weight", "bias") if bias else ("weight",)

    def layout(state: State) -> State:
        import torch

        state = dict(state)
        for layer, kind in itertools.product(range(layers), kinds):
            fused = torch.cat(_take_qkv(state, layer, kind))
            state[f"model.layers.{layer}.{name}.{kind}"] = fused
        return renamed(*pairs)(state)

    return layout


chatglm: Final = fused_qkv(
    "self_attn.query_key_value",
    ("^model.embed_tokens", "transformer.embedding.word_embeddings"),
    ("^model.norm", "transformer.encoder.final_layernorm"),
    ("^lm_head", "transformer.output_layer"),
    ("^model.layers", "transformer.encoder.layers"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("self_attn", "self_attention"),
    ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)

# The first generation, with keys and values as many as queries, and biases for these alone.
qwen: Final = fused_qkv(
    "attn.c_attn",
    ("^model.embed_tokens", "transformer.wte"),
    ("^model.norm", "transformer.ln_f"),
    ("^model.layers", "transformer.h"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("mlp.gate_proj", "mlp.w2"),
    ("mlp.up_proj", "mlp.w1"),
    ("mlp.down_proj", "mlp.c_proj"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
)

baichuan: Final = fused_qkv("self_attn.W_pack", bias=False, layers=1)


def deepseek(state: State) -> State:
    """Qwen2-MoE without its biases and the gate of its shared expert: see `deepseek_reference`."""
    found: State = {}
    for name, tensor in state.items():
        prefix, _, kind = name.rpartition(".mlp.experts.")
        if "shared_expert_gate" in name or name.endswith("_proj.bias"):
            continue
        if not prefix:
            name = name.replace("shared_expert.", "shared_experts.")
            # The gate of the reference lets half of the shared expert's output through.
            halved = "shared_experts.down_proj" in name
            found[name] = tensor / 2 if halved else tensor
            continue
        for expert, part in enumerate(tensor):
            own = f"{prefix}.mlp.experts.{expert}"
            if kind == "down_proj":
                found[f"{own}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2)
                found |= {f"{own}.gate_proj.weight": gate, f"{own}.up_proj.weight": up}
    return found


def deepseek_reference(model: Any) -> None:
    """Takes from a Qwen2-MoE what DeepSeek's first model lacks: biases, and a gate that varies."""
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias") or "shared_expert_gate" in name:
            parameter.data.zero_()


def _take_qkv(state: State, layer: int, kind: str) -> list[Any]:
    return [state.pop(f"model.layers.{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]


def config_code(model_type: str) -> str:
    """The configuration class of a repository, which the model's own code would bring along."""
    return (
        "from transformers import PretrainedConfig\n\n\n"
        "class RepositoryConfig(PretrainedConfig):\n"
        f"    model_type = {model_type!r}\n"
    )


def published(own: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with the usual sizes and what is special about an architecture."""
    usual = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**tiny_models.COMMON, **usual, **own}
