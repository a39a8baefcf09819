"""What models need and the driver lacks: known before a load, and the same as what SGLang says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.config import model_features
from pie_driver_sglang.config.model_features import (
    check_features,
    returns_embeddings,
    unserved_media,
)
from pie_driver_sglang.config.server_args import ARCHITECTURES, LISTS, SERVER_ARGS
from pie_driver_sglang.errors import ConfigError, Unsupported
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.sglang_server import server_process
from support.models.architectures import all_architectures
from support.models.tiny_models import POCKET
from support.versions import IS_OLDEST

# Phi-3-small is among those that SGLang computes wrongly.
TRIED = {name: each for name, each in all_architectures().items() if name != "Phi-3-small"}
REFUSED = [
    ({"architectures": ["BertModel"]}, "BertModel is an encoder, and the driver's attention is"),
    ({"architectures": ["HrmTextForCausalLM"]}, "tokens of HrmTextForCausalLM attend to later"),
    ({"architectures": ["SDARForCausalLM"]}, "tokens of SDARForCausalLM attend to later ones"),
    ({"use_bidirectional_attention": True}, "`use_bidirectional_attention` is set"),
    ({"architectures": ["MllamaForConditionalGeneration"]}, "an encoder whose output its decoder"),
    ({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}, "a KV pool for sparse"),
    ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "a KV pool for sparse attention"),
]

WRONG = [
    (
        {"architectures": ["BaichuanForCausalLM"], "hidden_size": 5120},
        "adds a bias by distance (ALiBi)",
    ),
    (
        {
            "architectures": ["Phi3SmallForCausalLM"],
            "blocksparse_block_size": 64,
            "blocksparse_num_local_blocks": 16,
            "max_position_embeddings": 8192,
        },
        "attend to the last 1024 tokens",
    ),
    (
        {
            "architectures": ["Phi3SmallForCausalLM"],
            "dense_attention_every_n_layers": 1,
            "gegelu_limit": 20.0,
        },
        "`gegelu_limit` limits the activations",
    ),
]


def folder(path: Path, without: tuple[str, ...] = (), **config: Any) -> Path:
    """The embedded model's folder with another `config.json`, and without some files."""
    shutil.copytree(POCKET, path, symlinks=False)
    for name in without:
        (path / name).unlink()
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**found, **config}))
    return path


