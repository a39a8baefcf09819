"""The entry point of `pie-sglang`: runs a command, and prints its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Final, NamedTuple

from pie_driver_sglang.errors import DriverError, nearest
from pie_driver_sglang.interpreter import refusal

PROGRAM: Final = "pie-sglang"
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as in shells."""
USAGE: Final = 2
"""Exit status of a wrong command line, as in `argparse`."""


class CliCommand(NamedTuple):
    """A command: its module and its help line."""

    module: str
    summary: str


COMMANDS: Final[Mapping[str, CliCommand]] = MappingProxyType(
    {
        "serve": CliCommand("cli.serve", "serve a model over HTTP: OpenAI's API, and SGLang's own"),
        "generate": CliCommand(
            "cli.generate", "generate from prompts in arguments, a file or a pipe; prints JSONL"
        ),
        "batch": CliCommand(
            "cli.batch", "run a file of requests in OpenAI's batch format; continues after a kill"
        ),
        "shell": CliCommand("cli.shell", "chat with a model in the terminal"),
        "bench": CliCommand(
            "cli.bench", "measure an engine, alone or against SGLang, or a running server"
        ),
        "replay": CliCommand(
            "cli.replay", "send recorded requests at their times and report latencies"
        ),
        "demo": CliCommand("demo.questions", "serve a small chat model and ask it a few questions"),
        "doctor": CliCommand("cli.doctor", "check this machine: versions, GPUs, /dev/shm, caches"),
        "plan": CliCommand(
            "cli.plan", "plan the memory of a model on a GPU of any size, without loading it"
        ),
        "check": CliCommand("cli.check", "check a Pie configuration without loading the model"),
        "tune": CliCommand(
            "cli.tune", "search the GEMM configs of a model on this GPU, ahead of its first load"
        ),
        "warm": CliCommand(
            "cli.warm", "compile the kernels of a model in parallel, ahead of its first start"
        ),
        "models": CliCommand(
            "cli.models", "list the models that were converted into the cache, and remove them"
        ),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `pie-sglang`.

    Args:
        arguments: The command line; None for that of the process.

    Returns:
        0; 1 after an error or a check that failed; 2 for a wrong command line; 130 after Ctrl-C.
    """
    if message := refusal(sys.version_info[:2], sys.executable):
        sys.stderr.write(message)
        return 1
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        sys.stderr.write(usage())
        return USAGE
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if name in ("-V", "--version", "version"):
        from pie_driver_sglang.cli.version import version_line

        sys.stdout.write(f"{version_line()}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        question = nearest(name, COMMANDS) or f"run `{PROGRAM} --help` for the list of commands"
        return _fail(f"there is no command {name!r}", question, USAGE)
    return run_command(import_module(f"pie_driver_sglang.{command.module}").main, rest)


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name:<{width}}  {c.summary}\n" for name, c in COMMANDS.items())
    return (
        f"usage: {PROGRAM} <command> [options]\n\n"
        "Serve SGLang's models, generate offline, measure, check a machine or a configuration.\n\n"
        f"commands:\n{commands}\n"
        "options:\n"
        "  --help     show this text; after a command, show its options\n"
        "  --version  show the version, with the commit where it is known\n\n"
        f"`python -m pie_driver_sglang <command>` is the same as `{PROGRAM} <command>`.\n"
    )


def run_command(
    command: Callable[[Sequence[str]], int], arguments: Sequence[str], program: str = PROGRAM
) -> int:
    """Run a command, and print its error as one line of `program`; returns its exit status."""
    try:
        status = command(arguments)
        sys.stdout.flush()
    except DriverError as error:
        return _fail(str(error), error.hint, 1, program)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The output's reader is gone; the exit must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return status


def _fail(message: str, hint: str, status: int, program: str = PROGRAM) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"{program}: {line}\n" + (f"\nhint: {hint}\n" if hint else ""))
    return status
