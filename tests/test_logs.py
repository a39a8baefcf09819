"""Log format and rate limits."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from pie_driver_sglang.errors import ConfigError, DriverError
from pie_driver_sglang.logs import (
    LEVEL_VARIABLE,
    Formatter,
    LogSource,
    RateLimitFilter,
    configure_logging,
    end_logging,
    format_failure,
    last_line,
)

LOGGER = "pie_driver_sglang.tests"
NAMES = ("", "pie_driver_sglang", "sglang", "torch", "transformers")


@pytest.fixture(autouse=True)
def restore_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    levels = {name: logging.getLogger(name).level for name in NAMES}
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(message: str = "lost %d", *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord(LOGGER, logging.WARNING, "f.py", 1, message, args, None)
    made.__dict__.update(extra)
    return made


class Slow(logging.Formatter):
    """Formats a record only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def format(self, record: logging.LogRecord) -> str:
        self.begun.set()
        assert self.may_end.wait(30.0)
        return super().format(record)


def test_nothing_is_logged_after_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    slow = Slow()
    logging.getLogger().handlers[-1].setFormatter(slow)
    log = logging.getLogger(LOGGER)
    writing = threading.Thread(target=log.error, args=("under way",))
    writing.start()
    assert slow.begun.wait(30.0)
    # A record that takes long delays the end by the limit alone.
    end_logging(0.05)
    ending = threading.Thread(target=end_logging, args=(30.0,))
    late = threading.Thread(target=log.error, args=("late",))
    ending.start()
    late.start()
    ending.join(0.1)
    assert ending.is_alive()
    slow.may_end.set()
    for thread in (writing, ending, late):
        thread.join(30.0)
    assert capfd.readouterr().err == "under way\n"


