"""docs/benchmarks.md and benches/RESULTS.md are generated from benches/results."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from support import REPOSITORY

TOOLS = REPOSITORY / "tools"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module("generate_benchmarks")
    sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def results(tool: ModuleType) -> dict[str, Any]:
    found = tool.read()
    assert isinstance(found, dict)
    return found


def sections(page: str) -> dict[str, str]:
    """The texts of a page's sections by their titles."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_pages_are_fresh(tool: ModuleType, results: dict[str, Any]) -> None:
    assert tool.render(results) == tool.TARGET.read_text(encoding="utf-8"), "run `make docs`"
    summary = tool.benchmark_summary.render(results, tool.has)
    assert summary == tool.SUMMARY.read_text(encoding="utf-8"), "run `make docs`"


def test_the_summary_is_short_and_complete(tool: ModuleType, results: dict[str, Any]) -> None:
    summary = tool.benchmark_summary.render(results, tool.has)
    assert len(summary.splitlines()) <= 120
    questions = tool.benchmark_summary.QUESTIONS
    missing = {title for title, (path, _) in questions.items() if not tool.has(results, path)}
    assert missing <= {"How accurate are log-probabilities?", "What do drafts gain on real text?"}
    answered = [title for title, (path, _) in questions.items() if tool.has(results, path)]
    assert [*answered, "What is slower, and what is missing"] == list(sections(summary))
    without = {name: each for name, each in results.items() if name != "servers-8b"}
    assert "8B server" not in tool.benchmark_summary.render(without, tool.has)


def test_every_table_names_device_date_commit_and_command(
    tool: ModuleType, results: dict[str, Any]
) -> None:
    found = sections(tool.render(results))
    assert len(found) >= 12
    for title, text in found.items():
        assert re.search(r"H[12]00|CPU", text), title
        assert re.search(r"; 20\d\d-\d\d-\d\d; commit .*`[0-9a-f]{7}`", text), title
        assert re.search(r"^    (python benches/|make )", text, re.MULTILINE), title


def test_each_section_is_in_a_list_of_links(tool: ModuleType, results: dict[str, Any]) -> None:
    page = tool.render(results)
    links = re.findall(r"^- \[(.+)\]\(#(.+)\)$", page.partition("\n## ")[0], re.MULTILINE)
    assert [title for title, _ in links] == list(sections(page))
    assert all(anchor == title.lower().replace(" ", "-") for title, anchor in links)


def test_every_section_has_records(tool: ModuleType, results: dict[str, Any]) -> None:
    """A section whose record is named wrongly would be missing for ever."""
    missing = {title for title, (path, _) in tool.SECTIONS.items() if not tool.has(results, path)}
    # These are to come.
    assert missing <= {"Accuracy", "Drafts on real text"}


def test_charts_exist(tool: ModuleType, results: dict[str, Any]) -> None:
    charts = re.findall(r"\]\((plots/[^)]+)\)", tool.render(results))
    assert {"load", "runner", "steps", "prefixes", "drafts", "ranks"} <= {
        chart.rpartition("/")[2].removesuffix(".svg") for chart in charts
    }
    for chart in charts:
        assert (REPOSITORY / "benches" / chart).is_file(), chart


def test_a_changed_figure_changes_the_page(tool: ModuleType, results: dict[str, Any]) -> None:
    speeds = {"ours": 12345, "sglang": {"fa3": 10000}}
    changed = {**results, "h200": {**results["h200"], "tokens_per_s": speeds}}
    text = sections(tool.render(changed))["Throughput"]
    assert "| 12,345 |" in text
    assert "| 10,000 | 1.23 |" in text


def test_thresholds_of_the_prefix_index_follow_from_its_results(
    tool: ModuleType, results: dict[str, Any]
) -> None:
    def row(bench: str, ours: float, **peers: float) -> dict[str, Any]:
        return {"bench": f"radix/{bench}", "unit": "ns", "ours": ours, "peers": peers}

    # What is given hashes does a part of the work: no bar is held against it.
    peers = {"sglang": 200.0, "kv_index_tokens": 20.0, "other": 14.0, "other_hashed": 5.0}
    rows = [row("conversations/1", 10.0, **peers), row("miss", 301.0), row("python/miss", 800.0)]
    changed = {**results, "radix": {**results["radix"], "rows": rows}}
    text = sections(tool.render(changed))["Prefix index on the host"]
    faster = "| conversations, pages of 1: times faster than"
    assert "| radix/conversations/1 | ns | 10.0 | 200 | 14.0 | 5.00 |" in text
    assert [line for line in text.splitlines() if "| at " in line] == [
        "| miss, Rust, ns | 301 | at most 300 | **no** |",
        "| miss from Python, ns | 800 | at most 800 | yes |",
        f"{faster} SGLang's tree | 20.0 | at least 20 | yes |",
        f"{faster} the best crate that takes tokens | 1.40 | at least 1.5 | **no** |",
    ]


