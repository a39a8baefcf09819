"""Our runtime with real drivers on the CPU."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang._core import Output, Runtime
from pie_driver_sglang.errors import StartError
from support.models.reference import Reference
from support.models.tiny_models import POCKET

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_S = 600.0
#: Fewer pages than 32 streams want, so that some of them must wait or give theirs back.
PAGES = 48


def make(python: str = sys.executable, **settings: Any) -> Runtime:
    return Runtime(str(POCKET), python=python, devices=["cpu"], **settings)


@pytest.fixture(scope="module")
def runtime(forked_python: str) -> Iterator[Runtime]:
    settings = {"max_total_pages": PAGES, "chunked_prefill_size": 64, "schedule_policy": "lpm"}
    vocabulary = [b"<%d>" % token for token in range(4096)]
    with make(forked_python, vocabulary=vocabulary, **settings) as runtime:
        assert runtime.wait_ready(START_S), runtime.log_lines()
        yield runtime


def stats_with(runtime: Runtime, **expected: int) -> dict[str, Any]:
    """The counts, once these have arrived: they are some milliseconds old."""
    until = time.monotonic() + START_S
    while True:
        stats = runtime.stats()
        if {name: stats[name] for name in expected} == expected:
            return stats
        assert time.monotonic() < until, stats
        time.sleep(0.02)


class Stories:
    """What came of requests: tokens and the last output of each of their sequences."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], Output] = {}

    def collect(self, sequences: int) -> None:
        """Polls until so many sequences have ended."""
        while len(self.ends) < sequences:
            for output in self.runtime.poll(60.0):
                key = (output.request, output.sample)
                assert key not in self.ends
                self.tokens.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.ends[key] = output


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 5 to 150 tokens, some of which begin alike."""
    draw = random.Random(seed)
    shared = [[draw.randrange(4096) for _ in range(100)] for _ in range(3)]
    return [
        [*draw.choice(shared)[: draw.randrange(100)], *draw.choices(range(4096), k=5 + index % 50)]
        for index in range(count)
    ]


def test_a_forked_child_is_refused(runtime: Runtime) -> None:
    """It has no thread that could answer, and the ring has one client."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            errors = []
            calls: list[Callable[[], object]] = [
                lambda: runtime.submit([1, 2], max_new_tokens=1),
                lambda: runtime.load_adapter(1, "/nowhere"),
                lambda: runtime.wait_ready(0.0),
            ]
            for call in calls:
                try:
                    call()
                except StartError as error:
                    errors.append(str(error))
            assert runtime.poll(60.0) == []
            os.write(writer, b"forked" if all("forked" in text for text in errors) else b"other")
            os.write(writer, b" %d" % len(errors))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "forked 3"
    os.waitpid(child, 0)


