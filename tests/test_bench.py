"""`pie-sglang bench` and `replay`, and the shell on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.cli import bench, main, replay
from pie_driver_sglang.cli.workloads import WORKLOADS, make_workload, quantiles
from pie_driver_sglang.errors import ConfigError, DriverError
from support import REPOSITORY
from support.models.tiny_models import POCKET


def standard(**changed: Any) -> Any:
    options = {"requests": 256, "longest": 1024, "vocabulary": 150_000, **changed}
    return make_workload("standard", **options)


def test_the_standard_workload_has_the_lengths_of_the_load_generator() -> None:
    lengths = json.loads((REPOSITORY / "benches" / "pie_load" / "lengths.json").read_text())
    found = standard()
    assert [len(prompt) for prompt in found.prompts] == lengths["prompts"]
    assert found.outputs == lengths["outputs"]
    assert not found.keeps_prefixes
    assert found.sampling()[3] == {
        "temperature": 0.6,
        "ignore_eos": True,
        "max_new_tokens": lengths["outputs"][3],
    }


@given(
    name=st.sampled_from(WORKLOADS),
    requests=st.integers(1, 20),
    longest=st.integers(2, 300),
    vocabulary=st.integers(2, 12_000),
    seed=st.integers(0, 3),
)
def test_workloads_stay_within_their_limits(
    name: str, requests: int, longest: int, vocabulary: int, seed: int
) -> None:
    sizes = {"requests": requests, "longest": longest, "vocabulary": vocabulary, "seed": seed}
    found = make_workload(name, **sizes)
    assert found == make_workload(name, **sizes)
    assert len(found.prompts) == len(found.outputs) == requests
    assert all(1 <= count <= longest for count in found.outputs)
    assert all(0 <= token < vocabulary for prompt in found.prompts for token in prompt)
    if name == "standard":
        assert all(1 <= len(prompt) <= longest for prompt in found.prompts)
    else:
        shared = min(1024, longest)
        assert all(prompt[:shared] == found.prompts[0][:shared] for prompt in found.prompts)
        assert all(len(prompt) > shared for prompt in found.prompts)


@pytest.mark.parametrize(
    ("name", "changed"), [("none", {}), ("standard", {"requests": 0}), ("standard", {"longest": 1})]
)
def test_what_is_no_workload_is_refused(name: str, changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_workload(name, **{"requests": 1, "longest": 9, "vocabulary": 9, **changed})
    assert caught.value.hint


@given(st.lists(st.floats(0, 1e6), max_size=60))
def test_quantiles_are_those_of_the_sorted_list(values: list[float]) -> None:
    found = quantiles(values)
    if not values:
        assert not found
        return
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        below = [value for value in values if value <= found[name]]
        assert found[name] in values
        assert len(below) >= math.ceil(share * len(values))
        assert len([value for value in values if value < found[name]]) < share * len(values)


def trace(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        {"at": 0.5, "prompt": "b", "id": 7},
        {"input_ids": [1]},
        {"at": 0.2, "prompt": "c"},
    )
    found = replay.read_trace(path)
    assert [request.at_s for request in found] == [0.0, 0.2, 0.5]
    assert found[0].prompt.tokens == [1]
    assert found[2].prompt.others == {"id": 7}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"at": -1, "prompt": "a"}, ("request 1", "-1")),
        ({"at": "soon", "prompt": "a"}, ("'soon'", "seconds")),
        ({"at": True, "prompt": "a"}, ("True",)),
        ({"at": 1}, ("line 1", "no prompt")),
    ],
)
def test_a_wrong_line_of_a_trace_is_refused(
    tmp_path: Path, line: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        replay.read_trace(trace(tmp_path, line))
    assert all(word in f"{caught.value} {caught.value.hint}" for word in words)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        replay.read_trace(trace(tmp_path))


def test_requests_that_failed_are_counted_and_have_no_times() -> None:
    answer = {"meta_info": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 4}}
    good = replay.RequestResult(0.0, 10.0, 40.0, [10.0, 10.0, 10.0], answer, "")
    bad = replay.RequestResult(1.0, None, 5.0, [], None, "it is over")
    record = replay.summarize([good, bad], 2.0)
    assert (record["requests"], record["failed"]) == (2, 1)
    assert record["output_tokens_per_s"] == 2.0
    assert record["total_ms"]["p99"] == 40.0
    text = replay.latency_table(record)
    assert "2 requests in 2.0 s, 1 failed; 4 tokens (2.0 tok/s), 1 of 3 prompt" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "--rounds", "0"], "measure nothing"),
        (["bench", "--requests", "0"], "no workload"),
        (["replay", "missing.jsonl"], "cannot read prompts"),
        (["replay", "missing.jsonl", "--speed", "0"], "`--speed` is 0"),
    ],
)
def test_wrong_arguments_end_before_an_engine_starts(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(POCKET)] if words[0] == "bench" else []
    assert main.main([*words, *model]) == 1
    assert expected in capsys.readouterr().err


def test_a_side_that_fails_ends_the_bench(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="`pie` was not measured"):
        bench.main(["--model", str(POCKET), "--option", "page_size=0", "--device", "cpu"])


@pytest.mark.engine
@pytest.mark.usefixtures("forks")
def test_a_bench_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    words = ["--model", str(POCKET), "--device", "cpu", "--requests", "3", "--longest", "20"]
    words += ["--repeats", "2", "--json", str(path)]
    assert main.main(["bench", *words]) == 0
    record = json.loads(path.read_text())
    expected = make_workload("standard", requests=3, longest=20, vocabulary=10**6)
    assert record["workload"]["prompt_tokens"] == sum(map(len, expected.prompts))
    assert record["workload"]["output_tokens"] == sum(expected.outputs)
    (run,) = record["runs"]
    assert [run["side"], len(run["seconds"])] == ["pie", 2]
    rates = [sum(expected.outputs) / seconds for seconds in run["seconds"]]
    assert run["tokens_per_s"] == pytest.approx(rates)
    assert record["tokens_per_s"]["pie"] == pytest.approx(statistics.median(rates))
    assert capsys.readouterr().out.splitlines()[1].startswith("pie ")


@pytest.mark.engine
@pytest.mark.usefixtures("forks")
def test_a_replay_keeps_the_times_and_the_answers(tmp_path: Path) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    lines = [
        {"at": 0.0, "input_ids": [5, 6, 7], "sampling_params": greedy, "id": "a"},
        {"at": 1.0, "prompt": "def f(x):", "sampling_params": greedy, "id": "b"},
        {"at": 1.0, "input_ids": [5, 6, 7], "id": "c"},
    ]
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    words = ["replay", trace(tmp_path, *lines), "--model", str(POCKET), "--device", "cpu"]
    words += ["--temperature", "0", "--max-new-tokens", "3", "--speed", "2"]
    assert main.main([*words, "--json", str(summary), "--output", str(out)]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == ["a", "b", "c"]
    assert [len(answer["output_ids"]) for answer in answers] == [5, 5, 3]
    assert answers[2]["output_ids"] == answers[0]["output_ids"][:3]
    record = json.loads(summary.read_text())
    assert (record["requests"], record["failed"], record["output_tokens"]) == (3, 0, 13)
    # Half of the trace's second, since it is played at twice its speed.
    assert record["seconds"] >= 0.5
    assert all(answer["first_token_ms"] <= answer["total_ms"] for answer in answers)


STEERING = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Sequences that move the cursor or set colours."""


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str], home: Path) -> None:
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        environment = {**os.environ, "HOME": str(home), "TERM": "xterm"}
        # A terminal that does not tell where its cursor is.
        environment["PROMPT_TOOLKIT_NO_CPR"] = "1"

        def own_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # What runs in the background of a script ignores Ctrl-C, and so would what it starts.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environment,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(follower)
        self._leader = leader
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str) -> None:
        """Waits until `text` is shown, and forgets what was shown up to it."""
        self._read_until(lambda: text in self.shown, repr(text))
        self.shown = self.shown.partition(text)[2]

    def type_until(self, key: str, text: str, seconds: float) -> bool:
        """Types a key ten times a second until `text` is shown; False if it is not."""
        typed, end = 0.0, time.monotonic() + seconds

        def is_there() -> bool:
            nonlocal typed
            if text in self.shown or time.monotonic() > end:
                return True
            if time.monotonic() - typed > 0.1:
                typed = time.monotonic()
                self.type(key)
            return False

        self._read_until(is_there, repr(text))
        _, found, self.shown = self.shown.partition(text)
        return bool(found)

    def wait_for_more(self, count: int) -> None:
        """Waits until so many characters are shown that were not there before."""
        wanted = len(self.shown) + count
        self._read_until(lambda: len(self.shown) >= wanted, f"{count} characters more")

    def _read_until(self, is_there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 120.0
        while not is_there():
            assert time.monotonic() < end, f"{what}: not in {self.shown[-2000:]!r}"
            if select.select([self._leader], [], [], 0.2)[0]:
                text = os.read(self._leader, 1 << 16).decode(errors="replace")
                self.shown += STEERING.sub("", text)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._leader)


