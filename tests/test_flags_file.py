"""The file of flags that `--config` names, for `serve` and `plan`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pie_driver_sglang.cli import plan, serve, serve_arguments
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.sglang_server import server_process
from support.models.tiny_models import POCKET
from support.servers.flags_file import as_file

MISSING = "missing/model"
"""A repository that would be looked for on the network."""


@pytest.mark.parametrize("flag", ["--config", "--config=", "--conf", "--conf="])
def test_flags_of_a_file_are_those_of_the_command_line(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind them, so that the command line has the last word."""
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model-path: org/first\nport: 0\ndevic: cpu\nenable-metrics: true\n"
        "trust-remote-code: false\nlora-paths: [a=/a, b=/b]\n"
        'json-model-override-args: {"a": 1}\nscheduler: pie\noption: [page_size=32, x=1]\n'
        "api-key: secret\nallow-pickled-weights: true\n"
    )
    words = (flag + str(file),) if "=" in flag else (flag, str(file))
    expected = [
        "--port",
        "0",
        "--device",
        "cpu",
        "--enable-metrics",
        "--lora-paths",
        "a=/a",
        "b=/b",
    ]
    expected += ["--json-model-override-args", '{"a": 1}', "--scheduler", "pie"]
    expected += ["--option", "page_size=32", "--option", "x=1"]
    expected += ["--api-key", "secret", "--allow-pickled-weights"]
    file_flags, rest = serve_arguments.take_config_file([MISSING, *words])
    assert list(itertools.chain(*file_flags)) == ["--model-path", "org/first", *expected]
    assert rest == [MISSING]
    file.write_text("port: 9\nmodel-path: org/first")
    started: list[list[str]] = []
    monkeypatch.setattr(serve, "run_server", started.append)
    serve.main([MISSING, *words, "--port", "0"])
    [found] = started
    assert "--config" not in found
    assert server_process.flag_value(found, "port") == "0"
    assert server_process.flag_value(found, "model_path") == MISSING


@pytest.mark.parametrize(
    ("text", "given", "expected"),
    [
        # No value of a list is taken for the model.
        (
            "enable-lora: true\nlora-paths: [sql=/a/sql, /a/chat]",
            [],
            ["--enable-lora", "--lora-paths", "sql=/a/sql", "/a/chat"],
        ),
        ("lora-target-modules: [q_proj, a/b]", [], ["--lora-target-modules", "q_proj", "a/b"]),
        # A flag of the command line replaces that of the file, however either is written.
        ("api-key: a\nport: 1", ["--api-key", "b"], ["--port", "1", "--api-key", "b"]),
        ("tp: 2", ["--tensor-parallel-size=4"], ["--tensor-parallel-size=4"]),
        # Some are given once for each value.
        ("option: [a=1]", ["--option", "b=2"], ["--option", "a=1", "--option", "b=2"]),
        # A value that looks like a flag, and one that is the name of this flag.
        ("served-model-name: -x", [], ["--served-model-name=-x"]),
        ("port: 1", ["--gateway-arg", "--config"], ["--port", "1", "--gateway-arg", "--config"]),
    ],
)
def test_values_of_a_file_stay_with_their_flags(
    text: str, given: list[str], expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    model = ["--model-path", MISSING]
    found = serve_arguments.expand_arguments([MISSING, *given, "--config", str(file)])
    own = given and found[-len(given) :]
    assert [*found[: len(found) - len(own) - 2], *own] == expected
    assert found[len(found) - len(own) - 2 : len(found) - len(own)] == model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp-size=4: 2", "there is no flag `--tp-size=4`"),
        ("no-such-flag: 1", "there is no flag `--no-such-flag`"),
        ("model_path: m", "there is no flag `--model_path`"),
        ("gpu-memory-utilization: 0.9", "there is no flag `--gpu-memory-utilization`"),
        ("enable-metrics: 1", "`enable-metrics` is 1"),
        ("port:", "`port` is None"),
        ("[a, b]", "it is no table of flags"),
        ("1: 2", "it is no table of flags"),
        ("a: [", "expected the node content"),
        ("config: other.yaml", "names another file"),
        ("conf: other.yaml", "names another file"),
        ("help: true", "there is no flag `--help`"),
    ],
)
def test_a_wrong_file_of_flags_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        serve.main([MISSING, "--config", str(file)])
    assert str(caught.value).startswith(f"`--config` names {quoted(str(file))}: ")
    assert message in str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_plan_takes_the_flags_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on the command line, which has the last word."""
    flags = ["--context-length", "256", "--mem-fraction-static", "0.5", "--enable-metrics"]
    assert plan.main([str(POCKET), "--device-gib", "8", *flags]) == 0
    expected = capsys.readouterr().out
    written = as_file([*flags, "--model-path", MISSING], tmp_path / "flags.yaml")
    assert plan.main([str(POCKET), "--device-gib", "8", *written]) == 0
    assert capsys.readouterr().out == expected
    assert plan.main([str(POCKET), "--device-gib", "8", *written, "--context-length", "512"]) == 0
    assert capsys.readouterr().out != expected
