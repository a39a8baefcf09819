"""The sections of `benches/RESULTS.md` whose figures come from a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmark_tables import Results, bars, source, table


class RadixBar(NamedTuple):
    """What the prefix index is held to on the host."""

    name: str
    bench: str
    """After `radix/`."""
    limit: float
    """The most of our own figure; the least of a peer's over ours."""
    peer: str = ""
    """A key of `radix_peers`; without one the bar is on our own figure."""


RADIX_BARS: Final = (
    RadixBar("hit of 2,048 tokens, match and lock, Rust, ns", "match_lock/2048", 1500),
    RadixBar("the same from Python, ns", "python/match_lock/2048", 3000),
    RadixBar("miss, Rust, ns", "miss", 300),
    RadixBar("miss from Python, ns", "python/miss", 800),
    *(
        RadixBar(
            f"conversations, pages of {page}: times faster than {name}",
            f"conversations/{page}",
            limit,
            peer,
        )
        for page in (1, 16)
        for name, peer, limit in (
            ("SGLang's tree", "sglang", 20),
            ("the best crate that takes tokens", "tokens", 1.5),
        )
    ),
    RadixBar("bytes a cached token, pages of 1", "memory/1", 20),
    RadixBar("bytes a cached token, pages of 16", "memory/16", 4),
    RadixBar("1,000 pages of a million nodes evicted, µs", "evict/1000", 300),
)


def radix_peers(row: Results) -> dict[str, float]:
    """SGLang's tree, the best crate that takes tokens and the best that is given their hashes.

    A peer that has no figure is left out.
    """
    peers: dict[str, list[float]] = {}
    for name, value in row["peers"].items():
        kind = "hashes" if name.endswith("_hashed") else "tokens"
        peers.setdefault("sglang" if name == "sglang" else kind, []).append(value)
    return {kind: min(values) for kind, values in peers.items()}


def radix_bars(rows: Sequence[Results]) -> list[Results]:
    """The bars that the rows have figures for."""
    by_bench = {row["bench"].removeprefix("radix/"): row for row in rows}
    found = []
    for bar in RADIX_BARS:
        row = by_bench.get(bar.bench)
        peers = {} if row is None else {"": 1.0, **radix_peers(row)}
        if row is None or bar.peer not in peers:
            continue
        ours = row["ours"]
        value = peers[bar.peer] / ours if bar.peer else ours
        asked = f"at {'least' if bar.peer else 'most'} {bar.limit:,}"
        ok = value >= bar.limit if bar.peer else value <= bar.limit
        found.append({"name": bar.name, "value": value, "bar": asked, "ok": ok})
    return found


def radix(results: Results) -> list[str]:
    """The prefix index on the host, with its peers."""
    record = results["radix"]
    rows = []
    for row in record["rows"]:
        peers = radix_peers(row)
        best = [peers.get(kind, "") for kind in ("sglang", "tokens", "hashes")]
        rows.append([row["bench"], row["unit"], row["ours"], *best])
    names = ["bench", "unit", "ours", "SGLang's tree", "best crate, of tokens", "given hashes"]
    return [
        "Medians of matching and locking a prefix, of turns of 1,000 conversations, and bytes a "
        "cached token. The crates are `kv-index`, `smg-radix-tree` and `dynamo-kv-router`.",
        table(names, rows),
        bars(radix_bars(record["rows"])),
        record["note"],
        source(record),
    ]


