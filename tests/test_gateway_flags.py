"""Flags of `pie-sglang serve --front gateway`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.cli.main import main
from pie_driver_sglang.config.server_args import LISTS, SERVER_ARGS
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.flag_values import read_flags
from pie_driver_sglang.frontends.gateway import gateway_flags, parsers, smg
from pie_driver_sglang.frontends.gateway.gateway_flags import parse_gateway_arguments
from support.models.tiny_models import POCKET


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_gateway_arguments(words)
    return f"{error.value} {error.value.hint}"


def test_arguments_are_parsed_by_the_types_of_sglang() -> None:
    found = parse_gateway_arguments(
        [
            *("--model", "m", "--tokenizer-path", "t", "--tp=2", "--dp-size", "3"),
            *("--schedule-conservativeness", "0.5"),
            *("--disable-radix-cache", "--served-model-name", "x", "--watchdog-timeout=9"),
            *("--option", "max_restarts=1", "--grpc-port=5001", "--grpc-contract", "sglang"),
            *("--gateway-arg=--queue-size", "--gateway-arg", "5", "--no-gateway"),
        ]
    )
    assert found.engine == {
        "model_path": "m",
        "tokenizer_path": "t",
        "tp_size": 2,
        "dp_size": 3,
        "schedule_conservativeness": 0.5,
        "disable_radix_cache": True,
        "max_restarts": 1,
    }
    assert found.front == {"served_model_name": "x", "watchdog_timeout": 9.0}
    assert (found.contract, found.grpc_port, found.starts_gateway) == ("sglang", 5001, False)
    assert found.smg == ("--queue-size", "5")


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_sglang_parses_the_same_arguments_equally() -> None:
    """Of every flag that this frontend takes: a value that SGLang's own parser accepts."""
    from pie_driver_sglang.frontends.sglang_server.compat import server_environment

    # The process keeps none of the server's variables.
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    tried = read = 0
    for name, field in SERVER_ARGS.items():
        if "table" in field.type or field.type == "any":
            continue  # SGLang keeps the text, and the engine takes a table.
        words = [f"--{name.replace('_', '-')}", *sample(field)]
        try:
            theirs = http_launch.given_flags(["--model-path", "m", *words])
        except ConfigError:
            continue  # Its parser has no such flag, or another kind of value.
        if (early := read_flags(["--model-path", "m", *words])) is not None:
            given = {key: value for key, value in theirs.items() if value is not None}
            assert given == {key: early.get(key) for key in given}, name
            read += 1
        try:
            found = parse_gateway_arguments(["--model-path", "m", *words])
        except ConfigError as error:
            assert "honoured" in str(error), name
            continue
        ours = {**found.engine, **found.front}
        for key in theirs.keys() & ours.keys():
            # A few of its lists are one number on its command line.
            alike = ours[key] if isinstance(ours[key], list) else []
            assert theirs[key] in (ours[key], *alike), name
            tried += 1
    assert tried > 60
    assert read > 300


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("-1", -1),
        ("8k", 8000),
        ("1.5M", 1_500_000),
        ("64Ki", 65536),
        ("1Gi", 1 << 30),
    ],
)
def test_integers_have_sglangs_suffixes(text: str, value: int) -> None:
    found = read_flags(["--model-path", "m", "--context-length", text])
    assert found == {"model_path": "m", "context_length": value}
    assert parse_gateway_arguments(["--model", "m", f"--context-length={text}"]).engine == found


@pytest.mark.parametrize("text", ["1.5Ki", "8K", "8kb", "7.5", ""])
def test_other_suffixes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`--context-length` is"):
        read_flags(["--model-path", "m", f"--context-length={text}"])


