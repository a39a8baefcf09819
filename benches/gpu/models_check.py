"""Finds out on a CUDA GPU what docs/supported-models.md says of each architecture.

    python benches/gpu/models_check.py [--device cuda:0] [--workers 4] [--limit S]
        [--dtype bfloat16] [--json FILE] [NAME ...]

Small random models of the architectures in `tests/architectures.py` are served in bfloat16 and
compared with `transformers` in float32 on the CPU, the same weights. Every model has a process and
a time limit of its own; several run at once, each with a small part of the memory. Prints the
document's table, and below it by how much the logits differ and which attention backends the driver
took. Where a model is sensitive, more is allowed: as much as rounding explains by what
`transformers` in the same type differs by. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import frame
import torch
from frame import Report
from processes import find, hand_over
from serving import PAGE, driver

sys.path.insert(0, str(frame.REPOSITORY / "tests"))

import architectures
import model_checks
from reference import MaskedReference, Pages, Reference

NAMES = (
    # The CPU has no code for these,
    *("Gemma 2", "EXAONE 4", "Qwen2-MoE", "DeepSeek-V2", "DeepSeek-V3", "GPT-OSS", "Qwen3-Next"),
    # and these differ from each other in attention, experts or normalization.
    *("Llama", "Qwen3", "Gemma 3", "Cohere 2", "Phi-3", "OLMo-2", "Qwen3-MoE", "Mixtral"),
    "GLM-4.5",
)
RACED = "another process took memory"
"""What a driver says if another took memory while its weights were loaded."""
TYPICAL, WORST, OUTLIERS = 0.04, 0.25, 0.1
"""A row's error is that of its logits (root of the mean square) over their spread. The median row
must keep to the first figure, and all but a tenth of the rows, in which an expert may have changed,
to the second. What the reference does in the same type, times `ROUNDING`, is also allowed, up to
`LIMITS`."""
ROUNDING = 1.5
LIMITS = (WORST, 0.5)
"""Of the median row, and of the share of rows that are off by more than `WORST`."""
FEW = 8
"""Rows from which on there is a median; fewer, as decodes have, are judged with those before."""
GAP = 0.12
"""Logit gap above which bfloat16 must agree with float32, in spreads."""


class Errors:
    """Compares logits and remembers the largest median."""

    def __init__(self) -> None:
        self.largest = self.rounding = 0.0
        self._few: list[torch.Tensor] = []
        self._waiting = 0

    def equal(
        self, found: torch.Tensor, expected: torch.Tensor, rounded: torch.Tensor | None
    ) -> None:
        """Asserts that rows are equal up to bfloat16's rounding."""
        off = torch.stack([_off(found, expected), _off(expected, expected)])
        if rounded is not None:
            off[1] = _off(rounded, expected)
        if off.shape[1] < FEW:
            self._few.append(off)
            self._waiting += off.shape[1]
            if self._waiting < FEW:
                return
            off = torch.cat(self._few, dim=1)
        self._judge(off)

    def finish(self) -> None:
        """Asserts the same of rows that were too few, and were followed by no others."""
        if 0 < self._waiting < FEW:
            self._judge(torch.cat(self._few, dim=1))

    def _judge(self, off: torch.Tensor) -> None:
        """Of errors ``[2, rows]``: the driver's, and the reference's in the same type."""
        median, rounding = off.median(dim=1).values.tolist()
        if math.isnan(median) or median > self.largest:
            self.largest, self.rounding = median, rounding
        outliers, flips = (~(off <= WORST)).float().mean(dim=1).tolist()
        typical = min(max(TYPICAL, ROUNDING * rounding), LIMITS[0])
        most = min(max(OUTLIERS, ROUNDING * flips), LIMITS[1])
        assert median <= typical, f"rows off by {median:.1%} of their spread"
        assert outliers <= most, f"{outliers:.0%} of the rows off by more than {WORST:.0%}"


