"""The fork server of the HTTP server: what it forks, for whom, and how forks end."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from typing import Any, Final

import psutil
import pytest

from pie_driver_sglang.frontends.sglang_server.compat import front_forks

LIMIT_S: Final = 60.0
PROGRAM: Final = """
import json, multiprocessing, os, signal, sys, threading, time
from pie_driver_sglang.frontends.sglang_server.compat import front_forks

def tell(pipe):
    pipe.send([os.getppid(), os.environ.get("LATER"), "marked" in globals()])

def start(context, target):
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(writer,))
    process.start()
    found = reader.recv()
    process.join()
    return [*found, process.exitcode]

def from_a_thread(pipe):
    found = []
    context = front_forks.inherited_context()
    thread = threading.Thread(target=lambda: found.append(start(context, tell)))
    thread.start()
    thread.join()
    pipe.send(found[0])

def fail(pipe):
    pipe.send([])
    os.kill(os.getppid(), signal.SIGQUIT)

def wait(pipe):
    pipe.send([os.getppid(), os.getpid()])
    time.sleep(3600)

if __name__ == "__main__":
    marked = True
    with front_forks.front_fork_server() as context:
        os.environ["LATER"] = "set after it was forked"
"""


def run(body: str) -> Any:
    """What a program prints that has this body within `front_fork_server`."""
    text = PROGRAM + textwrap.indent(textwrap.dedent(body), " " * 8)
    command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.PIPE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fork_has_the_environment_of_the_process_that_starts_it() -> None:
    own, parent, variable, is_fork, status = run(
        """
        found = start(context, tell)
        print(json.dumps([os.getpid(), *found]))
        """
    )
    assert parent != own
    assert (variable, is_fork, status) == ("set after it was forked", True, 0)


def test_a_thread_of_another_process_starts_forks_of_the_same() -> None:
    """As the data-parallel controller does, which is a fork of the server."""
    own, [there, *_], [here, *_] = run(
        """
        pipe, other = multiprocessing.get_context("fork").Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=from_a_thread, args=(other,))
        process.start()
        there = pipe.recv()
        process.join()
        print(json.dumps([os.getpid(), there, start(context, tell)]))
        """
    )
    assert there == here != own


def test_a_failure_that_a_fork_reports_reaches_the_server() -> None:
    assert run(
        """
        told = threading.Event()
        signal.signal(signal.SIGQUIT, lambda *_: told.set())
        start(context, fail)
        print(json.dumps(told.wait(30)))
        """
    )


@pytest.mark.parametrize("victim", ["the server", "the fork server"])
def test_forks_end_with(victim: str) -> None:
    body = """
        reader, writer = context.Pipe(duplex=False)
        context.Process(target=wait, args=(writer,), daemon=True).start()
        print(json.dumps(reader.recv()), flush=True)
        sys.stdin.read()
        """
    text = PROGRAM + textwrap.indent(textwrap.dedent(body), " " * 8)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], **pipes) as server:
        assert server.stdout is not None
        parent, fork = map(psutil.Process, json.loads(server.stdout.readline()))
        assert parent.cmdline()[0] == front_forks.TITLE
        if victim == "the server":
            server.kill()
            assert psutil.wait_procs([parent, fork], LIMIT_S)[1] == []
        else:
            parent.kill()
            fork.wait(LIMIT_S)
            server.kill()


def test_a_process_with_threads_is_not_forked(capfd: pytest.CaptureFixture[str]) -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    with front_forks.front_fork_server() as context:
        assert context is None
    ends.set()
    thread.join()
    line = capfd.readouterr().err
    assert line.startswith("pie-sglang: processes of the server import SGLang again: it has ")
    assert front_forks.inherited_context() is None
