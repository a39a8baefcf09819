"""The command line of `pie-sglang serve`: SGLang's parser, wrong flags, the model's place."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.backends.sglang import version
from pie_driver_sglang.cli import serve, serve_arguments
from pie_driver_sglang.config.api_keys import ApiKeys
from pie_driver_sglang.config.http_limits import HttpSettings
from pie_driver_sglang.config.server_arg import ServerArg
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_FLAGS
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common import flag_values
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag
from pie_driver_sglang.frontends.sglang_server import served_flags, server_process
from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from support.models.tiny_models import POCKET


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
        # Types of arguments of SGLang's own.
        (["--lora-paths", '{"name": "a"}'], "does not contain 'lora_name'", ""),
        (["--lora-paths", "{a}"], "wrong flags: ", ""),
        (["--tp-size", "2", "word"], "'word' belongs to no flag", ""),
        (["--schedule-policy", "best"], "invalid choice: 'best'", ""),
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
@pytest.mark.parametrize("flag", ["--enable-deterministic-inference", "--enable-determ"])
def test_a_switch_that_sglang_is_not_told(flag: str) -> None:
    """On a CPU it refuses deterministic inference, which the driver serves there."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    words = ["--model-path", "m", flag, "--port", "8000"]
    assert http_launch.given_flags(words)["enable_deterministic_inference"] is True
    with (
        mock.patch.object(http_launch, "load_plugins"),
        mock.patch.object(http_launch, "prepare_server_args", http_launch.given_flags),
        mock.patch.object(http_launch.selection.settings(), "resolve"),
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
        # Of its code for a family, where the configuration lacks a name, and of optional packages.
        (AttributeError("'C' object has no attribute 'index_head_dim'"), ConfigError),
        (ModuleNotFoundError("No module named 'runai_model_streamer'"), ConfigError),
        (RuntimeError("No CUDA GPUs are available"), ConfigError),
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
@pytest.mark.parametrize(
    ("raised", "cause", "has_traceback"),
    [
        (RuntimeError("LMCache is not installed"), ModuleNotFoundError("lmcache"), False),
        (ImportError("Please install mooncake"), None, False),
        (RuntimeError("out of\nmemory"), ValueError("x"), True),
    ],
)
def test_a_failure_of_sglangs_scheduler_ends_in_its_reason(
    raised: Exception, cause: Exception | None, has_traceback: bool, caplog: Any
) -> None:
    """By SGLang's own handler, in the process of its scheduler."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from sglang.srt.managers import scheduler

            from pie_driver_sglang.frontends.sglang_server.compat import http_launch

    def run_and_log(*_: Any) -> None:
        try:
            raise raised from cause
        except Exception:
            logging.getLogger("sglang").error(scheduler.get_exception_traceback())

    with mock.patch.object(scheduler, "run_scheduler_process", run_and_log):
        http_launch.run_sglang_scheduler("a reason", False)
    lines = caplog.messages[-1].splitlines()
    assert lines[-1] == f"SGLang's scheduler failed: {' '.join(str(raised).split())}"
    assert (len(lines) > 1) == has_traceback


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_ports_that_sglang_refuses_are_one_line() -> None:
    """What it finds once the settings are resolved: an address is missing."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch, load_snapshots
    words = ["--model-path", str(POCKET), "--device", "cpu", "--decoupled-spec-role", "verifier"]
    arguments = http_launch.parse_flags(words, HttpSettings(), ApiKeys())
    with load_snapshots.token_names(), pytest.raises(ConfigError) as caught:
        load_snapshots.PortArgs.init_new(arguments)
    assert "--decoupled-spec-rank are required" in str(caught.value)


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
        (["--mem-fraction", "0.5", "m"], ["--model-path", "m", "--mem-fraction-static", "0.5"]),
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
            ["--cuda-graph-bs-decode", "1", "2", "m"],
            ["--model-path", "m", "--cuda-graph-bs-decode", "1", "2"],
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
        # A word with a space is a value, as for argparse.
        (
            ["--served-model-name", "--x y", "m"],
            ["--model-path", "m", "--served-model-name", "--x y"],
        ),
        # Abbreviations in full; what follows a flag of this command is its value.
        (["--model-p", "m", "--devic=cpu"], ["--model-path", "m", "--device=cpu"]),
        (
            ["m", "--gateway-arg", "--model-p", "--gateway-arg", "--tp"],
            ["--model-path", "m", "--gateway-arg", "--model-p", "--gateway-arg", "--tp"],
        ),
    ],
)
def test_a_model_anywhere_and_short_names(words: list[str], expected: list[str]) -> None:
    assert serve_arguments.normalized(words) == expected


