"""The demo: the runtime's part, the report's arithmetic, and one run from end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import runtime_client as rc
from pie_driver_sglang.config.types import NEVER_PARK
from pie_driver_sglang.demo import program
from pie_driver_sglang.demo.display import Display, heading, plain_table, printable
from pie_driver_sglang.demo.driver import (
    Channel,
    DemoSettings,
    Profile,
    _read_handshake,
    _toml,
    choose_profile,
)
from pie_driver_sglang.demo.report import Grid, Result, mean_parts, read_steps, summarise
from pie_driver_sglang.demo.runtime import (
    AT_END,
    AT_LIMIT,
    Context,
    Limits,
    PagePool,
    Pass,
    Runtime,
    Sampling,
)
from pie_driver_sglang.demo.screen import open_display
from pie_driver_sglang.demo.tokens import find_model
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.pie.trace import Trace

REPO = Path(__file__).parents[1]
POCKET = REPO / "models" / "pocket"
PAGE = 4
END = 99
GREEDY = Sampling("greedy", "greedy")
ANNOUNCED: dict[str, Any] = {
    "total_pages": 12,
    "kv_page_size": PAGE,
    "max_forward_tokens": 64,
    "max_forward_requests": 8,
    "max_page_refs": 100,
    "max_model_len": 40,
    "arch_name": "qwen3",
}


@pytest.fixture(autouse=True)
def restore_sigterm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


class FakeDriver:
    """Records every batch, checks its geometry, and answers 1, or END in the steps asked for."""

    def __init__(self, ends: Sequence[tuple[int, int]] = ()) -> None:
        self.batches: list[list[Pass]] = []
        self.ends = set(ends)

    def forward(self, passes: Sequence[Pass]) -> list[int]:
        step = len(self.batches)
        self.batches.append(list(passes))
        for item in passes:
            stored = (len(item.pages) - 1) * PAGE + item.last_page_len
            assert 1 <= item.last_page_len <= PAGE
            assert list(item.positions) == list(range(stored - len(item.tokens), stored))
        return [END if (step, item.context_id) in self.ends else 1 for item in passes]

    def of(self, number: int) -> list[Pass]:
        return [item for batch in self.batches for item in batch if item.context_id == number]


def limits(**changed: Any) -> Limits:
    return Limits.of({**ANNOUNCED, **changed})


def context(number: int, prompt: int = 3, limit: int = 4, arrival: int = 0) -> Context:
    tokens = list(range(10, 10 + prompt))
    return Context(
        number, f"p{number}:", tokens, GREEDY, limit, arrival, lambda token: f"<{token}>"
    )


def run(
    driver: FakeDriver, contexts: Sequence[Context], announced: Limits | None = None
) -> Runtime:
    runtime = Runtime(driver, announced or limits(), contexts, frozenset({END}))
    while runtime.step():
        pages = [page for item in driver.batches[-1] for page in item.pages]
        assert len(pages) == len(set(pages)), "two contexts share a page"
        assert all(0 <= page < ANNOUNCED["total_pages"] for page in pages)
    return runtime


def test_pages_come_last_in_first_out_from_the_high_end() -> None:
    pool = PagePool(5)
    assert [pool.take(), pool.take(), pool.take()] == [4, 3, 2]
    pool.give_back([4, 3])
    assert [pool.take(), pool.take(), pool.take()] == [3, 4, 1]
    assert len(pool) == 1


def test_one_context_step_by_step() -> None:
    driver = FakeDriver()
    runtime = run(driver, [context(1, prompt=3, limit=4)])
    passes = driver.of(1)
    assert [list(item.tokens) for item in passes] == [[10, 11, 12], [1], [1], [1]]
    assert [list(item.positions) for item in passes] == [[0, 1, 2], [3], [4], [5]]
    assert [list(item.pages) for item in passes] == [[11], [11], [11, 10], [11, 10]]
    assert [item.last_page_len for item in passes] == [3, 4, 1, 2]
    (done,) = runtime.contexts
    assert (done.state, done.tokens, done.text) == (AT_LIMIT, [1] * 4, "<1>" * 4)
    assert (runtime.steps, runtime.rows, runtime.generated) == (4, 4, 4)
    assert runtime.free_pages == ANNOUNCED["total_pages"]


def test_a_newcomers_prompt_rides_with_the_decodes() -> None:
    driver = FakeDriver()
    run(driver, [context(1, limit=6), context(2, prompt=5, arrival=2), context(3, arrival=3)])
    shapes = [[(item.context_id, len(item.tokens)) for item in batch] for batch in driver.batches]
    assert shapes[:4] == [
        [(1, 3)],
        [(1, 1)],
        [(1, 1), (2, 5)],
        [(1, 1), (2, 1), (3, 3)],
    ]


def test_an_end_token_ends_the_text_and_frees_the_pages_for_the_next() -> None:
    driver = FakeDriver(ends=[(1, 1)])
    runtime = run(driver, [context(1, limit=9), context(2, arrival=2), context(3, arrival=3)])
    first = runtime.contexts[0]
    assert (first.state, first.tokens, first.text) == (AT_END, [1, END], "<1>")
    assert [list(item.pages) for item in driver.of(1)] == [[11], [11]]
    assert list(driver.of(2)[0].pages) == [11]


def test_nobody_waits_for_an_arrival_when_nothing_runs() -> None:
    driver = FakeDriver()
    runtime = run(driver, [context(1, limit=1), context(2, limit=1, arrival=50)])
    assert runtime.steps == 2


@pytest.mark.parametrize(
    ("announced", "sizes"),
    [
        (limits(), [3, 3, 3, 3]),
        (limits(max_forward_requests=2), [2, 2, 2, 2, 1, 1, 1, 1]),
        # The second prompt fits with one decode, the third with two.
        (limits(max_forward_tokens=5), [1, 2, 3, 3, 2, 1]),
        # Two contexts of two pages each.
        (limits(total_pages=5), [2, 2, 2, 2, 1, 1, 1, 1]),
        (limits(max_page_refs=4), [2, 2, 2, 2, 1, 1, 1, 1]),
    ],
)
def test_batches_keep_within_the_limits(announced: Limits, sizes: list[int]) -> None:
    driver = FakeDriver()
    runtime = run(driver, [context(number) for number in (1, 2, 3)], announced)
    assert [len(batch) for batch in driver.batches] == sizes
    assert runtime.free_pages == announced.total_pages
    assert all(item.state == AT_LIMIT for item in runtime.contexts)


@pytest.mark.parametrize("prompt", [39, 40])
def test_a_context_ends_where_the_model_ends(prompt: int) -> None:
    driver = FakeDriver()
    runtime = run(driver, [context(1, prompt=prompt, limit=96)])
    # The last token is never fed back.
    assert runtime.generated == 41 - prompt
    assert max(position for item in driver.of(1) for position in item.positions) == 39


@pytest.mark.parametrize(
    ("prompt", "announced", "message"),
    [
        (41, limits(), "prompt 1 has 41 tokens, this model takes up to 40"),
        (13, limits(total_pages=3), "prompt 1 has 13 tokens, this model takes up to 12"),
        (9, limits(max_forward_tokens=8), "prompt 1 has 9 tokens, this model takes up to 8"),
        (0, limits(), "prompt 1 is empty"),
    ],
)
def test_prompts_that_cannot_run(prompt: int, announced: Limits, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$") as raised:
        Runtime(FakeDriver(), announced, [context(1, prompt=prompt)], frozenset())
    assert raised.value.hint


@pytest.mark.parametrize(
    ("cores", "load", "name", "spin"),
    [
        (16, 2.5, "latency", NEVER_PARK),
        (4, 0.0, "latency", NEVER_PARK),
        (4, 0.1, "balanced", 1000),
        (2, 9.0, "balanced", 1000),
    ],
)
def test_the_profile_follows_the_free_cores(cores: int, load: float, name: str, spin: int) -> None:
    profile = choose_profile(cores, load)
    assert (profile.name, profile.spin_budget_us) == (name, spin)
    assert f"of {cores} cores are free" in profile.reason


def test_the_driver_accepts_its_configuration(tmp_path: Path) -> None:
    from pie_driver_sglang.config.file import load_config

    model = tmp_path / 'a "model" ü'
    model.mkdir()
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").write_text("{}")
    file = tmp_path / "driver.toml"
    for spin, devices in ((NEVER_PARK, ("cpu",)), (1000, ("cuda:1", "cuda:0"))):
        settings = DemoSettings(model, ",".join(devices), 7, Profile("", spin, ""))
        file.write_text(_toml(settings, 5, tmp_path / "trace.json"), encoding="utf-8")
        read = load_config(file)
        assert (read.model.snapshot_dir, read.model.name) == (model, model.name)
        assert (read.driver.group_id, read.driver.device) == (5, devices)
        assert (read.driver.spin_budget_us, read.driver.random_seed) == (spin, 7)
        assert read.driver.options.trace_file == str(tmp_path / "trace.json")


def test_the_handshake_is_read_as_it_comes() -> None:
    group = json.dumps({"group_id": 5, "shmem_name": "/pie_shmem_g5", "caps": ANNOUNCED}) + "\n"
    whole = (group + '{"ready":true,"num_groups":1}\n').encode()
    assert _read_handshake(whole[:-1], 5) is None
    assert _read_handshake(whole, 5) == limits()
    assert _read_handshake(whole, 6) is None
    for line in (b"loading\n", b"{}\n", b'{"group_id":5,"caps":{}}\n', b"[]\n"):
        with pytest.raises(StartError, match="the driver's handshake has the line"):
            _read_handshake(line, 5)


class FakeReply:
    def __init__(self, tokens: list[list[int]], aborted: bool = False) -> None:
        self.tokens, self.aborted, self.status = tokens, aborted, None


class FakeClient:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def forward(self, requests: Sequence[Any]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_channel_takes_the_time_of_every_batch() -> None:
    channel = Channel(FakeClient(FakeReply([[7], [8]])), lambda error: StartError(str(error)))
    passes = [Pass(number, (1,), (0,), (3,), 1, GREEDY) for number in (1, 2)]
    assert channel.forward(passes) == [7, 8]
    assert len(channel.round_trips_ns) == 1
    assert channel.round_trips_ns[0] > 0


@pytest.mark.parametrize(
    "answer", [TimeoutError("late"), FakeReply([[], [8]]), FakeReply([], aborted=True)]
)
def test_the_channel_refuses_a_batch_without_its_tokens(answer: Any) -> None:
    channel = Channel(FakeClient(answer), lambda error: StartError(f"no answer: {error}"))
    passes = [Pass(number, (1,), (0,), (3,), 1, GREEDY) for number in (1, 2)]
    with pytest.raises(StartError, match=r"^no answer: "):
        channel.forward(passes)


@pytest.mark.parametrize("sampling", [*program.SAMPLINGS], ids=lambda item: item.label)
def test_every_sampler_exists(sampling: Sampling) -> None:
    channel = Channel(FakeClient(FakeReply([[7]])), lambda error: StartError(str(error)))
    assert channel.forward([Pass(1, (1, 2), (0, 1), (3,), 2, sampling)]) == [7]


def write_trace(path: Path, steps: Sequence[Sequence[int]]) -> None:
    names = ("parse", "plan", "forward", "sample", "respond")
    with path.open("w") as file:
        trace = Trace(os.dup(file.fileno()), str(path), 1024, None)
        trace.begin()
        for start, phases in enumerate(steps):
            named = dict(zip(names, phases, strict=True))
            trace.step(start * 10**6, named, requests=1, tokens=1)


def test_the_ring_takes_what_the_driver_does_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [(1000, 2000, 100_000, 20_000, 3000), (3000, 4000, 300_000, 40_000, 5000)])
    steps = read_steps(path)
    assert [step["step"] for step in steps] == [126.0, 352.0]
    parts = mean_parts(steps, [136_000, 382_000])
    expected = {"ring": 20, "parse and plan": 5, "model and sampling": 230, "respond": 4}
    assert parts == pytest.approx(expected)


def test_a_cut_trace_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [(1000, 2000, 100_000, 20_000, 3000)])
    with path.open("a") as file:
        file.write(',\n{"name": "step", "ph": "X", "du')
    steps = read_steps(path)
    assert len(steps) == 1
    assert mean_parts(steps, [127_000, 500_000])["ring"] == pytest.approx(1)
    assert mean_parts([], [127_000]) == {}


def test_the_tables_of_a_run() -> None:
    contexts = [context(1, limit=4), context(2, limit=4, arrival=2)]
    runtime = run(FakeDriver(), contexts)
    steps = [{"step": 60.0, "parse": 1, "plan": 9, "forward": 40, "sample": 8, "respond": 2}] * 6
    result = Result(runtime, 2.0, [100_000] * 6)
    assert result.rate == 4.0
    per_context, totals, split = summarise(result, steps)
    assert per_context.rows[1] == ("2", "3", "4", "greedy", AT_LIMIT)
    assert totals.rows == [("8", "2.00", "4.0", "6", "1.3")]
    assert dict(zip(totals.headers, totals.rows[0], strict=True))["tokens/s"] == "4.0"
    assert split.rows == [
        ("ring", "40.0", "40.0"),
        ("parse and plan", "10.0", "10.0"),
        ("model and sampling", "48.0", "48.0"),
        ("respond", "2.0", "2.0"),
        ("whole step", "100.0", "100.0"),
    ]
    assert len(summarise(result, [])) == 2


def test_a_plain_table_is_aligned() -> None:
    grid = Grid("t", ("part", "µs"), [("ring", "1.5"), ("a", "10.5")], frozenset({"part"}))
    assert plain_table(grid).splitlines() == ["t:", "part    µs", "ring   1.5", "a     10.5"]


def test_plain_lines_show_each_context_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    shown = context(1, limit=2)
    assert heading(shown) == "1: greedy, waiting"
    runtime = Runtime(FakeDriver(), limits(), [shown], frozenset())
    while runtime.step():
        display.show(runtime.contexts)
        display.show(runtime.contexts)
    assert capsys.readouterr().out == "\n--- 1: greedy, 2 tokens, token limit ---\np1:<1><1>\n"


def test_plain_lines_show_what_the_driver_logs(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    for elapsed, line in (
        (0.1, ""),
        (0.2, "importing"),
        (0.3, "importing"),
        (12.34, "load\x1bing"),
    ):
        display.loading(elapsed, line)
    assert capsys.readouterr().out == "  0.2 s  importing\n 12.3 s  load\ufffding\n"


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\tb\n\x1b[2J\x00é\xa0x\r") == "a   b\n\ufffd[2J\ufffdé x "


def test_live_panels_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    live = pytest.importorskip("pie_driver_sglang.demo.live")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    display = live.LiveDisplay()
    contexts = [context(number, limit=50) for number in range(1, 7)]
    contexts[5].text = "\n".join(str(line) for line in range(40))
    contexts[3].text = "x" * 200 + "y"
    with display._console.capture() as captured:
        display._console.print(display._panels(contexts, whole=False))
    lines = captured.get().splitlines()
    assert len(lines) <= 22
    assert all(len(line) <= 80 for line in lines)
    assert "39" in lines[-2]
    assert "y" in captured.get()
    with display._console.capture() as captured:
        display.finish(contexts, [Grid("t", ("n",), [("1",)])])
    assert len(captured.get().splitlines()) > 40


def test_off_a_terminal_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_display()) is Display
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_display()) is Display
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert type(open_display()) is Display
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setitem(sys.modules, "pie_driver_sglang.demo.live", None)
    assert type(open_display()) is Display


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such"], "there is no model folder 'no/such'"),
        (["--model", "models/pocket", "--model", "/dev"], "the model folder '/dev' has no token"),
    ],
)
def test_a_wrong_model_shows_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "\n\nhint: pass a folder with config.json, tokenizer.json and weights" in error


def test_a_model_in_the_cache_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--a--small-model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).touch()
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    assert find_model(Path("a/small-model")) == snapshot
    with pytest.raises(ConfigError, match="no model folder 'a/other'"):
        find_model(Path("a/other"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "0"],
        ["--tokens", "x"],
        ["--prompt", "\udcff"],
        ["--device", "gpu"],
        ["--device", "cuda:"],
        ["--device", "cpu,cuda:0"],
        ["--device", "cpu,"],
    ],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)


def demo_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pie_driver_sglang.demo", "--model", str(POCKET), *arguments]


def test_the_drivers_own_error_comes_last(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    command = demo_command("--model", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    error = done.stderr.splitlines()
    assert error[-1].startswith("hint: ")
    assert "has no config.json" in error[-3]


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_six_prompts_from_end_to_end() -> None:
    assert POCKET.is_dir()
    pipe = subprocess.PIPE
    command = demo_command("--tokens", "8")
    with subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe) as demo:
        # Other demos and drivers may run at the same time.
        region = Path(f"/dev/shm/pie_shmem_g{2**31 + demo.pid}")
        rc.eventually(region.exists, "the region", 120.0)
        out, error = demo.communicate(timeout=280)
    assert demo.returncode == 0, error
    lines = out.splitlines()
    assert re.fullmatch(r"[0-9]+\.[0-9] tok/s", lines[-1])
    assert float(lines[-1].split()[0]) > 0
    assert lines[0].startswith("starting the driver: ")
    assert re.match("(latency|balanced) profile: ", lines[1])
    assert any("importing SGLang" in line for line in lines[2:])
    assert sum(line.startswith("--- ") for line in lines) == len(program.PROMPTS)
    assert out.count("def read_config(path):\n") == 1
    for part in ("ring", "parse and plan", "model and sampling", "respond"):
        assert any(line.startswith(f"{part} ") for line in lines)
    assert not region.exists()
