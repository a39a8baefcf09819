"""The start of a driver: command line, failures before the handshake ends, and signals."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pie_driver_sglang import __version__
from pie_driver_sglang.backends.sglang.library import LIBRARY
from pie_driver_sglang.config.driver_config import ModelSection
from pie_driver_sglang.driver import startup
from pie_driver_sglang.errors import not_running
from support.models import tiny_models
from support.process import drivers
from support.process.config_files import config_of


def test_a_model_that_does_not_run_is_one_line() -> None:
    error = not_running("cuda:0", RuntimeError("failed to dispatch data type Float\nat norm.cu:1"))
    assert str(error).endswith("does not run on cuda:0: failed to dispatch data type Float")
    assert "`activation_dtype`" in error.hint
    compiler = RuntimeError(
        "at 105:8:\n\n    if X:\n        y = f(x)\n        ^\nno float16 here\n"
    )
    assert str(not_running("cuda:0", compiler)).endswith("cuda:0: at 105:8: no float16 here")
    assert str(not_running("cpu", AssertionError())).endswith("cpu: AssertionError")


def test_the_version_is_printed_without_a_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        startup.main(LIBRARY, ["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("argv", [[], ["--config", "x"], ["--config", "x", "--handshake-fd", "a"]])
def test_a_wrong_command_line_is_an_error_with_the_usage(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        startup.main(LIBRARY, argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "--handshake-fd" in printed.err


FAILING = """
import os, sys
sys.path.insert(0, sys.argv[3])
from pie_driver_sglang.backends.sglang.library import LIBRARY as library
from pie_driver_sglang.driver import startup
from support.models import tiny_models
from support.process import drivers
drivers.watch_handshake(int(sys.argv[2]))
exec(sys.argv[4])
os._exit(startup.main(library, ["--config", sys.argv[1], "--handshake-fd", sys.argv[2]]))
"""
"""A driver that notes whether the handshake is open when it says why the start fails."""

WARMING_UP = """
def start(*arguments): raise not_running("cpu", RuntimeError("no such kernel"))
from pie_driver_sglang.errors import not_running
startup._start = start
"""
A_RANK_ENDS = """
import subprocess, time
from pie_driver_sglang.ranks import parallel
startup._start = lambda *arguments: time.sleep(60)
end = [sys.executable, "-c", "raise SystemExit(3)"]
parallel._start_interpreter = lambda *arguments: subprocess.Popen(end)
"""
FAILURES = {
    "no configuration": ("", "does not exist"),
    "the import": (
        "def load(*_): import no_such_library\nlibrary = library._replace(load_rank=load)",
        "no_such_lib",
    ),
    "the warm-up": (WARMING_UP, "does not run on cpu: no such kernel"),
    "a rank": (A_RANK_ENDS, "rank 1 on cpu ended with status 3"),
    "an exception": ("startup.load_config = lambda *_: 1 // 0", "ZeroDivisionError"),
    "an interrupt": (
        "def stop(*_): raise KeyboardInterrupt\nstartup.load_config = stop",
        "Inter",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_reason_is_printed_before_the_handshake_closes(name: str, tmp_path: Path) -> None:
    """Then the runtime terminates the driver. `tests/test_lifecycle.py` has the later stages."""
    change, expected = FAILURES[name]
    path = tmp_path / "none.toml"
    if name != "no configuration":
        path = drivers.write_config(tmp_path, tiny_models.POCKET, **drivers.spread(2))
    reader, writer = os.pipe()
    arguments = [str(path), str(writer), str(drivers.TESTS), change]
    log = tmp_path / "stderr"
    with log.open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, "-c", FAILING, *arguments], stderr=file, pass_fds=[writer]
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b""
    text = log.read_text()
    assert driver.wait(30.0) == 1
    assert drivers.CLOSED_EARLY not in text
    assert expected in text
    assert "\nhint: " in text


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """It is the runtime's; `tests/test_ranks.py` has a whole start, with its workers."""
    traps = drivers.set_traps(tmp_path / "traps")
    command = [sys.executable, "-m", "pie_driver_sglang", "--config", "none.toml"]
    ended = subprocess.run(
        [*command, "--handshake-fd", "2"], cwd=traps, stderr=subprocess.PIPE, text=True, check=False
    )
    assert drivers.TRAPPED not in ended.stderr
    assert ended.returncode == 1
    assert "'none.toml' does not exist" in ended.stderr


