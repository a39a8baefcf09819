"""What `serve` checks before it imports, downloads or loads anything."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from pie_driver_sglang.cli import plan, serve
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag
from support.models.tiny_models import POCKET

MISSING = "nobody/nothing"
"""A repository that would be looked for on the network."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MISSING, "--no-such-flag"], "there is no flag `--no-such-flag`"),
        ([MISSING, "--disable-log-requests"], "there is no flag `--disable-log-requests`"),
        ([MISSING, "--option", "foo=1"], "there is no argument 'foo'"),
        ([MISSING, "--engine", "vllm", "--option", "foo=1"], "there is no argument 'foo'"),
        ([MISSING, "--front", "gateway", "--option", "foo=1"], "there is no argument 'foo'"),
        ([MISSING, "--port", "65536"], "`--port` is '65536'"),
        ([MISSING, "--port", "-1"], "`--port` is '-1'"),
        ([MISSING, "--port", "http"], "`--port` is 'http'"),
        ([MISSING, "--host", "192.0.2.1"], "192.0.2.1:30000 is no address of this host"),
        (["--config", "/missing.yaml"], "`--config` names '/missing.yaml', which is no file"),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(arguments: list[str], message: str) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        serve.main(arguments)
    assert message in str(caught.value)
    assert caught.value.hint
    assert not {name for name in set(sys.modules) - before if name.startswith("sglang")}


@pytest.mark.parametrize("front", [[], ["--front", "gateway"]])
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_port_in_use_is_refused_at_once(
    front: list[str], family: socket.AddressFamily, host: str
) -> None:
    with socket.socket(family) as other:
        try:
            other.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no {host}")
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf":{port} is in use"):
            serve.main([MISSING, "--host", host, "--port", str(port), *front])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--disable-log-requests", "`--log-requests` alone"),
        ("--max-cpu-loras", "`--max-loaded-loras`"),
        ("--guided-decoding-backend", "llguidance"),
        ("--generation-config", "`--sampling-defaults`"),
        ("--override-generation-config", "`--preferred-sampling-params`"),
        ("--enable-sleep-mode", "/release_memory_occupation"),
    ],
)
def test_flags_of_vllm_have_a_hint(flag: str, words: str) -> None:
    assert words in other_engines_flag(flag)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert plan.main([str(POCKET), "--device-gib", "8", "--json", *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["plan"]
    return found


def test_plan_takes_the_flags_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--reasoning-parser", "qwen3", "--enable-metrics", "--host", "0.0.0.0"]
    same += ["--max-running-requests", "512", "--speculative-algorithm", "NGRAM"]
    usual = planned(capsys)
    assert planned(capsys, *same) == usual
    # The name of today and that of older versions.
    wider = planned(capsys, "--cuda-graph-max-bs-decode", "512")
    assert wider == planned(capsys, "--cuda-graph-max-bs", "512") != usual
    assert planned(capsys, "--kv-cache-dtype", "fp8_e4m3") != usual


@pytest.mark.parametrize("flag", ["--max-total-tokens", "--lora-paths", "--no-such-flag"])
def test_plan_refuses_what_it_would_be_wrong_with(flag: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        plan.main([str(POCKET), "--device-gib", "8", flag, "4"])
