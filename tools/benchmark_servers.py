"""The sections of `benches/RESULTS.md` about the engine and the HTTP servers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark_tables import Results, bars, source, table


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
    """Our server and SGLang's, 8B."""
    return _servers(results["servers-8b"], "8B")


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


def _servers(record: Mapping[str, Any], shape: str) -> list[str]:
    """Medians of the repeats, and how they stand to SGLang's."""
    names = {"ours": "our scheduler", "gateway": "our scheduler, smg gateway"}
    names |= {"sglang": "SGLang's scheduler"}
    names |= {"mini": "Mini-SGLang's server"}
    loads = {"1": "1", "64": "64", "256": "256", "all": "all at once", "prefix": "shared prefixes"}
    keys = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms", "front_cpu_us")
    repeats: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        if "load" in row and row.get("side") in names:
            repeats.setdefault((row["load"], row["side"]), []).append(row)
    rows: list[list[Any]] = []
    for load, side in itertools.product(loads, names):
        if (load, side) not in repeats:
            continue
        tokens, *times = (_middle(repeats[load, side], key) for key in keys)
        speed = tokens / _middle(repeats[load, "sglang"], keys[0])
        rows.append([loads[load], names[side], tokens, speed, *times])
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
