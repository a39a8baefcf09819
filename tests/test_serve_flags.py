"""Which scheduler serves which flags of SGLang's server, without a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.backends.sglang import version
from pie_driver_sglang.cli import serve
from pie_driver_sglang.config import flag_names
from pie_driver_sglang.config.api_keys import ApiKeys
from pie_driver_sglang.config.http_limits import HttpSettings
from pie_driver_sglang.config.no_effect import NO_EFFECT
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_VERSION
from pie_driver_sglang.errors import ConfigError, StartError, Unsupported
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag
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
            assert flag == f"--{name.replace('_', '-')}"
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
        ("speculative_algorithm", "EAGLE", "n-grams or suffixes only"),
    ],
)
def test_a_flag_that_is_not_served_has_its_reason(name: str, value: Any, words: str) -> None:
    plan, reason = choose(**{name: value})
    assert plan is None
    assert words in reason
    with pytest.raises(ConfigError, match="our scheduler does not serve"):
        choose("--scheduler", "pie", **{name: value})


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
    changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
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
    words = ["--model=a", "--model-path", "b", "--device=cpu"]
    assert server_process.flag_value(words, "--model-path", "--model") == "b"
    assert server_process.flag_value(words, "--device") == "cpu"
    assert server_process.flag_value(words, "--tp") is None
    for words in (["--scheduler"], ["--scheduler", "other"], ["--option", "nothing"]):
        with pytest.raises(ConfigError):
            server_process.split_arguments(words)


def test_an_option_is_for_our_scheduler_alone() -> None:
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        choose("--option", "page_size=32", enable_memory_saver=True)
    for words in (("--option", "page_size=32"), ("--option", "engine=vllm")):
        with pytest.raises(ConfigError, match="takes no options of our driver"):
            choose("--scheduler", "sglang", *words)


def test_the_usual_engine_is_no_option_and_vllm_has_no_fallback() -> None:
    plan, reason = choose("--option", "engine=sglang", enable_memory_saver=True)
    assert (plan, "--enable-memory-saver" in reason) == (None, True)
    with pytest.raises(ConfigError, match="--enable-memory-saver") as caught:
        choose("--option", "engine=vllm", enable_memory_saver=True)
    assert caught.value.hint == "remove it, or start without `--engine`"


def test_memory_of_a_gpu_is_released_by_an_option_or_by_sglang() -> None:
    """The flag is SGLang's, whose scheduler has run on GPUs; the option is the driver's."""
    plan, _ = choose("--option", "enable_memory_saver=true")
    given = {"model_path": str(POCKET), "device": "cpu", "enable_memory_saver": True}
    for runtime in (plan.runtime, parse_arguments(given).runtime):
        assert runtime["options"]["enable_memory_saver"] is True
    plan, reason = choose(enable_memory_saver=True)
    assert (plan, "--option enable_memory_saver=true" in reason) == (None, True)
    with pytest.raises(Unsupported, match="always wait in host memory"):
        parse_arguments({**given, "enable_weights_cpu_backup": True})


@pytest.mark.engine
def test_an_unknown_flag_is_a_line_and_not_a_page() -> None:
    """By the real command: SGLang's parser prints the usage of hundreds of flags."""
    words = ["--model-path", str(POCKET), "--device", "cpu", "--bogus-flag", "--tp-sizes=2"]
    command = [sys.executable, "-m", "pie_driver_sglang", "serve", *words]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert failed.returncode == 1
    [line] = [line for line in failed.stderr.splitlines() if "bogus" in line]
    assert line == "pie-sglang: there is no flag `--bogus-flag`, `--tp-sizes`"
    assert "hint: did you mean `--tp-size`" in failed.stderr
    assert served_flags.FLAG_LIST in failed.stderr
    assert "usage:" not in failed.stderr


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "names", "hint"),
    [
        (["--schedular=pie"], "there is no flag `--schedular`", "`--scheduler`"),
        (
            ["--gpu-memory-utilization", "0.9"],
            "`--gpu-memory-utilization`",
            "`--mem-fraction-static`",
        ),
        (["--max-num-seqs=9", "--enforce-eager"], "`--enforce-eager`", "`--disable-cuda-graph`"),
        # SGLang's parser would read it as an abbreviation of several others.
        (["--tokenizer", "t"], "there is no flag `--tokenizer`", "`--tokenizer-path`"),
        (["--swap-space", "4"], "`--swap-space`", "`--option cpu_mem_budget_in_gb=VALUE`"),
        (["--tp-size", "x"], "invalid int value: 'x'", ""),
        (["--tp-size", "2", "word"], "'word' belongs to no flag", ""),
        (["--schedule-policy", "best"], "invalid choice: 'best'", ""),
        (["--enable-http2"], "`--enable-http2` is not served", "a proxy that speaks HTTP/2"),
    ],
)
def test_what_is_wrong_with_a_flag_is_one_line(words: list[str], names: str, hint: str) -> None:
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    with pytest.raises(ConfigError) as error:
        http_launch.given_flags(["--model-path", "m", *words])
    assert names in str(error.value)
    assert hint in error.value.hint
    assert len(f"{error.value} {error.value.hint}".splitlines()) == 1


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flag", ["--enable-deterministic-inference", "--enable-determ", "file"])
def test_a_switch_that_sglang_is_not_told(flag: str, tmp_path: Path) -> None:
    """On a CPU it refuses deterministic inference, which the driver serves there."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    file = tmp_path / "flags.yaml"
    file.write_text("enable-deterministic-inference: true\nport: 8000\n")
    words = ["--config", str(file)] if flag == "file" else [flag, "--port", "8000"]
    words = ["--model-path", "m", *words]
    assert http_launch.given_flags(words)["enable_deterministic_inference"] is True
    with (
        mock.patch.object(http_launch, "load_plugins"),
        mock.patch.object(http_launch, "prepare_server_args", http_launch.given_flags),
        mock.patch.object(http_launch.http_app, "attach_http_config"),
    ):
        found = http_launch.parse_flags(
            words, HttpSettings(), ApiKeys(), "enable_deterministic_inference"
        )
    assert (found["model_path"], found["port"]) == ("m", 8000)
    assert "enable_deterministic_inference" not in found


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("--ssl-certfile requires\n--ssl-keyfile"), ConfigError),
        (AssertionError("dp_size must be 1"), ConfigError),
        (AssertionError(), AssertionError),
    ],
)
def test_settings_that_sglang_refuses_are_one_line(
    error: Exception, expected: type[Exception]
) -> None:
    """An error without a text keeps its traceback."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    with (
        mock.patch.object(http_launch, "load_plugins"),
        mock.patch.object(http_launch, "prepare_server_args", side_effect=error),
        pytest.raises(expected) as caught,
    ):
        http_launch.parse_flags(["--model-path", "m"], HttpSettings(), ApiKeys())
    assert len(str(caught.value).splitlines()) <= 1
    assert str(caught.value).endswith(" ".join(str(error).split()))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["flag", "variable", "none"])