SHELL = """
import sys
sys.executable = sys.argv.pop(1)
from pie_driver_sglang.cli.main import main
raise SystemExit(main())
"""


@pytest.fixture
def terminal(forked_python: str, tmp_path: Path) -> Iterator[Terminal]:
    # A new interpreter: a fork's session has no terminal.
    command = [sys.executable, "-c", SHELL, forked_python, "shell", "--model", str(POCKET)]
    command += ["--device", "cpu", "--temperature", "0", "--ignore-eos", "--max-new-tokens", "1500"]
    found = Terminal(command, tmp_path)
    yield found
    found.close()


@pytest.mark.engine
def test_a_shell_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("Ctrl-C stops an answer")
    terminal.wait_for(">")
    for _ in range(6):
        terminal.type("tell me of sorting\r")
        terminal.wait_for_more(100)
        # What is typed while the terminal changes its mode, before the answer begins, may be lost,
        # and on a busy machine the answer may have ended before the key is seen.
        if stopped := terminal.type_until("\x03", "[stopped]", 15):
            break
        # Two such answers are more than the model's context holds.
        terminal.type("/reset\r")
        terminal.wait_for(">")
    assert stopped
    # The shell continues, and the engine with it.
    terminal.wait_for(">")
    terminal.type("/stats\r")
    terminal.wait_for("last answer")
    terminal.wait_for("steps ")
    terminal.type("/reset\r")
    terminal.wait_for("the conversation is empty")
    # The arrow brings the last line back.
    terminal.wait_for(">")
    terminal.type("\x1b[A\r")
    terminal.wait_for("the conversation is empty")
    # At the prompt Ctrl-C clears the line.
    terminal.wait_for(">")
    terminal.type("half a line\x03")
    terminal.type("/nonsense\r")
    terminal.wait_for("there is no command /nonsense")
    terminal.type("/exit\r")
    assert terminal.process.wait(30) == 0
    history = (tmp_path / ".local" / "state" / "pie-sglang" / "history").read_text()
    lines = [line[1:] for line in history.splitlines() if line.startswith("+")]
    assert {"tell me of sorting", "/stats", "/reset"} <= {*lines}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9/v1/models"),
        (["--serve", "--concurrency", "0"], "0 is no number of streams"),
        (["--serve", "--output-len", "-1"], "-1 is no number of streams"),
    ],
)
def test_servers_that_cannot_be_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "hint:" in error