def test_without_a_record_there_is_no_table(tool: ModuleType, results: dict[str, Any]) -> None:
    page = tool.render({name: each for name, each in results.items() if name != "h200"})
    assert "## Throughput" not in page
    assert "## Host path" in page
    h200 = {key: value for key, value in results["h200"].items() if key != "drafts"}
    assert "## Drafts\n" not in tool.render({**results, "h200": h200})
    empty = tool.render({})
    assert sections(empty) == {}
    assert "](#throughput)" not in empty
    assert "Parts:" not in empty


def test_records_that_are_to_come(tool: ModuleType, results: dict[str, Any]) -> None:
    """Shapes, and any record of a GPU check."""
    shape = {
        "step_us": {"1": 4000, "16": 4500},
        "bytes_us": {"1": 3500, "16": 3800},
        "tokens_per_s": {
            "ours": 12000,
            "sglang": {"fa3": 10000, "flashinfer": 9000},
            "limit": 15000,
        },
    }
    about = {
        "commit": "0123456",
        "date": "2026-12-01T00:00:00+00:00",
        "device": "1 x NVIDIA H200",
        "command": "benches/gpu/some_check.py --x",
    }
    other = {**about, "commit": "89abcde", "device": "1 x NVIDIA H100 80GB HBM3"}
    shape["sources"] = {"step_us": about, "bytes_us": about, "tokens_per_s": other}
    bar = {"name": "tokens that differ", "value": 0.0, "bar": "<= 0", "ok": True}
    one_row = {
        "8b": {"700": {"us": 4000, "before_us": 5000}},
        "8b-fp8": {"700": {"us": 2000, "before_us": 3000}},
    }
    more = {
        "shapes": {"8b": shape, "14b": shape},
        "sampling": {**about, "bars": [bar]},
        "one-row": {**about, "step_us": one_row},
    }
    found = sections(tool.render({**results, **more}))
    assert "| 8b | 1 | 4,000 | 3,500 | 0.88 | H200 |" in found["Larger shapes"]
    assert "| 8b | 12,000 | fa3 | 10,000 | 1.20 | 15,000 | 0.80 | H100 |" in found["Larger shapes"]
    assert "| 8b-fp8 | 700 | 3,000 | 2,000 | 1.50 |" in found["One row"]
    assert "is 2.00 times as fast in FP8" in found["One row"]
    sources = [line for line in found["Larger shapes"].splitlines() if "commit" in line]
    assert sources == [
        "8b steps, 14b steps: 1 x NVIDIA H200; 2026-12-01; commit `0123456`.",
        "8b throughput, 14b throughput: 1 x NVIDIA H100 80GB HBM3; 2026-12-01; commit `89abcde`.",
    ]
    assert "| tokens that differ | 0.00 | <= 0 | yes |" in found["Sampling"]
    assert "2026-12-01; commit" in found["Sampling"]


def test_peers_of_parts(tool: ModuleType) -> None:
    """Each peer has a column, which is empty where it has no figure."""
    about = {
        "commit": "0123456",
        "date": "2026-12-01T00:00:00+00:00",
        "device": "1 x NVIDIA H100",
        "command": "benches/gpu/some_check.py",
    }
    long = {"tokens": 16384, "prompt": 562, "ms": {"driver": 200.0, "sglang": 220.0}}
    short = {"tokens": 2048, "prompt": 562}
    short |= {"ms": {"driver": 25, "graph": 20, "sglang": 22, "breakable": 21}}
    steps = [
        {"way": {"peer": "sglang"}, "length": 700, "us_by_rows": {"1": 5000.0, "16": 6000.0}},
        {"way": {"peer": "compiled"}, "length": 700, "us_by_rows": {"1": 4500.0}},
        {"way": {}, "length": 700, "us_by_rows": {"1": 4000.0, "16": 5000.0}},
        {"way": {"stages": 4}, "length": 700, "us_by_rows": {"1": 1.0, "16": 1.0}},
    ]
    kinds = [
        {"kind": "top-p", "kernel_ms": 0.5, "sorting_ms": 9.0, "sglang_ms": 2, "flashinfer_ms": 1},
        {"kind": "greedy", "kernel_ms": 0.1, "sorting_ms": 0.1},
        {"kind": "one read of the logits", "kernel_ms": 0.1},
    ]
    turns = [
        {"ranks": 2, "part": "turns", "off": 0.01},
        {"ranks": 2, "part": "times", "rows": 8, "us": {"1-shot/8": 9.5, "SGLang": 12.5}},
        {"ranks": 2, "part": "flashinfer", "rows": 8, "us": {"1-shot/8": 9.6, "FlashInfer": 11.0}},
    ]
    passes = [short | {"graphs": {"breakable": {}}}, long | {"graphs": {}}]
    records = {
        "prefill": {"8b": {**about, "rows": passes}},
        "step-peers": {"8b": {**about, "rows": steps}},
        "samplers": {**about, "rows": kinds},
        "sums": {**about, "rows": turns},
    }
    found = sections(tool.render(records))
    assert "| 8b | 2,048 | 562 | 25 | 20 | 22 | 21 | 1.05 |" in found["Prefill"]
    assert "| 8b | 16,384 | 562 | 200 |  | 220 |  | 1.10 |" in found["Prefill"]
    both = found["Steps and graphs of SGLang"]
    assert "| 8b | 700 | 1 | 4,000 | 5,000 | 4,500 | 1.12 |" in both
    assert "| 8b | 700 | 16 | 5,000 | 6,000 |  | 1.20 |" in both
    assert "| top-p | 0.50 | 9.00 | 2 | 1 | 2.00 |" in found["Sampling kernels"]
    assert "| greedy | 0.10 | 0.10 |  |  |  |" in found["Sampling kernels"]
    assert "| 2 | 8 | 9.50 | 12.5 | 11.0 | 9.60 |" in found["All-reduce over ranks"]
    assert all("2026-12-01; commit `0123456`" in text for text in found.values())


