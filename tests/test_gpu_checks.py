"""The GPU checks: arguments, registry and records."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from pie_driver_sglang.driver.trace import Trace
from support import REPOSITORY
from support.models.tiny_models import POCKET
from support.process import scripts

FOLDER = REPOSITORY / "benches" / "gpu"


@pytest.fixture(scope="module")
def frame() -> Iterator[Any]:
    """What the checks have in common."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("frame")
    sys.path.remove(str(FOLDER))


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", json=tmp_path / "new" / "record.json")


class TestRecord:
    def test_of_a_check_that_ends(self, frame: Any, arguments: argparse.Namespace) -> None:
        with frame.Report("benches/gpu/some_check.py", arguments) as report:
            report.add(batch=8, p50_us=1.5)
            report.put("part", {"first": 1})
            report.put("part", {"second": math.inf})
            assert report.hold("off", 0.5, at_most=0.5)
            assert report.hold("speed", 0.98, at_least=0.98)
        record = frame.read(arguments.json)
        assert record.ok
        assert (record.check, record.device, record.driver) == ("some_check", "cpu", "")
        assert record.commit == frame.commit() != ""
        assert record.rows == [
            {"batch": 8, "p50_us": 1.5},
            # JSON knows no infinity.
            {"part": "part", "figures": {"second": None}},
        ]
        assert record.bars == [
            frame.Bar("off", 0.5, "<= 0.5", True),
            frame.Bar("speed", 0.98, ">= 0.98", True),
        ]

    @pytest.mark.parametrize("value", [0.51, math.nan])
    def test_a_missed_threshold_ends_with_status_1(
        self, value: float, frame: Any, arguments: argparse.Namespace
    ) -> None:
        with (
            pytest.raises(SystemExit) as ended,
            frame.Report("some_check.py", arguments) as report,
        ):
            assert not report.hold("off", value, at_most=0.5)
        assert ended.value.code == 1
        record = frame.read(arguments.json)
        assert record.error is None
        assert not record.ok
        assert not record.bars[0].ok

    def test_of_a_check_that_raises(self, frame: Any, arguments: argparse.Namespace) -> None:
        with (
            pytest.raises(ValueError, match="no tokens"),
            frame.Report("some_check.py", arguments) as report,
        ):
            report.add(batch=8)
            raise ValueError("no tokens")
        record = frame.read(arguments.json)
        assert (record.error, record.rows, record.ok) == (
            "ValueError: no tokens",
            [{"batch": 8}],
            False,
        )

    def test_of_a_check_that_is_killed(self, frame: Any, arguments: argparse.Namespace) -> None:
        with frame.Report("some_check.py", arguments) as report:
            report.add(batch=8)
            # All that a signal would leave.
            record = frame.read(arguments.json)
        assert record.error == frame.UNFINISHED
        assert not record.ok

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("commit", None),
            ("more", 1),
            ("rows", [1]),
            ("bars", [{"name": "off", "value": "1", "bar": "<= 2", "ok": True}]),
            ("bars", [{"name": "off", "value": 1, "bar": "below 2", "ok": True}]),
            ("bars", [{"name": "off", "value": 1, "bar": "<= 2"}]),
        ],
    )
    def test_another_schema_is_refused(
        self, key: str, value: object, frame: Any, arguments: argparse.Namespace
    ) -> None:
        with frame.Report("some_check.py", arguments):
            pass
        fields = json.loads(arguments.json.read_text())
        fields[key] = value
        arguments.json.write_text(json.dumps(fields))
        with pytest.raises(msgspec.ValidationError):
            frame.read(arguments.json)

    def test_a_bar_has_one_limit(self, frame: Any, arguments: argparse.Namespace) -> None:
        with frame.Report("some_check.py", arguments) as report:
            for limits in ({}, {"at_most": 1, "at_least": 0}):
                with pytest.raises(TypeError, match="one limit"):
                    report.hold("off", 0.5, **limits)


def test_paths_alternate(frame: Any) -> None:
    called: list[str] = []

    def way(name: str) -> float:
        called.append(name)
        return len(called)

    times = frame.in_turns({name: lambda name=name: way(name) for name in "ab"}, 2, warmup=1)
    assert "".join(called) == "ababab"
    assert times == {"a": [3, 5], "b": [4, 6]}


