"""The demo: its output, its model, and one run from end to end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang.checkpoint.packaged import UnavailableError, packaged_folder
from pie_driver_sglang.cli.main import main
from pie_driver_sglang.demo import questions
from pie_driver_sglang.demo.screen import (
    PlainScreen,
    RichScreen,
    StreamedAnswer,
    open_screen,
    printable,
)
from pie_driver_sglang.demo.server import serving
from pie_driver_sglang.errors import StartError
from support import REPOSITORY
from support.models.tiny_models import POCKET

SECTIONS = ("JSON by a schema", "A tool call", "A second turn")


@pytest.fixture(autouse=True)
def restore_sigterm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reaches no package index and has nothing in its cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def test_without_an_index_the_repositorys_model_answers(
    no_index: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert questions._find_model("smollm2") == (Path("models/pocket"), "pocket")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pie-sglang: cannot download SmolLM2-135M-Instruct: ")
    assert "; this is models/pocket instead" in error


def test_elsewhere_the_error_names_the_remedy(
    no_index: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 1
    assert "\nhint: check the network" in capsys.readouterr().err


def test_a_folder_is_used_unchanged() -> None:
    assert questions._find_model(str(POCKET)) == (POCKET, "pocket")


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--tokens", "x"], ["--device", "gpu"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        questions.main(arguments)


def test_an_ended_server_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program_file = tmp_path / "python"
    program_file.write_text("#!/bin/sh\necho first; echo the reason >&2; exit 3\n")
    program_file.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program_file))
    expected = r"(?s)^the server ended with status 3\n\n.*the reason$"
    with (
        pytest.raises(StartError, match=expected),
        serving(POCKET, "pocket", "cpu", tmp_path / "log", lambda *_: None),
    ):
        raise AssertionError("it cannot be ready")


def answers() -> list[StreamedAnswer]:
    found = [StreamedAnswer("greedy", f"question {number}") for number in range(6)]
    found[0].text, found[0].done = "\n".join(map(str, range(40))), True
    found[5].text = "x" * 200 + "y"
    return found


def test_an_answer_that_the_limit_cut_is_marked() -> None:
    answer = StreamedAnswer("greedy", "question", "some\twords")
    assert answer.shown == "some    words"
    answer.is_cut = True
    assert answer.shown == "some    words …"


@pytest.mark.parametrize(
    ("found", "started", "program"),
    [
        ("/usr/bin/pie-sglang", "anything", "pie-sglang"),
        (None, ".venv/bin/pie-sglang", ".venv/bin/pie-sglang"),
        (None, "/lib/pie_driver_sglang/demo/__main__.py", "python -m pie_driver_sglang"),
    ],
)
def test_the_next_commands_can_be_copied(
    found: str | None,
    started: str,
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After `make demo` the program is not in PATH."""
    monkeypatch.setattr(questions.shutil, "which", lambda _: found)
    monkeypatch.setattr(sys, "argv", [started])
    questions._name_what_is_next("smollm2", PlainScreen())
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title == "--- Try next"
    commands = [line.split("  ")[0] for line in lines]
    assert commands == [
        f"{program} shell --model smollm2",
        f"{program} serve smollm2",
        f"{program} serve Qwen/Qwen3-8B",
    ]


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainScreen() as screen:
        screen.note("a note")
        screen.growing(answers())
        screen.answers(answers()[5:])
        screen.section("title", "first\x1b[2J", "second")
    out = capsys.readouterr().out
    assert out.startswith(f"a note\n\n--- greedy: question 5\n{'x' * 200}y\n\n--- title\nfirst")
    assert out.endswith("\nfirst\ufffd[2J\nsecond\n")


def test_panels_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    screen = RichScreen()
    with screen._console.capture() as captured:
        screen._console.print(screen._panels(answers(), 12))
    lines = captured.get().splitlines()
    assert len(lines) <= 22
    assert all(len(line) <= 80 for line in lines)
    assert "39" in captured.get()
    assert "y" in captured.get()
    with screen._console.capture() as captured:
        screen.answers(answers())
    assert len(captured.get().splitlines()) > 40


def test_an_svg_has_the_printed_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    path = tmp_path / "demo.svg"
    with open_screen(path) as screen:
        screen.note("a note")
        screen.waiting(1.0, "importing")
        screen.growing(answers())
        screen.answers(answers())
        screen.section("title", "body")
    picture = path.read_text()
    assert picture.startswith("<svg")
    for text in ("a&#160;note", "question&#160;5", "title", "body"):
        assert text in picture
    assert "importing" not in picture
    assert "url(" not in re.sub(r"url\(#", "", picture)


def test_off_a_terminal_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert type(open_screen()) is PlainScreen
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_screen()) is PlainScreen
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert type(open_screen()) is PlainScreen
    monkeypatch.delenv("NO_COLOR")
    assert type(open_screen()) is RichScreen


def test_text_cannot_control_the_terminal() -> None:
    assert printable("a\tb\n\x1b[2J\x00é\xa0x\r") == "a   b\n\ufffd[2J\ufffdé x "


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_demo_from_end_to_end(forked_python: str) -> None:
    try:
        packaged_folder("smollm2")
        model = "smollm2"
    except UnavailableError:
        model = str(POCKET)
    command = [forked_python, "-m", "pie_driver_sglang", "demo"]
    done = subprocess.run(
        [*command, "--model", model, "--tokens", "16"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert re.search(r"^ready after [0-9.]+ s at http://127", out, re.MULTILINE)
    for title, question, _ in questions.QUESTIONS:
        assert f"--- {title}: {question}\n" in out
    for title in SECTIONS:
        assert f"--- {title}\n" in out
    assert re.search(r'^\{"city": ".*", "continent": "\w+", "population": \d+, ', out, re.MULTILINE)
    assert re.search(r'^get_weather\(\{.*"city": ?".*\}\)$', out, re.MULTILINE)
    first, second = map(int, re.findall(r"^\((\d+) of \d+ prompt tokens", out, re.MULTILINE))
    assert second >= 16
    assert second >= first
    assert re.search(r"^--- \d+ tokens in [0-9.]+ s: [0-9.]+ tokens/s", out, re.MULTILINE)
    assert re.search(r"^First text after [0-9.]+ s \(median\)\. .* limit of 16 tokens", out, re.M)
    assert re.search(r"^Served by scheduler: pie; grammar: llguidance; ", out, re.MULTILINE)
    assert out.rstrip().splitlines()[-3].endswith(f" shell --model {model}  chat in this terminal")
    if model == "smollm2":
        assert "Paris" in out
        # The sky is not explained in 16 tokens.
        assert re.search(r"Why is the sky blue\?\n.* …$", out, re.MULTILINE)