def test_accuracy_of_checkpoints(tool: ModuleType, results: dict[str, Any]) -> None:
    """With the record there is a table, and no page says that it is missing."""
    common = {"model": "m", "tokens": 16384, "agreement": 0.98, "kl": 0.0001, "mean": 0.0174}
    tails = {"p99": 0.1, "p999": 0.17, "max": 0.189, "behind": 0.1}
    perplexities = {"perplexity": 15.25, "reference_perplexity": 15.26}
    plain = {"model": "m", "tokens": 16384, "agreement": 0.99, "kl": None}
    record = {
        "commit": "0123456",
        "date": "2026-12-01T00:00:00+00:00",
        "device": "1 x NVIDIA H200",
        "command": "benches/gpu/accuracy_check.py --model m",
        "bars": [
            {"name": "m, fused one: mean", "value": 1.1, "bar": "<= 1.05", "ok": False},
            {"name": "failed processes", "value": 0.0, "bar": "<= 0", "ok": True},
        ],
        "rows": [
            {"part": "versions", "figures": {"sglang": "0.5.17"}},
            {**common, **tails, "way": "sglang", "path": "one"},
            {**plain, "way": "fused", "path": "plain"},
            {**common, **tails, **perplexities, "way": "fp8", "path": "prefill"},
        ],
    }
    summary = tool.benchmark_summary.render({**results, "accuracy": record}, tool.has)
    text = sections(summary)["How accurate are log-probabilities?"]
    assert "| m | SGLang | 0.9800 | 0.0001 | 0.0174 | 0.1700 | 0.1890 |  |" in text
    assert "| m | ours | 0.9900 |  |  |  |  |  |" in text
    assert "| m | ours, FP8 |  |  |  |  |  | 15.250 (15.260) |" in text
    assert "1 of 2 thresholds were missed. sglang 0.5.17." in text
    assert "1 x NVIDIA H200; 2026-12-01; commit `0123456`: `python benches" in text
    page = tool.render({**results, "accuracy": record})
    text = sections(page)["Accuracy"]
    differences = "0.0174 | 0.1000 | 0.1700 | 0.1890"
    assert f"| m | SGLang | 1 request | 16,384 | 0.9800 | 0.0001 | {differences} |  |" in text
    assert "| 256, no log-probabilities | 16,384 | 0.9900 |  |  |  |  |  |  |" in text
    assert "| m, fused one: mean | 1.10 | <= 1.05 | **no** |" in text
    for each in (summary, page):
        assert not re.search(r"published checkpoints.* have no record", each)
    without = {name: each for name, each in results.items() if name != "accuracy"}
    assert "How accurate" not in tool.benchmark_summary.render(without, tool.has)


def test_drafts_on_real_text(tool: ModuleType, results: dict[str, Any]) -> None:
    row = {"model": "m", "kind": "edit", "batch": 16, "requests": 64, "accepted_per_step": 1.234}
    row |= {"plain_tokens_per_s": 1000.0, "drafts_tokens_per_s": 1500.0, "ratio": 1.5}
    record = {
        "commit": "0123456",
        "date": "2026-12-01T00:00:00+00:00",
        "device": "1 x NVIDIA H200",
        "command": "benches/gpu/draft_check.py --model m",
        "rows": [row],
    }
    more = {**results, "drafts-real": record}
    expected = "| m | code edits | 16 | 1.23 | 1,000 | 1,500 | 1.50x |"
    summary = tool.benchmark_summary.render(more, tool.has)
    assert expected in sections(summary)["What do drafts gain on real text?"]
    assert expected in sections(tool.render(more))["Drafts on real text"]