def test_a_folder_without_a_shape_is_named(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} is not a folder with"):
        frame.shapes(str(tmp_path))
    config = tmp_path / "config.json"
    config.touch()
    assert frame.shapes(str(tmp_path)) == frame.shapes(str(config)) == tmp_path.resolve()


@pytest.mark.engine
def test_every_script_is_registered_and_takes_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    out = scripts.run("tests/support/sglang_scripts/gpu_check_help.py", str(tmp_path))
    found = json.loads(out.splitlines()[-1])
    helps, arguments = found["helps"], found["arguments"]
    listed = {line.split("`")[1] for line in found["table"].splitlines()[2:]}
    assert listed == {path.name for path in FOLDER.glob("*_check.py")}
    assert helps.keys() == {*listed, "all_checks.py"}
    for name, text in helps.items():
        assert f"python benches/gpu/{name}" in text
    # Each leaves its record where `all_checks.py` looks for it.
    for name, given in arguments.items():
        assert given.get("json") == f"out/{name}.json" or given.get("out") == f"out/{name}"


class TestServers:
    """`server_check.py` and its clients, with figures that are known."""

    @pytest.fixture
    def clients(self, frame: Any) -> Any:
        return importlib.import_module("bench_clients")

    @pytest.mark.parametrize("name", ["1", "64", "256", "all", "prefix"])
    def test_clients_share_a_load_out(self, name: str, clients: Any) -> None:
        load = clients.Load(name, "ours", "http://x", "sglang", 256, 4, 1, "folder", 1)
        words = [load.words(client, Path("r")) for client in range(4)]

        def sum_of(flag: str) -> int:
            return sum(int(each[each.index(f"--{flag}") + 1]) for each in words)

        if name == "prefix":
            assert load.asked == clients.GROUPS * sum_of("gsp-prompts-per-group") == 256
        else:
            assert load.asked == sum_of("num-prompts") == 256
        if name in ("64", "256"):
            assert sum_of("max-concurrency") == int(name)
        assert len({each[each.index("--seed") + 1] for each in words}) == 4

    @pytest.mark.parametrize(("name", "limit"), [("64", 256), ("prefix", 64)])
    def test_mini_sglang_gets_only_supported_arguments(
        self, name: str, limit: int, clients: Any
    ) -> None:
        """Its endpoint has an older name of the limit, and it cannot empty its prefix index."""
        load = clients.Load(name, "mini", "http://x", "sglang-oai-chat", 256, 1, 1, "folder", 1)
        words = load.words(0, Path("r"))
        body = json.loads(words[words.index("--extra-request-body") + 1])
        assert body == {"max_tokens": limit}
        assert not {"--flush-cache", "--cache-report"} & {*words}

    def test_mini_sglang_counts_by_its_stream(
        self, frame: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A token may have no text yet, and the last chunk has no token."""
        check = importlib.import_module("server_check")

        def chunk(delta: dict[str, str], reason: str | None) -> str:
            choice = {"delta": delta, "index": 0, "finish_reason": reason}
            return f"data: {json.dumps({'choices': [choice]})}\n\n"

        chunks = [chunk({"role": "assistant"}, None), chunk({"content": "abc"}, None)]
        stream = "".join([*chunks, chunk({}, "stop"), "data: [DONE]\n\n"]).encode()
        monkeypatch.setattr(check, "ask", lambda *_: stream)
        assert check.mini_said("http://x", "hello") == (2, "ab")

    def test_mini_sglang_is_started_by_its_own_flags(self, frame: Any, tmp_path: Path) -> None:
        check = importlib.import_module("server_check")
        words = ["--shapes", str(POCKET), "--out", "o", "--peer-mini", str(tmp_path)]
        chosen = check.parser().parse_args([*words, "--peer-mini-backend", "fa:256"])
        command = check.mini_command("mini", chosen, tmp_path, 0.5)
        assert command[1:5] == ["-m", "minisgl", "--model-path", tmp_path]
        assert command[command.index("--attention-backend") + 1 :][:3] == [
            "fa",
            "--page-size",
            "256",
        ]
        assert "--dummy-weight" in command
        first = check.mini_environment(tmp_path)["PYTHONPATH"].split(os.pathsep)[0]
        assert first == str(tmp_path / "python")

    def test_texts_have_the_requested_number_of_tokens(self, frame: Any, tmp_path: Path) -> None:
        """Random tokens, which a client turns into a text, and a server into tokens again."""
        texts = importlib.import_module("texts")
        folder = texts.make_tokenizer(tmp_path / "model", 151_936)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        draw = random.Random(1)
        own = tokenizer.decode(new := [draw.randrange(5000, 151_936) for _ in range(500)])
        assert tokenizer.encode(own).ids == new
        mixed = tokenizer.decode([draw.randrange(151_936) for _ in range(4000)])
        # The embedded model's own tokens may be parts of letters.
        assert 4000 <= len(tokenizer.encode(mixed)) < 4320

    def test_clients_are_counted_together(self, clients: Any) -> None:
        def client(tokens: int, seconds: float, between: float, rate: float) -> dict[str, Any]:
            figures = {"duration": seconds, "total_output_tokens": tokens, "completed": 3}
            times = {"p99_itl_ms": 9 * between, "median_itl_ms": between, "median_ttft_ms": 1}
            return {**figures, **times, "cache_report": {"cache_hit_rate_pct": rate}}

        found = clients.together([client(100, 2.0, 4.0, 90.0), client(300, 4.0, 6.0, 80.0)])
        # All tokens in the time of the slowest, not the sum of rates.
        assert found["output_throughput"] == 100
        assert (found["completed"], found["median_itl_ms"], found["p99_itl_ms"]) == (6, 5, 54)
        assert found["hit_rate_pct"] == 85

    def test_cpu_time_is_counted_by_part(self, clients: Any) -> None:
        """A driver is known by its command line, and burns 0.3 s here."""
        burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
        before = clients.cpu_s(os.getpid())
        words = [sys.executable, "-c", burn, "--handshake-fd", "3"]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            process.stdout.readline()
            after = clients.cpu_s(os.getpid())
            process.communicate(b"\n")
        assert 0.25 <= after["driver"] - before["driver"] < 1.0
        assert after["scheduler"] == before["scheduler"] == 0.0
        assert after["front"] >= before["front"] > 0.0

    def test_the_faster_frontend_counts_at_saturation(
        self, frame: Any, arguments: argparse.Namespace
    ) -> None:
        check = importlib.import_module("server_check")

        def figures(throughput: float, time: float) -> list[dict[str, float]]:
            times = {name: time for name in check.FIGURES[1:]}
            return [{"output_throughput": throughput, **times}]

        found = {("all", "sglang"): figures(10.0, 4.0), ("all", "ours"): figures(12.0, 2.0)}
        found["all", "gateway"] = figures(14.0, 5.0)
        # It has ratios, but no bars.
        found["all", "mini"] = [{"output_throughput": 99.0, "median_ttft_ms": 9.0}]
        report = frame.Report("benches/gpu/server_check.py", arguments)
        check.compare(found, report, check.LIMITS["small"])
        bars = {bar.name: (bar.value, bar.ok) for bar in report.record.bars}
        assert bars == {
            "all, ours: time to the first token": (0.5, True),
            "all, gateway: time to the first token": (1.25, False),
            "all: tokens/s of the faster frontend": (1.4, True),
        }
        (mini,) = [row for row in report.record.rows if row["side"] == "mini over sglang"]
        assert mini["output_throughput"] == 9.9
        assert "front_cpu_us" not in mini


class TestShapes:
    """`shapes_check.py`, with processes that write records instead of the checks that it runs."""

    @pytest.fixture
    def shapes(self, frame: Any) -> Any:
        return importlib.import_module("shapes_check")

    @pytest.mark.parametrize(
        ("name", "billions"),
        [
            ("8b", 8.03),
            ("14b", 14.77),
            ("0.6b", 0.596),
            ("30b-a3b", 30.53),
            ("3b", 3.213),
            ("qwen2.5-7b", 7.616),
            ("qwen3-4b", 4.022),
            ("mistral-7b", 7.248),
            ("phi-4", 14.66),
        ],
    )
    def test_shapes_have_the_published_sizes(self, name: str, billions: float, shapes: Any) -> None:
        """A step of very many rows moves all experts, and no table of embeddings."""
        shape = shapes.SHAPES[name]._replace(context=0)
        config = shape.config
        moved = shapes.moved_bytes(shape, 1_000_000) / 2
        if not config["tie_word_embeddings"]:
            moved += config["hidden_size"] * config["vocab_size"]
        assert moved / 1e9 == pytest.approx(billions, rel=0.003)

    def test_bytes_grow_by_the_kv_of_a_row(self, shapes: Any) -> None:
        shape = shapes.SHAPES["8b"]
        one, more = (shapes.moved_bytes(shape, rows) for rows in (1, 65))
        assert more - one == 64 * 700 * 32 * 2 * 8 * 128 * 2
        slower = shapes.bytes_us(shape, "2 x NVIDIA H100 80GB HBM3")["1"]
        assert slower == pytest.approx(shapes.bytes_us(shape, "1 x NVIDIA H200")["1"] * 4.3 / 3)
        half = shapes.moved_bytes(shapes.SHAPES["8b-fp8"], 1)
        assert one - half == 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)

    def test_the_least_time_of_requests(self, shapes: Any) -> None:
        """A token after the prompt's is one step; of very many rows products take longest."""
        shape, flops = shapes.SHAPES["8b"], shapes.FLOPS
        matrices = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
        prompt = 2 * matrices * 699 + 32 * 4 * 4096 * 699**2 / 2
        moved = shapes.moved_bytes(shape, 1) / 4.3e12
        assert shapes.least_s(shape, "H200", [699], [2]) == pytest.approx(prompt / flops + moved)
        assert shapes.least_s(shape, "H200", [699], [1]) == pytest.approx(prompt / flops)
        many = shapes.least_s(shape, "H200", [1] * 4096, [2] * 4096)
        products = 2 * 4096 * (2 * matrices + 4096 * 128256) + 4096 * 32 * 4 * 4096 / 2
        kv = 4096 * 2 * 32 * 2 * 8 * 128 * 2 / 4.3e12
        assert many == pytest.approx(products / flops + kv)
        assert 12_000 < shapes.limit_tokens_per_s(shape, "H200") < 14_000

    def test_results_are_kept_from_run_to_run(
        self, shapes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Steps first, then the load; a part that fails leaves what was there."""
        results = tmp_path / "shapes.json"

        def run(parts: str, *, fails: bool = False) -> int:
            def play(runner: Any, what: str, command: list[object], limit_s: float) -> str:
                if fails:
                    runner.failed.append(what)
                    return ""
                words = [str(word) for word in command]
                name = "load_check" if "load_check.py" in " ".join(words) else "step_check"
                folder = tmp_path / "8b"
                path = folder / "load_check.json" if name == "load_check" else None
                path = path or Path(words[words.index("--json") + 1])
                written = argparse.Namespace(device="cpu", json=path)
                frame = importlib.import_module("frame")
                with frame.Report(f"{name}.py", written) as report:
                    if name == "load_check":
                        figures = {"ours": 9.0, "sglang": {"fa3": 8.0}}
                        report.put("tokens_per_s", figures)
                        return ""
                    for way, us in (({}, 1.0), ({"stages": 4}, 9.0), ({}, 3.0)):
                        rows = dict.fromkeys((1, 16, 64), us)
                        report.add(way=way, length=700, us_by_rows=rows)
                return ""

            monkeypatch.setattr(shapes.Runner, "run", play)
            words = ["shapes_check.py", "--out", str(tmp_path), "--pie-load", "pie_load"]
            words += ["--names", "8b", "--parts", parts, "--results", str(results)]
            monkeypatch.setattr(sys, "argv", words)
            try:
                shapes.main()
            except SystemExit as end:
                return int(end.code or 0)
            return 0

        assert run("steps") == 0
        [row] = json.loads(results.read_text()).values()
        assert row["step_us"] == {"1": 2.0, "16": 2.0, "64": 2.0}
        assert row["bytes_us"]["1"] == pytest.approx(3512, abs=1)
        assert run("throughput") == 0
        both = json.loads(results.read_text())["8b"]
        limit = both["tokens_per_s"]["limit"]
        assert limit == pytest.approx(shapes.limit_tokens_per_s(shapes.SHAPES["8b"], "cpu"))
        assert both["tokens_per_s"] == {"ours": 9.0, "sglang": {"fa3": 8.0}, "limit": limit}
        assert both["step_us"] == row["step_us"]
        assert both["sources"]["step_us"] == row["sources"]["step_us"]
        command = both["sources"]["tokens_per_s"]["command"]
        assert command.startswith("benches/gpu/shapes_check.py ")
        assert "--parts throughput" in command
        assert both["sources"]["tokens_per_s"]["device"]
        assert run("steps,throughput", fails=True) == 1
        assert json.loads(results.read_text())["8b"] == both

    def test_a_name_that_is_none_is_refused(
        self, shapes: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            shapes.parser().parse_args(["--out", "o", "--pie-load", "p", "--names", "8b,9b"])
        assert "no shape 9b; there are 8b, 14b" in capsys.readouterr().err


def test_peers_are_quantized_as_the_driver_is(frame: Any) -> None:
    load_check = importlib.import_module("load_check")
    options = ["mem_fraction_static = 0.8", 'quantization = "fp8"', 'load_format="dummy"']
    assert load_check.quantization(options) == "fp8"
    assert load_check.quantization(options[:1]) is None


@pytest.mark.engine
class TestPeersOfSGLang:
    """What the checks read of SGLang's graphs and FlashInfer's kernels."""

    def test_passes_with_and_without_a_graph(
        self, frame: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("torch")
        check = importlib.import_module("prefill_check")
        arguments = argparse.Namespace(tokens="512,4096", prompt=562)
        assert check.passes(arguments) == [(512, 512), (4096, 562), (4096, 4096)]
        end = "its graphs end at 2048 tokens"
        row = {"tokens": 4096, "prompts": 8, "graphs": "full", "why": end, "eager_ms": 50.0}
        [found] = check.figures(f"noise\nprefill {json.dumps(row)}\nprefill of others")
        assert found == row
        replayed = {"why": None, "eager_ms": 51.0, "graph_ms": 45.0, "off": 0.001}
        times = {"driver": 44.0, "graph": 40.0, "breakable": 45.0}
        check.show(4096, 562, times, {"full": row, "x": replayed})
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("graph 40.0 ms, breakable 45.0 ms; over ours: 1.125")
        tokens = (1, 100, 300, 2304, 2305, 4097)
        rows = {
            sparse: [check.graph_rows(count, sparse=sparse) for count in tokens]
            for sparse in (False, True)
        }
        assert rows[False] == [1, 112, 320, 2304, None, None]
        assert rows[True] == [1, 112, 320, 2304, 2560, None]
        assert lines[1] == f"    SGLang, full: {end}; 50.0 ms"
        assert lines[2] == "    SGLang, x: 51.0 ms without, states off by 0.0010"

    def test_steps_and_their_graphs(self, frame: Any) -> None:
        pytest.importorskip("torch")
        check = importlib.import_module("step_check")
        lines = ["runner fa3 1x700: 5095 us, 4900 us of its graph", "runner fa3 16x700: 5929 us"]
        found = check.peer_figures("\n".join(lines))
        assert found == {700: {"step": {1: 5095.0, 16: 5929.0}, "graph": {1: 4900.0}}}
        load_check = importlib.import_module("load_check")
        assert load_check.runner_figures(lines[0]) == {"1x700": 5095.0}

    def test_kernels_that_cannot_be_built_are_named(
        self, frame: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels = importlib.import_module("flashinfer_kernels")
        assert set(kernels.BUILDS) == {"sampling", "all-reduce"}
        builds = {
            "none": "",
            "lacks": "import no_such_package",
            "slow": "import time; time.sleep(9)",
        }
        monkeypatch.setattr(kernels, "BUILDS", builds)
        assert kernels.unavailable_reason("none", 60) is None
        assert "No module named 'no_such_package'" in kernels.unavailable_reason("lacks", 60)
        assert kernels.unavailable_reason("slow", 0.3) == "TimeoutExpired after 0.3 s"


def test_drafts_of_a_real_model(frame: Any, forked_python: str, tmp_path: Path) -> None:
    """Both engines answer requests of every workload, in float32 alike."""
    texts = importlib.import_module("real_texts")
    words = ["--device", "cpu", "--model", str(POCKET), "--out", str(tmp_path)]
    words += ["--batch", "2", "--requests", "2", "--output", "8"]
    printed = scripts.run("benches/gpu/draft_check.py", *words, python=forked_python)
    record = frame.read(tmp_path / "draft_check.json")
    assert record.ok, printed
    assert [row["kind"] for row in record.rows] == list(texts.KINDS)
    for row in record.rows:
        assert (row["batch"], row["requests"], row["equal_answers"]) == (2, 2, 2)
        assert row["ratio"] > 0
        assert row["accepted_per_step"] >= 0


@pytest.mark.engine
def test_the_clock_of_ranks_check_takes_what_a_trace_takes(frame: Any) -> None:
    ranks_check = importlib.import_module("ranks_check")
    own, traced = (inspect.signature(kind.step) for kind in (ranks_check.Host, Trace))
    assert own.parameters == traced.parameters