def test_a_grpc_server_beside_keys_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own has neither keys nor limits, whatever asks for it."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_app
    names = ("api_key", "admin_api_key", "grpc_mode", "smg_grpc_mode", "grpc_port")
    settings = SimpleNamespace(**dict.fromkeys(names), host="127.0.0.1")
    if way == "flag":
        settings.grpc_port = 5000
    elif way == "variable":
        monkeypatch.setenv("SGLANG_GRPC_PORT", "5000")
    expected: Any = (
        nullcontext() if way == "none" else pytest.raises(ConfigError, match="neither keys")
    )
    with expected:
        http_app.attach_http_config(settings, HttpSettings(), ApiKeys("key"))
    http_app.attach_http_config(settings, HttpSettings(), ApiKeys())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["org/model", "--port", "1"], ["--model-path", "org/model", "--port", "1"]),
        (["--model", "m", "--tp=2"], ["--model-path", "m", "--tp-size=2"]),
        (["--model=m", "--dp", "2"], ["--model-path=m", "--dp-size", "2"]),
        (["--port", "1", "--model-path", "m"], ["--port", "1", "--model-path", "m"]),
        (["--port", "1", "m"], ["--model-path", "m", "--port", "1"]),
        (
            ["--tp", "2", "m", "--enable-metrics"],
            ["--model-path", "m", "--tp-size", "2", "--enable-metrics"],
        ),
        (["--enable-metrics", "m"], ["--model-path", "m", "--enable-metrics"]),
        (["--option", "a=1", "m"], ["--model-path", "m", "--option", "a=1"]),
        (
            ["--allow-private-media-hosts", "m"],
            ["--model-path", "m", "--allow-private-media-hosts"],
        ),
        (["--api-key-file=f", "m"], ["--model-path", "m", "--api-key-file=f"]),
        (
            ["--tensor-parallel-size", "2", "m"],
            ["--model-path", "m", "--tensor-parallel-size", "2"],
        ),
        (["--data-parallel-size=2", "m"], ["--model-path", "m", "--data-parallel-size=2"]),
        # An abbreviation, as SGLang's parser takes it.
        (["--mem-fraction", "0.5", "m"], ["--model-path", "m", "--mem-fraction", "0.5"]),
        (["--grpc-port", "1", "m"], ["--model-path", "m", "--grpc-port", "1"]),
        (["--no-gateway", "m"], ["--model-path", "m", "--no-gateway"]),
        (["--gateway-arg", "x", "m"], ["--model-path", "m", "--gateway-arg", "x"]),
        # A list takes all words, as in SGLang's parser, but for a last one of another form.
        (["--lora-paths", "a=1", "m"], ["--model-path", "m", "--lora-paths", "a=1"]),
        (
            ["--lora-paths", "a=1", "b=2", "m", "--port", "1"],
            ["--model-path", "m", "--lora-paths", "a=1", "b=2", "--port", "1"],
        ),
        (["m", "--lora-paths", "a=1", "b"], ["--model-path", "m", "--lora-paths", "a=1", "b"]),
        (["--lora-paths", "/a", "/b"], ["--lora-paths", "/a", "/b"]),
        (["--lora-paths", "a=1"], ["--lora-paths", "a=1"]),
        (
            ["--cuda-graph-bs", "1", "2", "m"],
            ["--model-path", "m", "--cuda-graph-bs", "1", "2"],
        ),
        (
            ["--lora-target-modules", "q_proj", "k_proj", "org/m-1.5"],
            ["--model-path", "org/m-1.5", "--lora-target-modules", "q_proj", "k_proj"],
        ),
        (
            ["--lora-target-modules", "q_proj", "k_proj"],
            ["--lora-target-modules", "q_proj", "k_proj"],
        ),
        # A flag that is not known may take all words.
        (["--bogus", "m"], ["--bogus", "m"]),
        # The second model belongs to no flag, and the parser says so.
        (["m", "--model-path", "n"], ["m", "--model-path", "n"]),
        (["m", "n"], ["--model-path", "m", "n"]),
    ],
)
def test_a_model_anywhere_and_short_names(words: list[str], expected: list[str]) -> None:
    assert serve.normalized(words) == expected


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_flags_take_as_many_values_as_in_sglangs_parser() -> None:
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    most = {"0": 0, "None": 1, "?": 1}
    actions = http_launch._flag_parser()._option_string_actions
    flags_of_sglang = {name: act for name, act in actions.items() if name not in ("-h", "--help")}
    found = {name: min(serve.values_after(name), 2) for name in flags_of_sglang}
    assert found == {name: most.get(str(act.nargs), 2) for name, act in flags_of_sglang.items()}
    # The words that are checked before that parser are no flags of it.
    assert flags_of_sglang.keys() <= flag_names.SGLANG_FLAGS
    shared = {name for name in flags_of_sglang if other_engines_flag(name)}
    parallel = {f"--{kind}-parallel-size" for kind in ("data", "pipeline", "tensor")}
    assert shared == {"--model", *parallel}


