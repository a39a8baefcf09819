"""Compares suffix decoding with n-gram drafts on recorded token streams.

    python benches/ngram_replay/suffix.py target/release/ngram_replay target/ngram_streams.json ...

Two questions, each by kind of text. How many drafts are accepted per step if as many are verified?
N-gram drafts of one length are a point of a curve: verified and accepted drafts per step; suffix
decoding, whose drafts are as long as their probability says, is held against that curve. And how
many tokens per second come of a simulated device, where the policy chooses how many drafts to
verify, as in the driver? The record is `benches/results/suffix.json`.
"""

import datetime
import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RECORD = REPOSITORY / "benches" / "results" / "suffix.json"
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
"""Lengths of n-gram drafts."""
DRAFTS = 16
"""Most drafts of suffix decoding, and of both where the policy chooses."""
REPEATS = 5
"""Of the times of drafts, of which the least counts: other processes only add."""
ROWS = ("2 %", "10 %")
"""Costs of a row on the simulated devices, as a share of a step."""
ASKED = 1.15
NEVER_SLOWER = 0.99

Outcome = dict[str, float]
Outcomes = dict[str, dict[str, Outcome]]


def replay(program: str, streams: Path, drafts: int) -> Outcomes:
    """All variants of the drafter over all kinds of text."""
    command = [program, str(streams), str(drafts)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Outcomes = json.loads(out)
    return found


def per_step(outcome: Outcome) -> tuple[float, float]:
    """Verified and accepted drafts."""
    return outcome["drafted"] / outcome["steps"], outcome["accepted"] / outcome["steps"]


def accepted_at(curve: list[tuple[float, float]], drafted: float) -> float:
    """Accepted drafts of a curve where so many are verified."""
    for (left, low), (right, high) in pairwise([(0.0, 0.0), *sorted(curve)]):
        if left <= drafted <= right:
            return low + (high - low) * (drafted - left) / (right - left)
    raise ValueError(f"{drafted} verified drafts per step; the curve ends at {max(curve)[0]}")


def speed(outcome: Outcome) -> float:
    """Tokens per second of a simulated device over those without drafts."""
    return outcome["plain"] / outcome["device"]


def measure(program: str, path: Path) -> list[dict[str, Any]]:
    """The rows of a file of streams, one for each kind of text."""
    runs = {length: replay(program, path, length) for length in LENGTHS}
    again = [replay(program, path, DRAFTS) for _ in range(REPEATS)]

    def us(name: str, kind: str) -> float:
        times = (run[name][kind]["seconds"] / run[name][kind]["steps"] for run in again)
        return 1e6 * min(times)

    rows = []
    for kind in runs[DRAFTS]["ours"]:
        curve = [per_step(run["ours"][kind]) for run in runs.values()]
        drafted, accepted = per_step(runs[DRAFTS]["ours, suffix"][kind])
        ngram = accepted_at(curve, drafted)
        gains = {}
        for cost in ROWS:
            names = (f"ours, rows of {cost}", f"ours, suffix, rows of {cost}")
            gains[cost] = [speed(runs[DRAFTS][name][kind]) for name in names]
        rows.append(
            {
                "streams": path.stem,
                "text": kind,
                "steps": runs[DRAFTS]["ours, suffix"][kind]["steps"],
                "verified": drafted,
                "suffix_accepted": accepted,
                "ngram_accepted": ngram,
                "ratio": accepted / ngram,
                "ngram_of_4_accepted": per_step(runs[4]["ours"][kind])[1],
                "speed_by_policy": gains,
                "ngram_us": us("ours", kind),
                "suffix_us": us("ours, suffix", kind),
            }
        )
    return rows


def thresholds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of the rows of each file."""
    found = []
    for name in dict.fromkeys(row["streams"] for row in rows):
        some = [row for row in rows if row["streams"] == name]

        def mean(values: list[float]) -> float:
            return math.exp(sum(map(math.log, values)) / len(values))

        accepted = mean([row["ratio"] for row in some])
        found.append((f"{name}: accepted at as many verified, suffix / n-grams", accepted, ASKED))
        for cost in ROWS:
            pairs = [row["speed_by_policy"][cost] for row in some]
            value = mean([suffix / ngram for ngram, suffix in pairs])
            what = f"{name}: tokens/s by the policy, rows of {cost}, suffix / n-grams"
            found.append((what, value, NEVER_SLOWER))
    return [
        {"name": what, "value": value, "bar": f">= {least}", "ok": value >= least}
        for what, value, least in found
    ]


def main(program: str, paths: list[Path]) -> None:
    """Measures, prints a table and writes the record."""
    rows = [row for path in paths for row in measure(program, path)]
    for row in rows:
        speeds = "  ".join(
            f"{cost} rows {ngram:.2f} / {suffix:.2f}"
            for cost, (ngram, suffix) in row["speed_by_policy"].items()
        )
        print(
            f"{row['streams']:16}{row['text']:12} verified {row['verified']:5.2f}  accepted "
            f"{row['ngram_accepted']:.2f} / {row['suffix_accepted']:.2f} ({row['ratio']:.2f})  "
            f"speed {speeds}  us {row['ngram_us']:.1f} / {row['suffix_us']:.1f}"
        )
    asked = thresholds(rows)
    for bar in asked:
        print(f"{bar['name']}: {bar['value']:.3f}, asked {bar['bar']}")
    # A final `+` marks sources that were changed since.
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    record = {
        "check": "suffix",
        "commit": commit,
        "device": "CPU",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "make suffix",
        "rows": rows,
        "bars": asked,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], [Path(path) for path in sys.argv[2:]])
