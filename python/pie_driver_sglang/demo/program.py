"""The demo's command line, and its course from the first line to the last."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from pie_driver_sglang.demo.display import Display
from pie_driver_sglang.demo.driver import DemoSettings, DriverEnded, SpawnedDriver, choose_profile
from pie_driver_sglang.demo.report import Result, read_steps, summarise
from pie_driver_sglang.demo.runtime import Context, Limits, Runtime, Sampling
from pie_driver_sglang.demo.screen import open_display
from pie_driver_sglang.demo.tokens import Tokenizer, find_model
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.logs import format_failure

PROMPTS: Final = (
    "def read_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import socket\n\n\ndef connect(host, port):\n",
    "    def test_split(self):\n",
    "for line in lines:\n",
    "async def main():\n",
)
SAMPLINGS: Final = (
    Sampling("greedy", "greedy"),
    Sampling("T 0.7, p 0.95", "top_p", (0.7, 0.95)),
    Sampling("T 0.7, k 20, p 0.95", "top_k_top_p", (0.7, 20, 0.95)),
    Sampling("T 0.7, p 0.95", "top_p", (0.7, 0.95)),
    Sampling("T 0.7, min-p 0.1", "min_p", (0.7, 0.1)),
    Sampling("T 0.7, p 0.95", "top_p", (0.7, 0.95)),
)

#: Steps between two arrivals.
_STAGGER: Final = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
        argv: The arguments after the program's name; None for the process's own.

    Returns:
        0, 1 after an error, 130 after Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    # A terminal that is not UTF-8 shows marks instead of ending the demo.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        rate = _run(arguments)
        print(f"{rate:.1f} tok/s", flush=True)
    except DriverError as error:
        print(_failure(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the driver is stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the pipe is gone; the exit must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> float:
    model = find_model(arguments.model)
    profile = choose_profile(len(os.sched_getaffinity(0)), os.getloadavg()[0])
    settings = DemoSettings(model, arguments.device, arguments.seed, profile)
    with (
        tempfile.TemporaryDirectory(prefix="pie-demo-") as folder,
        SpawnedDriver(settings, Path(folder)) as driver,
        open_display() as display,
    ):
        display.note(f"starting the driver: {arguments.model} on {arguments.device}")
        display.note(f"{profile.name} profile: {profile.reason}")
        # The driver loads meanwhile.
        tokenizer = Tokenizer(model)
        limits = _wait(driver, display)
        channel = driver.connect()
        contexts = _contexts(arguments.prompt, tokenizer, arguments.tokens)
        runtime = Runtime(channel, limits, contexts, tokenizer.end_tokens)
        seconds = _decode(runtime, display)
        result = Result(runtime, seconds, channel.round_trips_ns)
        display.finish(contexts, summarise(result, read_steps(driver.trace_path)))
    return result.rate


def _wait(driver: SpawnedDriver, display: Display) -> Limits:
    started = time.monotonic()
    limits = driver.wait_ready(display.loading)
    display.note(
        f"ready after {time.monotonic() - started:.1f} s: {limits.arch_name}, "
        f"{limits.total_pages} pages of {limits.kv_page_size} tokens"
    )
    return limits


def _decode(runtime: Runtime, display: Display) -> float:
    """Runs every step; returns the seconds it took."""
    started = time.perf_counter()
    while runtime.step():
        display.show(runtime.contexts)
    return time.perf_counter() - started


def _contexts(prompts: Sequence[str], tokenizer: Tokenizer, limit: int) -> list[Context]:
    contexts = []
    for index, prompt in enumerate(prompts):
        tokens = tokenizer.encode(prompt)
        contexts.append(
            Context(
                number=index + 1,
                prompt=prompt,
                prompt_tokens=tokens,
                sampling=SAMPLINGS[index % len(SAMPLINGS)],
                limit=limit,
                arrival=index * _STAGGER,
                detokenise=tokenizer.stream(tokens),
            )
        )
    return contexts


def _failure(error: DriverError) -> str:
    if isinstance(error, DriverEnded):
        return f"{error}\n\n{error.log}"
    return format_failure(error)


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8") from None
    return text


def _path(text: str) -> Path:
    return Path(_text(text))


def _devices(text: str) -> str:
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,4})?(,\1(:\d{1,4})?)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither cpu nor cuda:N, nor several of one kind such as cuda:0,cuda:1"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pie-sglang demo",
        description="Serves several prompts at once, from the ring to the text on the terminal.",
    )
    add = parser.add_argument
    help_model = "folder, or a repository in the Hugging Face cache (default: %(default)s)"
    add("--model", type=_path, default=Path("models/pocket"), help=help_model)
    help_device = "cpu or cuda:N; several share the model: cuda:0,cuda:1 (default: %(default)s)"
    add("--device", type=_devices, default="cpu", help=help_device)
    add("--tokens", type=_count, default=96, help="most tokens per prompt (default: %(default)s)")
    add("--prompt", type=_text, nargs="+", default=PROMPTS, metavar="TEXT", help="own prompts")
    add("--seed", type=int, default=42, help="the driver's random seed (default: %(default)s)")
    return parser
