"""Checks on a CUDA GPU what the driver does about faults, and what loads cost requests that decode.

    python benches/gpu/fault_check.py --shapes CONFIG_DIR [--pocket DIR] [--parts A,B]
        [--device cuda:0[,cuda:1]]

1. `checkpoint`: a whole checkpoint is served. With a tensor missing, one too many, one of another
   shape or a damaged file the start ends with one line that names the tensor or the file.
2. `memory`: a GPU that fills up while graphs are captured ends the start with the memory hint.
3. `lost`: a kernel fails an assertion while graphs decode, and while a prompt goes through Python.
   The open request is aborted, and the driver ends with status 1 and one line.
4. `joiner`: a batch of decodes takes in a context of 40,000 cached tokens without a call of Python.
5. `loads`: decode steps while a large adapter is read, compared with those before.

Parts 2 to 5 have random weights in the shape of CONFIG_DIR and take the first device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import frame
from frame import Report
from lora_check import make_adapter
from serving import NEVER_PARK, PAGE, step, write_config

from pie_driver_sglang._core import Client, Request

START_S = 180.0
END_S = 30.0
ROWS = 64
CONTEXT = 512
LONG = 40_000
"""Cached tokens of the context that joins."""
RANK = 512
"""Of the large adapter: 645 MB in the shape of Qwen3-0.6B."""
FAULTY = '''
"""The driver, with a fault that a file in the working folder asks for."""
import os, pathlib, sys, threading, time
FOLDER = pathlib.Path(sys.argv.pop())

def patch(module, name, wrap):
    while True:
        owner = getattr(sys.modules.get("pie_driver_sglang." + module), name[0], None)
        if owner is not None:
            setattr(owner, name[1], wrap(getattr(owner, name[1])))
            return
        time.sleep(0.001)

def counted(forward):
    def count(*arguments):
        with (FOLDER / "forwards").open("a") as file:
            file.write(".")
        return forward(*arguments)
    return count

def crowded(capture):
    def fill(*arguments):
        import torch
        if os.environ.get("PIE_CHECK_FILL"):
            size = torch.cuda.mem_get_info()[0] - (8 << 20)
            fill.held = torch.empty(size, dtype=torch.uint8, device="cuda")
        return capture(*arguments)
    return fill

def fault():
    while not (FOLDER / "fault").exists():
        time.sleep(0.001)
    import torch
    torch.zeros(4, device="cuda:0")[torch.tensor([1 << 20], device="cuda:0")]

if __name__ == "__main__":
    from pie_driver_sglang import _core
    guard = _core.ExitGuard()
    for target, arguments in (
        (patch, ("engine.backend_executor", ("BackendExecutor", "forward"), counted)),
        (patch, ("engine.cuda_graphs", ("CudaGraphRunner", "_capture_all"), crowded)),
        (fault, ()),
    ):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    from pie_driver_sglang.backends.sglang.library import LIBRARY
    from pie_driver_sglang.driver.startup import main
    os._exit(main(LIBRARY, guard=guard))
'''


class Driver:
    """A driver process and what it says."""

    def __init__(self, model: Path, device: str, options: dict[str, object]) -> None:
        """Starts it."""
        self.folder = Path(tempfile.mkdtemp())
        self._group = os.getpid() % 100_000
        devices = device.split(",")
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        config = write_config(self.folder, model, lines, device, group=self._group)
        script = self.folder / "faulty.py"
        script.write_text(FAULTY)
        read, write = os.pipe()
        command = [sys.executable, script, "--config", config, "--handshake-fd", str(write)]
        if len(devices) > 1:
            # Other ranks are started as the first one was.
            command[1:2] = ["-m", "pie_driver_sglang"]
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*map(str, command), *([str(self.folder)] if len(devices) == 1 else [])],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        os.close(write)
        with os.fdopen(read) as pipe:
            self.started = bool(pipe.read())

    def client(self) -> Client:
        """A client that spins."""
        return Client(f"/pie_shmem_g{self._group}", spin_budget_us=NEVER_PARK)

    def forwards(self) -> int:
        """Calls of the model by Python so far."""
        path = self.folder / "forwards"
        return path.stat().st_size if path.exists() else 0

    def text(self) -> str:
        """Its stderr."""
        return (self.folder / "log").read_text()

    def end(self) -> int:
        """Waits for its end, and returns the status."""
        return self._process.wait(END_S)

    def stop(self) -> int:
        """Ends it as the runtime does."""
        self._process.terminate()
        return self.end()


@contextmanager
def serving(
    model: Path, device: str, options: dict[str, object]
) -> Iterator[tuple[Driver, Client]]:
    """A driver that serves, and its client."""
    driver = Driver(model, device, options)
    try:
        assert driver.started, driver.text()[-4000:]
        yield driver, driver.client()
    except Exception:
        print(driver.text()[-4000:])
        raise
    finally:
        driver.stop()


def refusal(model: Path, device: str, options: dict[str, object]) -> str:
    """The line that a start ends with."""
    driver = Driver(model, device, options)
    assert not driver.started, "the driver serves"
    status, lines = driver.end(), driver.text().rstrip().splitlines()
    said = [line for line in lines if line.startswith("pie_driver_sglang: ")]
    assert status == 1, (status, lines[-5:])
    assert lines[-1].startswith("hint: "), lines[-5:]
    return f"{said[-1]} | {lines[-1]}"


def check_checkpoint(pocket: Path, device: str, report: Report) -> None:
    """Whole, and with each kind of fault."""
    import torch
    from safetensors.torch import load_file, save_file

    [file] = pocket.glob("*.safetensors")
    whole = load_file(file)
    name = next(name for name in whole if name.endswith("up_proj.weight"))
    faults: dict[str, Callable[[dict[str, Any]], object]] = {
        "missing": lambda tensors: tensors.pop(name),
        "surplus": lambda tensors: tensors.update({name[:-6] + "bias": torch.ones(7)}),
        "other shape": lambda tensors: tensors.update({name: tensors[name][:-8].contiguous()}),
    }
    with serving(pocket, device, {"page_size": PAGE}) as (_, client):
        assert len(client.forward([step([300, 301], 0, 0, 1)]).tokens[0]) == 1
    report.add(part="checkpoint", fault="none", line="served")
    for kind, change in faults.items():
        folder = Path(tempfile.mkdtemp()) / "model"
        shutil.copytree(pocket, folder)
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, folder / file.name, {"format": "pt"})
        line = refusal(folder, device, {"page_size": PAGE})
        assert name.removesuffix("weight") in line, line
        report.add(part="checkpoint", fault=kind, line=line)
        print(f"    {kind}: {line}")
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(pocket, folder)
    os.truncate(folder / file.name, (folder / file.name).stat().st_size // 2)
    line = refusal(folder, device, {"page_size": PAGE})
    assert file.name in line, line
    report.add(part="checkpoint", fault="damaged", line=line)
    print(f"    damaged: {line}")


def check_memory(shapes: Path, device: str, report: Report) -> None:
    """A GPU that fills up during capture."""
    os.environ["PIE_CHECK_FILL"] = "1"
    try:
        line = refusal(shapes, device, {"load_format": "dummy"})
    finally:
        del os.environ["PIE_CHECK_FILL"]
    assert "mem_fraction_static" in line, line
    report.add(part="memory", line=line)
    print(f"    {line}")


def decodes(rows: int, position: int) -> list[Request]:
    """A token for each of `rows` contexts, which each have the pages of 1,024 tokens."""
    return [step([300 + c], position, 64 * c, c + 1) for c in range(rows)]


def check_lost(shapes: Path, device: str, report: Report) -> None:
    """A failed assertion on the device, by either path."""
    for path in ("graphs", "Python"):
        driver = Driver(shapes, device, {"load_format": "dummy", "page_size": PAGE})
        assert driver.started, driver.text()[-4000:]
        client = driver.client()
        client.forward(decodes(8, CONTEXT))
        (driver.folder / "fault").touch()
        # More rows than a graph takes.
        prompt = [300 + n % 1000 for n in range(3000)]
        batch = decodes(8, CONTEXT) if path == "graphs" else [step(prompt, 0, 900, 99)]
        answers, started = 0, time.monotonic()
        while not client.forward(batch).aborted:
            answers += 1
            assert time.monotonic() - started < END_S, "the fault goes unnoticed"
        status, text = driver.end(), driver.text()
        lines = [line for line in text.splitlines() if line.startswith("pie_driver_sglang: ")]
        assert (status, len(lines)) == (1, 1), (status, text[-3000:])
        assert "Traceback" not in text, text[-3000:]
        report.add(part="lost", path=path, answers=answers, line=lines[0])
        print(f"    {path}: {answers} answers, an abort, status {status}: {lines[0]}")


def check_joiner(shapes: Path, device: str, report: Report) -> None:
    """A context with a long cached prefix joins."""
    with serving(shapes, device, {"load_format": "dummy", "page_size": PAGE}) as (driver, client):
        for position in range(CONTEXT, CONTEXT + 3):
            client.forward(decodes(ROWS - 1, position))
        before = driver.forwards()
        batch = [*decodes(ROWS - 1, CONTEXT + 3), step([300], LONG, 64 * ROWS, 999)]
        times = []
        tokens = []
        for _ in range(3):
            started = time.perf_counter()
            tokens.append([row[0] for row in client.forward(batch).tokens])
            times.append((time.perf_counter() - started) * 1e6)
        assert driver.forwards() == before, "Python ran the model"
        assert tokens[0] == tokens[1] == tokens[2]
        report.add(part="joiner", us=times)
        print(f"    joining {times[0]:.0f} us, then {times[1]:.0f} and {times[2]:.0f}")


def check_loads(shapes: Path, device: str, report: Report) -> None:
    """Decode steps while an adapter is read."""
    config = json.loads((shapes / "config.json").read_text())
    folder = Path(tempfile.mkdtemp()) / "adapter"
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    make_adapter(folder, config, RANK, targets, {})
    size = (folder / "adapter_model.safetensors").stat().st_size / 1e6
    options: dict[str, object] = {"load_format": "dummy", "page_size": PAGE, "enable_lora": True}
    options |= {"max_lora_rank": RANK, "max_loras_per_batch": 1, "max_loaded_loras": 2}
    with serving(shapes, device, options) as (_, client):
        status: list[int | None] = []
        loading = threading.Thread(
            target=lambda: status.append(client.adapter("Load", 1, str(folder)))
        )
        before = _steps(client, 200, lambda: False)
        loading.start()
        during = _steps(client, 10_000, lambda: not loading.is_alive())
        loading.join()
        assert status == [0], status
        after = _steps(client, 200, lambda: False)
    for name, times in (("before", before), ("while reading", during), ("after", after)):
        middle, worst = statistics.median(times), max(times)
        late = sum(time > 2 * middle for time in times)
        report.add(part="loads", when=name, steps=len(times), p50_us=middle, longest_us=worst)
        text = f"{len(times)} steps, p50 {middle:.0f} us, longest {worst:.0f} us"
        print(f"    {name}: {text}, {late} of more than twice the p50")
    print(f"    the adapter has {size:.0f} MB")
    report.hold(
        "longest step while an adapter is read / p50",
        max(during) / statistics.median(during),
        at_most=3,
    )


def _steps(client: Client, most: int, over: Callable[[], bool]) -> list[float]:
    """Round trips of decode steps in µs."""
    times: list[float] = []
    while len(times) < most and not over():
        started = time.perf_counter()
        client.forward(decodes(ROWS, CONTEXT + len(times) % 400))
        times.append((time.perf_counter() - started) * 1e6)
    return times


PARTS: dict[str, Callable[[Path, str, Report], None]] = {
    "checkpoint": check_checkpoint,
    "memory": check_memory,
    "lost": check_lost,
    "joiner": check_joiner,
    "loads": check_loads,
}


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "shapes", "device")
    made.add_argument("--parts", default=",".join(PARTS))
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    failed = 0
    with Report(__file__, arguments) as report:
        for name in arguments.parts.split(","):
            print(f"{name}:", flush=True)
            try:
                if name == "checkpoint":
                    check_checkpoint(arguments.pocket, arguments.device, report)
                else:
                    PARTS[name](arguments.shapes, arguments.device.split(",")[0], report)
            except Exception as error:
                failed += 1
                report.add(part=name, error=f"{type(error).__name__}: {error}")
                print(f"    failed: {type(error).__name__}: {error}", flush=True)
        report.hold("parts that failed", failed, at_most=0)


if __name__ == "__main__":
    main()
