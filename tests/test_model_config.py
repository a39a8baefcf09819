"""The checks of a snapshot's files and of its `config.json`, before SGLang is imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.config.server_args import SGLANG_VERSION
from support.process.config_files import HF_CONFIG, Write, refused
from support.process.config_files import snapshot as snapshot
from support.process.config_files import write as write


def test_a_snapshot_that_is_a_file(write: Write, snapshot: Path) -> None:
    refused(
        write(snapshot_dir=json.dumps(str(snapshot / "config.json"))), "is a file, not a directory"
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("has no config.json", "download")),
        ("{", ("cannot read", "config.json")),
        ("[" * 100_000, ("cannot read", "config.json")),
        ("[]", ("not a JSON object",)),
        ('{"architectures": ["A"]}', ("`model_type`", "None")),
        ('{"model_type": 3, "architectures": ["A"]}', ("`model_type`", "3")),
        ('{"model_type": "a"}', ("`architectures`", "None")),
        ('{"model_type": "a", "architectures": []}', ("`architectures`", "[]")),
    ],
)
def test_model_configs(
    write: Write, snapshot: Path, text: str | None, parts: tuple[str, ...]
) -> None:
    (snapshot / "config.json").unlink()
    if text is not None:
        (snapshot / "config.json").write_text(text)
    refused(write(), *parts)


def test_a_model_config_that_could_block(write: Write, snapshot: Path) -> None:
    (snapshot / "config.json").unlink()
    os.mkfifo(snapshot / "config.json")
    refused(write(), "config.json' is not a regular file", "download")


def test_infinity_in_a_model_config(snapshot: Path) -> None:
    config: dict[str, Any] = {**HF_CONFIG, "time_step_limit": [0.0, float("inf")]}
    (snapshot / "config.json").write_text(json.dumps(config))
    assert load_hf_config(snapshot) == config


def test_weights(write: Write, snapshot: Path) -> None:
    weights = snapshot / "model.safetensors"
    weights.rename(snapshot / "adapter_model.safetensors")
    refused(write(), "has no weights", 'load_format = "dummy"')
    load_config(write(after='[driver.options]\nload_format = "dummy"'))
    load_config(write(after='[driver.options]\nload_format = "runai_streamer"'))
    weights.symlink_to(snapshot / "blob-that-was-never-downloaded")
    refused(write(), "has no weights")
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    load_config(write())
    refused(write(after='[driver.options]\nload_format = "safetensors"'), "has no weights")


def test_an_incomplete_download(write: Write, snapshot: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(write(), "lacks 1 of the weight files", "'model-2.safetensors'", "download")
    (snapshot / "model-2.safetensors").write_bytes(b"")
    load_config(write())


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 1}'])
def test_an_unreadable_index_is_left_to_the_loader(
    write: Write, snapshot: Path, index: str
) -> None:
    (snapshot / "model.safetensors.index.json").write_text(index)
    load_config(write())


def test_a_missing_tokenizer(
    write: Write, snapshot: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(write())
    assert not caplog.records
    (snapshot / "tokenizer.json").unlink()
    refused(write(), "no tokenizer", "tokenizer.json or tiktoken.model", "download")
    load_config(write(after='[driver.options]\nload_format = "dummy"'))
    (snapshot / "tiktoken.model").touch()
    load_config(write())


def changed(snapshot: Path, **values: Any) -> None:
    (snapshot / "config.json").write_text(json.dumps({**HF_CONFIG, **values}))


class TestSizes:
    """Numbers in `config.json` that no model has."""

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("head_dim", -16),
            ("head_dim", 2**20),
            ("hidden_size", 0),
            ("hidden_size", "64"),
            ("intermediate_size", -1),
            ("intermediate_size", [64, -64]),
            ("max_position_embeddings", 0),
            ("max_position_embeddings", 2**31),
            ("moe_intermediate_size", 2**40),
            ("num_attention_heads", 0),
            ("num_attention_heads", -4),
            ("num_attention_heads", 4.0),
            ("num_experts", -1),
            ("num_hidden_layers", -1),
            ("num_hidden_layers", 0),
            ("num_hidden_layers", 100_000),
            ("num_hidden_layers", True),
            ("num_hidden_layers", {}),
            ("num_key_value_heads", 0),
            ("num_key_value_heads", 10**4000),
            ("n_layer", -1),
            ("vocab_size", 0),
            ("vocab_size", -1),
            ("vocab_size", 2**40),
        ],
    )
    @pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
    def test_refused(
        self, key: str, value: object, nested: bool, write: Write, snapshot: Path
    ) -> None:
        changed(snapshot, **({"text_config": {key: value}} if nested else {key: value}))
        refused(write(), f"`{key}` = ", "expected an integer from ", f"correct `{key}`")

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (2, 4), (7, 2)])
    @pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
    def test_query_heads_that_kv_heads_do_not_divide(
        self, heads: int, kv_heads: int, nested: bool, write: Write, snapshot: Path
    ) -> None:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        changed(snapshot, **({"text_config": sizes} if nested else sizes))
        named = (f"`num_attention_heads` = {heads} ", f"`num_key_value_heads` = {kv_heads},")
        refused(write(), *named, "does not divide it", "correct `num_key_value_heads`")

    @pytest.mark.parametrize(
        "sizes",
        [
            {"num_attention_heads": 4, "num_key_value_heads": 3, "kv_lora_rank": 8},
            {"head_dim": None, "num_key_value_heads": None},
            {"intermediate_size": [64, 128], "num_experts": 0},
            {"text_config": {"num_hidden_layers": 2}, "num_hidden_layers": -1},
        ],
    )
    def test_taken(self, sizes: dict[str, Any], write: Write, snapshot: Path) -> None:
        changed(snapshot, **sizes)
        load_config(write())

    def test_left_to_sglang_with_overridden_sizes(self, write: Write, snapshot: Path) -> None:
        changed(snapshot, num_hidden_layers=-1)
        options = """json_model_override_args = '{"num_hidden_layers": 2}'"""
        load_config(write(after=f"[driver.options]\n{options}"))


class TestArchitectures:
    """Those that SGLang lacks."""

    @pytest.mark.parametrize(
        ("names", "parts"),
        [
            (["UnheardOfForCausalLM"], ("UnheardOfForCausalLM", "`architectures`", SGLANG_VERSION)),
            (["Qwen3ForCasualLM"], ("did you mean `Qwen3ForCausalLM`",)),
            (["GPTNeoXForCausalLM"], ("has no GPTNeoXForCausalLM",)),
            (["a\nb" * 100], ("has no 'a\\nb",)),
        ],
    )
    def test_refused(
        self, names: list[str], parts: tuple[str, ...], write: Write, snapshot: Path
    ) -> None:
        changed(snapshot, architectures=names)
        refused(write(), *parts)

    def test_one_of_several_is_enough(self, write: Write, snapshot: Path) -> None:
        changed(snapshot, architectures=["UnheardOfForCausalLM", "Qwen3ForCausalLM"])
        load_config(write())

    def test_those_that_sglang_renames(self, write: Write, snapshot: Path) -> None:
        changed(snapshot, model_type="deepseek_vl_v2", architectures=["DeepseekVLV2ForCausalLM"])
        load_config(write())

    @pytest.mark.parametrize(
        "variable", ["SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE"]
    )
    def test_those_that_may_be_added(
        self, variable: str, write: Write, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed(snapshot, architectures=["UnheardOfForCausalLM"])
        monkeypatch.setenv(variable, "ours")
        load_config(write())


class TestContext:
    """More positions than the model has."""

    @pytest.mark.parametrize(
        ("config", "positions", "source"),
        [
            ({}, 2048, "`max_position_embeddings` in"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 5.0}}, 10240, "rope factor 5.0"),
            ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, 8192, "rope factor 4"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048, "in its config.json"),
            (
                {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 512}},
                2048,
                "`max_position_embeddings`",
            ),
            ({"seq_length": 1024}, 1024, "`seq_length`"),
            ({"text_config": {"max_position_embeddings": 4096}}, 4096, "`max_pos"),
        ],
    )
    def test_refused(
        self, config: dict[str, Any], positions: int, source: str, write: Write, snapshot: Path
    ) -> None:
        changed(snapshot, **{"max_position_embeddings": 2048, **config})
        options = f"[driver.options]\ncontext_length = {positions}"
        assert load_config(write(after=options)).driver.options.context_length == positions
        options = f"[driver.options]\ncontext_length = {positions + 1}"
        parts = (f"is {positions + 1}", f"has {positions} positions", source, "at most", "LONGER")
        refused(write(after=options), "`context_length`", *parts)

    @pytest.mark.parametrize("value", ["1", "true", "YES"])
    def test_as_sglang_is_configured(
        self, value: str, write: Write, snapshot: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed(snapshot, max_position_embeddings=2048)
        monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", value)
        load_config(write(after="[driver.options]\ncontext_length = 10000000"))

    def test_a_length_that_only_the_models_class_knows(self, write: Write) -> None:
        load_config(write(after="[driver.options]\ncontext_length = 10000000"))