GUARDED = """
import time
from pie_driver_sglang import _core
guard = _core.ExitGuard()
print("ready", flush=True)
time.sleep(60)
"""


PARENT = """
import ctypes, subprocess, sys, time
bind = lambda: ctypes.CDLL(None).prctl(1, int(sys.argv[1]), 0, 0, 0)
subprocess.Popen([sys.argv[2], "-c", sys.argv[3]], preexec_fn=bind)
time.sleep(60)
"""
"""Starts the rest of its arguments as the runtime does, bound to its life by a signal."""


class TestStoppedFromOutside:
    """The exit guard says why, and waits for nothing."""

    @pytest.fixture
    def pipe(self) -> Iterator[tuple[int, int]]:
        reader, writer = os.pipe()
        yield reader, writer
        os.close(reader)
        os.close(writer)

    @staticmethod
    def stop(stderr: int) -> None:
        command = [sys.executable, "-c", GUARDED]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30.0) == 0

    def test_a_last_line_names_the_signal(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        self.stop(writer)
        line = os.read(reader, 1000).decode()
        assert line.endswith(" INFO pie_driver_sglang: stopped by SIGTERM\n")
        moment = datetime.strptime(line.partition(" INFO")[0], "%Y-%m-%d %H:%M:%S.%f")
        assert abs((datetime.now() - moment).total_seconds()) < 60

    def test_a_pipe_that_nobody_reads(self, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
        os.write(writer, bytes(size))
        self.stop(writer)
        assert os.read(reader, 2 * size) == bytes(size)

    @pytest.mark.parametrize("number", [0, signal.SIGTERM], ids=["no signal", "SIGTERM"])
    def test_the_parent_ends(self, number: int, pipe: tuple[int, int]) -> None:
        """With and without the signal that the runtime has the kernel send."""
        reader, writer = pipe
        command = [sys.executable, "-c", PARENT, str(int(number)), sys.executable, GUARDED]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            parent.kill()
        line = os.read(reader, 1000).decode()
        assert line.endswith("pie_driver_sglang: the runtime that started this driver has ended\n")

    def test_a_failed_start_whose_stderr_nobody_reads(self, pipe: tuple[int, int]) -> None:
        """It ends all the same, and closes the handshake with that."""
        os.write(pipe[1], bytes(fcntl.fcntl(pipe[1], fcntl.F_GETPIPE_SZ)))
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "pie_driver_sglang", "--config", "/none.toml"]
        command += ["--handshake-fd", str(writer)]
        with subprocess.Popen(command, stderr=pipe[1], pass_fds=[writer]) as process:
            os.close(writer)
            assert os.read(reader, 1) == b""
            assert process.wait(10.0) == 1
        os.close(reader)

    def test_a_pipe_that_nobody_can_read(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        self.stop(writer)
        os.close(writer)

    def test_a_terminal(self) -> None:
        primary, secondary = os.openpty()
        self.stop(secondary)
        assert b"stopped by SIGTERM" in os.read(primary, 1000)
        os.close(primary)
        os.close(secondary)

    def test_a_last_line_is_appended_to_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "log"
        path.write_text("before\n")
        with path.open("a") as file:
            self.stop(file.fileno())
        assert path.read_text().startswith("before\n")
        assert "stopped by SIGTERM" in path.read_text()


def test_a_model_with_code_of_its_own_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings_of(**options: Any) -> list[str]:
        caplog.clear()
        model = ModelSection(snapshot_dir=tmp_path)
        config = msgspec.structs.replace(config_of(**options), model=model)
        startup._warn_of_code(config)
        return caplog.messages

    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "tokenizer_config.json").write_text("[broken")
    assert warnings_of() == []
    code = {"auto_map": {"AutoModel": "modeling_x.X"}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(code))
    [line] = warnings_of()
    assert "`auto_map` in config.json, tokenizer_config.json" in line
    assert "`trust_remote_code = false`" in line
    assert warnings_of(trust_remote_code=False) == []
