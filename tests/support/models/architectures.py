"""The architectures of docs/supported-models.md, as small random models in float32.

A model is small enough to be built and served within seconds, and has what is special about its
architecture: windows, caps, sinks, experts, latent attention, recurrent layers.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Final

from support.models import hub_layouts, tiny_models
from support.models.architecture import (
    ALL_HEADS,
    EXPERTS,
    LATENT,
    NO_HEAD_DIM,
    PLAIN,
    WINDOW,
    Architecture,
)
from support.models.more_architectures import MORE

HEAD: Final = 64
"""Width of an attention head of a wide model."""
REFERENCE: Final = "reference"
"""The folder of the model of transformers below one whose weights have other names."""

ARCHITECTURES: Final[dict[str, Architecture]] = {
    "Llama": Architecture("LlamaConfig", "LlamaForCausalLM", PLAIN),
    "Qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM", NO_HEAD_DIM),
    "Qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", PLAIN),
    "Mistral": Architecture(
        "MistralConfig", "MistralForCausalLM", {**PLAIN, "sliding_window": None}
    ),
    "Gemma": Architecture(
        "GemmaConfig",
        "GemmaForCausalLM",
        {**PLAIN, "hidden_act": "gelu", "tie_word_embeddings": True},
    ),
    "Gemma 2": Architecture(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **PLAIN,
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
            **PLAIN,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Phi-3": Architecture("Phi3Config", "Phi3ForCausalLM", NO_HEAD_DIM),
    "Phi-2": Architecture("PhiConfig", "PhiForCausalLM", {**ALL_HEADS, "intermediate_size": 256}),
    "OLMo": Architecture("OlmoConfig", "OlmoForCausalLM", ALL_HEADS),
    "OLMo-2": Architecture("Olmo2Config", "Olmo2ForCausalLM", NO_HEAD_DIM),
    "OLMoE": Architecture("OlmoeConfig", "OlmoeForCausalLM", {**ALL_HEADS, **EXPERTS}),
    "GLM-4": Architecture("Glm4Config", "Glm4ForCausalLM", PLAIN),
    "Granite": Architecture(
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            **NO_HEAD_DIM,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "Granite-MoE": Architecture(
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**NO_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Cohere": Architecture(
        "CohereConfig", "CohereForCausalLM", {**NO_HEAD_DIM, "tie_word_embeddings": True}
    ),
    "Cohere 2": Architecture(
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {
            **PLAIN,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
        },
    ),
    "StarCoder2": Architecture(
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {**NO_HEAD_DIM, "tie_word_embeddings": True, "sliding_window": None},
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
    "StableLM": Architecture("StableLmConfig", "StableLmForCausalLM", NO_HEAD_DIM),
    "Persimmon": Architecture("PersimmonConfig", "PersimmonForCausalLM", ALL_HEADS),
    "EXAONE 4": Architecture(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {
            **PLAIN,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"sliding_window_pattern": "LG"},
    ),
    "ERNIE 4.5": Architecture(
        "Ernie4_5Config", "Ernie4_5ForCausalLM", PLAIN, {"architectures": ["Ernie4_5_ForCausalLM"]}
    ),
    "Arcee": Architecture("ArceeConfig", "ArceeForCausalLM", PLAIN),
    "Qwen2-MoE": Architecture(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**NO_HEAD_DIM, **EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "Qwen3-MoE": Architecture("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**PLAIN, **EXPERTS}),
    "Mixtral": Architecture(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Phi-3.5-MoE": Architecture(
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {**NO_HEAD_DIM, "lm_head_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"architectures": ["PhiMoEForCausalLM"]},
    ),
    "GLM-4.5": Architecture(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **PLAIN,
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
        {**LATENT, "n_group": 1, "topk_group": 1},
        {"moe_layer_freq": 1, "scoring_func": "softmax"},
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**LATENT, "n_group": 2, "topk_group": 1, "q_lora_rank": 32},
        {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "GPT-OSS": Architecture(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **PLAIN,
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
            **PLAIN,
            **EXPERTS,
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


def all_architectures() -> dict[str, Architecture]:
    """Both tables."""
    return {**ARCHITECTURES, **MORE}


def build(name: str, folder: Path, *, wide: bool = False) -> Path:
    """Makes the model of an architecture in a subfolder of `folder`, once, and returns it.

    Args:
        name: Of `all_architectures`.
        folder: Where to put it.
        wide: With heads of :data:`HEAD` and weights of bfloat16, as the kernels of GPUs want them.
            Not of an architecture with a layout of its own.
    """
    target = folder / name.replace(" ", "-")
    if not target.exists():
        unfinished = folder / f".{target.name}"
        architecture = all_architectures()[name]
        assert not wide or architecture.layout is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _make(architecture, sum(name.encode()), wide)
            kept = unfinished if architecture.layout is None else unfinished / REFERENCE
            model.save_pretrained(kept)
        if architecture.layout is None:
            written = json.loads((unfinished / "config.json").read_text())
        else:
            written = _lay_out(architecture, model, unfinished)
        config = {**written, **architecture.published}
        (unfinished / "config.json").write_text(json.dumps(config))
        tiny_models.add_tokenizer(unfinished)
        unfinished.rename(target)
    return target


def reference_folder(snapshot: Path) -> Path:
    """The model of transformers that computes what a model of `build` does."""
    kept = snapshot / REFERENCE
    return kept if kept.is_dir() else snapshot


def _lay_out(architecture: Architecture, model: Any, folder: Path) -> dict[str, Any]:
    """Stores the weights by their published names; returns what `config.json` has besides."""
    from safetensors.torch import save_file

    assert architecture.layout is not None
    weights = architecture.layout(model.state_dict())
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    module = "configuration_repository"
    code = hub_layouts.config_code(architecture.published["model_type"])
    (folder / f"{module}.py").write_text(code)
    return {"auto_map": {"AutoConfig": f"{module}.RepositoryConfig"}}


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
        if architecture.adjust is not None:
            architecture.adjust(model)
    return model.bfloat16() if wide else model
