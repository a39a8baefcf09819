"""`pie-sglang check CONFIG`: all checks of a start before the model is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang.version import check_versions
from pie_driver_sglang.cli.machine import Shm, query_shm
from pie_driver_sglang.cli.pie_config import driver_tables
from pie_driver_sglang.cli.report import Finding, print_findings
from pie_driver_sglang.config.arch import context_length
from pie_driver_sglang.config.config_file import parse_config, read_table
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.driver.startup import request_bytes
from pie_driver_sglang.driver.trace import open_trace
from pie_driver_sglang.errors import ConfigError, DriverError, RingError
from pie_driver_sglang.memory.host import check_budget
from pie_driver_sglang.memory.plan import size_text


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 1 if a driver would refuse to start."""
    parser = CommandParser(
        prog="pie-sglang check",
        description="Checks a configuration as a driver does before it loads the model, and lists "
        "what it would reject. No model is loaded, and no GPU is needed.",
    )
    parser.add_argument(
        "config",
        type=Path,
        help="the Pie server's file, with [[model]], or the driver.toml that it writes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    return print_findings(list(check_file(options.config)), options.json)


def check_file(path: Path) -> Iterator[Finding]:
    """Checks every driver that a file configures, and the packages that all of them need."""
    yield _refusal("packages", "those that the driver is made for", check_versions)
    try:
        drivers = list(driver_tables(read_table(path)))
    except ConfigError as error:
        yield Finding("configuration", "fail", str(error), error.hint)
        return
    if not drivers:
        text = "no model of the file has a driver of this type"
        hint = 'set `type = "sglang"` under [model.driver]'
        yield Finding("configuration", "fail", text, hint)
    for driver in drivers:
        for finding in check_table(driver.table):
            name = f"{driver.model}: {finding.name}" if len(drivers) > 1 else finding.name
            yield finding._replace(name=name)


def check_table(table: Mapping[str, Any], shm: Shm | None = None) -> Iterator[Finding]:
    """Checks one driver's configuration.

    Args:
        table: The sections `model` and `driver`.
        shm: Where the region goes; None for this machine's `/dev/shm`.
    """
    with _warnings() as warnings:
        config, errors = _checked(table)
    for text in warnings:
        yield Finding("configuration", "warn", text)
    for error in errors:
        yield Finding("configuration", "fail", str(error), error.hint)
    if config is None:
        return
    yield Finding("configuration", "ok", _described(config))
    options = config.driver.options
    swap, devices = options.cpu_mem_budget_in_gb, config.driver.device
    offload = 0 if devices[0] == "cpu" else options.cpu_offload_gb
    if swap or offload:
        yield _refusal(
            "host memory",
            f"{swap + offload * len(devices)} GiB available",
            lambda: check_budget(swap, offload, len(devices)),
        )
    if options.trace_file is not None:
        path = options.trace_file
        yield _refusal("trace", f"{path} can be written", lambda: _try_trace(path))
    yield _region(config, shm or query_shm(Path("/dev/shm")))


def _checked(table: Mapping[str, Any]) -> tuple[DriverConfig | None, list[ConfigError]]:
    try:
        return parse_config(table), []
    except ConfigError as error:
        return None, _all_errors(table, error)


def _all_errors(table: Mapping[str, Any], first: ConfigError) -> list[ConfigError]:
    """The error that ends the start, and those of other options, which would end the next ones."""
    driver = table.get("driver")
    options = driver.get("options") if isinstance(driver, Mapping) else None
    device = driver.get("device") if isinstance(driver, Mapping) else None
    listed = device[0] if isinstance(device, list) and device else device
    errors = {str(first): first}
    if isinstance(options, Mapping) and isinstance(listed, str):
        kind = "cpu" if listed.startswith("cpu") else listed
        errors |= {str(error): error for error in _option_errors(options, kind)}
    return list(errors.values())


def _option_errors(options: Mapping[str, Any], device: str) -> Iterator[ConfigError]:
    """The errors of all options."""
    # Some options need others, so each is checked with all that are valid alone.
    right = {key: value for key, value in options.items() if not _error({key: value}, device)}
    for key in options.keys() - right.keys():
        error = _error({**right, key: options[key]}, device)
        if error is not None:
            yield error


def _error(options: Mapping[str, Any], device: str) -> ConfigError | None:
    with _warnings():
        try:
            parse_options(options, device)
        except ConfigError as error:
            return error
    return None


def _described(config: DriverConfig) -> str:
    driver, model = config.driver, config.model
    context = driver.options.context_length or context_length(model.hf_config)
    return (
        f"{model.name or model.snapshot_dir.name} ({model.hf_config['architectures'][0]}) on "
        f"{', '.join(driver.device)}: {driver.activation_dtype}, contexts of {context:,} tokens, "
        f"up to {driver.options.max_forward_requests} requests at once"
    )


def _region(config: DriverConfig, shm: Shm | None) -> Finding:
    try:
        size = _core.region_bytes(request_bytes(config, config.model.hf_config))
    except RingError as error:
        hint = "lower `context_length` or, of a model with images, `max_image_tokens`"
        return Finding("region", "fail", str(error), hint)
    text = f"{size_text(size)} of /dev/shm"
    values = {"bytes": size, "free": shm.free if shm else 0}
    if shm is None:
        hint = "mount a tmpfs there: `mount -t tmpfs tmpfs /dev/shm`"
        return Finding("region", "fail", f"{text}, which is missing", hint, values)
    if shm.total and shm.free < size:
        hint = "run `pie-sglang doctor` for stale regions; in a container raise `--shm-size`"
        text = f"{text}, which has {size_text(shm.free)} free"
        return Finding("region", "fail", text, hint, values)
    return Finding("region", "ok", text, values=values)


def _try_trace(path: str) -> None:
    was_there = Path(path).exists()
    trace = open_trace(path)
    if trace is not None:
        trace.close()
        if not was_there:
            Path(path).unlink()


def _refusal(name: str, text: str, check: Any) -> Finding:
    """The finding of a check; `text` if it passes."""
    with _warnings() as warnings:
        try:
            check()
        except DriverError as error:
            return Finding(name, "fail", str(error), error.hint)
    return Finding(name, "warn" if warnings else "ok", "; ".join(warnings) or text)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the driver's warnings."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect(logging.WARNING)
    package = logging.getLogger("pie_driver_sglang")
    package.addHandler(handler)
    propagates, package.propagate = package.propagate, False
    try:
        yield messages
    finally:
        package.removeHandler(handler)
        package.propagate = propagates