def test_a_value_with_dashes_and_a_space_is_no_unknown_flag() -> None:
    words = ["--served-model-name", "--x y", "--bogus=a b", "--other c"]
    assert serve_arguments.unknown_names(words) == ["--bogus"]


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
    found = {name: min(serve_arguments.values_after(name), 2) for name in flags_of_sglang}
    expected = {name: most.get(str(act.nargs), 2) for name, act in flags_of_sglang.items()}
    # A flag of this command, too, which takes a list with commas, before SGLang's parser.
    assert expected.pop("--allowed-media-domains", 2) == 2
    assert found.pop("--allowed-media-domains", 1) == 1
    assert found == expected
    # The words that are checked before that parser are no flags of it.
    assert flags_of_sglang.keys() == SGLANG_FLAGS.keys()
    shared = {name for name in flags_of_sglang if other_engines_flag(name)}
    parallel = {f"--{kind}-parallel-size" for kind in ("data", "pipeline", "tensor")}
    assert shared == {"--model", *parallel}


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_flags_are_read_as_by_sglangs_parser() -> None:
    """Every flag that can be, with its first choice or a small number, and at its default."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    read = 0
    # SGLang opens the file that one names, and reads two by functions of its own.
    own = {"config", "preferred_sampling_params", "quantization_param_path"}
    for flag, about in SGLANG_FLAGS.items():
        if about.field in own:
            continue
        field = SERVER_ARGS.get(about.field, ServerArg("str"))
        usual = [] if field.default is None else [str(field.default)]
        for value in ("2", *field.choices[:1], *usual):
            words = ["--model-path", "m", *([flag] if about.nargs == "0" else [flag, value])]
            with suppress(ConfigError):
                # Where both read it; which choices there are is tested by the fresh list.
                found, expected = flag_values.read_flags(words), http_launch.given_flags(words)
                given = {name: each for name, each in expected.items() if each is not None}
                assert found is None or found == given, words
                read += found is not None
    assert read > 700


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_flags_is_read_as_by_sglang(tmp_path: Path) -> None:
    """Every flag that its file may have, with a value of each form in YAML."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    names = ("sglang.srt.server_args_config_parser", "sglang.srt.utils.server_args_config_parser")
    name = next(each for each in names if importlib.util.find_spec(each))
    merger = importlib.import_module(name).ConfigArgumentMerger(http_launch._flag_parser())
    file, read = tmp_path / "flags.yaml", 0
    for flag, about in SGLANG_FLAGS.items():
        field = SERVER_ARGS.get(about.field, ServerArg("str"))
        values: tuple[Any, ...] = (
            (True, False) if about.nargs == "0" else (2, "a", [1, 2], {"a": 1})
        )
        for value in (*values, *field.choices[:1]):
            file.write_text(json.dumps({flag[2:]: value}))
            words = ["--model-path", "m", "--config", str(file)]
            with suppress(ConfigError, ValueError):
                # What SGLang reads.
                expected = http_launch.given_flags(merger.merge_config_with_args(words))
                found = http_launch.given_flags(serve_arguments.expand_arguments(words))
                assert found == expected, (flag, value)
                read += 1
    assert read > 700


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
    # SGLang would log an exception and go on without the plug-in.
    with pytest.raises(SystemExit, match=r"pie_radix: .*supported: 0\.5\.17"):
        hooks.is_named("pie_radix")
