"""Reads and checks the configuration file that the Pie runtime writes for the driver.

Sections, keys and defaults are those of the Pie driver protocol. As it requires, unknown sections
and keys are ignored, with a warning, except in `[driver.options]`. All checks that need no SGLang
are made here, so errors are reported within a second.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from pie_driver_sglang.config.driver_config import (
    ACTIVATION_DTYPES,
    MAX_RANKS,
    DriverConfig,
    DriverSection,
    ModelSection,
)
from pie_driver_sglang.config.hf_config import DOWNLOAD, check_hf_config, load_hf_config
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.config.weight_formats import check_stored_format
from pie_driver_sglang.errors import ConfigError, nearest, quoted, reason

logger = logging.getLogger(__name__)


_MAX_FILE_BYTES: Final = 1 << 20
_U32_MAX: Final = 2**32 - 1
_U64_MAX: Final = 2**64 - 1
_BY_HAND: Final = "docs/options.md has the keys; Pie writes a driver's file itself"


class _ModelTable(msgspec.Struct, kw_only=True):
    """`[model]` as written."""

    name: str = ""
    hf_repo: str = ""
    snapshot_dir: str


class _DriverTable(msgspec.Struct, kw_only=True):
    """`[driver]` as written; the limits are checked afterwards."""

    group_id: int
    device: list[str] | str
    tensor_parallel_size: int = 1
    activation_dtype: str = "bfloat16"
    random_seed: int = 42
    master_port: int = 29500
    ready_timeout_s: float = 1200.0
    spin_budget_us: int | str = 1000
    kept_pages: int = 0
    max_pages: int = 0
    options: dict[str, Any] = {}


class _File(msgspec.Struct):
    """The file as written."""

    model: _ModelTable
    driver: _DriverTable


#: Known keys by section. `telemetry` is read by the runtime's other launchers.
_KNOWN: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "": frozenset({"model", "driver", "telemetry"}),
        "model": frozenset(_ModelTable.__struct_fields__),
        "driver": frozenset(_DriverTable.__struct_fields__),
    }
)


class ConfigRules(NamedTuple):
    """What an inference library takes: its options and its models. Imports no library."""

    parse_options: Callable[[Mapping[str, Any], str], DriverOptions]
    """Checks the table `[driver.options]` for a device."""
    check_model: Callable[[Mapping[str, Any], DriverOptions, int], None]
    """Refuses a `config.json` with these options on so many ranks."""
    override: Callable[[Mapping[str, Any], DriverOptions], Mapping[str, Any]] = (
        lambda hf_config, _: hf_config
    )
    """A `config.json` with what the options change of it."""


SGLANG_RULES: Final = ConfigRules(parse_options, check_hf_config)


def load_config(path: Path, rules: ConfigRules = SGLANG_RULES) -> DriverConfig:
    """Read and check the configuration file and the model's snapshot.

    Args:
        path: The file named by `--config`.
        rules: Of the library that runs the model.

    Raises:
        ConfigError: The file, a value in it or the snapshot is wrong.
    """
    return parse_config(read_table(path), rules)


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: It cannot be read, or is not TOML.
    """
    data = _read(path)
    try:
        table: dict[str, Any] = msgspec.toml.decode(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors.
        raise ConfigError(
            f"configuration file {quoted(path)} is not valid TOML: {reason(error)}", _BY_HAND
        ) from error
    return table


def parse_config(table: Mapping[str, Any], rules: ConfigRules = SGLANG_RULES) -> DriverConfig:
    """Check the contents of a configuration file, and the model's snapshot.

    Args:
        table: The sections `model` and `driver`.
        rules: Of the library that runs the model.

    Raises:
        ConfigError: A value in it or the snapshot is wrong.
    """
    file = _convert(table)
    driver = _check_driver(file.driver, rules)
    model = _check_model(file.model)
    hf_config = rules.override(load_hf_config(model.snapshot_dir), driver.options)
    rules.check_model(hf_config, driver.options, driver.tensor_parallel_size)
    check_stored_format(hf_config, driver.device[0])
    load_format = driver.options.server_args.get("load_format", "auto")
    check_weight_files(model.snapshot_dir, load_format)
    _check_tokenizer(model.snapshot_dir, load_format)
    model = msgspec.structs.replace(model, hf_config=hf_config)
    return DriverConfig(model=model, driver=driver)


def _read(path: Path) -> bytes:
    """Read the file; only a regular one, since others may block."""
    shown = quoted(path)
    hint = "name the driver's or the Pie server's configuration, a TOML file"
    try:
        if not path.exists():
            raise ConfigError(f"configuration file {shown} does not exist", hint)
        if not path.is_file():
            raise ConfigError(f"configuration file {shown} is not a regular file", hint)
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read configuration {shown}: {reason(error)}", hint) from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"configuration file {shown} is larger than {_MAX_FILE_BYTES} bytes", _BY_HAND
        )
    return data


