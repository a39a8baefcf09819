"""`[driver.options]`: the driver's keys, SGLang's fields, and refusals."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.config.option_checks import (
    CAPACITY_NAMES,
    OWNERS,
    TYPES,
    parse_options,
    valid_names,
)
from pie_driver_sglang.config.options import OPTIONS, DriverOptions, Option
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError

GPU = "cuda:0"
#: What else must be set for an option to be at its limit.
#: Options that do nothing unless they are set.
NOTHING: Final = ("trace_file", "metrics_port", "metrics_file", "active_file", "control_socket")
COMPANIONS: dict[tuple[str, float], dict[str, Any]] = {
    ("max_loaded_loras", 1): {"max_loras_per_batch": 1},
    ("max_loras_per_batch", 4096): {"max_loaded_loras": 4096},
    ("spec_ngram_min_n", 255): {"spec_ngram_max_depth": 255},
}


def refused(table: dict[str, Any], *parts: str, device: str = GPU) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(table, device)
    error = caught.value
    assert error.hint
    for part in parts:
        assert part in f"{error} {error.hint}"


def test_the_documented_defaults() -> None:
    assert parse_options({}, GPU) == DriverOptions(
        attention_backend="triton",
        paged_decode=None,
        mem_fraction_static=None,
        disable_radix_cache=True,
        disable_cuda_graph=False,
        cuda_graph_max_bs=None,
        fuse_layers=True,
        tune_gemms=False,
        chunked_prefill_size=None,
        kv_cache_dtype="auto",
        trust_remote_code=True,
        context_length=None,
        cpu_mem_budget_in_gb=0,
        max_image_tokens=1024,
        max_input_embeds_bytes=0,
        spec_ngram_enabled=False,
        spec_ngram_num_drafts=4,
        spec_ngram_max_depth=18,
        spec_ngram_min_n=1,
        spec_ngram_max_n=None,
        spec_ngram_capacity=1_000_000,
        spec_suffix_enabled=False,
        spec_suffix_num_drafts=16,
        spec_suffix_max_spec_factor=4.0,
        spec_suffix_min_token_prob=0.1,
        page_size=16,
        enable_lora=False,
        max_lora_rank=64,
        lora_target_modules=("all",),
        max_loras_per_batch=8,
        max_loaded_loras=32,
        lora_backend="triton",
        trace_file=None,
        server_args={},
    )


def test_writing_the_defaults_changes_nothing() -> None:
    table = {
        "disable_radix_cache": True,
        "disable_cuda_graph": False,
        "kv_cache_dtype": "auto",
        "trust_remote_code": True,
        "cpu_mem_budget_in_gb": 0,
        "max_image_tokens": 1024,
        "spec_ngram_enabled": False,
        "spec_ngram_num_drafts": 4,
        "spec_ngram_max_depth": 18,
        "spec_ngram_capacity": 1_000_000,
    }
    assert parse_options(table, GPU) == parse_options({}, GPU)


def test_every_field_has_a_key_and_every_owner_a_sentence() -> None:
    assert set(OPTIONS) == set(DriverOptions.__struct_fields__) - {"paged_decode", "server_args"}
    owners = {field.owner for field in SERVER_ARGS.values()} - {None, "key"}
    assert owners == set(OWNERS)
    keys = {name for name, field in SERVER_ARGS.items() if field.owner == "key"}
    assert keys == OPTIONS.keys() & SERVER_ARGS.keys()
    for name in keys:
        assert OPTIONS[name].type == SERVER_ARGS[name].type
    types = {part for field in SERVER_ARGS.values() for part in field.type.split(" | ")}
    assert types <= {*TYPES, "any"}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_definition_is_whole(option: Option) -> None:
    about = option.about
    assert about.text.endswith(".")
    assert about.sglang in {"", *SERVER_ARGS}
    # What None stands for must be said, unless it is that nothing is done.
    assert option.default is not None or about.default or option.name in NOTHING
    if option.type in ("int", "float"):
        assert about.limits is not None
        low, high = about.limits
        assert option.default is None or low <= option.default <= high
        for limit in about.limits:
            parse_options({option.name: limit, **COMPANIONS.get((option.name, limit), {})}, GPU)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"log_format": "xml"}, ("log_format", "'xml'", "text, json")),
        ({"metrics_port": 0}, ("metrics_port", "1 to 65535")),
        ({"metrics_file": ""}, ("metrics_file", "names nothing")),
        ({"log_interval_s": -1}, ("log_interval_s", "0 to 86400")),
        ({"trace_max_mib": 0}, ("trace_max_mib", "1 to 1048576")),
        ({"nvtx": True}, ("nvtx", "no CUDA device")),
    ],
)
def test_options_of_logs_and_traces_are_checked(
    table: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(table, "cpu")
    assert all(word in f"{caught.value} {caught.value.hint}" for word in words), caught.value
    assert parse_options({"nvtx": True}, GPU).nvtx


def test_attention_backend_may_name_those_of_prefill_and_decode() -> None:
    options = parse_options({"attention_backend": "flashinfer, triton"}, GPU)
    assert options.attention_backend == "triton"
    assert options.server_args == {
        "prefill_attention_backend": "flashinfer",
        "decode_attention_backend": "triton",
    }
    refused({"attention_backend": "fa3,"}, "names nothing")
    refused(
        {"attention_backend": "fa3,triton", "prefill_attention_backend": "fa3"},
        "remove `prefill_attention_backend`",
    )
    refused({"attention_backend": "torch_native,triton"}, "does not run on the CPU", device="cpu")


@pytest.mark.parametrize(
    ("table", "base", "passed"),
    [
        ({"attention_backend": "pie"}, "triton", {}),
        ({"attention_backend": "fa3, pie"}, "fa3", {"prefill_attention_backend": "fa3"}),
        ({"decode_attention_backend": "pie"}, "triton", {}),
        ({"attention_backend": "pie", "decode_attention_backend": "pie"}, "triton", {}),
        (
            {"attention_backend": "pie", "prefill_attention_backend": "fa3"},
            "fa3",
            {"prefill_attention_backend": "fa3"},
        ),
        (
            {"attention_backend": "flashinfer", "decode_attention_backend": "pie"},
            "flashinfer",
            {},
        ),
    ],
    ids=str,
)
def test_the_drivers_own_attention_backend_decodes(
    table: dict[str, Any], base: str, passed: dict[str, str]
) -> None:
    """SGLang hears of its own backends only."""
    options = parse_options({**table, "trace_file": "pie"}, GPU)
    assert (options.paged_decode, options.attention_backend) == (True, base)
    assert options.server_args == passed
    assert options.trace_file == "pie"
    refused(table, "'pie' does not run on the CPU", "torch_native", device="cpu")


@pytest.mark.parametrize(
    "table",
    [
        {"attention_backend": "pie,triton"},
        {"attention_backend": "pie,pie"},
        {"prefill_attention_backend": "pie"},
        {"attention_backend": "pie", "decode_attention_backend": "triton"},
    ],
    ids=str,
)
def test_the_drivers_own_attention_backend_does_not_prefill(table: dict[str, Any]) -> None:
    refused(table, "decodes only", '"triton,pie"')


@pytest.mark.parametrize(
    ("table", "device", "paged"),
    [
        ({}, GPU, None),
        ({"page_size": 64}, GPU, None),
        ({"attention_backend": "triton"}, GPU, False),
        ({"prefill_attention_backend": "fa3"}, GPU, False),
        ({"decode_attention_backend": "triton"}, GPU, False),
        ({}, "cpu", False),
    ],
    ids=str,
)
def test_the_backend_is_chosen_only_if_none_is_named(
    table: dict[str, Any], device: str, paged: bool | None
) -> None:
    assert parse_options(table, device).paged_decode is paged


def test_the_cpu_has_its_own_attention_backend() -> None:
    assert parse_options({}, "cpu").attention_backend == "torch_native"
    refused(
        {"attention_backend": "triton"}, "does not run on the CPU", "torch_native", device="cpu"
    )
    refused({"decode_attention_backend": "fa3"}, "decode_attention_backend", device="cpu")


def test_adapters() -> None:
    options = parse_options({"enable_lora": True, "max_lora_chunk_size": 32}, GPU)
    assert (options.enable_lora, options.lora_backend) == (True, "triton")
    assert options.server_args == {"max_lora_chunk_size": 32}
    assert parse_options({"enable_lora": True}, "cpu").lora_backend == "torch_native"
    assert parse_options({"lora_backend": "csgmv"}, GPU).lora_backend == "csgmv"
    refused({"lora_backend": "triton"}, "`torch_native`", device="cpu")
    refused({"lora_backend": "pie"}, "`torch_native`", device="cpu")
    refused({"lora_backend": "torch_native"}, "`triton`, `csgmv` or `pie`")
    fused = parse_options({"enable_lora": True, "lora_backend": "pie"}, GPU)
    assert fused.lora_backend == "pie"
    refused({"lora_root": "adapters"}, "absolute path")
    refused({"lora_root": "/nothing/here"}, "absolute path")
    assert parse_options({"lora_root": "/"}, GPU).lora_root == "/"
    refused({"lora_backend": "punica"}, "SGLang does not know", "csgmv")
    for targets in ([], ["q"], ["all", "q_proj"], [""]):
        refused({"lora_target_modules": targets}, "lora_target_modules", "q_proj", '["all"]')
    targets = ["q_proj", "lm_head"]
    assert parse_options({"lora_target_modules": targets}, GPU).lora_target_modules == targets
    refused({"max_loaded_loras": 7}, "less than `max_loras_per_batch`, which is 8")
    refused({"max_loras_per_batch": 33}, "set `max_loaded_loras` to at least 33")
    assert parse_options({"max_loaded_loras": 8}, GPU).max_loaded_loras == 8


def test_the_batch_limit_follows_the_graphs() -> None:
    assert parse_options({}, GPU).max_forward_requests == 256
    assert parse_options({"cuda_graph_max_bs": 64}, GPU).max_forward_requests == 64


def test_whole_numbers_are_numbers() -> None:
    refused({"mem_fraction_static": 1}, "outside 0.01 to 0.99")
    assert parse_options({"forward_hooks": [{"a": 1}]}, GPU).server_args == {
        "forward_hooks": [{"a": 1}]
    }


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("mem_fraction_static", 0.0, ("0.0", "0.01 to 0.99")),
        ("mem_fraction_static", float("nan"), ("nan",)),
        ("mem_fraction_static", "0.5", ("'0.5'", "a number")),
        ("page_size", 0, ("0", "1 to 1024")),
        ("page_size", 2048, ("2048", "1 to 1024")),
        ("page_size", True, ("True", "an integer")),
        pytest.param("page_size", 1 << 100_000, ("4300 digits", "1 to 1024"), id="huge"),
        ("cuda_graph_max_bs", -1, ("1 to 4096",)),
        ("chunked_prefill_size", 0, ("at least 1",)),
        ("chunked_prefill_size", -2, ("-2",)),
        ("context_length", 0, ("context_length",)),
        ("cpu_mem_budget_in_gb", -1, ("-1",)),
        ("cpu_mem_budget_in_gb", 0.5, ("an integer",)),
        ("max_image_tokens", 2**17 + 1, ("0 to 131072",)),
        ("disable_cuda_graph", 1, ("true or false",)),
        ("trust_remote_code", "yes", ("true or false",)),
        ("spec_ngram_num_drafts", 0, ("1 to 64",)),
        ("spec_ngram_max_depth", "18", ("an integer",)),
        ("spec_ngram_max_depth", 256, ("1 to 255",)),
        ("spec_ngram_capacity", -1, ("spec_ngram_capacity",)),
        ("spec_ngram_enabled", 0, ("true or false",)),
        ("spec_suffix_num_drafts", 65, ("1 to 64",)),
        ("spec_suffix_max_spec_factor", 0, ("0.01 to 64",)),
        ("spec_suffix_min_token_prob", 1.5, ("0.0 to 1.0",)),
        ("kv_cache_dtype", "fp8", ("'fp8'", "did you mean `fp8_e4m3` or `fp8_e5m2`?", "mxfp8")),
        ("attention_backend", "", ("names nothing",)),
        ("trace_file", "a\0b", ("names nothing",)),
        ("attention_backend", ["triton"], ("a string",)),
        ("quantization", 8, ("8", "a string")),
        ("quantization", "", ("names nothing",)),
        ("model_impl", 1, ("a string",)),
        ("cuda_graph_bs_decode", [1, "2"], ("an array of integers",)),
        ("cuda_graph_bs_decode", 8, ("an array of integers",)),
        ("modelopt_quant", 1, ("a string or a table",)),
        ("bf16_gemm_backend", "torhc", ("SGLang does not know", "`torch`")),
        ("enable_torch_compile", "true", ("true or false",)),
    ],
)
def test_wrong_values(name: str, value: Any, parts: tuple[str, ...]) -> None:
    refused({name: value}, f"`{name}`", *parts)


def test_settings_of_speculation() -> None:
    table = {"spec_ngram_num_drafts": 8, "spec_ngram_min_n": 2, "spec_ngram_max_n": 2}
    options = parse_options({**table, "spec_ngram_enabled": True}, GPU)
    assert options.spec_ngram_enabled
    assert {name: getattr(options, name) for name in table} == table
    assert options.drafts == "ngram"
    assert parse_options({}, GPU).drafts == "off"
    assert parse_options({**table, "spec_suffix_enabled": True}, GPU).drafts == "suffix"


def test_suffix_decoding_that_never_drafts() -> None:
    table = {"spec_suffix_enabled": True, "spec_ngram_max_depth": 3}
    factor = {"spec_suffix_max_spec_factor": 0.33}
    refused({**table, **factor}, "`spec_suffix_max_spec_factor` is 0.33", "at most 3 tokens")
    assert parse_options({**table, "spec_suffix_max_spec_factor": 0.34}, GPU).drafts == "suffix"
    # It is of no meaning to n-grams.
    assert parse_options(factor | {"spec_ngram_max_depth": 3}, GPU).drafts == "off"


@pytest.mark.parametrize("longest", ["spec_ngram_max_n", "spec_ngram_max_depth"])
def test_matches_that_cannot_be(longest: str) -> None:
    refused({"spec_ngram_min_n": 5, longest: 4}, "`spec_ngram_min_n` is 5", "longer than 4")


def test_a_radix_cache_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    assert not parse_options({"disable_radix_cache": False}, GPU).disable_radix_cache
    assert "no effect" in caplog.text


def test_the_interpreter_is_not_ours() -> None:
    assert parse_options({"venv": "/x", "python": "/y"}, GPU) == parse_options({}, GPU)


def test_fields_pass_through_by_name() -> None:
    table = {
        "quantization": "fp8",
        "load_format": "dummy",
        "enable_tf32_matmul": True,
        "cuda_graph_bs_decode": [1, 2, 4],
        "modelopt_quant": {"a": 1},
        "enable_deterministic_inference": True,
    }
    assert parse_options(table, GPU).server_args == table


@pytest.mark.parametrize("variable", ["SGLANG_PLUGINS", "SGLANG_PLATFORM"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_plugin_may_add_choices(
    variable: str,
    device: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "ours")
    options = parse_options({"quantization": "fp9", "attention_backend": "tritn"}, device)
    assert options.server_args == {"quantization": "fp9"}
    assert options.attention_backend == "tritn"
    assert "did you mean `triton`" in caplog.text
    assert "`fp8`" in caplog.text


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    "name", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]
)
def test_an_unknown_attention_backend(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    refused({name: "flashfoo"}, f"`{name}`", "'flashfoo'", "SGLANG_PLUGINS", device=device)
    refused({name: "tritn"}, "did you mean `triton`?", "flashinfer", device=device)
    refused({"attention_backend": "triton,flashinfr"}, "did you mean `flashinfer`")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model_path", ("snapshot", "hf_repo")),
        ("device", ("set `device` under [model.driver]",)),
        ("dtype", ("`activation_dtype`",)),
        ("random_seed", ("`random_seed` under [model.driver]",)),
        ("tp_size", ("over its devices", "`tensor_parallel_size`")),
        ("pp_size", ("over its devices", "`tensor_parallel_size`")),
        ("dp_size", ("over its devices", "`tensor_parallel_size`")),
        ("nnodes", ("over its devices", "`tensor_parallel_size`")),
        ("node_rank", ("over its devices", "`tensor_parallel_size`")),
        ("nccl_port", ("over its devices", "`tensor_parallel_size`")),
        ("dist_init_addr", ("over its devices", "`tensor_parallel_size`")),
        ("host", ("the runtime serves",)),
        ("port", ("the runtime serves",)),
        ("api_key", ("the runtime serves",)),
        ("served_model_name", ("the runtime serves",)),
        ("tokenizer_path", ("tokenizes",)),
        ("tokenizer_mode", ("tokenizes",)),
        ("skip_tokenizer_init", ("remove",)),
        ("max_running_requests", ("computes its capacity",)),
        ("max_total_tokens", ("computes its capacity",)),
        ("speculative_algorithm", ("speculation",)),
        ("disaggregation_mode", ("prefill and decode",)),
        ("lora_paths", ("adapters", "`enable_lora = true`")),
        ("enable_lora_overlap_loading", ("adapters",)),
        ("lora_strict_loading", ("adapters",)),
        ("radix_eviction_policy", ("prefixes",)),
        ("enable_hierarchical_cache", ("prefixes",)),
        ("schedule_policy", ("schedules",)),
        ("max_prefill_tokens", ("schedules",)),
        ("log_level_http", ("`log_level`",)),
        ("enable_metrics", ("metrics", "`metrics_port`")),
        ("cuda_graph_max_bs_decode", ("`cuda_graph_max_bs`",)),
        ("sampling_backend", ("each request sets its own sampling",)),
        ("offload_group_size", ("`cpu_offload_gb` only",)),
        ("disable_cuda_graph_padding", ("captures its CUDA graphs", "`cuda_graph_bs_decode`")),
        ("disable_prefill_cuda_graph", ("`disable_cuda_graph`",)),
    ],
)
def test_fields_of_the_driver_are_refused(name: str, parts: tuple[str, ...]) -> None:
    refused({name: 1}, f"option `{name}` cannot be set", *parts)


@pytest.mark.parametrize("name", sorted(CAPACITY_NAMES))
def test_the_capacity_is_not_an_option(name: str) -> None:
    refused({name: 1}, name, "computes its capacity", "mem_fraction_static")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("atention_backend", ("`attention_backend`",)),
        ("attention-backend", ("`attention_backend`",)),
        ("QUANTIZATION", ("`quantization`",)),
        ("quantisation", ("`quantization`",)),
        ("pagesize", ("`page_size`",)),
        ("mem_fraction", ("did you mean `mem_fraction_static`?",)),
        ("gpu_memory_utilization", ("`mem_fraction_static`",)),
        ("enforce_eager", ("`disable_cuda_graph`",)),
        ("max_model_len", ("`context_length`",)),
        ("activation_dtype", ("belongs under [model.driver]",)),
        ("zzzzzz", ("valid options of the driver", "page_size")),
        ("", ("valid options of the driver",)),
    ],
)
def test_unknown_options(name: str, parts: tuple[str, ...]) -> None:
    refused({name: 1}, "unknown option", *parts)


def test_the_valid_names() -> None:
    names = valid_names()
    assert list(names) == sorted(set(names))
    assert {"page_size", "quantization", "load_format", "trace_file"} <= set(names)
    assert not {"model_path", "venv", *CAPACITY_NAMES} & set(names)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    table=st.dictionaries(st.sampled_from([*SERVER_ARGS, *OPTIONS]) | st.text(), ANY, max_size=4),
    device=st.sampled_from(["cpu", GPU]),
)
def test_any_table_is_accepted_or_refused(table: dict[str, Any], device: str) -> None:
    try:
        options = parse_options(table, device)
    except ConfigError as error:
        assert error.hint
        assert len(str(error)) < 1000
    else:
        assert set(table) <= {*valid_names(), "venv", "python"}
        assert not options.spec_ngram_enabled
        assert 0 <= options.cpu_mem_budget_in_gb <= 2**20