def test_lines_go_to_stderr_only(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    logging.getLogger(LOGGER).info("loaded %d pages", 7)
    logging.getLogger(LOGGER).debug("hidden")
    out, err = capfd.readouterr()
    assert out == ""
    time_of = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(rf"{time_of} INFO pie_driver_sglang: loaded 7 pages\n", err)


def test_libraries_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug")
    for name in ("sglang.srt.model_executor", "transformers.models", "torch.nn", "urllib3"):
        logging.getLogger(name).info("chatter of %s", name)
    logging.getLogger("sglang.srt").warning("trouble")
    err = capfd.readouterr().err
    assert "chatter" not in err
    assert "WARNING sglang: trouble" in err


def test_the_environment_sets_the_level(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, " Error ")
    configure_logging()
    logging.getLogger(LOGGER).warning("hidden")
    logging.getLogger("sglang").warning("hidden")
    logging.getLogger(LOGGER).error("shown")
    assert [line.split(" ", 2)[2] for line in capfd.readouterr().err.splitlines()] == [
        "ERROR pie_driver_sglang: shown"
    ]


def test_a_line_names_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging(source=LogSource(3, 1, "cuda:1"))
    logging.getLogger(LOGGER).info("loaded")
    assert " [group 3 rank 1 cuda:1] INFO pie_driver_sglang: loaded\n" in capfd.readouterr().err


def test_json_lines(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging(source=LogSource(3, 1, "cuda:1"), log_format="json")
    logger = logging.getLogger(LOGGER)
    logger.info('a "quoted" %s', "text\nof two lines", extra={"fields": {"steps": 7}})
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("failed")
    print(format_failure(ConfigError("a is 1,\n  too small", "set a to 2")), file=sys.stderr)
    first, second, third = map(json.loads, capfd.readouterr().err.splitlines())
    source = {"group": 3, "rank": 1, "device": "cuda:1"}
    assert first.items() >= {**source, "level": "INFO", "steps": 7}.items()
    assert first["message"] == 'a "quoted" text\nof two lines'
    assert first["logger"] == "pie_driver_sglang"
    written = datetime.fromisoformat(first["time"])
    assert abs((datetime.now().astimezone() - written).total_seconds()) < 60
    assert "ValueError: inner" in second["traceback"]
    assert (third["message"], third["hint"]) == ("a is 1, too small", "set a to 2")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_line_of_the_end_is_like_the_others(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = LogSource(3, 0, "cpu")
    configure_logging(source=source, log_format=log_format)
    logging.getLogger("pie_driver_sglang").info("stopped")
    err = capfd.readouterr().err
    form = last_line(source, log_format).replace("{text}", "stopped")
    time_of = json.loads(err)["time"] if log_format == "json" else err[:23]
    placeholder = "{iso}" if log_format == "json" else "{time}"
    assert form.replace(placeholder, time_of) + "\n" == err


def test_warnings_that_do_not_concern_the_driver_are_left_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = (
        "Cuda graph is disabled because of using torch native attention backend",
        "init_cpu_threads_env and shared memory based AllReduce is disabled, only intel amx "
        "backend and arm64 are supported",
        "trouble",
    )
    configure_logging()
    for text in texts:
        logging.getLogger("sglang.srt.server_args").warning(text)
    assert [line.split(": ", 1)[1] for line in capfd.readouterr().err.splitlines()] == ["trouble"]
    configure_logging("debug")
    logging.getLogger("sglang").warning(texts[0])
    assert texts[0] in capfd.readouterr().err


def test_unknown_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'loud'"):
        configure_logging("loud")
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match=f"{LEVEL_VARIABLE} is 'loud'") as caught:
        configure_logging()
    assert "debug, info, warning, error" in caught.value.hint


def test_configuring_twice_prints_once(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    configure_logging("warning")
    logging.getLogger(LOGGER).warning("once")
    assert capfd.readouterr().err.count("once") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging()
    logging.getLogger(LOGGER).warning("careful")
    return terminal.getvalue()


def test_color_only_on_terminals_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[33mWARNING\x1b[0m" in logged_to_a_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in logged_to_a_terminal(monkeypatch)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in logged_to_a_terminal(monkeypatch)


def test_a_traceback_is_kept() -> None:
    try:
        raise ValueError("inner")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    assert "ValueError: inner" in Formatter().format(made)


def test_the_first_five_then_one_per_interval() -> None:
    clock = Clock()
    limit = RateLimitFilter(clock=clock)
    first = [record("lost %d", n) for n in range(5)]
    assert [limit.filter(made) for made in first] == [True] * 5
    assert first[0].getMessage() == "lost 0"
    assert first[4].getMessage() == "lost 4 (from now on at most once in 10 s)"
    assert not any(limit.filter(record("lost %d", n)) for n in range(1000))
    clock.now += 10
    after = record("lost %d", 9)
    assert limit.filter(after)
    assert after.getMessage() == "lost 9 (1000 more like this left out)"
    assert not limit.filter(record("lost %d", 10))
    clock.now += 25
    last = record("lost %d", 11)
    assert limit.filter(last)
    assert last.getMessage() == "lost 11 (1 more like this left out)"


def test_kinds_are_counted_apart() -> None:
    limit = RateLimitFilter(first=1, clock=Clock())
    assert limit.filter(record("a"))
    assert limit.filter(record("b"))
    assert not limit.filter(record("a"))
    assert limit.filter(record("c 1", kind="c"))
    assert not limit.filter(record("c 2", kind="c"))


def test_a_record_may_be_exempt() -> None:
    limit = RateLimitFilter(first=1, clock=Clock())
    assert all(limit.filter(record("step", kind=None)) for _ in range(100))


def test_messages_with_percent_signs_and_odd_kinds() -> None:
    limit = RateLimitFilter(first=1, clock=Clock())
    plain = record("100% done")
    assert limit.filter(plain)
    assert plain.getMessage() == "100% done (from now on at most once in 10 s)"
    assert limit.filter(record("x", kind=[1]))


def test_kinds_do_not_pile_up() -> None:
    limit = RateLimitFilter(clock=Clock())
    for number in range(5000):
        limit.filter(record(f"message {number}"))
    assert len(limit._kinds) <= 1024


def test_threads_share_the_count() -> None:
    limit = RateLimitFilter(clock=Clock())
    passed: list[bool] = []

    def work() -> None:
        passed.extend(limit.filter(record("same")) for _ in range(500))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(passed), sum(passed)) == (2000, 5)


def test_the_filter_is_installed(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    for number in range(50):
        logging.getLogger(LOGGER).error("frame %d refused", number)
    assert len(capfd.readouterr().err.splitlines()) == 5


def test_a_failure_is_one_line_and_a_hint() -> None:
    assert format_failure(ConfigError("a is 1,\n  too small", "set a to 2")) == (
        "pie_driver_sglang: a is 1, too small\n\nhint: set a to 2"
    )
    assert format_failure(DriverError("broken")) == "pie_driver_sglang: broken"
