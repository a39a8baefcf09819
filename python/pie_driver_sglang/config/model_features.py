"""What a model needs and the driver does not have, by its `config.json` alone.

Driver, engine and servers check it before anything is loaded, so `--scheduler auto` starts SGLang's
scheduler for such a model. `tests/test_model_features.py` compares the names with SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pie_driver_sglang.config.arch import context_length as model_context_length
from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.errors import ConfigError, Unsupported, quoted

#: Architectures that return embeddings, classes or rewards.
NO_TEXT: Final = frozenset(
    {
        "BertForSequenceClassification",
        "BertModel",
        "CLIPModel",
        "Contriever",
        "EmbeddingGemma2Model",
        "Gemma2ForSequenceClassification",
        "InternLM2ForRewardModel",
        "Lfm2BidirectionalModel",
        "LlamaEmbeddingModel",
        "LlamaForSequenceClassification",
        "LlamaForSequenceClassificationWithNormal_Weights",
        "MistralModel",
        "Qwen2ForRewardModel",
        "Qwen2ForSequenceClassification",
        "Qwen3ForRewardModel",
        "Qwen3ForSequenceClassification",
        "Qwen3Model",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaModel",
    }
)
#: Of these, the ones whose attention is not causal.
ENCODERS: Final = frozenset(
    {
        "BertForSequenceClassification",
        "BertModel",
        "CLIPModel",
        "Contriever",
        "Lfm2BidirectionalModel",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaModel",
    }
)
#: Architectures whose tokens attend to later ones: diffusion, embeddings, prompts as one block.
NOT_CAUSAL: Final = frozenset(
    {
        "DiffusionGemmaForBlockDiffusion",
        "EmbeddingGemma2Model",
        "HrmTextForCausalLM",
        "LLaDA2MoeModelLM",
        "SDARForCausalLM",
        "SDARMoeForCausalLM",
    }
)
#: Architectures whose decoder attends to an encoder's output.
ENCODER_DECODER: Final = frozenset(
    {
        "MllamaForConditionalGeneration",
        "MossVLForConditionalGeneration",
        "WhisperForConditionalGeneration",
    }
)
#: Architectures with KV pools of their own.
OTHER_POOLS: Final = frozenset(
    {
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForCausalLMDSpark",
        "DeepseekV4ForCausalLMNextN",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
    }
)
#: Architectures that have an index of keys next to the KV pool if `index_topk` is set (DSA).
INDEXED: Final = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForCausalLMNextN",
        "Dots3NoteForCausalLM",
        "Dots3NoteForCausalLMNextN",
        "Glm5NextForConditionalGeneration",
        "Glm5NextForConditionalGenerationNextN",
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaForCausalLMNextN",
        "HYV4ForCausalLM",
        "HYV4ForCausalLMNextN",
        "LongcatFlashForCausalLM",
        "LongcatFlashForCausalLMNextN",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
    }
)
#: Types of KV whose pools the driver has.
KV_TYPES: Final = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
#: Types of KV that SGLang has besides.
OTHER_KV_TYPES: Final = ("fp4_e2m1", "fp4_mx_block16", "mxfp8", "nvfp4")
#: Architectures that SGLang gives images or audio.
MEDIA: Final = frozenset(
    {
        "BailingMM2NativeForConditionalGeneration",
        "BailingMMNativeForConditionalGeneration",
        "BailingMoeV3VLForConditionalGeneration",
        "CLIPModel",
        "Cohere2VisionForConditionalGeneration",
        "Cosmos3EdgeForConditionalGeneration",
        "DeepseekOCRForCausalLM",
        "DeepseekVL2ForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        "Dots3NoteForCausalLM",
        "DotsOCRForCausalLM",
        "DotsVLMForCausalLM",
        "EmbeddingGemma2Model",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Glm5NextForConditionalGeneration",
        "GlmAsrForConditionalGeneration",
        "GlmImageForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "Grok1AForCausalLM",
        "Grok1VForCausalLM",
        "InternS1ForConditionalGeneration",
        "InternS1ProForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "InternVLChatModel",
        "JetVLMForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "LightOnOCRForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaLlamaForCausalLM",
        "LlavaMistralForCausalLM",
        "LlavaQwenForCausalLM",
        "LlavaVidForCausalLM",
        "LocateAnythingForConditionalGeneration",
        "MiDashengLMModel",
        "MiMoV2ASRForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniCPMO",
        "MiniCPMV",
        "MiniMaxM3SparseForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "MossVLForConditionalGeneration",
        "MultiModalityCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "MuseSparkForConditionalGeneration",
        "NVILAForConditionalGeneration",
        "NVILALiteForConditionalGeneration",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "POINTSV15ChatModel",
        "PaddleOCRVLForConditionalGeneration",
        "Phi4MMForCausalLM",
        "PixtralForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ASRForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "Sarashina2VisionForCausalLM",
        "Step3VLForConditionalGeneration",
        "Step3p7ForConditionalGeneration",
        "StepVLForConditionalGeneration",
        "UnlimitedOCRForCausalLM",
        "VoxtralForConditionalGeneration",
        "WhisperForConditionalGeneration",
    }
)
#: Of these, the ones that are text models unless `--enable-multimodal` is set.
TEXT_BY_DEFAULT: Final = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "InklingForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Step3VLForConditionalGeneration",
    }
)
#: The ones that are text models unless `config.json` has encoders of images and audio.
MEDIA_BY_CONFIG: Final = frozenset({"MiMoV2ForCausalLM"})
#: Baichuan's size with rotary positions, as SGLang tells it from those with ALiBi.
_BAICHUAN_ROTARY: Final = 4096
_DENSE: Final = "dense_attention_every_n_layers"
_CAUSAL_MODEL: Final = "use an embedding model with causal attention, as Qwen3-Embedding"


def returns_embeddings(hf_config: Mapping[str, Any], *, is_embedding: bool) -> bool:
    """Whether a model returns embeddings, classes or rewards, and no text.

    Args:
        hf_config: The model's `config.json`.
        is_embedding: As the option.
    """
    return is_embedding or not NO_TEXT.isdisjoint(hf_config.get("architectures") or ())


def check_features(
    hf_config: Mapping[str, Any],
    kv_cache_dtype: str,
    model_impl: str,
    context_length: int | None = None,
) -> None:
    """Reject a model, or settings of it, for which the driver lacks a feature.

    Args:
        hf_config: The model's `config.json`.
        kv_cache_dtype: As the option.
        model_impl: SGLang's setting.
        context_length: As the option; None for the model's.

    Raises:
        Unsupported: The driver lacks a feature that SGLang's scheduler has.
        ConfigError: SGLang computes the model wrongly, whichever scheduler runs it.
    """
    _check_attention(hf_config, context_length or model_context_length(hf_config))
    names = hf_config.get("architectures") or ()
    if found := ENCODERS.intersection(names):
        raise Unsupported(
            f"{min(found)} is an encoder, and the driver's attention is causal", _CAUSAL_MODEL
        )
    if found := NOT_CAUSAL.intersection(names):
        raise Unsupported(
            f"tokens of {min(found)} attend to later ones, and the driver's attention is causal",
            "use a model with causal attention",
        )
    if hf_config.get("use_bidirectional_attention"):
        raise Unsupported(
            "`use_bidirectional_attention` is set, and the driver's attention is causal",
            _CAUSAL_MODEL,
        )
    if found := ENCODER_DECODER.intersection(names):
        raise Unsupported(
            f"{min(found)} has an encoder whose output its decoder attends to, for which the "
            "runtime has no pages",
            "use a decoder-only language model",
        )
    indexed = INDEXED.intersection(names) if hf_config.get("index_topk") is not None else ()
    if found := OTHER_POOLS.intersection(names).union(indexed):
        raise Unsupported(
            f"{min(found)} needs a KV pool for sparse attention, which the driver does not support",
            "use a model with one pool of keys and values",
        )
    if str(model_impl).lower() == "transformers":
        raise Unsupported(
            f"`model_impl` is {quoted(model_impl)}: the driver runs SGLang's own classes of models",
            "remove `model_impl`",
        )
    if kv_cache_dtype in OTHER_KV_TYPES:
        raise Unsupported(
            f"`kv_cache_dtype` is {quoted(kv_cache_dtype)}, for which the driver has no KV pool",
            f"set one of {', '.join(KV_TYPES)}",
        )


def _check_attention(hf_config: Mapping[str, Any], context: int) -> None:
    """Reject models that SGLang's classes compute with other attention or activations."""
    names = hf_config.get("architectures") or ()
    if "BaichuanForCausalLM" in names and hf_config.get("hidden_size") != _BAICHUAN_ROTARY:
        raise ConfigError(
            "the attention of this BaichuanForCausalLM adds a bias by distance (ALiBi), which "
            "SGLang ignores",
            "use Baichuan 2 with 7B, which has rotary positions, or another model",
        )
    if "Phi3SmallForCausalLM" not in names:
        return
    if hf_config.get("gegelu_limit") is not None:
        raise ConfigError(
            "`gegelu_limit` limits the activations of this Phi3SmallForCausalLM, which SGLang "
            "ignores",
            "use another model",
        )
    if hf_config.get(_DENSE) == 1:
        return
    size, blocks = (
        value if isinstance(value := hf_config.get(key), int) else 0
        for key in ("blocksparse_block_size", "blocksparse_num_local_blocks")
    )
    # Sparse layers see all of a context that has no more blocks than this.
    if 0 < size * blocks < context:
        raise ConfigError(
            f"some layers of Phi3SmallForCausalLM attend to the last {size * blocks} tokens, and "
            f"to a part of the others in a context of {context}, which SGLang ignores",
            f"set `context_length` to {size * blocks} or less, or use another model",
        )


def unserved_media(hf_config: Mapping[str, Any]) -> str | None:
    """Why images or audio of a model are not served; None if it is a text model, or they are."""
    names = hf_config.get("architectures") or ()
    found = MEDIA.intersection(names) - TEXT_BY_DEFAULT - ENCODER_DECODER
    if MEDIA_BY_CONFIG.intersection(names) and not all(
        hf_config.get(key) for key in ("vision_config", "audio_config")
    ):
        found -= MEDIA_BY_CONFIG
    if not found or takes_images(hf_config):
        return None
    return f"the driver has no encoder for the images or the audio of {min(found)}"