def grammars(results: Results) -> list[str]:
    """Masks and compiling over many schemas."""
    record = results["grammar-suite"]
    wanted = (
        "schemas",
        "side",
        "compiled",
        "given",
        "both_compile_ms_p50",
        "mask_us_p50",
        "mask_us_p99",
        "documents_refused",
    )
    rows = [["" if row[key] is None else row[key] for key in wanted] for row in record["rows"]]
    names = ["schemas", "side", "compiled", "of", "compile p50, ms", "mask p50, µs", "p99, µs"]
    return [
        "JSON schemas and the 131,072 tokens of `tekken`; CPU time of one thread, the first mask "
        "of a state included. Compile times are of the schemas that both compile. *refused* are "
        "documents that fit their schema and that a mask refuses.",
        table([*names, "refused"], rows),
        bars(record["bars"]),
        "The optional tests miss their bar by strings and keys that must contain an expression, "
        "such as `[a-z]cole`, or must not. 11 schemas of the suite have 88 of its 100 masks above "
        "500 µs. llguidance sees only of simple repetitions that they take all common tokens: "
        "here it walks the whole vocabulary each time. The runtime computes masks ahead where it "
        "can, and no unbound row waits for one longer than 0.5 ms.",
        source(record),
    ]


def grammar_coverage(results: Results) -> list[str]:
    """Schemas that compile, and documents that masks get wrong."""
    record = results["grammar-coverage"]
    rows = [
        [
            row["schemas"],
            row["side"],
            row["compiled"],
            row["given"],
            row["relaxed"] if row["side"] == "ours" else "",
            f"{row['invalid_allowed']:,} of {row['invalid']:,}",
            f"{row['valid_refused']:,} of {row['valid']:,}",
        ]
        for row in record["rows"]
    ]
    names = ["schemas", "side", "compiled", "of", "relaxed", "invalid allowed", "valid refused"]
    return [
        "*Relaxed* are schemas of which some keyword is not enforced, as reported; *invalid "
        "allowed* are documents that their schema rejects and the masks allow, *valid refused* "
        "the opposite, both of the schemas that the side compiles. Properties are in the order "
        "of the schema.",
        table(names, rows),
        bars(record["bars"]),
        source(record),
    ]


def host_path(results: Results) -> list[str]:
    """The planner against numpy, on a CPU."""
    record = results["host"]
    sides: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        if row["bench"].startswith("plan/"):
            sides.setdefault(row["bench"], {})[row["side"]] = row["p50"] / 1000
    # A record from before there was one of them has no column for it.
    known = ("numpy_delta", "numpy_full_table", "numpy_rebuilt")
    peers = [peer for peer in known if all(peer in row for row in sides.values())]
    rows = [
        [
            name.removeprefix("plan/"),
            row["ours"],
            *(row[peer] for peer in peers),
            row["numpy_full_table"] / row["ours"],
        ]
        for name, row in sides.items()
    ]
    names = ["frame", "ours, µs", *(f"`{peer}`, µs" for peer in peers), "full table / ours"]
    return [
        "From a request's bytes to staged arrays and a reply, without ring and model; medians. The"
        " baselines are Python processes that make the same arrays "
        "in vectorised numpy. They leave out storage slots named twice, masks, drafts, adapters, "
        "media and seeds.",
        table(names, rows),
        source(record),
    ]


def ring(results: Results) -> list[str]:
    """Round trips of the ring against other transports."""
    record = results["host"]
    kept = [row for row in record["rows"] if row["bench"].startswith("ring/")]
    rows = [
        [
            row["bench"].removeprefix("ring/round_trip/"),
            row["side"],
            row["p50"] / 1000,
            row["p99"] / 1000,
        ]
        for row in kept
    ]
    return [
        "A request to another process and its answer back. `ping_pong` and `memcpy` are the "
        "machine's floors.",
        table(["waiting / bytes", "side", "p50, µs", "p99, µs"], rows),
        source(record),
    ]


def drafters(results: Results) -> list[str]:
    """The drafter against others on recorded streams, without a model."""
    record = results["ngram"]
    streams = list(record["8"]["ours"])
    rows = [
        [side, *(each[name]["accepted"] / each[name]["steps"] for name in streams)]
        for side, each in record["8"].items()
    ]
    meta = {
        "device": "CPU",
        "date": "2026-11-22",
        "commit": "0a05a9e",
        "command": "make replay",
    }
    return [
        "Drafts that came true for each step, of at most eight, on recorded streams of tokens. No "
        "model and no clock are involved.",
        table(["drafter", *streams], rows),
        source({**meta, **{key: record[key] for key in meta if key in record}}),
    ]