@pytest.mark.parametrize("front", ["sglang", "gateway"])
@pytest.mark.parametrize(
    ("words", "flag", "hint"),
    [
        (["m", "--tokenizer", "t"], "--tokenizer", "SGLang calls `--tokenizer` `--tokenizer-path`"),
        (["--swap-space", "4", "m"], "--swap-space", "set `--option cpu_mem_budget_in_gb=VALUE`"),
        (
            ["m", "--scheduling-policy=priority"],
            "--scheduling-policy",
            "set `--enable-priority-scheduling`, and, as in vLLM, "
            "`--schedule-low-priority-values-first`",
        ),
        (["m", "--enable-auto-tool-choice"], "--enable-auto-tool-choice", "remove it"),
        (["m", "--speculative-config", "{}"], "--speculative-config", "`--speculative-algorithm`"),
        # The hint is more than that no model was found.
        (["--bogus", "m"], "--bogus", "`pie-sglang serve --help` lists all flags"),
        (["--schedular", "pie", "m"], "--schedular", "did you mean `--scheduler`"),
    ],
)
def test_flags_of_vllm_are_answered_before_anything_is_imported(
    front: str, words: list[str], flag: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        serve.main(["--front", front, *words])
    assert str(error.value) == f"there is no flag `{flag}`"
    assert hint in error.value.hint
    assert len(error.value.hint.splitlines()) == 1


def test_the_engine_answers_the_same_names_with_its_arguments() -> None:
    for name, hint in (
        ("swap_space", "`cpu_mem_budget_in_gb`"),
        ("max_loras", "`max_loras_per_batch`"),
    ):
        with pytest.raises(ConfigError, match="there is no argument") as error:
            parse_arguments({"model_path": str(POCKET), name: 1})
        assert hint in error.value.hint
        assert "--" not in error.value.hint


def test_flags_that_exist_are_no_flags_of_vllm() -> None:
    served_flags.refuse_other_engines_flags(["--model", "m", "--tensor-parallel-size", "2"])
    # It is one of smg.
    served_flags.refuse_other_engines_flags(["--gateway-arg", "--seed"])


def test_the_migration_page_names_no_flag_that_lacks_a_hint() -> None:
    """Of vLLM's flags that do not exist here."""
    page = (REPOSITORY / "docs/start/from-vllm.md").read_text()
    table = page.partition("## Flags")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    named = {flag for cell in cells for flag in re.findall(r"(?<!\S)`?(--[\w-]+)", cell)}
    assert len(named) > 25
    known = flag_names.SGLANG_FLAGS
    assert [flag for flag in named if flag not in known and not other_engines_flag(flag)] == []


def test_the_help_has_every_flag_of_sglang() -> None:
    flags = serve.sglang_flags().split()
    assert {f"--{name.replace('_', '-')}" for name in SERVER_ARGS} <= set(flags)
    stars = re.findall(r"^\* --([\w-]+)", serve.sglang_flags(), re.MULTILINE)
    assert "enable-two-batch-overlap" in stars
    assert "max-prefill-tokens" not in stars
    assert "max-running-requests" not in stars


def test_the_migration_page_names_flags_that_choose_sglangs_scheduler() -> None:
    """It says how many there are, and lists those of every day."""
    page = (REPOSITORY / "docs/start/from-sglang.md").read_text()
    table = page.partition("## Flags that switch")[2].partition("## ")[0]
    unserved = [name for name in SERVER_ARGS if served_flags.unserved_flag({name: "x"})]
    assert f"{len(unserved)} of {len(SERVER_ARGS)} settings of SGLang {SGLANG_VERSION}" in table
    # Some values of these are served.
    some = {"speculative_algorithm"}
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    named = {
        flag.removeprefix("--").replace("-", "_")
        for cell in cells
        for flag in re.findall(r"`(--[\w-]+)", cell.partition("; ours:")[0])
    }
    assert len(named) > 25
    assert named - some <= set(unserved)


def test_help_and_a_missing_model() -> None:
    command = [sys.executable, "-m", "pie_driver_sglang", "serve"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, serve.HELP + serve.sglang_flags())
    for words in ([], ["--port", "1"], ["--model-path", "/nowhere/at/all"]):
        failed = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)
        assert failed.returncode == 1
        assert "hint:" in failed.stderr
        assert "Traceback" not in failed.stderr


def test_another_version_of_sglang_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the HTTP server's process, with either scheduler; only a driver's was checked."""
    monkeypatch.setattr(version, "pins", lambda: {"sglang": "9.9.9"})
    monkeypatch.delenv(version.OVERRIDE, raising=False)
    for scheduler in ("auto", "sglang"):
        words = ["--model-path", str(POCKET), "--device", "cpu", "--scheduler", scheduler]
        assert server_process.run(words) == 1
        assert "sglang==9.9.9" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_the_plugins_refuse_another_version_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from pie_driver_sglang.backends.sglang.compat import hooks

    monkeypatch.setattr(version, "pins", lambda: {"sglang": "9.9.9"})
    monkeypatch.delenv(version.OVERRIDE, raising=False)
    monkeypatch.setenv("SGLANG_PLUGINS", "pie_radix")
    assert not hooks.is_named("pie_ngram")
    with pytest.raises(StartError, match=r"supported: 0\.5\.17"):
        hooks.is_named("pie_radix")