def sample(field: Any) -> list[str]:
    if field.type.startswith("bool"):
        return []
    if field.choices:
        return [field.choices[-1]]
    kinds = {"int": "3", "float": "0.25", "str": "word"}
    inner = field.type.removeprefix("list[").split("]")[0].split("|")[0].strip()
    return [kinds.get(inner, "{}")]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            ["--lora-paths", "a=b"],
            "`--lora-paths` is not honoured by the gateway: the gateway pass",
        ),
        (["--enable-priority-scheduling"], "passes no priority on"),
        (["--tokenizer-worker-num", "2"], "`--tokenizer-worker-num`"),
        (["--log-requests"], "the gateway logs and measures by itself"),
        (["--skip-tokenizer-init"], "the gateway tokenizes"),
        (["--kv-events-config", "{}"], "by themselves"),
        (["--no-such-flag"], "there is no flag `--no-such-flag`"),
        (["--gpu-memory-utilization", "1"], "`--mem-fraction-static`"),
        (["--grcp-port", "1"], "did you mean `--grpc-port`"),
        (["--grpc-contract", "x"], "expected one of vllm, sglang"),
        (["--grpc-port", "65536"], "`--grpc-port` is 65536 name a port from 1 to 65535"),
        (["--grpc-port=65535", "--dp=2"], "`--grpc-port` is 65535 name a port from 1 to 65534"),
        (["--prometheus-port=-1"], "`--prometheus-port` is -1"),
        (["--grpc-port", "x"], "`--grpc-port` is 'x' expected an integer"),
        (["--tp", "x"], "`--tp-size` is 'x' expected an integer"),
        (["--model-path"], "`--model-path` has no value"),
        (["--no-gateway=1"], "takes no value"),
        (["--disable-radix-cache=maybe"], "expected true or false"),
        (["word"], "'word' belongs to no flag"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(words: list[str], names: str) -> None:
    assert names in refusal(*words)


def test_what_the_engine_does_not_serve_it_refuses_itself() -> None:
    arguments = parse_gateway_arguments(
        ["--model-path", str(POCKET), "--device", "cpu", "--pp-size", "2"]
    )
    with pytest.raises(ConfigError, match="`pp_size` = 2 is not served"):
        parse_arguments(arguments.engine)


def test_the_gateways_command_line(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    given = ["--host", "0.0.0.0", "--port", "8000", "--api-key", "k", "--log-level", "error"]
    given += ["--tool-call-parser", "qwen25", "--reasoning-parser", "deepseek-r1"]
    given += ["--chat-template", str(template), "--ssl-certfile", "c", "--ssl-keyfile", "f"]
    given += ["--prometheus-port", "9000", "--enable-trace", "--enable-metrics"]
    given += ["--gateway-arg=--queue-size=3"]
    arguments = parse_gateway_arguments(["--model-path", "m", *given])
    words = smg.smg_arguments(arguments, ["grpc://a", "grpc://b"], Path("folder"), 9001)
    line = " ".join(words)
    for part in (
        "launch --host 0.0.0.0 --port 8000 --prometheus-host 127.0.0.1 --prometheus-port 9001",
        "--model-path folder --log-level error",
        "--policy cache_aware --worker-urls grpc://a grpc://b",
        "--max-payload-size 67108864 --header-read-timeout-secs 30",
        "--reasoning-parser deepseek_r1",
        "--tool-call-parser qwen",
        f"--chat-template {template}",
        "--tls-cert-path c --tls-key-path f",
        "--enable-trace",
    ):
        assert part in line
    assert words[-1] == "--queue-size=3"
    # Keys are in no list of arguments. Without one of the admin's, nobody registers workers.
    assert not {"k", "--api-key"} & set(words)
    assert smg.secret_arguments(arguments)[2:] == ["--api-key", "k"]
    [flag, admin] = smg.secret_arguments(parse_gateway_arguments(["--model-path", "m"]))
    assert (flag, len(admin) > 40) == ("--control-plane-api-keys", True)
    single = smg.smg_arguments(
        parse_gateway_arguments(["--model-path", "m"]), ["grpc://a"], Path("folder"), 1
    )
    assert "--policy round_robin" in " ".join(single)
    assert "--host 127.0.0.1 --port 30000 " in " ".join(single)
    assert "--log-level warn " in " ".join(single)
    # It makes no spans at a level above.
    traced = smg.smg_arguments(
        parse_gateway_arguments(["--model-path", "m", "--enable-trace"]), (), Path("m"), 1
    )
    assert "--log-level info " in " ".join(traced)


def test_services_without_authentication_stay_on_the_loopback() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert parse_gateway_arguments(["--model-path", "m", "--grpc-host", host]).grpc_host == host
    for host in ("0.0.0.0", "10.0.0.2", "::", "node-1"):
        words = ["--model-path", "m", "--grpc-host", host]
        with pytest.raises(ConfigError, match="no authentication"):
            parse_gateway_arguments(words)
        assert parse_gateway_arguments([*words, "--grpc-allow-remote"]).grpc_host == host


def test_limits_go_to_the_gateway_or_are_refused() -> None:
    given = ["--max-body-bytes=1MiB", "--header-timeout=2.5", "--keep-alive-timeout=7"]
    given += ["--allow-private-media-hosts", "--allowed-media-domains=a.example,b.example"]
    line = " ".join(
        smg.smg_arguments(parse_gateway_arguments(["--model-path", "m", *given]), (), Path("m"), 1)
    )
    for part in (
        "--max-payload-size 1048576 --header-read-timeout-secs 3",
        "--idle-connection-timeout-secs 7",
        "--mm-allowed-media-domains a.example,b.example --mm-allow-private-media-hosts",
    ):
        assert part in line
    for flag in ("--max-connections=7", "--allow-pickled-adapters", "--write-timeout=3"):
        with pytest.raises(ConfigError, match=flag.partition("=")[0]):
            parse_gateway_arguments(["--model-path", "m", flag])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--chat-template", "chatml"], "`--chat-template` is 'chatml', which is not a file"),
        (["--tool-call-parser", "gpt-oss"], "for which the gateway has no parser"),
        (["--reasoning-parser", "auto"], "for which the gateway has no parser"),
        (["--tool-call-parser", "qwen52"], "`--tool-call-parser` is 'qwen52', for which the gat"),
        (["--reasoning-parser", "qwen52"], "`--reasoning-parser` is 'qwen52', for which the gat"),
        (["--log-level", "loud"], "`--log-level` is 'loud'"),
    ],
)
def test_wrong_values_are_refused_before_a_model_is_loaded(words: list[str], names: str) -> None:
    arguments = parse_gateway_arguments(["--model-path", "m", *words])
    with pytest.raises(ConfigError) as error:
        smg.smg_arguments(arguments, (), Path("m"), 0)
    assert names in str(error.value)


