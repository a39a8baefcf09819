"""What a run took: tokens, tokens per second, and where the time of a step went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pie_driver_sglang.demo.runtime import Context, Runtime

#: The parts of a step, and the events of the driver's trace that make up each of them.
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "ring": (),
    "parse and plan": ("parse", "plan"),
    "model and sampling": ("forward", "sample", "launch", "wait"),
    "respond": ("respond",),
}


@dataclass(frozen=True)
class Grid:
    """A table without a look: a title, headers and rows of text; all but `text` are numbers."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    text: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Result:
    """One run of the decoding loop.

    Attributes:
        runtime: The runtime after its last step.
        seconds: Wall time of the loop.
        round_trips_ns: Nanoseconds of each batch, seen from the runtime.
    """

    runtime: Runtime
    seconds: float
    round_trips_ns: Sequence[int]

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.runtime.generated / self.seconds if self.seconds else 0.0


def read_steps(trace_path: Path) -> list[dict[str, float]]:
    """Returns the microseconds of every step and its phases, by the events' names.

    The file is an array with one event a line; while it is written the last line may be cut.
    """
    steps: list[dict[str, float]] = []
    for line in trace_path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if event.get("ph") != "X":
            continue
        if event["name"] == "step":
            steps.append({})
        if steps:
            steps[-1][event["name"]] = event["dur"]
    return steps


def mean_parts(
    steps: Sequence[Mapping[str, float]], round_trips_ns: Sequence[int]
) -> dict[str, float]:
    """Returns the mean microseconds of each part of a step; empty without a step.

    The ring's part is what the round trip took beyond the driver's phases: waking both sides, and
    the interpreter between the phases.

    Args:
        steps: The driver's steps, as `read_steps` returns them.
        round_trips_ns: The round trips of the same steps, in the same order.
    """
    pairs = list(zip(steps, round_trips_ns, strict=False))
    if not pairs:
        return {}
    totals = dict.fromkeys(PARTS, 0.0)
    for step, round_trip_ns in pairs:
        totals["ring"] += round_trip_ns / 1000 - step["step"]
        for part, events in PARTS.items():
            totals[part] += sum(step.get(event, 0.0) for event in events)
    return {part: total / len(pairs) for part, total in totals.items()}


def summarise(result: Result, steps: Sequence[Mapping[str, float]]) -> list[Grid]:
    """Returns the tables of a run."""
    grids = [_contexts(result.runtime.contexts), _totals(result)]
    parts = mean_parts(steps, result.round_trips_ns)
    if parts:
        grids.append(_split(parts))
    return grids


def _contexts(contexts: Sequence[Context]) -> Grid:
    rows = [
        (
            str(context.number),
            str(len(context.prompt_tokens)),
            str(len(context.tokens)),
            context.sampling.label,
            context.state,
        )
        for context in contexts
    ]
    headers = ("context", "prompt", "tokens", "sampler", "stopped at")
    return Grid("contexts", headers, rows, frozenset(headers[3:]))


def _totals(result: Result) -> Grid:
    runtime = result.runtime
    row = (
        str(runtime.generated),
        f"{result.seconds:.2f}",
        f"{result.rate:.1f}",
        str(runtime.steps),
        f"{runtime.rows / max(1, runtime.steps):.1f}",
    )
    return Grid("run", ("tokens", "seconds", "tokens/s", "steps", "contexts/step"), [row])


def _split(parts: Mapping[str, float]) -> Grid:
    whole = sum(parts.values())
    rows = [(part, f"{value:.1f}", f"{100 * value / whole:.1f}") for part, value in parts.items()]
    rows.append(("whole step", f"{whole:.1f}", "100.0"))
    return Grid(
        "mean step",
        ("part", "µs", "%"),
        rows,
        frozenset({"part"}),
    )