def _convert(table: Mapping[str, Any]) -> _File:
    try:
        checked = msgspec.convert(table, _File)
    except (ValueError, OverflowError) as error:
        raise _wrong_type(str(error), table) from error
    for section in _KNOWN:
        for key in _unknown(table, section):
            dotted = f"{section}.{key}".lstrip(".")
            question = nearest(key, _KNOWN[section])
            logger.warning("configuration: `%s` is unknown and ignored. %s", dotted, question)
    return checked


def _unknown(table: Mapping[str, Any], section: str) -> list[str]:
    """The unknown keys of a section, or of the file for ``""``."""
    found = table.get(section, {}) if section else table
    keys = sorted(found.keys() - _KNOWN[section]) if isinstance(found, Mapping) else []
    return [quoted(key).strip("'") for key in keys]


def _wrong_type(text: str, table: Mapping[str, Any]) -> ConfigError:
    """Msgspec's error with the dotted path of the key and its value."""
    what, _, where = text.partition(" - at `$")
    keys = re.findall(r"[A-Za-z_]\w*", where)
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        dotted = ".".join([*keys, missing[1]])
        unknown = ", ".join(f"`{key}`" for key in _unknown(table, ".".join(keys))[:8])
        instead = f", but an unknown {unknown}" if unknown else ""
        return ConfigError(
            f"configuration has no `{dotted}`{instead}", f"add `{dotted}`; {_BY_HAND}"
        )
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else value
    reason = what.replace("`", "").replace("object", "table").replace("str", "string")
    dotted = where.strip(".`")
    return ConfigError(
        f"`{dotted}` is {quoted(value)}: {reason[0].lower()}{reason[1:]}",
        f"correct `{dotted}`; {_BY_HAND}",
    )


def _check_driver(table: _DriverTable, rules: ConfigRules) -> DriverSection:
    _check_range("driver.group_id", table.group_id, 0, _U32_MAX)
    _check_range("driver.random_seed", table.random_seed, -(2**63), _U64_MAX)
    _check_range("driver.master_port", table.master_port, 1, 65535)
    _check_range("driver.kept_pages", table.kept_pages, 0, _U32_MAX)
    _check_range("driver.max_pages", table.max_pages, 0, _U32_MAX)
    _check_range("driver.ready_timeout_s", table.ready_timeout_s, 0, float("inf"))
    devices = _check_devices(table.device, table.tensor_parallel_size)
    if table.activation_dtype not in ACTIVATION_DTYPES:
        raise ConfigError(
            f"`driver.activation_dtype` is {quoted(table.activation_dtype)}, "
            f"expected one of {', '.join(ACTIVATION_DTYPES)}",
            'set `activation_dtype = "bfloat16"` under [model.driver]',
        )
    return DriverSection(
        group_id=table.group_id,
        device=devices,
        tensor_parallel_size=len(devices),
        activation_dtype=table.activation_dtype,
        random_seed=table.random_seed,
        master_port=table.master_port,
        ready_timeout_s=table.ready_timeout_s,
        spin_budget_us=_check_spin_budget(table.spin_budget_us),
        kept_pages=table.kept_pages,
        max_pages=table.max_pages,
        options=rules.parse_options(table.options, devices[0]),
    )


