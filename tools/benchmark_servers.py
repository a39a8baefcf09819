"""The sections of `benches/RESULTS.md` about the engine and the HTTP servers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmark_tables import Results, bars, source, table

SERVERS: Final = {
    "ours": "our scheduler",
    "gateway": "our scheduler, smg gateway",
    "sglang": "SGLang's scheduler",
    "mini": "Mini-SGLang's server",
}
LOADS: Final = {
    "1": "1",
    "64": "64",
    "256": "256",
    "all": "all at once",
    "prefix": "shared prefixes",
}


def engine(results: Results) -> list[str]:
    """The offline engine, third repeats."""
    record = results["engine"]
    last = {
        row["part"]: [float(each) for each in row["repeats"][-1] if each] for row in record["rows"]
    }
    speeds = [
        [name, last[part][0]]
        for part, name in (
            ("ring", "frames through the ring"),
            ("engine", "`Engine` of this driver"),
            ("text", "the same, texts in and out"),
            ("sglang", "`Engine` of SGLang"),
        )
        if part in last
    ]
    return [
        "The same workload through `pie_driver_sglang.Engine`, third repeats.",
        table(["engine", "output tokens/s"], speeds),
        bars(record["bars"]),
        *([record["note"]] if record.get("note") else []),
        source(record),
    ]


def servers(results: Results) -> list[str]:
    """Our server, the gateway and SGLang's server under the same loads, 0.6B."""
    return _servers(results["servers"], "0.6B")


def servers_8b(results: Results) -> list[str]:
    """Our server and SGLang's, 8B: medians, and every run."""
    *texts, origin = _servers(results["servers-8b"], "8B")
    return [*texts, *_single_runs(results["servers-8b"]), origin]


def gateway_8b(results: Results) -> list[str]:
    """The gateway and SGLang's server, 8B."""
    return _servers(results["servers-8b-gateway"], "8B")


def servers_mini(results: Results) -> list[str]:
    """Our server, SGLang's and Mini-SGLang's."""
    return _servers(results["servers-mini"], "0.6B")


def _middle(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    """The median of the repeats; an empty text where they do not have the figure."""
    known = [row[key] for row in rows if key in row]
    return statistics.median(known) if known else ""


def repeats_of(record: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The runs of a record by load and server, in their order."""
    repeats: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        if "load" in row and row.get("side") in SERVERS:
            repeats.setdefault((row["load"], row["side"]), []).append(row)
    return repeats


def run_ratios(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], load: str) -> str:
    """Our tokens/s over SGLang's, in each run of a load."""
    pairs = zip(runs[load, "sglang"], runs[load, "ours"], strict=True)
    key = "output_throughput"
    return ", ".join(f"{ours[key] / theirs[key]:.2f}x" for theirs, ours in pairs)


def _single_runs(record: Mapping[str, Any]) -> list[str]:
    """Every run of our server and SGLang's."""
    runs = repeats_of(record)

    def both(load: str, key: str, form: str) -> str:
        values = (
            ", ".join(f"{row[key]:{form}}" for row in runs[load, side] if key in row)
            for side in ("sglang", "ours")
        )
        return " / ".join(values)

    rows = [
        [
            name,
            runs[load, "ours"][0]["completed"],
            both(load, "output_throughput", ",.0f"),
            run_ratios(runs, load),
            both(load, "p99_itl_ms", ".1f"),
            both(load, "median_ttft_ms", ",.0f"),
            both(load, "hit_rate_pct", ".1f") if load == "prefix" else "",
        ]
        for load, name in LOADS.items()
        if (load, "ours") in runs
    ]
    return [
        "The runs in their order, SGLang / ours. Samples are small, most of all with one stream, "
        "and TTFT and p99 inter-token latency vary widely between runs. With shared prefixes "
        "SGLang's prefix cache hit rate differs between its runs, which is a part of the ratio.",
        table(
            ["streams", "requests a run", "tokens/s", "ratio", "p99 ms between tokens",
             "ms to first token", "prefix cache hit rate, %"],
            rows,
        ),
    ]  # fmt: skip


def _servers(record: Mapping[str, Any], shape: str) -> list[str]:
    """Medians of the repeats, and how they stand to SGLang's."""
    keys = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms", "front_cpu_us")
    repeats = repeats_of(record)
    rows: list[list[Any]] = []
    for load, side in itertools.product(LOADS, SERVERS):
        if (load, side) not in repeats:
            continue
        tokens, *times = (_middle(repeats[load, side], key) for key in keys)
        speed = tokens / _middle(repeats[load, "sglang"], keys[0])
        rows.append([LOADS[load], SERVERS[side], tokens, speed, *times])
    return [
        "`sglang.bench_serving`: 128 random tokens in, 256 out; shared prefixes of 1,024 tokens. "
        f"{shape} architecture with random weights. Medians of the repeats. The last column is the "
        "CPU time of HTTP and text processes per token.",
        table(
            ["streams", "server", "tokens/s", "of SGLang's", "ms a token, median", "p99",
             "ms to the first", "CPU, µs"],
            rows,
        ),
        bars(record["bars"]),
        record["note"],
        source(record),
    ]  # fmt: skip
