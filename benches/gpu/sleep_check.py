"""Sleep and wake on a GPU: memory that becomes free by tag, seconds, and equal answers.

    python benches/gpu/sleep_check.py [--names 0.6b,8b] [--json FILE]

Engines with random weights and `enable_memory_saver`, one shape after the other, a minute or more
each. Their steps are captured graphs, which sleep keeps. Of each shape it has, with the bytes that
`cudaMemGetInfo` says are free:

- `tags`: release of `kv_cache`, then of `weights`, and a resume in that order;
- `all`: three releases and resumes of everything. Host memory is page-locked in the first release
  only. The wake is the slowest resume;
- `full`: a resume while another process has the memory, which is refused, and one afterwards;
- `update`, of the first shape: new weights after `weights` were resumed, then `kv_cache`;
- `restart`, of the first shape: the driver is killed while it sleeps, and sleeps again.

Greedy tokens after each part are those before. A part that fails is recorded, and the next one
runs. The file is written after each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import frame
import torch
from shapes_check import SHAPES
from weights_check import file_shapes, free_bytes, output_ids, timed, write_checkpoint

from pie_driver_sglang import Engine
from pie_driver_sglang.errors import DriverError

KV, WEIGHTS = "kv_cache", "weights"
WAKE_S, FREED = 2.0, 0.95
REPEATS: Final = 3
LEFT: Final = 256 << 20
"""Bytes of the GPU that are free while another process has the memory."""
RESTART_S: Final = 120.0


class Sleeper(NamedTuple):
    """An engine of one shape, and what it answers."""

    name: str
    engine: Engine
    device: str
    folder: Path
    tokens: list[list[int]]
    weight_bytes: int

    def timed_free(self, call: Callable[[], Any]) -> dict[str, float]:
        """Seconds of a call, and the bytes that are free after it."""
        seconds, _ = timed(call)
        return {"seconds": seconds, "free_bytes": free_bytes(self.device)}

    def changed(self) -> int:
        """How many answers are others than before."""
        return sum(x != y for x, y in zip(output_ids(self.engine), self.tokens, strict=True))


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("--names", default="0.6b,8b", help="shapes, by their names in shapes_check")
    made.add_argument("--shapes", **frame.SHAPES)
    made.add_argument("--mem-fraction-static", type=float, default=0.85)
    return made


def by_tags(sleeper: Sleeper, report: frame.Report) -> None:
    """Releases and resumes one tag after the other."""
    engine = sleeper.engine
    awake = free_bytes(sleeper.device)
    steps = {
        f"{what} {tag}": sleeper.timed_free(partial(call, [tag]))
        for what, call, tag in (
            ("release", engine.release_memory_occupation, KV),
            ("release", engine.release_memory_occupation, WEIGHTS),
            ("resume", engine.resume_memory_occupation, WEIGHTS),
            ("resume", engine.resume_memory_occupation, KV),
        )
    }
    report.put(f"{sleeper.name} tags", {"awake_free_bytes": awake, "steps": steps})
    if sleeper.device != "cpu":
        freed = steps[f"release {WEIGHTS}"]["free_bytes"] - steps[f"release {KV}"]["free_bytes"]
        ratio = freed / sleeper.weight_bytes
        report.hold(f"{sleeper.name}: freed over the weights", ratio, at_least=FREED)


def of_all(sleeper: Sleeper, report: frame.Report) -> None:
    """Releases and resumes everything, several times."""
    rounds = []
    for _ in range(REPEATS):
        release = sleeper.timed_free(sleeper.engine.release_memory_occupation)
        resume = sleeper.timed_free(sleeper.engine.resume_memory_occupation)
        first_s, changed = timed(sleeper.changed)
        figures = {"first_answers_s": first_s, "changed_answers": changed}
        rounds.append({"release": release, "resume": resume, **figures})
    report.put(f"{sleeper.name} all", {"rounds": rounds})
    changed = sum(each["changed_answers"] for each in rounds)
    report.hold(f"{sleeper.name}: answers that sleeps change", changed, at_most=0)
    slowest = max(each["resume"]["seconds"] for each in rounds)
    report.hold(f"{sleeper.name}: seconds of the wake", slowest, at_most=WAKE_S)


def with_a_full_gpu(sleeper: Sleeper, report: frame.Report) -> None:
    """Resumes while this process has the memory, and again afterwards."""
    sleeper.engine.release_memory_occupation()
    taken = None
    if sleeper.device != "cpu":
        size = free_bytes(sleeper.device) - LEFT
        taken = torch.empty(size, dtype=torch.uint8, device=sleeper.device)
    try:
        sleeper.engine.resume_memory_occupation()
        refusal = ""
    except DriverError as error:
        refusal = str(error)
    del taken
    if sleeper.device != "cpu":
        torch.cuda.empty_cache()
        report.hold(f"{sleeper.name}: resumes that a full GPU refuses", bool(refusal), at_least=1)
    sleeper.engine.resume_memory_occupation()
    report.put(f"{sleeper.name} full", {"refusal": refusal})


def update(engine: Engine, folder: Path) -> None:
    """Replaces all weights."""
    success, message = engine.update_weights_from_disk(str(folder))
    if not success:
        raise RuntimeError(message)


def after_an_update(sleeper: Sleeper, report: frame.Report) -> None:
    """Writes new weights while KV is released, as a trainer does; then the former ones again."""
    engine = sleeper.engine
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary)
        config = json.loads((sleeper.folder / "config.json").read_text())
        write_checkpoint(other, config, sleeper.device, seed=2)
        changed = []
        for folder in (other, sleeper.folder):
            engine.release_memory_occupation()
            engine.resume_memory_occupation([WEIGHTS])
            update(engine, folder)
            engine.resume_memory_occupation()
            changed.append(sleeper.changed())
    report.put(f"{sleeper.name} update", {"changed_answers": changed})
    report.hold(f"{sleeper.name}: answers that new weights change", changed[0], at_least=1)


def after_a_restart(sleeper: Sleeper, report: frame.Report) -> None:
    """Kills the driver while it sleeps: the next one sleeps, too, and wakes."""
    engine = sleeper.engine
    engine.release_memory_occupation()
    asleep = free_bytes(sleeper.device)
    [state] = engine.get_server_info()["internal_states"]
    os.kill(state["driver_pids"][0], signal.SIGKILL)
    begin = time.monotonic()
    while True:
        try:
            engine.resume_memory_occupation([WEIGHTS])
            break
        except DriverError:
            if time.monotonic() - begin > RESTART_S:
                raise
            time.sleep(0.2)
    report.put(f"{sleeper.name} restart", {
        "seconds": time.monotonic() - begin, "asleep_free_bytes": asleep,
        "free_bytes": free_bytes(sleeper.device),
    })  # fmt: skip
    engine.resume_memory_occupation()


PARTS: Final = (by_tags, of_all, with_a_full_gpu)
FIRST_ONLY: Final = (after_an_update, after_a_restart)


@contextmanager
def started(
    name: str, arguments: argparse.Namespace, report: frame.Report, *, stored: bool
) -> Iterator[Sleeper]:
    """An engine of a shape, which has answered; `stored`: with the weights of a folder."""
    config = dict(SHAPES[name].config)
    if arguments.shapes:
        config = json.loads((arguments.shapes / "config.json").read_text())
    device: str = arguments.device
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if stored:
            size = write_checkpoint(folder, config, device)
        else:
            (folder / "config.json").write_text(json.dumps(config))
            sizes = [math.prod(shape) for part in file_shapes(config) for shape in part.values()]
            size = 2 * sum(sizes)
        if device != "cpu":
            torch.cuda.empty_cache()
        before = free_bytes(device)
        start_s, engine = timed(
            lambda: Engine(
                model_path=str(folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                device=frame.engine_device(device),
                enable_memory_saver=True,
                # Prompts that are cached, or not, may have other last bits.
                disable_radix_cache=True,
                mem_fraction_static=arguments.mem_fraction_static,
            )
        )
        with engine:
            if stored:
                update(engine, folder)
            made = Sleeper(name, engine, device, folder, output_ids(engine), size)
            report.put(f"{name} start", {
                "start_s": start_s, "weight_bytes": size, "free_bytes_before": before,
                "free_bytes": free_bytes(device), "active": engine.get_server_info()["active"],
            })  # fmt: skip
            print(f"{name}: started in {start_s:.0f} s", flush=True)
            yield made


class Attempts:
    """Parts of which one may fail."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, what: str, call: Callable[[], object]) -> None:
        """Runs a part; what it raises is kept, and the next one runs."""
        try:
            seconds, _ = timed(call)
            print(f"{what}: {seconds:.1f} s", flush=True)
        except Exception as error:
            self.failed.append(f"{what}: {type(error).__name__}: {error}")
            print(self.failed[-1], flush=True)


def check_shape(
    name: str,
    arguments: argparse.Namespace,
    report: frame.Report,
    attempts: Attempts,
    *,
    first: bool,
) -> None:
    """Runs the parts of a shape, and compares answers after each."""

    def compare(sleeper: Sleeper, part: str) -> None:
        # A part that failed may have left it asleep.
        sleeper.engine.resume_memory_occupation()
        changed = sleeper.changed()
        report.hold(f"{name}: answers that `{part}` changes", changed, at_most=0)

    with started(name, arguments, report, stored=first) as sleeper:
        for part in (*PARTS, *(FIRST_ONLY if first else ())):
            attempts.run(f"{name} {part.__name__}", partial(part, sleeper, report))
            attempts.run(f"{name}, answers", partial(compare, sleeper, part.__name__))


def main() -> None:
    """Sleeps with each shape."""
    arguments = parser().parse_args()
    attempts = Attempts()
    with frame.Report(__file__, arguments) as report:
        for number, name in enumerate(arguments.names.split(",")):
            check = partial(check_shape, name, arguments, report, attempts, first=not number)
            attempts.run(name, check)
            report.put("failed", {"parts": attempts.failed})
        report.hold("failed parts", len(attempts.failed), at_most=0)


if __name__ == "__main__":
    main()
