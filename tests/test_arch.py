"""Architecture names that a driver reports to the runtime."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.config.arch import (
    TEMPLATE_NAMES,
    arch_name,
    auto_dtype,
    context_length,
    image_token_bytes,
    takes_images,
    vocab_size,
)
from pie_driver_sglang.errors import ConfigError, Unsupported


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "llama3"),
        ("mistral", "mistral3"),
        ("gpt_oss", "gptoss"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3_moe", "qwen3_moe"),
        ("gemma2", "gemma2"),
        ("gemma3_text", "gemma3_text"),
        ("deepseek_v3", "deepseek_v3"),
        ("falcon", "falcon"),
    ],
)
def test_text_models(model_type: str, name: str) -> None:
    assert arch_name({"model_type": model_type}) == name


@pytest.mark.parametrize(
    ("outer", "inner", "name"),
    [
        ("gemma3", "gemma3_text", "gemma3"),
        ("qwen3_vl", "qwen3_vl_text", "qwen3_vl"),
        ("mistral3", "mistral", "mistral3"),
        ("llava", "llama", "llama3"),
        ("qwen2_5_vl", "qwen2", "qwen2"),
        ("idefics", "unknown", "idefics"),
    ],
)
def test_models_with_a_language_model_inside(outer: str, inner: str, name: str) -> None:
    config = {"model_type": outer, "text_config": {"model_type": inner}}
    assert arch_name(config) == name


def test_deeper_nesting() -> None:
    text = {"model_type": "qwen2", "vocab_size": 7}
    config = {"model_type": "omni", "thinker_config": {"text_config": text}}
    assert arch_name(config) == "qwen2"
    assert vocab_size(config) == 7


def test_every_renamed_type_has_a_template() -> None:
    for model_type in ("llama", "mistral", "gpt_oss"):
        assert arch_name({"model_type": model_type}) in TEMPLATE_NAMES


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ""}])
def test_no_model_type(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="model_type") as caught:
        arch_name(config)
    assert caught.value.hint


def test_vocabulary() -> None:
    assert vocab_size({"vocab_size": 151936}) == 151936
    assert vocab_size({"vocab_size": 1, "text_config": {"vocab_size": 262208}}) == 262208
    assert vocab_size({"vocab_size": 5, "text_config": {}}) == 5
    assert vocab_size({"text_config": {}}) is None
    assert vocab_size({"vocab_size": "5"}) is None
    assert vocab_size({"vocab_size": True}) is None


def test_image_tokens() -> None:
    """A Qwen3-VL 8B: four patches of 2 frames, 16 x 16 pixels and 3 colours, and positions."""
    named = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    shape = {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    expected = 4 * (4 * 2 * 16 * 16 * 3 + 2 * 4) + 3 * 4
    for vision in (shape, {}, None, [], {"patch_size": None, "depth": 27}):
        assert image_token_bytes({**named, "vision_config": vision}) == expected
    small = {**shape, "patch_size": 4, "spatial_merge_size": 3}
    expected = 9 * (4 * 2 * 4 * 4 * 3 + 2 * 4) + 3 * 4
    assert image_token_bytes({**named, "vision_config": small}) == expected


def test_only_models_that_the_driver_feeds_take_images() -> None:
    for architecture in ("InternVLChatModel", "Qwen3ForCausalLM"):
        config = {"architectures": [architecture], "vision_config": {"patch_size": 16}}
        assert not takes_images(config)
        assert image_token_bytes(config) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.dictionaries(
        st.sampled_from(["text_config", "model_type", "vocab_size", "llm_config"]), inner
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["text_config", "model_type", "vocab_size"]), JSON))
def test_any_config_has_a_name_or_is_refused(config: dict[str, Any]) -> None:
    size = vocab_size(config)
    assert size is None or size > 0
    try:
        assert arch_name(config)
    except ConfigError:
        assert not isinstance(config.get("model_type"), str) or not config["model_type"]


def test_a_config_that_contains_itself_ends() -> None:
    config: dict[str, Any] = {"model_type": "a"}
    config["text_config"] = config
    assert arch_name(config) == "a"


SCALINGS: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "linear", "factor": 5.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.5}},
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1000,
        }
    },
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1000,
        }
    },
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6}},
    {"seq_length": 700},
    {"max_position_embeddings": 999},
]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_the_context_is_sglangs(model_type: str, scaling: dict[str, Any]) -> None:
    """Whatever a `config.json` says, so no context is refused early that SGLang takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.utils.hf_transformers.common import get_context_length, get_hf_text_config
        from transformers import AutoConfig
    written = {"max_position_embeddings": 4000, **scaling}
    config = AutoConfig.for_model(model_type, **written)
    assert context_length(written) == get_context_length(get_hf_text_config(config))


NESTED = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
GEMMA3 = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
OMNI = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"]}
THINKER = {"model_type": "qwen2_5_omni_thinker"}
DTYPES: list[dict[str, Any]] = [
    *(
        {"model_type": kind, "architectures": [name], **stored}
        for kind, name in (
            ("qwen3", "Qwen3ForCausalLM"),
            ("gemma", "GemmaForCausalLM"),
            ("gemma2", "Gemma2ForCausalLM"),
            ("gemma3_text", "Gemma3ForCausalLM"),
            ("llava", "LlavaLlamaForCausalLM"),
        )
        for stored in (
            {},
            {"dtype": None},
            {"torch_dtype": "float32"},
            {"dtype": "float16"},
            {"dtype": "half"},
            {"torch_dtype": "bfloat16"},
            {"dtype": "bfloat16", "torch_dtype": "float16"},
        )
    ),
    *(
        {**outer, **stored, "text_config": {"model_type": inner, **own}}
        for outer, inner in ((NESTED, "qwen3_vl_text"), (GEMMA3, "gemma3_text"))
        for stored in ({}, {"dtype": "float32"}, {"torch_dtype": "bfloat16"})
        for own in ({}, {"dtype": "float32"}, {"torch_dtype": "float16"})
    ),
    *(
        {**OMNI, **stored, "thinker_config": {**THINKER, **own, "text_config": inner}}
        for stored in ({}, {"dtype": "bfloat16"})
        for own in ({}, {"dtype": "float16"})
        for inner in (
            {"model_type": "qwen2_5_omni_text"},
            {"model_type": "qwen2_5_omni_text", "dtype": "bfloat16"},
        )
    ),
]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("written", DTYPES, ids=str)
def test_the_dtype_is_sglangs(written: dict[str, Any], tmp_path: Path) -> None:
    """Of what `config.json` says, as transformers reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.configs.model_config import _get_and_verify_dtype
        from sglang.srt.utils.hf_transformers.common import get_hf_text_config
        from transformers import AutoConfig
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = get_hf_text_config(AutoConfig.from_pretrained(tmp_path))
    assert f"torch.{auto_dtype(written)}" == str(_get_and_verify_dtype(config, "auto"))


def test_a_quantized_gpt_oss_runs_in_bfloat16() -> None:
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    assert auto_dtype(config) == "float16"
    assert auto_dtype({**config, "quantization_config": {"quant_method": "mxfp4"}}) == "bfloat16"


@pytest.mark.parametrize("stored", ["float64", "auto", "torch.bfloat16", 7, ["bfloat16"]])
def test_a_dtype_that_no_model_runs_in_is_refused(stored: Any) -> None:
    with pytest.raises(Unsupported, match="`dtype` = ") as refusal:
        auto_dtype({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": stored})
    assert "bfloat16" in refusal.value.hint