def _off(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """By how much rows differ, in spreads of the expected ones."""
    return (rows - expected).pow(2).mean(dim=-1).sqrt() / expected.std(dim=-1)


def check(name: str, folder: Path, device: str, dtype: str) -> dict[str, str]:
    """Cells of one architecture; runs in a process of its own."""
    snapshot = architectures.build(name, folder, wide=True)
    options: dict[str, object] = {
        "page_size": PAGE,
        "chunked_prefill_size": model_checks.CHUNK,
        "cpu_mem_budget_in_gb": model_checks.SWAP_GIB,
        "mem_fraction_static": 0.1,
        "cuda_graph_max_bs": 16,
    }
    errors = Errors()
    # One at a time: transformers loads under a default type that all threads have in common.
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(Reference, snapshot)
        rounding = pool.submit(Reference, snapshot, dtype)
        with driver(snapshot, options, device, dtype=dtype, spin_budget_us=200) as (client, caps):
            reference, rounded = loading.result(), rounding.result()
            spread = float(reference.logits(list(range(3, 100))).std(dim=-1).median())
            served = model_checks.Served(
                client=client,
                pages=Pages(caps["total_pages"], PAGE),
                host=Pages(caps["swap_pool_size"], PAGE),
                states=Pages(caps["rs_cache_slots"], 1) if caps.get("rs_cache_slots") else None,
                reference=reference,
                rounded=rounded,
                masked=functools.partial(MaskedReference, snapshot, "float32"),
                equal=errors.equal,
                gap=GAP * spread,
            )
            cells = model_checks.find_out(served)
            try:
                errors.finish()
            except AssertionError as error:
                cells["runs"] = f"WRONG: {error}"
            off = f"{errors.largest:.2%}"
            # Of masked rows it is not known.
            if errors.rounding:
                off += f", transformers in {dtype} by {errors.rounding:.2%} there"
            return {**cells, "off": off}


def row(name: str, folder: Path, device: str, limit: float, dtype: str) -> tuple[str, str]:
    """A line of the table, and a line below it."""
    command = [sys.executable, __file__, "--device", device, "--folder", folder, "--one", name]
    started = time.monotonic()
    while True:
        left = limit - (time.monotonic() - started)
        ended = find([*command, "--dtype", dtype], left)
        if RACED not in ended.output or ended.status.startswith("over"):
            break
    seconds = f"{name}: {time.monotonic() - started:.0f} s"
    taken = re.search(r"attention (\S+), \d+ pages", ended.output)
    if taken is not None:
        seconds += f", attention {taken[1]}"
    found = ended.value
    if found is None:
        last = " / ".join(ended.output.splitlines()[-3:])
        text = ended.refusal or f"FAILED, {ended.status}: {last}"
        cells = [model_checks.REFUSED if ended.refusal else "FAILED", *["—"] * 4, text[:300]]
        return "| " + " | ".join([name, *cells]) + " |", seconds
    cells = [found[subject] for subject in model_checks.SUBJECTS]
    long = [subject for subject in model_checks.SUBJECTS if len(found[subject]) > 8]
    wrong = [f"{subject}: {found[subject]}" for subject in long]
    cells = [cell.partition(":")[0] for cell in cells]
    line = "| " + " | ".join([name, *cells, "—", "; ".join(wrong)[:300]]) + " |"
    return line.replace("|  |", "| |"), f"{seconds}, logits off by {found['off']}"


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("names", nargs="*", default=NAMES)
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--limit", type=float, default=150.0, help="seconds of one model")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--one", help=argparse.SUPPRESS)
    return made


def main() -> None:
    """One architecture, or a table of them."""
    arguments = parser().parse_args()
    if arguments.one:
        with contextlib.redirect_stdout(sys.stderr):
            found = check(arguments.one, arguments.folder, arguments.device, arguments.dtype)
        hand_over(found)
        return
    with Report(__file__, arguments) as report:
        make_table(arguments, report)


def make_table(arguments: argparse.Namespace, report: Report) -> None:
    """Every architecture; a cell that is WRONG or FAILED breaks the check."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        results = [
            pool.submit(row, name, Path(folder), arguments.device, arguments.limit, arguments.dtype)
            for name in arguments.names
        ]
        print("| architecture | runs | masks | drafts | copies | LoRA | why not |")
        print("|---|---|---|---|---|---|---|")
        for name, result in zip(arguments.names, results, strict=True):
            line, below = result.result()
            print(line, flush=True)
            report.add(model=name, cells=line, notes=below)
            bad = sum(word in line for word in ("WRONG", "FAILED"))
            report.hold(f"{name}: wrong or failed", bad, at_most=0)
        print()
        for result in results:
            print(f"    {result.result()[1]}")


if __name__ == "__main__":
    main()
