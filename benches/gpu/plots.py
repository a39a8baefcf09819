"""Draws `../results/h200.json` and `servers-8b.json` as `../plots/*.svg`.

    pip install "matplotlib>=3.10,<4"
    python benches/gpu/plots.py

The same figures give the same files. A section that the results lack has no plot.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parents[1]
OURS, PEER, HOST = "#1b6ca8", "#b8b8b8", "#d9822b"
BATCHES = (1, 4, 16, 64, 128, 256)
LENGTHS = ("128", "512", "1024", "2048", "8192", "32768", "ragged")

Results = dict[str, Any]


def load(axes: Axes, results: Results) -> None:
    """Output tokens per second of the standard workload."""
    speeds = {"this driver": results["tokens_per_s"]["ours"]}
    peers = results["tokens_per_s"]["sglang"]
    speeds |= {f"SGLang, {name}": speed for name, speed in peers.items()}
    names, values = list(speeds)[::-1], list(speeds.values())[::-1]
    colors = [PEER if name.startswith("SGLang") else OURS for name in names]
    axes.bar_label(axes.barh(names, values, color=colors), fmt="{:,.0f}", padding=3)
    axes.set(xlabel="output tokens/s", xlim=(0, 1.15 * max(values)))
    axes.set_title("256 requests, Qwen3-0.6B shape, one H200")


def steps(axes: Axes, results: Results) -> None:
    """Decode steps: the device's time and the host's."""
    rows = [
        (f"{batch} x {context}", row)
        for context, batches in results["lane"].items()
        if context.isdigit()
        for batch, row in batches.items()
    ]
    names = [name for name, _ in rows]
    device = [row["gpu_us"] / 1000 for _, row in rows]
    host = [max(0.0, row["overhead_us"]) / 1000 for _, row in rows]
    axes.bar(names, device, color=OURS, label="GPU")
    bars = axes.bar(names, host, bottom=device, color=HOST, label="host")
    axes.bar_label(bars, [f"+{1000 * each:.0f} µs" for each in host], padding=2, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set(xlabel="contexts x tokens", ylabel="ms")
    axes.set_title("A decode step through the ring, Qwen3-0.6B shape")
    axes.legend(frameon=False)


def attention(axes: Axes, results: Results, shape: str) -> None:
    """The best peer's time over ours, for each step of the grid."""
    times = {
        row["work"]: row["best_peer"]
        for row in results["attention"]["times"]
        if row["shape"] == shape
    }
    grid = [[times.get(f"{batch} x {length}") for length in LENGTHS] for batch in BATCHES]
    norm = TwoSlopeNorm(1.0, vmin=0.7, vmax=1.3)
    axes.imshow(grid, cmap="RdYlGn", norm=norm, aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(LENGTHS)), LENGTHS)
    axes.set_yticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axes.set(xlabel="tokens of a context", ylabel="contexts")
    axes.set_title(f"Decode attention, {shape}: best peer's time / ours")


def drafts(axes: Axes, results: Results) -> None:
    """Tokens per second with drafts over those without."""
    kinds = {"text": "pocket's text", "cycles": "greedy cycles", "random": "nothing repeats"}
    for marker, (kind, name) in zip("os^", kinds.items(), strict=True):
        rows = results["drafts"][kind]
        batches, ratios = ([row[key] for row in rows] for key in ("batch", "ratio"))
        axes.plot(batches, ratios, marker=marker, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set(xlabel="contexts", ylabel="tokens/s with drafts / without", ylim=(0, None))
    axes.set_title("Drafts of 4 tokens")
    axes.legend(frameon=False)


def mixed(axes: Axes, results: Results) -> None:
    """What a prompt adds to a step of decodes."""
    section = results["mixed"]
    sides = {"this driver": section["graph"], "SGLang, fa3": section["sglang_fa3"]}
    lengths = [length for length in section["graph"] if length.isdigit()]
    for number, (name, row) in enumerate(sides.items()):
        positions = [position + 0.4 * number for position in range(len(lengths))]
        values = [row[length] / 1000 for length in lengths]
        bars = axes.bar(positions, values, 0.38, label=name, color=PEER if number else OURS)
        axes.bar_label(bars, fmt="{:.1f}", padding=2, fontsize=8)
    axes.set_xticks([position + 0.2 for position in range(len(lengths))], lengths)
    axes.set(xlabel="tokens of the prompt", ylabel="ms more than a step without it")
    axes.set_title("A prompt that joins 64 decodes, Qwen3-0.6B shape")
    axes.legend(frameon=False)


def ranks(axes: Axes, results: Results) -> None:
    """Tokens per second of several GPUs over one."""
    speedups = results["tp"]["speedup"]
    rows = list(speedups["2"])
    for number, (count, color) in enumerate({"2": PEER, "4": OURS}.items()):
        known = [position for position, row in enumerate(rows) if row in speedups[count]]
        positions = [position + 0.4 * number for position in known]
        values = [speedups[count][rows[position]] for position in known]
        bars = axes.bar(positions, values, 0.38, label=f"{count} GPUs", color=color)
        axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=8)
    axes.set_xticks([position + 0.2 for position in range(len(rows))], rows)
    axes.set(xlabel="contexts x tokens", ylabel="speed-up over one GPU", ylim=(0, 4))
    axes.set_title("Tensor parallelism, Qwen3-14B shape")
    axes.legend(frameon=False)