def choose(model: Path, *words: str, **given: Any) -> tuple[Any, str]:
    flags = {"model_path": str(model), "device": "cpu", **given}
    return server_process.choose_scheduler(server_process.split_arguments(words), flags)


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=str)
def test_sglangs_scheduler_serves_what_only_it_can(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = folder(tmp_path / "model", **config)
    plan, reason = choose(model)
    assert plan is None
    assert words in reason
    assert len(reason.splitlines()) == 1
    with pytest.raises(ConfigError, match="our scheduler does not serve"):
        choose(model, "--scheduler", "pie")
    # The engine refuses it in the same words, before anything is loaded.
    with pytest.raises(Unsupported, match=words):
        parse_arguments({"model_path": str(model), "device": "cpu"})


@pytest.mark.parametrize(("config", "words"), WRONG, ids=str)
def test_what_sglang_computes_wrongly_is_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """By either scheduler's choice: SGLang's own would answer, with other tokens."""
    model = folder(tmp_path / "model", **config)
    for flags in ((), ("--scheduler", "pie")):
        with pytest.raises(ConfigError) as refusal:
            choose(model, *flags)
        assert not isinstance(refusal.value, Unsupported)
        assert words in str(refusal.value)
        assert len(str(refusal.value).splitlines()) == 1


def test_contexts_and_widths_that_sglang_computes_right() -> None:
    check_features({"architectures": ["BaichuanForCausalLM"], "hidden_size": 4096}, "auto", "auto")
    small = WRONG[1][0]
    check_features(small, "auto", "auto", context_length=1024)
    check_features({**small, "max_position_embeddings": 512}, "auto", "auto")
    dense = {**small, "dense_attention_every_n_layers": 1}
    check_features(dense, "auto", "auto")


def test_embedding_models_are_ours(tmp_path: Path) -> None:
    reward = folder(tmp_path / "reward", architectures=["Qwen3ForRewardModel"])
    for model, given in ((reward, {}), (POCKET, {"is_embedding": True})):
        plan, reason = choose(model, **given)
        assert plan is not None, reason
        assert plan.returns_embeddings
    plan, _ = choose(POCKET)
    assert plan is not None
    assert not plan.returns_embeddings
    assert model_features.ENCODERS < model_features.NO_TEXT
    assert returns_embeddings({"architectures": ["MistralModel"]}, is_embedding=False)


def test_kv_types_are_of_some_version() -> None:
    known = {name for x in LISTS.values() for name in x.fields["kv_cache_dtype"].choices}
    assert known >= set(model_features.OTHER_KV_TYPES)


@pytest.mark.parametrize(
    "name", sorted({*model_features.OTHER_KV_TYPES} & {*SERVER_ARGS["kv_cache_dtype"].choices})
)
def test_kv_without_a_pool_of_ours(name: str) -> None:
    plan, reason = choose(POCKET, kv_cache_dtype=name)
    assert plan is None
    assert f"`kv_cache_dtype` is '{name}'" in reason


def test_model_code_of_transformers() -> None:
    plan, reason = choose(POCKET, model_impl="transformers")
    assert plan is None
    assert "`model_impl` is 'transformers'" in reason


def test_a_tokenizer_of_another_format(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", without=("tokenizer.json",))
    (model / "tokenizer.model").write_bytes(b"\n")
    plan, reason = choose(model)
    assert plan is None
    assert reason.endswith("is a tokenizer.model, without a tokenizer.json")
    # Without text none is read.
    plan, reason = choose(model, skip_tokenizer_init=True)
    assert plan is not None, reason


def test_a_model_without_a_tokenizer_is_a_mistake(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", without=("tokenizer.json",))
    for words in ((), ("--scheduler", "pie")):
        with pytest.raises(ConfigError, match="no tokenizer in") as refusal:
            choose(model, *words)
        assert not isinstance(refusal.value, Unsupported)


def test_images_of_other_families_are_sglangs(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", architectures=["InternVLChatModel"])
    plan, reason = choose(model)
    assert plan is None
    assert reason == (
        "the driver has no encoder for the images or the audio of "
        "InternVLChatModel; `--scheduler pie` serves its text"
    )
    for words in (("--scheduler", "pie"), ("--option", "max_loaded_loras=64")):
        plan, reason = choose(model, *words)
        assert plan is not None, reason
    # SGLang serves it as a text model, unless a flag says otherwise.
    model = folder(tmp_path / "text", architectures=["Gemma3ForConditionalGeneration"])
    plan, reason = choose(model)
    assert plan is not None, reason
    plan, reason = choose(model, enable_multimodal=True)
    assert plan is None


def test_every_model_with_attention_that_is_not_causal_is_known() -> None:
    """The classes of SGLang's files with such attention: none of them is served as a decoder."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [sglang] = spec.submodule_search_locations or ()
    known = model_features.ENCODERS | model_features.NOT_CAUSAL | model_features.ENCODER_DECODER
    # By their configurations, and embeddings of images.
    known |= {"Gemma3ForCausalLM", "EmbeddingGemmaModel"}
    known |= {"Lfm2ForCausalLM", "Qwen3_5ForConditionalGeneration"}
    known |= {"Qwen3_5MoeForConditionalGeneration", "MuseGlimmerAssistantModel"}
    found = set()
    for path in Path(sglang, "srt", "models").glob("*.py"):
        text = path.read_text()
        if re.search(r"AttentionType\.(ENCODER_ONLY|DECODER_BIDIRECTIONAL)", text):
            entry = text.rpartition("\nEntryClass = ")[2]
            found.update(re.findall(r"\w+", entry.partition("]")[0].partition("\n\n")[0]))
    assert found & ARCHITECTURES
    # Drafts of other models are none of the driver's.
    assert not {name for name in found - known if not re.search("D(Flash|Spark)", name)}


def test_models_with_images_by_config() -> None:
    name = "MiMoV2ForCausalLM"
    assert unserved_media({"architectures": [name]}) is None
    whole = {"architectures": [name], "vision_config": {"a": 1}, "audio_config": {"a": 1}}
    assert unserved_media(whole) is not None
    for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"):
        assert unserved_media({"architectures": [f"{family}ForConditionalGeneration"]}) is None


@pytest.mark.parametrize("name", sorted(TRIED))
def test_no_model_that_was_tried_is_refused(name: str) -> None:
    config = {**TRIED[name].published, "architectures": [TRIED[name].name]}
    check_features(config, "auto", "auto")
    assert unserved_media(config) is None


NEWER_MEDIA = {
    "BailingMM2NativeForConditionalGeneration",
    "BailingMMNativeForConditionalGeneration",
    "BailingMoeV3VLForConditionalGeneration",
    "Cosmos3EdgeForConditionalGeneration",
    "DiffusionGemmaForBlockDiffusion",
    "Dots3NoteForCausalLM",
    "EmbeddingGemma2Model",
    "Glm5NextForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "Qwen4ExpForConditionalGeneration",
}
"""Of SGLang 0.5.23 alone, of those with images or audio."""
NEWER_INDEXED = {
    *("Dots3NoteForCausalLM", "Dots3NoteForCausalLMNextN", "HYV4ForCausalLM"),
    *("HYV4ForCausalLMNextN", "Glm5NextForConditionalGeneration"),
    "Glm5NextForConditionalGenerationNextN",
}
"""The same, of those with attention to the tokens that an indexer chooses."""


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_the_names_are_those_of_sglang() -> None:
    from sglang.srt.configs import model_config as sglang

    media = {*sglang.multimodal_model_archs}
    own = {
        *model_features.NO_TEXT,
        *model_features.ENCODER_DECODER,
        *model_features.OTHER_POOLS,
        *model_features.INDEXED,
        *media,
    }
    unknown = NEWER_MEDIA | NEWER_INDEXED if IS_OLDEST else set()
    names = (ARCHITECTURES | own) - unknown
    assert media == model_features.MEDIA - unknown
    assert {*sglang.MIMO_V2_MULTIMODAL_ARCHS} == model_features.MEDIA_BY_CONFIG
    for name in names:
        generates = sglang.is_generation_model([name])
        assert generates != (name in model_features.NO_TEXT), name
        has_encoder = sglang.is_encoder_decoder_model([name])
        assert has_encoder == (name in model_features.ENCODER_DECODER), name
        indexed = {"architectures": [name], "index_topk": 64}
        assert sglang.is_deepseek_dsa(indexed) == (name in model_features.INDEXED), name
    from transformers import PretrainedConfig

    sparse = {
        name
        for name in names
        if sglang.is_deepseek_v4({"architectures": [name]})
        or sglang.is_minimax_sparse(PretrainedConfig(architectures=[name]))
    }
    assert sparse == {*model_features.OTHER_POOLS} & names
    choices = {*SERVER_ARGS["kv_cache_dtype"].choices}
    gone = set() if IS_OLDEST else {"fp4_e2m1"}
    assert choices == {*model_features.KV_TYPES, *model_features.OTHER_KV_TYPES} - gone


def built(name: str, path: Path) -> Path:
    """A small random model of transformers, with the embedded model's tokenizer."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    if name == "WhisperForConditionalGeneration":
        layers = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 128}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
        config = transformers.WhisperConfig(
            **layers, **heads, **tokens, decoder_start_token_id=1, suppress_tokens=None
        )
    elif name == "BertModel":
        config = transformers.BertConfig(**sizes, num_attention_heads=2)
    else:
        encoder = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        config = transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**sizes, **heads),
            vision_config=transformers.CLIPVisionConfig(**sizes, **encoder),
        )
    getattr(transformers, name)(config).save_pretrained(path)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / each, path)
    return path


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BertModel", "is an encoder, and the driver's attention is causal"),
        ("LlavaForConditionalGeneration", "no encoder for the images"),
        ("WhisperForConditionalGeneration", "has an encoder whose output"),
    ],
)
def test_models_of_transformers_that_only_sglang_serves(
    name: str, words: str, tmp_path: Path
) -> None:
    plan, reason = choose(built(name, tmp_path / "model"))
    assert plan is None
    assert name in reason
    assert words in reason