def _check_range(dotted: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(
            f"`{dotted}` is {quoted(value)}, outside {low} to {high}",
            f"set `{dotted}` to a value from {low} to {high}",
        )


def _check_spin_budget(value: int | str) -> int:
    """Accept a decimal string too: TOML has no integer above 2**63 - 1."""
    is_decimal = isinstance(value, int) or bool(re.fullmatch("[0-9]{1,20}", value))
    number = int(value) if is_decimal else -1
    if not 0 <= number <= _U64_MAX:
        raise ConfigError(
            f"`driver.spin_budget_us` is {quoted(value)}, expected microseconds "
            f"from 0 to {_U64_MAX}, as an integer or a decimal string",
            "set `spin_budget_us` under [model.driver], e.g. to 1000, or remove it",
        )
    return number


def _check_devices(listed: list[str] | str, tensor_parallel_size: int) -> tuple[str, ...]:
    """Return the devices, one for each rank."""
    devices = [listed] if isinstance(listed, str) else listed
    if not devices:
        raise ConfigError("`driver.device` is empty", 'set `device = ["cuda:0"]` or `["cpu"]`')
    checked = tuple(_check_device(device) for device in devices)
    _check_range("driver.tensor_parallel_size", tensor_parallel_size, 1, MAX_RANKS)
    if len(checked) != tensor_parallel_size:
        raise ConfigError(
            f"`driver.device` lists {len(checked)} and `driver.tensor_parallel_size` is "
            f"{tensor_parallel_size}: each rank needs one device",
            f"list {tensor_parallel_size} under `device`, or set "
            f"`tensor_parallel_size = {len(checked)}` under [model.driver]",
        )
    if len({device.partition(":")[0] for device in checked}) > 1:
        raise ConfigError(
            f"`driver.device` is {quoted(list(checked))}: one model needs CPU or GPUs, not both",
            "list devices of one kind",
        )
    doubled = next((device for device in checked if checked.count(device) > 1), "cpu")
    if doubled != "cpu":
        raise ConfigError(
            f"`driver.device` lists {doubled} more than once: each rank needs a GPU of its own",
            "list different GPUs",
        )
    return checked


def _check_device(device: str) -> str:
    """Return `cpu` or `cuda:N`; `cpu:N` is `cpu`, because the runtime needs different names."""
    match = re.fullmatch("(cpu|cuda)(?::([0-9]{1,4}))?", device)
    if not match:
        raise ConfigError(
            f"`driver.device` names {quoted(device)}, expected `cpu`, `cpu:N` or `cuda:N`",
            'set `device = ["cuda:0"]` or `device = ["cpu"]` under [model.driver]',
        )
    return "cpu" if match[1] == "cpu" else f"cuda:{int(match[2] or 0)}"


def _check_model(table: _ModelTable) -> ModelSection:
    shown = quoted(table.snapshot_dir)
    if not table.snapshot_dir or "\0" in table.snapshot_dir:
        raise ConfigError(f"`model.snapshot_dir` is {shown}, which names no directory", DOWNLOAD)
    path = Path(table.snapshot_dir)
    if path.suffix.lower() == ".gguf":
        raise ConfigError(
            f"`model.snapshot_dir` is {shown}: a GGUF file cannot be served by this driver",
            "convert it by `python -m pie_driver_sglang.checkpoint.gguf FILE FOLDER` and name the "
            "folder; `pie-sglang serve` and the engine do so by themselves",
        )
    try:
        exists, is_directory = path.exists(), path.is_dir()
    except OSError as error:
        raise ConfigError(f"cannot read snapshot {shown}: {reason(error)}", DOWNLOAD) from error
    if not exists:
        raise ConfigError(f"snapshot directory {shown} does not exist", DOWNLOAD)
    if not is_directory:
        raise ConfigError(
            f"`model.snapshot_dir` is {shown}, which is a file, not a directory",
            "name the directory that holds config.json and the weights",
        )
    return ModelSection(name=table.name, hf_repo=table.hf_repo, snapshot_dir=path)


#: File patterns of SGLang's loaders; other formats have weights elsewhere.
_WEIGHT_PATTERNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "auto": ("*.safetensors", "*.bin", "*.pt"),
        "bitsandbytes": ("*.safetensors", "*.bin", "*.pt"),
        "fastsafetensors": ("*.safetensors",),
        "layered": ("*.safetensors", "*.bin", "*.pt"),
        "mistral": ("consolidated*.safetensors",),
        "npcache": ("*.bin",),
        "pt": ("*.pt", "*.bin"),
        "safetensors": ("*.safetensors",),
        "sharded_state": ("*.safetensors",),
    }
)
#: Files that trainers write next to the weights.
_NOT_WEIGHTS: Final = frozenset(
    {
        "adapter_model.bin",
        "adapter_model.safetensors",
        "optimizer.bin",
        "optimizer.pt",
        "scaler.pt",
        "scheduler.pt",
        "training_args.bin",
    }
)


def check_weight_files(snapshot_dir: Path, load_format: str) -> None:
    """Refuse a snapshot without weights, or with fewer files than its index lists.

    Raises:
        ConfigError: Files of weights are missing.
    """
    patterns = _WEIGHT_PATTERNS.get(load_format, ())
    shown = quoted(str(snapshot_dir))
    try:
        candidates = [path for pattern in patterns for path in snapshot_dir.glob(pattern)]
        found = {path.name for path in candidates if path.is_file()} - _NOT_WEIGHTS
    except OSError as error:
        raise ConfigError(f"cannot read snapshot {shown}: {reason(error)}", DOWNLOAD) from error
    if patterns and not found:
        raise ConfigError(
            f"the snapshot {shown} has no weights ({', '.join(patterns)})",
            f'{DOWNLOAD}, or set `load_format = "dummy"` for random weights',
        )
    missing = sorted(_indexed_files(snapshot_dir) - found) if "*.safetensors" in patterns else []
    if missing:
        raise ConfigError(
            f"the snapshot {shown} lacks {len(missing)} of the weight files in its index, "
            f"e.g. {quoted(missing[0])}",
            DOWNLOAD,
        )


def _indexed_files(snapshot_dir: Path) -> set[str]:
    """Return the shards that the safetensors index lists; none if there is no readable index."""
    try:
        index = json.loads((snapshot_dir / "model.safetensors.index.json").read_bytes())
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return set()


def _check_tokenizer(snapshot_dir: Path, load_format: str) -> None:
    """Reject a snapshot without a tokenizer, which the runtime needs; not with dummy weights."""
    names = ("tokenizer.json", "tiktoken.model")
    if load_format == "dummy" or any((snapshot_dir / name).is_file() for name in names):
        return
    raise ConfigError(
        f"the snapshot {quoted(str(snapshot_dir))} has no tokenizer that the Pie runtime reads "
        f"({' or '.join(names)})",
        f"{DOWNLOAD}, or convert its tokenizer to tokenizer.json with transformers",
    )