def runner(axes: Axes, results: Results) -> None:
    """Decode steps, compared with SGLang's runner on its best backend, and with the bytes moved."""
    section = results["runner"]
    rows = list(section["ours_us"])
    peers = section["sglang_runner_us"].values()
    sides = {
        "SGLang's ModelRunner, best backend": (PEER, [min(p[row] for p in peers) for row in rows]),
        "this driver, through the ring": (OURS, [section["ours_us"][row] for row in rows]),
    }
    for number, (name, (color, times)) in enumerate(sides.items()):
        positions = [position + 0.4 * number for position in range(len(rows))]
        bars = axes.bar(positions, [us / 1000 for us in times], 0.38, label=name, color=color)
        axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=7)
    limits = [section["roofline_us"][row] / 1000 for row in rows]
    positions = [position + 0.2 for position in range(len(rows))]
    axes.hlines(limits, [p - 0.4 for p in positions], [p + 0.4 for p in positions], color="black")
    axes.set_xticks(positions, [row.replace("x", " x ") for row in rows], fontsize=8)
    axes.set(xlabel="contexts x tokens; lines: time to move the bytes", ylabel="ms", yscale="log")
    axes.set_title("A decode step, Qwen3-0.6B shape")
    axes.legend(frameon=False, fontsize=8)


def prefixes(axes: Axes, results: Results) -> None:
    """Times of steps whose contexts share a prefix, over those of contexts that share nothing."""
    rows = results["prefixes"]["steps"]
    for marker, batch in zip("os^", sorted({row["batch"] for row in rows}), strict=True):
        ours = {row["common"]: row["p50_us"] for row in rows if row["batch"] == batch}
        axes.plot(list(ours), [ours[0] / us for us in ours.values()], marker=marker, label=batch)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="tokens in common, of 2,048", ylabel="step without / with", ylim=(0, None))
    axes.set_title("Contexts with a common prefix, Qwen3-0.6B shape")
    axes.legend(frameon=False, title="contexts")


def servers(record: Results) -> Figure:
    """Output tokens/s, and median time between tokens, of two servers by concurrency."""
    loads = {"1": "1", "64": "64", "256": "256", "all": "408 at once", "prefix": "shared prefixes"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axes, key, title in (
        (panels[0], "output_throughput", "output tokens/s (higher is better)"),
        (panels[1], "median_itl_ms", "ms between tokens, median (lower is better)"),
    ):
        for number, (side, name, color) in enumerate(
            [("sglang", "SGLang's scheduler", PEER), ("ours", "pie-sglang serve", OURS)]
        ):
            rows = [row for row in record["rows"] if row.get("side") == side and "load" in row]
            values = [
                statistics.median(row[key] for row in rows if row["load"] == load) for load in loads
            ]
            positions = [position + 0.4 * number for position in range(len(loads))]
            bars = axes.bar(positions, values, 0.38, label=name, color=color)
            form = "{:,.0f}" if key == "output_throughput" else "{:.1f}"
            axes.bar_label(bars, fmt=form, padding=2, fontsize=7)
        axes.set_xticks(
            [position + 0.2 for position in range(len(loads))], loads.values(), fontsize=8
        )
        axes.set(xlabel="streams", yticks=[])
        axes.set_title(title, fontsize=10)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


PLOTS: dict[str, tuple[str, Callable[[Axes, Results], None]]] = {
    "load": ("tokens_per_s", load),
    "steps": ("lane", steps),
    "attention-0.6B": ("attention", lambda axes, results: attention(axes, results, "0.6B")),
    "attention-14B": ("attention", lambda axes, results: attention(axes, results, "14B")),
    "drafts": ("drafts", drafts),
    "mixed": ("mixed", mixed),
    "ranks": ("tp", ranks),
    "prefixes": ("prefixes", prefixes),
    "runner": ("runner", runner),
}
"""Each with the section of the results that it draws."""


def main() -> None:
    """Draws everything that there is."""
    # Without these a file would change with every run.
    mpl.rcParams.update({"svg.hashsalt": "pie-driver-sglang", "svg.fonttype": "none"})
    results = json.loads((FOLDER / "results" / "h200.json").read_text())
    target = FOLDER / "plots"
    target.mkdir(exist_ok=True)
    for name, (section, draw) in PLOTS.items():
        if section not in results:
            continue
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        draw(axes, results)
        figure.savefig(target / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
    record = json.loads((FOLDER / "results" / "servers-8b.json").read_text())
    figure = servers(record)
    figure.savefig(target / "servers-8b.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
