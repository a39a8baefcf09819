"""Calls of functions in processes of their own: a kernel that fails may lose a process its GPU."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import traceback
from typing import Any


def in_process(function: Any, name: str, arguments: argparse.Namespace, *given: Any,
               limit_s: float) -> Any:  # fmt: skip
    """Calls a function in a process of its own.

    A forked one saves the imports. If these have used the GPU, it cannot, and a new one is spawned.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    try:
        return _in_process(arguments.start, limit_s, function, name, arguments, *given)
    except RuntimeError as error:
        if arguments.start != "fork" or "initializ" not in str(error):
            raise
        arguments.start = "spawn"
        return _in_process(arguments.start, limit_s, function, name, arguments, *given)


def _in_process(start: Any, limit_s: float, function: Any, *given: Any) -> Any:
    context = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, given))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise RuntimeError(f"nothing after {limit_s:.0f} s")
        found, error = receiver.recv()
    except EOFError as ended:
        process.join(5)
        raise RuntimeError(f"the process ended with {process.exitcode}") from ended
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise RuntimeError(error)
    return found


def _call(sender: Any, function: Any, given: tuple[Any, ...]) -> None:
    try:
        sender.send((function(*given), None))
    except BaseException as error:
        traceback.print_exc()
        sender.send((None, repr(error)))
    finally:
        sys.stdout.flush()
        os._exit(0)