def test_tokens_are_those_of_transformers(runtime: Runtime) -> None:
    reference = Reference(POCKET)
    all_prompts = prompts(40, seed=3)
    stories = Stories(runtime)
    ids = []
    for index, prompt in enumerate(all_prompts):
        given = array("q", prompt) if index % 2 else prompt
        ids.append(runtime.submit(given, temperature=0.0, max_new_tokens=8 + index % 40))
        if index % 13 == 12:
            stories.collect(index // 2)
    stories.collect(len(ids))
    for index, (id, prompt) in enumerate(zip(ids, all_prompts, strict=True)):
        found = stories.tokens[id, 0]
        assert stories.ends[id, 0].finish_reason == "length"
        assert len(found) == 8 + index % 40
        reference.check([*prompt, *found[:-1]], found)
    stats = stats_with(runtime, finished=40)
    assert stats["cached_tokens"] > 0
    assert stats["pages_total"] == PAGES
    assert stats["replicas"][0]["finished"] == 40


def test_a_killed_driver_changes_no_token(runtime: Runtime) -> None:
    reference = Reference(POCKET)
    streams = prompts(32, seed=7)
    stories = Stories(runtime)
    ids = [runtime.submit(p, temperature=0.0, max_new_tokens=32) for p in streams]
    stories.collect(8)
    (pid,) = runtime.stats()["driver_pids"]
    assert len(stories.ends) < 32
    os.kill(pid, signal.SIGKILL)
    stories.collect(32)
    for id, prompt in zip(ids, streams, strict=True):
        found = stories.tokens[id, 0]
        assert len(found) == 32
        reference.check([*prompt, *found[:-1]], found)
    stats = stats_with(runtime, restarts=1)
    assert stats["driver_pids"] != [pid]
    log = "\n".join(runtime.log_lines())
    assert "the driver ended (signal: 9 (SIGKILL)) while it served" in log


def test_ends_and_samples(runtime: Runtime) -> None:
    prompt = [11, 12, 13, 14, 15]
    stories = Stories(runtime)
    whole = runtime.submit(prompt, temperature=0.0, max_new_tokens=24)
    stories.collect(1)
    tokens = stories.tokens[whole, 0]
    by_token = runtime.submit(prompt, temperature=0.0, stop_token_ids=[tokens[5]])
    by_text = runtime.submit(prompt, temperature=0.0, stop=[f"<{tokens[3]}><{tokens[4]}>"])
    several = runtime.submit(prompt, temperature=1.0, max_new_tokens=6, n=3)
    endless = runtime.submit(prompt, temperature=0.0, max_new_tokens=1900)
    late = runtime.submit(prompt, temperature=0.0, max_new_tokens=1900, deadline_s=0.05)
    long = runtime.submit([1] * 3000, max_new_tokens=1)
    runtime.abort(endless)
    stories.collect(9)

    first = tokens.index(tokens[5])
    end = stories.ends[by_token, 0]
    assert (end.finish_reason, end.stop_token) == ("stop", tokens[5])
    assert stories.tokens[by_token, 0] == tokens[: first + 1]
    end = stories.ends[by_text, 0]
    assert (end.finish_reason, end.stop_string) == ("stop", 0)
    text = "".join(f"<{token}>" for token in stories.tokens[by_text, 0])
    assert end.text_bytes is not None
    assert text[end.text_bytes :] == f"<{tokens[3]}><{tokens[4]}>"
    assert [len(stories.tokens[several, sample]) for sample in range(3)] == [6, 6, 6]
    assert stories.ends[endless, 0].finish_reason == "abort"
    assert stories.ends[late, 0].finish_reason == "deadline"
    error = stories.ends[long, 0]
    assert error.finish_reason == "error"
    assert error.error is not None
    assert "3000 tokens" in error.error


def test_parameters_are_checked_at_once(runtime: Runtime) -> None:
    for wrong, text in [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"logit_bias": [(10**6, 1.0)]}, "token 1000000 of `logit_bias` is not in the vocabulary"),
        ({"logit_bias": [(3, 1.0), (3, 2.0)]}, "`logit_bias` has token 3 twice"),
        ({"stop": ["x"] * 2000}, "`stop` has 2000 strings, 1024 is the most: send fewer, or raise"),
        ({"n": 2**40}, "n is 1099511627776, it must be from 1 to"),
        ({"min_new_tokens": 2**62, "max_new_tokens": 3}, "at most 3 are asked for"),
        ({"deadline_s": -1.0}, "deadline_s is -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            runtime.submit([1, 2], **wrong)
    with pytest.raises(TypeError):
        runtime.submit("text")  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        runtime.submit(array("q", [-1]))
    # Further away than any clock goes.
    runtime.abort(runtime.submit([1, 2], deadline_s=1e19))
    with pytest.raises(ValueError, match="there is no request limit `stops`: the limits are name_"):
        make(request_limits={"stops": 1})
    with pytest.raises(ValueError, match="2 replicas of 1 devices"):
        make(replicas=2)
    with pytest.raises(ValueError, match="is not a scheduling policy"):
        make(schedule_policy="fastest")
    with pytest.raises(ValueError, match="max_token_gap_ms is -5: "):
        make(max_token_gap_ms=-5)
    with pytest.raises(ValueError, match="max_step_ms is NaN: "):
        make(max_step_ms=float("nan"))


def test_shutdown_leaves_no_driver() -> None:
    runtime = make()
    while (pid := runtime.stats()["driver_pids"][0]) == 0:
        time.sleep(0.01)
    runtime.shutdown()
    runtime.shutdown()
    assert not Path(f"/proc/{pid}").exists()
    assert runtime.poll(60.0) == []
    with pytest.raises(RuntimeError, match="shut down"):
        runtime.submit([1])


def test_a_start_that_fails_is_explained() -> None:
    runtime = make(options={"page_sise": 16})
    with pytest.raises(StartError, match="page_sise"):
        runtime.wait_ready(START_S)
    assert any("did you mean `page_size`" in line for line in runtime.log_lines())


SCRIPT = """
import sys
from pie_driver_sglang._core import Runtime
runtime = Runtime(sys.argv[1], python=sys.executable, devices=["cpu"])
runtime.wait_ready(0.2)
while not any(pids := runtime.stats()["driver_pids"]):
    pass
print(*pids)
"""


def test_a_program_may_end_without_output() -> None:
    """Nothing hangs at the interpreter's end, and the driver goes with it."""
    command = [sys.executable, "-c", SCRIPT, str(POCKET)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    until = time.monotonic() + 60
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