def test_the_parsers_that_there_are_are_listed() -> None:
    """Of the gateway's names and SGLang's, those that the installed gateway serves."""
    pytest.importorskip("smg")
    arguments = parse_gateway_arguments(["--model-path", "m", "--tool-call-parser", "qwen52"])
    with pytest.raises(ConfigError) as error:
        smg.smg_arguments(arguments, (), Path("m"), 0)
    listed = error.value.hint.removeprefix("expected one of ").split(", ")
    assert {"qwen", "qwen25", "llama3", "mistral"} <= set(listed)
    assert "gpt-oss" not in listed
    for name in listed:
        assert parsers.tool_parser(name) in parsers.gateway_choices("--tool-call-parser")


@pytest.mark.engine
def test_every_parser_of_sglang_has_a_name_of_the_gateways_or_none() -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    pytest.importorskip("smg")
    for flag, theirs, names, missing in (
        (
            "tool-call-parser",
            FunctionCallParser.ToolCallParserEnum,
            parsers.TOOL_PARSERS,
            parsers.MISSING_TOOL_PARSERS,
        ),
        (
            "reasoning-parser",
            ReasoningParser.DetectorMap,
            parsers.REASONING_PARSERS,
            parsers.MISSING_REASONING_PARSERS,
        ),
    ):
        known = parsers.gateway_choices(f"--{flag}")
        assert set(names.values()) <= known
        assert not missing & known
        for name in theirs:
            assert (name in missing) != (names.get(name, name) in known), name


def test_front_is_removed_from_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model-path", "m", "--front", "side"]) == 1
    assert "`--front` is 'side'" in capsys.readouterr().err
    words = ["--model-path", "m", "--front=gateway", "--port=0", "--lora-paths", "x"]
    assert main(["serve", *words]) == 1
    assert "`--lora-paths` is not honoured" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "--grpc-contract" in capsys.readouterr().out


def test_every_refused_flag_is_one_of_sglangs() -> None:
    assert not (gateway_flags.UNSUPPORTED_FLAGS.keys() | gateway_flags.FRONT) - SERVER_ARGS.keys()
    assert not gateway_flags.UNSUPPORTED_FLAGS.keys() & gateway_flags.FRONT
    known = {name for version in LISTS.values() for name in version.fields}
    assert set(gateway_flags.ALIASES.values()) <= known


@pytest.mark.parametrize(
    ("words", "grace_s"),
    [
        ([], 30),
        (["--gateway-arg=--shutdown-grace-period-secs=600"], 600),
        (["--gateway-arg=--shutdown-grace-period-secs", "--gateway-arg=50"], 50),
    ],
)
def test_a_gateway_that_does_not_end_is_killed_after_its_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], grace_s: int
) -> None:
    stuck, ready = tmp_path / "stuck", tmp_path / "ready"
    stuck.write_text(f"#!/bin/sh\ntrap '' TERM\n: > {ready}\nwhile :; do sleep 0.1; done\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    now = mock.Mock(return_value=100.0)
    monkeypatch.setattr(smg, "time", mock.Mock(monotonic=now))
    arguments = parse_gateway_arguments(["--model-path", str(POCKET), *words])
    command = smg.smg_arguments(arguments, [], POCKET, 0)
    gateway = smg.GatewayProcess(command, arguments, "http://127.0.0.1:1")
    try:
        while not ready.exists():
            time.sleep(0.01)
        gateway.drain()
        now.return_value += grace_s
        assert gateway.is_draining()
        now.return_value += smg._EXIT_S
        assert not gateway.is_draining()
    finally:
        gateway.stop()
    assert gateway.poll() == -signal.SIGKILL
