"""Which scheduler serves which flags of SGLang's server, without a server."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.cli import serve
from pie_driver_sglang.config.flag_names import flag_of
from pie_driver_sglang.config.no_effect import NO_EFFECT
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_FLAGS, SGLANG_VERSION
from pie_driver_sglang.errors import ConfigError, Unsupported
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.sglang_server import served_flags, server_process
from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from support import REPOSITORY
from support.models.tiny_models import POCKET


def choose(*words: str, **given: Any) -> tuple[Any, str]:
    own = server_process.split_arguments(words)
    return server_process.choose_scheduler(
        own, {"model_path": str(POCKET), "device": "cpu", **given}
    )


def test_every_flag_of_sglang_is_served_or_has_a_reason() -> None:
    for name in SERVER_ARGS:
        reason = served_flags.unserved_flag({name: "x"})
        if reason is not None:
            flag, _, why = reason.partition(": ")
            assert flag == (flag_of(name) or name)
            assert why
            assert why != "it is not supported", name
        else:
            assert SERVER_ARGS[name].owner not in (
                "parallel",
                "media",
                "disaggregation",
            ) or name in (
                "allowed_media_domains",
                "disable_fast_image_processor",
                "dp_size",
                "image_processor_backend",
                "limit_mm_data_per_request",
                "load_balance_method",
                "media_url_max_file_size_mb",
                "mm_io_worker_num",
                "mm_preprocess_cache_size_mb",
                "mm_process_config",
                "mm_processor_worker_num",
                "tp_size",
                "trust_mm_content_hashes",
                *NO_EFFECT,
            )


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--ep-size", "2"], True),
        (["--disable-prefill-cuda-graph"], False),
        (["--cuda-graph-backend-prefill", "full"], False),
    ],
)
@pytest.mark.parametrize("on_cpu", [False, True])
def test_sglangs_scheduler_captures_no_prefill_graphs_on_a_cpu(
    words: list[str], added: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is free it would, and fail; what a flag selects is SGLang's to refuse."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    # It adds the plugin of the prefix index.
    monkeypatch.setenv("SGLANG_PLUGINS", "")
    parsed: list[list[str]] = []
    monkeypatch.setattr(http_launch, "parse_flags", lambda line, *_: parsed.append(line))
    own = server_process.split_arguments(["--model-path", str(POCKET), *words])
    given = http_launch.given_flags(own.sglang)
    server_process._sglang_scheduler(own, given, "a reason", on_cpu=on_cpu)
    [line] = parsed
    count = (on_cpu and added) + words.count("--disable-prefill-cuda-graph")
    assert line.count("--disable-prefill-cuda-graph") == count


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("offload_group_size", 4, "`--cpu-offload-gb` only"),
        ("disable_cuda_graph_padding", True, "captures its CUDA graphs itself"),
        ("enable_hierarchical_cache", True, "its own prefix index"),
        ("enable_lora_overlap_loading", True, "adapters"),
        ("enable_return_routed_experts", True, "does not return them"),
        ("ep_size", 2, "--tp-size"),
        ("dllm_algorithm", "LowConfidence", "causal attention"),
        ("device", "xpu", "expected `cuda` or `cpu`"),
        ("attention_backend", "intel_amx", "does not run on the CPU"),
        ("lora_backend", "csgmv", "not for cpu"),
        ("mm_feature_transport", "cuda_ipc", "through host memory"),
        ("nnodes", 2, "--tp-size"),
        ("numa_node", [0], "under `numactl"),
        ("prefill_max_requests", 4, "set `chunked_prefill_size` or `max_prefill_tokens`"),
        ("enable_nccl_nvls", True, "multicast"),
        ("enable_symm_mem", True, "symmetric memory"),
        ("disaggregation_mode", "prefill", "one driver"),
        ("speculative_algorithm", "EAGLE", "without `speculative_draft_model_path`"),
        ("decoupled_spec_role", "verifier", "the driver drafts by"),
        ("decoupled_spec_bind_endpoint", "tcp://h:1", "the driver drafts by"),
        ("decoupled_spec_connect_endpoints", ["tcp://h:1"], "the driver drafts by"),
        ("decoupled_spec_rank", 1, "the driver drafts by"),
        ("spec_trace_dir", "/tmp", "the driver drafts by"),
        ("speculative_algorithm", "STANDALONE", "n-grams or suffixes or EAGLE heads"),
    ],
)
def test_a_flag_that_is_not_served_has_its_reason(name: str, value: Any, words: str) -> None:
    plan, reason = choose(**{name: value})
    assert plan is None
    assert words in reason
    with pytest.raises(ConfigError, match="our scheduler does not serve"):
        choose("--scheduler", "pie", **{name: value})


@pytest.mark.parametrize("words", [("--lora-backend", "pie"), ("--lora-backend=pie",)])
def test_the_lora_backend_of_the_driver_is_not_told_to_sglang(words: tuple[str, ...]) -> None:
    own = server_process.split_arguments([*words, "--enable-lora"])
    assert own.options == {"lora_backend": "pie"}
    assert list(own.sglang) == ["--enable-lora"]
    with pytest.raises(ConfigError, match="`lora_backend` is given"):
        choose("--scheduler", "sglang", *words)
    with pytest.raises(ConfigError, match="not for cpu"):
        choose(*words)
    other = server_process.split_arguments(["--lora-backend", "csgmv"])
    assert (other.options, list(other.sglang)) == ({}, ["--lora-backend", "csgmv"])


@pytest.mark.parametrize("words", [(), ("--scheduler", "pie"), ("--option", "max_loaded_loras=64")])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lora_paths", ["a=/nowhere"], "adapter 'a' is not at '/nowhere'"),
        ("model_path", "/no/model", "the model '/no/model' is neither a folder nor"),
        ("tokenizer_path", "/no/tokenizer", "the model '/no/tokenizer' is neither"),
        ("dtype", "int3", "`dtype` is 'int3'"),
        ("device", "gpu", "`device` is 'gpu'"),
        ("page_size", 0, "option `page_size` is 0"),
        ("mem_fraction_static", 1.5, "option `mem_fraction_static` is 1.5"),
        ("context_length", 10**6, "option `context_length` is 1000000"),
        ("tp_size", 3, "attention heads"),
        ("lora_target_modules", ["q"], "option `lora_target_modules`"),
        ("reasoning_parser", "qwen4", "no reasoning parser 'qwen4'"),
        ("preferred_sampling_params", "{", "`preferred_sampling_params` is '{'"),
    ],
)
def test_a_mistake_ends_the_command_and_chooses_no_other_scheduler(
    name: str, value: Any, text: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        choose(*words, **{name: value})
    assert not isinstance(refusal.value, Unsupported)
    assert text in str(refusal.value)
    assert refusal.value.hint
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"architectures": ["NewForCausalLM"]}, "has no NewForCausalLM"),
        ({"dtype": "float64"}, "in which the driver runs no model"),
    ],
)
def test_a_model_that_only_sglang_may_run_is_left_to_it(
    changed: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With plug-ins, SGLang may have other classes; tests before may have named one.
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)
    for each in POCKET.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "config.json").unlink()
    config = {**json.loads((POCKET / "config.json").read_text()), **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan, reason = choose(model_path=str(tmp_path), device="cuda")
    assert plan is None
    assert text in reason


def test_the_front_end_reads_the_commit_that_the_driver_runs(tmp_path: Path) -> None:
    plan, _ = choose()
    assert server_process.pinned_revision(plan, {"model_path": str(POCKET)}) == []
    commit = "c" * 40
    plan = plan._replace(model=tmp_path / "snapshots" / commit)
    named = {"model_path": "house/pocket"}
    assert server_process.pinned_revision(plan, named) == ["--revision", commit]
    same = {**named, "tokenizer_path": "house/pocket"}
    assert server_process.pinned_revision(plan, same) == ["--revision", commit]
    assert server_process.pinned_revision(plan, {**named, "tokenizer_path": "house/other"}) == []


def test_what_ours_starts_with() -> None:
    plan, _ = choose(
        "--option",
        "max_token_gap_ms=9.5",
        "--option=cuda_graph_max_bs=64",
        stream_interval=4,
        tool_call_parser="qwen",
        schedule_policy="lpm",
        max_running_requests=7,
        watchdog_timeout=33.0,
        page_size=32,
        mm_feature_transport="cpu",
    )
    runtime = plan.runtime
    assert (runtime["schedule_policy"], runtime["max_running_requests"]) == ("lpm", 7)
    assert (runtime["max_token_gap_ms"], runtime["step_timeout_s"]) == (9.5, 33.0)
    options = {"cuda_graph_max_bs": 64, "page_size": 32, "trust_remote_code": False}
    assert runtime["options"] == options | {"max_input_embeds_bytes": 2 << 20}
    assert runtime["devices"] == ["cpu"]


def test_own_arguments_are_removed() -> None:
    own = server_process.split_arguments(["--port", "1", "--scheduler=sglang", "--model-path", "m"])
    assert (own.scheduler, own.sglang) == ("sglang", ["--port", "1", "--model-path", "m"])
    assert server_process.choose_scheduler(own, {}) == (None, "as `--scheduler sglang` says")
    words = ["--model=a", "--model-path", "b", "--devic=cpu"]
    assert server_process.flag_value(words, "model_path") == "b"
    assert server_process.flag_value(words, "device") == "cpu"
    assert server_process.flag_value(words, "tp_size") is None
    for words in (["--scheduler"], ["--scheduler", "other"], ["--option", "nothing"]):
        with pytest.raises(ConfigError):
            server_process.split_arguments(words)


def test_an_option_is_for_our_scheduler_alone() -> None:
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        choose("--option", "page_size=32", enable_return_routed_experts=True)
    for words in (("--option", "page_size=32"), ("--option", "engine=vllm")):
        with pytest.raises(ConfigError, match="takes no options of our driver"):
            choose("--scheduler", "sglang", *words)


def test_the_usual_engine_is_no_option_and_vllm_has_no_fallback() -> None:
    plan, reason = choose("--option", "engine=sglang", enable_return_routed_experts=True)
    assert (plan, "--enable-return-routed-experts" in reason) == (None, True)
    with pytest.raises(ConfigError, match="--enable-return-routed-experts") as caught:
        choose("--option", "engine=vllm", enable_return_routed_experts=True)
    assert caught.value.hint == "remove it, or start without `--engine`"


def test_memory_of_a_gpu_is_released_with_the_flag_of_sglang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"model_path": str(POCKET), "device": "cpu", "enable_memory_saver": True}
    backed_up = {**given, "enable_weights_cpu_backup": True}
    plans = [choose("--option", "enable_memory_saver=true")[0]]
    plans += [choose(enable_memory_saver=True, enable_weights_cpu_backup=True)[0]]
    runtimes = [plan.runtime for plan in plans]
    runtimes += [parse_arguments(arguments).runtime for arguments in (given, backed_up)]
    assert all(runtime["options"]["enable_memory_saver"] is True for runtime in runtimes)
    assert "weights that are released always wait in host memory" in caplog.text


def test_vllm_has_no_release_of_memory() -> None:
    with pytest.raises(ConfigError, match="enable_memory_saver"):
        choose("--option", "engine=vllm", enable_memory_saver=True)


def test_the_help_has_every_flag_of_sglang() -> None:
    """And no other: some fields have another flag, or none."""
    lines = serve.sglang_flags().splitlines()
    flags = {line.removeprefix("*").split()[0] for line in lines} - {"x"}
    flags |= {line.split()[1] for line in lines if line.startswith("x ")}
    assert flags <= SGLANG_FLAGS.keys()
    assert {SGLANG_FLAGS[flag].field for flag in flags} == {
        about.field for about in SGLANG_FLAGS.values() if about.field in SERVER_ARGS
    }
    stars = re.findall(r"^\* --([\w-]+)", serve.sglang_flags(), re.MULTILINE)
    assert "enable-two-batch-overlap" in stars
    assert "max-prefill-tokens" not in stars
    assert "max-running-requests" not in stars


def test_the_migration_page_names_flags_that_choose_sglangs_scheduler() -> None:
    """It says how many there are, and lists those of every day."""
    page = (REPOSITORY / "docs/start/from-sglang.md").read_text()
    table = page.partition("## Flags that switch")[2].partition("## ")[0]
    unserved = [name for name in SERVER_ARGS if served_flags.unserved_flag({name: "x"})]
    unserved = [name for name in unserved if name not in served_flags.REFUSED]
    assert f"{len(unserved)} of {len(SERVER_ARGS)} settings of SGLang {SGLANG_VERSION}" in table
    # Some values of these are served.
    some = {"schedule_policy", "speculative_algorithm", "speculative_eagle_topk"}
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    named = {
        flag.removeprefix("--").replace("-", "_")
        for cell in cells
        for flag in re.findall(r"`(--[\w-]+)", cell.partition("; ours:")[0])
    }
    assert len(named) > 25
    assert named - some <= set(unserved)
