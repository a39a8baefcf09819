"""The architectures of docs/supported-models.md, as small random models in float32.

A model is small enough to be built and served within seconds, and has what is special about its
architecture: windows, caps, sinks, experts, latent attention, recurrent layers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from support.models import tiny_models

WINDOW: Final = tiny_models.WINDOW
HEAD: Final = 64
"""Width of an attention head of a wide model."""

_PLAIN: Final = {
    **tiny_models.COMMON,
    "tie_word_embeddings": False,
}
_NO_HEAD_DIM: Final = {key: value for key, value in _PLAIN.items() if key != "head_dim"}
_ALL_HEADS: Final = {**_NO_HEAD_DIM, "num_key_value_heads": 4}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# GPU kernels for latent attention know these sizes only.
_LATENT: Final = {
    **_ALL_HEADS,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}


class Architecture(NamedTuple):
    """A class of transformers and the configuration of a small model of it."""

    config: str
    model: str
    options: Mapping[str, Any]
    published: Mapping[str, Any] = MappingProxyType({})
    """What the `config.json` of published checkpoints says otherwise than transformers does."""

    @property
    def name(self) -> str:
        """The entry in a checkpoint's `architectures`."""
        names: list[str] = self.published.get("architectures", [self.model])
        return names[0]


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "Llama": Architecture("LlamaConfig", "LlamaForCausalLM", _PLAIN),
    "Qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM", _NO_HEAD_DIM),
    "Qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", _PLAIN),
    "Mistral": Architecture(
        "MistralConfig", "MistralForCausalLM", {**_PLAIN, "sliding_window": None}
    ),
    "Gemma": Architecture(
        "GemmaConfig",
        "GemmaForCausalLM",
        {**_PLAIN, "hidden_act": "gelu", "tie_word_embeddings": True},
    ),
    "Gemma 2": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_PLAIN,
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma 3": Architecture(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **_PLAIN,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3": Architecture("Phi3Config", "Phi3ForCausalLM", _NO_HEAD_DIM),
    "Phi-2": Architecture("PhiConfig", "PhiForCausalLM", {**_ALL_HEADS, "intermediate_size": 256}),
    "OLMo": Architecture("OlmoConfig", "OlmoForCausalLM", _ALL_HEADS),
    "OLMo-2": Architecture("Olmo2Config", "Olmo2ForCausalLM", _NO_HEAD_DIM),
    "OLMoE": Architecture("OlmoeConfig", "OlmoeForCausalLM", {**_ALL_HEADS, **_EXPERTS}),
    "GLM-4": Architecture("Glm4Config", "Glm4ForCausalLM", _PLAIN),
    "Granite": Architecture(
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            **_NO_HEAD_DIM,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "Granite-MoE": Architecture(
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**_NO_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Cohere": Architecture(
        "CohereConfig", "CohereForCausalLM", {**_NO_HEAD_DIM, "tie_word_embeddings": True}
    ),
    "Cohere 2": Architecture(
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {
            **_PLAIN,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
        },
    ),
    "StarCoder2": Architecture(
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {**_NO_HEAD_DIM, "tie_word_embeddings": True, "sliding_window": None},
    ),
    "GPT-2": Architecture(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 300, "n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    ),
    "GPT-J": Architecture(
        "GPTJConfig",
        "GPTJForCausalLM",
        {
            "vocab_size": 300,
            "n_positions": 512,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "rotary_dim": 8,
            "tie_word_embeddings": False,
        },
    ),
    "OPT": Architecture(
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 300,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 64,
            "pad_token_id": 1,
        },
    ),
    "StableLM": Architecture("StableLmConfig", "StableLmForCausalLM", _NO_HEAD_DIM),
    "Persimmon": Architecture("PersimmonConfig", "PersimmonForCausalLM", _ALL_HEADS),
    "EXAONE 4": Architecture(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {
            **_PLAIN,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"sliding_window_pattern": "LG"},
    ),
    "ERNIE 4.5": Architecture(
        "Ernie4_5Config", "Ernie4_5ForCausalLM", _PLAIN, {"architectures": ["Ernie4_5_ForCausalLM"]}
    ),
    "Arcee": Architecture("ArceeConfig", "ArceeForCausalLM", _PLAIN),
    "Qwen2-MoE": Architecture(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_NO_HEAD_DIM, **_EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3-MoE": Architecture("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_PLAIN, **_EXPERTS}),
    "Mixtral": Architecture(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Phi-3.5-MoE": Architecture(
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {**_NO_HEAD_DIM, "lm_head_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"architectures": ["PhiMoEForCausalLM"]},
    ),
    "GLM-4.5": Architecture(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **_PLAIN,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
    "DeepSeek-V2": Architecture(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LATENT, "n_group": 1, "topk_group": 1},
        {"moe_layer_freq": 1, "scoring_func": "softmax"},
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_LATENT, "n_group": 2, "topk_group": 1, "q_lora_rank": 32},
        {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "GPT-OSS": Architecture(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_PLAIN,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"swiglu_limit": 7.0},
    ),
    "Qwen3-Next": Architecture(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_PLAIN,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        {"full_attention_interval": 4},
    ),
}


def build(name: str, folder: Path, *, wide: bool = False) -> Path:
    """Makes the model of an architecture in a subfolder of `folder`, once, and returns it.

    Args:
        name: Of :data:`ARCHITECTURES`.
        folder: Where to put it.
        wide: With heads of :data:`HEAD` and weights of bfloat16, as the kernels of GPUs want them.
    """
    target = folder / name.replace(" ", "-")
    if not target.exists():
        unfinished = folder / f".{target.name}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _make(ARCHITECTURES[name], sum(name.encode()), wide).save_pretrained(unfinished)
        config = unfinished / "config.json"
        written = json.loads(config.read_text())
        config.write_text(json.dumps({**written, **ARCHITECTURES[name].published}))
        tiny_models.add_tokenizer(unfinished)
        unfinished.rename(target)
    return target


def _make(architecture: Architecture, seed: int, wide: bool) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = dict(architecture.options)
    if wide:
        sizes = {"hidden_size": 4 * HEAD, "n_embd": 4 * HEAD, "head_dim": HEAD}
        sizes |= {"word_embed_proj_dim": 4 * HEAD, "intermediate_size": 4 * HEAD}
        options |= {name: size for name, size in sizes.items() if name in options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, architecture.config)(**options)
        model = getattr(transformers, architecture.model)(config)
        tiny_models.randomize(model)
    return model.bfloat16() if wide else model
