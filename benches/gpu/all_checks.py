"""Runs what RESULTS.md reports, or some of it, on one GPU or on several at once.

    python benches/gpu/all_checks.py --out DIR --small DIR --large DIR --pie-load BINARY [PART ...]

--small and --large have the config.json of a Qwen3-0.6B and a Qwen3-14B shape; weights are random.
The binary is what `make load` builds. Parts that time the host run first, one after the other; then
the others of one GPU side by side, one on each; and at last those that need several GPUs. What a
part prints goes to DIR/PART.txt, its figures to DIR. The status is 1 when a part failed or ran out
of time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

GRACE_S = 20.0
FOLDER = Path(__file__).resolve().parent
POCKET = str(FOLDER.parents[1] / "models" / "pocket")
LOAD = "--shapes {small}/config.json --pie-load {pie_load} --commit {commit} --budget-s {limit}"
ONE_GPU = {
    "load": "load_check.py " + LOAD + " --out {out}/load --parts throughput,peers "
    "--peer-backends fa3 --option mem_fraction_static=0.8",
    "drafts": "draft_check.py " + LOAD + " --pocket {pocket} --out {out}/drafts --patience 2",
    "attention": "attention_check.py --seconds {limit} --json {out}/attention.json",
    "models": "models_check.py --workers 7 --limit 120",
    "mixed": "mixed_check.py --shapes {small} --peers fa3 --json {out}/mixed.json",
    "lane": "lane_check.py --pocket {pocket} --steps 200 --shapes {small} --json {out}/lane.json",
    "steps": "load_check.py " + LOAD + " --out {out}/steps --parts steps",
    "memory": "memory_check.py --shapes {small} --shapes {large} --json {out}/memory.json",
    "dense": "dense_check.py --parity --times --shapes 0.6B,14B --json {out}/dense.json",
    "adapters": "lora_check.py --pocket {pocket} --shapes {small}",
    "probes": "probe_check.py --pocket {pocket} --shapes {small}",
    "images": "image_check.py",
    "samplers": "sampler_check.py",
    "masks": "mask_check.py --pocket {pocket}",
    "copies": "swap_check.py --pocket {pocket}",
}
"""Scripts of this folder and their arguments."""
ALONE = ("load", "drafts", "lane", "steps")
"""Parts that time the host, too."""
SEVERAL_GPUS = {
    "sums": "sums_check.py --times --ranks {several}",
    "ranks": "ranks_check.py --parts steps --ranks {several},1 --shapes {large}/config.json "
    "--out {out}/ranks --budget-s {limit} --commit {commit}",
    "tokens": "ranks_check.py --parts tokens --ranks {several} --out {out}/tokens "
    "--budget-s {limit}",
}


class Checks:
    """Runs parts, and remembers which of them failed."""

    def __init__(self, arguments: argparse.Namespace, gpus: Sequence[str]) -> None:
        """Takes the folders, the limits, and the GPUs' names."""
        counts = (count for count in (8, 4, 2) if count <= len(gpus))
        self._values = {
            "out": arguments.out.resolve(),
            "small": arguments.small.resolve(),
            "large": arguments.large.resolve(),
            "pie_load": arguments.pie_load.resolve(),
            "commit": arguments.commit,
            "limit": int(arguments.limit_s),
            "pocket": POCKET,
            "several": ",".join(map(str, counts)),
        }
        self._limit_s: float = arguments.limit_s
        self._gpus = gpus
        self.failed: list[str] = []

    def run_side_by_side(self, names: Sequence[str]) -> None:
        """Runs parts of one GPU, each on the next one that is free."""
        free: SimpleQueue[str] = SimpleQueue()
        for gpu in self._gpus:
            free.put(gpu)

        def work(name: str) -> None:
            gpu = free.get()
            try:
                self.run(name, ONE_GPU[name], gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            list(pool.map(work, names))

    def run(self, name: str, command: str, gpus: str) -> None:
        """Runs a part to its end or its limit."""
        words = [word.format(**self._values) for word in command.split()]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1"}
        started = time.monotonic()
        with (self._values["out"] / f"{name}.txt").open("w", encoding="utf-8") as log:
            print(f"$ CUDA_VISIBLE_DEVICES={gpus} {' '.join(words)}", file=log, flush=True)
            process = subprocess.Popen(
                [sys.executable, FOLDER / words[0], *words[1:]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(self._limit_s + GRACE_S)
                how = "done" if status == 0 else f"status {status}"
            except subprocess.TimeoutExpired:
                how = "out of time"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if how != "done":
            self.failed.append(name)
        print(f"{name} on {gpus}: {how}, {time.monotonic() - started:.0f} s", flush=True)


def visible_gpus() -> list[str]:
    """Their numbers, in a process that makes no context on them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[*ONE_GPU, *SEVERAL_GPUS], metavar="PART")
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--small", type=Path, required=True, help="Qwen3-0.6B's shape")
    parser.add_argument("--large", type=Path, required=True, help="Qwen3-14B's shape")
    parser.add_argument("--pie-load", type=Path, required=True, help="the load generator's binary")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of a part")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - ONE_GPU.keys() - SEVERAL_GPUS.keys()
    if unknown:
        names = ", ".join([*ONE_GPU, *SEVERAL_GPUS])
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {names}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus()
    if not gpus:
        parser.error("there is no GPU")
    checks = Checks(arguments, gpus)
    chosen = [name for name in ONE_GPU if name in arguments.parts]
    for name in chosen:
        if name in ALONE:
            checks.run(name, ONE_GPU[name], gpus[0])
    checks.run_side_by_side([name for name in chosen if name not in ALONE])
    for name, command in SEVERAL_GPUS.items():
        if name in arguments.parts:
            if len(gpus) > 1:
                checks.run(name, command, ",".join(gpus))
            else:
                print(f"{name}: needs several GPUs, left out", flush=True)
    if checks.failed:
        sys.exit(f"failed: {', '.join(checks.failed)}")


if __name__ == "__main__":
    main()
