"""Further architectures of docs/supported-models.md, as small random models.

Those of the first half have their code on the Hugging Face hub and not in transformers. Another
class of transformers computes the same, with other names for the weights (`hub_layouts.py`).
"""

from __future__ import annotations

from typing import Any, Final

from support.models import hub_layouts
from support.models.architecture import (
    ALL_HEADS,
    EXPERTS,
    LATENT,
    NO_HEAD_DIM,
    PLAIN,
    WINDOW,
    Architecture,
)

# SGLang has rotary positions for this width alone.
_BAICHUAN: Final = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
}


def _round_activations(model: Any) -> None:
    """SGLang has the parameters of xIELU in bfloat16, as published checkpoints do."""
    for name, parameter in model.named_parameters():
        if ".act_fn." in name:
            parameter.data = parameter.data.bfloat16().float()


MORE: Final[dict[str, Architecture]] = {
    "InternLM 2": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
        ),
        hub_layouts.internlm2,
    ),
    "EXAONE 3": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {
                "architectures": ["ExaoneForCausalLM"],
                "model_type": "exaone",
                "num_layers": hub_layouts.LAYERS,
                "activation_function": "silu",
                "layer_norm_epsilon": 1e-6,
            }
        ),
        hub_layouts.exaone,
    ),
    "ChatGLM": Architecture(
        "GlmConfig",
        "GlmForCausalLM",
        {**PLAIN, "attention_bias": True, "rms_norm_eps": 1e-6},
        {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "num_layers": hub_layouts.LAYERS,
            "padded_vocab_size": PLAIN["vocab_size"],
            "hidden_size": PLAIN["hidden_size"],
            "ffn_hidden_size": PLAIN["intermediate_size"],
            "kv_channels": PLAIN["head_dim"],
            "num_attention_heads": PLAIN["num_attention_heads"],
            "multi_query_attention": True,
            "multi_query_group_num": PLAIN["num_key_value_heads"],
            "seq_length": PLAIN["max_position_embeddings"],
            "layernorm_epsilon": 1e-6,
            "add_qkv_bias": True,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "eos_token_id": 2,
        },
        hub_layouts.chatglm,
    ),
    "Qwen": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        # SGLang rounds its vocabulary up to a multiple of 64.
        {**ALL_HEADS, "vocab_size": 320},
        hub_layouts.published(
            {
                "architectures": ["QWenLMHeadModel"],
                "model_type": "qwen",
                "vocab_size": 320,
                "intermediate_size": 2 * PLAIN["intermediate_size"],
                "seq_length": PLAIN["max_position_embeddings"],
                "layer_norm_epsilon": 1e-6,
                "num_key_value_heads": 4,
            }
        ),
        hub_layouts.qwen,
    ),
    "MiniCPM": Architecture(
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            **NO_HEAD_DIM,
            "embedding_multiplier": 12.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": PLAIN["head_dim"] ** -0.5,
        },
        hub_layouts.published(
            {
                "architectures": ["MiniCPMForCausalLM"],
                "model_type": "minicpm",
                "scale_emb": 12.0,
                "scale_depth": hub_layouts.LAYERS**0.5,
                "dim_model_base": PLAIN["hidden_size"] // 2,
            }
        ),
        hub_layouts.renamed(),
    ),
    "XVERSE": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**PLAIN, "num_key_value_heads": 4},
        hub_layouts.published(
            {
                "architectures": ["XverseForCausalLM"],
                "model_type": "xverse",
                "num_key_value_heads": 4,
            }
        ),
        hub_layouts.renamed(),
    ),
    "DeepSeek": Architecture(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **ALL_HEADS,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
        hub_layouts.published(
            {
                "architectures": ["DeepseekForCausalLM"],
                "model_type": "deepseek",
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "norm_topk_prob": False,
            }
        ),
        hub_layouts.deepseek,
        hub_layouts.deepseek_reference,
    ),
    "DBRX": Architecture(
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "vocab_size": 300,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 96,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 64,
            },
        },
        {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "Orion": Architecture(
        "StableLmConfig",
        "StableLmForCausalLM",
        {**NO_HEAD_DIM, "partial_rotary_factor": 1.0, "layer_norm_eps": 1e-6},
        hub_layouts.published({"architectures": ["OrionForCausalLM"], "model_type": "orion"}),
        hub_layouts.renamed(),
    ),
    "Baichuan 2": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        {**PLAIN, **_BAICHUAN},
        hub_layouts.published(
            {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", **_BAICHUAN}
        ),
        hub_layouts.baichuan,
    ),
    "MiMo": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        NO_HEAD_DIM,
        hub_layouts.published({"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}),
        hub_layouts.renamed(),
    ),
    "InternLM 3": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {
                "architectures": ["InternLM3ForCausalLM"],
                "model_type": "internlm3",
                "bias": False,
                "qkv_bias": False,
            }
        ),
        hub_layouts.renamed(),
    ),
    "Apertus": Architecture(
        "ApertusConfig", "ApertusForCausalLM", NO_HEAD_DIM, adjust=_round_activations
    ),
    "GPT-BigCode": Architecture(
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {"vocab_size": 300, "n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    ),
    "Hunyuan": Architecture(
        "HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", PLAIN, {"use_qk_norm": True}
    ),
    "Hunyuan-MoE": Architecture(
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {**PLAIN, "num_experts": 4, "moe_topk": 2},
        {
            "use_qk_norm": True,
            "moe_intermediate_size": 96,
            "use_mixed_mlp_moe": True,
            "num_shared_expert": 1,
        },
    ),
    "ERNIE 4.5-MoE": Architecture(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            **PLAIN,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "LFM2": Architecture(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**NO_HEAD_DIM, "layer_types": ["conv", "full_attention"]},
    ),
    "Ministral 3": Architecture(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {**PLAIN, "sliding_window": None},
    ),
    "MiniMax-M2": Architecture(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    ),
    "GLM-4.7-Flash": Architecture(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": 32},
    ),
    "Granite 4": Architecture(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **NO_HEAD_DIM,
            "num_local_experts": 0,
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.25,
        },
    ),
    "Gemma 4": Architecture(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **PLAIN,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "AFM-MoE": Architecture(
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {
            **PLAIN,
            **EXPERTS,
            "num_dense_layers": 1,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Cohere 2-MoE": Architecture(
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {
            **PLAIN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "Mellum 2": Architecture("MellumConfig", "MellumForCausalLM", {**PLAIN, **EXPERTS}),
    "MiniCPM 3": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {
                "architectures": ["MiniCPM3ForCausalLM"],
                "model_type": "minicpm3",
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
                "scale_emb": 12.0,
                "scale_depth": 1.4,
                "dim_model_base": 32,
            }
        ),
        hub_layouts.renamed(),
    ),
    "XVERSE-MoE": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {
                "architectures": ["XverseMoeForCausalLM"],
                "model_type": "xverse",
                "num_experts": 4,
                "num_shared_experts": 1,
                "moe_top_k": 2,
            }
        ),
        hub_layouts.renamed(),
    ),
    "Grok-1": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {
                "architectures": ["Grok1ModelForCausalLM"],
                "model_type": "grok-1",
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "attn_output_multiplier": 0.1,
                "embedding_multiplier_scale": 8.0,
                "output_multiplier_scale": 0.5,
            }
        ),
        hub_layouts.renamed(),
    ),
    "Phi-3-small": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        PLAIN,
        hub_layouts.published(
            {
                "architectures": ["Phi3SmallForCausalLM"],
                "model_type": "phi3small",
                "hidden_act": "gegelu",
                "gegelu_limit": 20.0,
                "layer_norm_epsilon": 1e-5,
                "rope_embedding_base": 1e6,
                "rope_position_scale": 1.0,
                "mup_use_scaling": True,
                "mup_attn_multiplier": 1.0,
                "mup_embedding_multiplier": 10.0,
                "mup_width_multiplier": 8.0,
                "dense_attention_every_n_layers": 2,
                "blocksparse_block_size": 64,
                "blocksparse_triton_kernel_block_size": 64,
                "blocksparse_homo_head_pattern": False,
                "blocksparse_num_local_blocks": 16,
                "blocksparse_vert_stride": 8,
                "dummy_token_indices": [],
            }
        ),
        hub_layouts.renamed(),
    ),
    "Laguna": Architecture(
        "LagunaConfig",
        "LagunaForCausalLM",
        {**PLAIN, **EXPERTS, "num_attention_heads_per_layer": None},
    ),
}
