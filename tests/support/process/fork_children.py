"""Has a server's processes fork their children instead of starting new interpreters for them.

They have all imports then, as those that `fork_server.py` forks. Unlike these, they are children of
the processes that start them: parents, sessions, process groups, titles and what a process is told
at its parent's death are those of a server that a user starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import setproctitle

VARIABLE: Final = "PIE_TESTS_FORK_CHILDREN"
"""The environment variable that asks `fork_server.py` for such a process, which keeps it to itself.

Its value is the interpreter that starts all other processes, such as drivers.
"""
MODULES: Final = frozenset(
    {"pie_driver_sglang.fork_server.server", "pie_driver_sglang.frontends.sglang_server"}
)
"""What Python code starts by `python -m`; a driver is started by Rust."""

_ARGUMENTS: Final = (
    *("words", "programs", "closes_others", "kept", "folder", "environment"),
    *("stdin", "to_stdin", "from_stdout", "stdout", "from_stderr", "stderr"),
    *("from_errors", "errors", "restores_signals", "leads_session", "group"),
    *("gid", "gids", "uid", "umask", "prepare", "uses_vfork"),
)
"""Of `_posixsubprocess.fork_exec`, in Python 3.11 and 3.12."""

Runner = Callable[[str, dict[str, str], dict[int, int]], int]
"""Runs a module with an environment and descriptors; returns its exit status."""


def fork_children(run: Runner) -> None:
    """From now on `subprocess` forks what runs one of `MODULES`, while it has one thread."""
    execute = vars(subprocess)["_fork_exec"]

    def start(*given: Any) -> int:
        words = [os.fsdecode(word) for word in given[0]]
        if _module(words) is None or len(list(Path("/proc/self/task").iterdir())) > 1:
            pid: int = execute(*given)
            return pid
        pid = os.fork()
        if pid == 0:
            _become(words, dict(zip(_ARGUMENTS, given, strict=True)), run)
        return pid

    vars(subprocess)["_fork_exec"] = start


def name_process(words: Sequence[str]) -> None:
    """Sets the command line, as others see it and as this process does."""
    sys.orig_argv[:] = words
    setproctitle.setproctitle(" ".join(words))


def _module(words: Sequence[str]) -> str | None:
    """The module that a command line runs, if it is one of `MODULES`."""
    if words[0] != sys.executable or "-m" not in words:
        return None
    named = words[words.index("-m") + 1]
    return named if named in MODULES else None


def _become(words: Sequence[str], given: Mapping[str, Any], run: Runner) -> None:
    """Runs the module in the fork, with what `subprocess` would do before it executes a program."""
    status = 70
    try:
        if given["leads_session"]:
            os.setsid()
        if given["group"] >= 0:
            os.setpgid(0, given["group"])
        if given["prepare"] is not None:
            given["prepare"]()
        if given["folder"] is not None:
            os.chdir(given["folder"])
        variables = dict(os.environ)
        if given["environment"] is not None:
            variables = dict(os.fsdecode(each).split("=", 1) for each in given["environment"])
        standard = [given[name] for name in ("stdin", "stdout", "stderr")]
        wanted = {number: number if each < 0 else each for number, each in enumerate(standard)}
        # At the end of this pipe the parent knows that all went well.
        wanted.update({each: each for each in given["kept"] if each != given["errors"]})
        module = _module(words)
        assert module is not None
        sys.argv = ["-m", *words[words.index(module) + 1 :]]
        name_process(words)
        status = run(module, variables, wanted)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
