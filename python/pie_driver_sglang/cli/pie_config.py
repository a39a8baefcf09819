"""Driver configurations, from the Pie server's file or from that of a driver.

The server reads `[[model]]` with `[model.driver]`, and writes `[model]` and `[driver]` for every
driver, by the rules of the Pie driver protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.checkpoint.hub_cache import (
    cached_snapshot,
    is_repository_name,
    local_path,
)
from pie_driver_sglang.config.driver_config import NEVER_PARK
from pie_driver_sglang.errors import ConfigError, quoted

TYPE: Final = "sglang"
"""`[model.driver] type` of this driver."""
SPIN_BUDGETS: Final[Mapping[str, int]] = MappingProxyType(
    {"latency": NEVER_PARK, "balanced": 1000, "power": 0}
)
"""Microseconds that each `ipc_profile` spins."""

_COPIED: Final = ("activation_dtype", "master_port", "random_seed", "ready_timeout_s")


class DriverTable(NamedTuple):
    """The unchecked configuration of a driver."""

    model: str
    """The name of the model; empty where the file is of one driver."""
    table: Mapping[str, Any]
    """The sections `model` and `driver`."""


def driver_tables(table: Mapping[str, Any]) -> Iterator[DriverTable]:
    """The drivers of type `sglang` that a file configures.

    Args:
        table: The file, as TOML gives it.

    Raises:
        ConfigError: A section is missing or is not a table, or a model is not on this machine.
    """
    models = table.get("model")
    if not isinstance(models, list):
        yield DriverTable("", table)
        return
    for number, model in enumerate(models):
        driver = model.get("driver") if isinstance(model, Mapping) else None
        if not isinstance(driver, Mapping):
            raise ConfigError(
                f"model {number + 1} of the file has no [model.driver]",
                'add `[model.driver]` with `type = "sglang"` and `device`',
            )
        if driver.get("type") == TYPE:
            yield DriverTable(
                str(model.get("name") or model.get("hf_repo")), _written(model, driver)
            )


def _written(model: Mapping[str, Any], driver: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that the Pie server would write for the first driver of a model."""
    repository = model.get("hf_repo")
    if not isinstance(repository, str) or not repository:
        raise ConfigError("[[model]] has no `hf_repo`", "name a repository or a folder")
    devices = driver.get("device")
    listed = [devices] if isinstance(devices, str) else devices
    ranks = driver.get("tensor_parallel_size") or (len(listed) if listed else 1)
    section = {key: driver[key] for key in _COPIED if key in driver}
    section |= {
        "group_id": 0,
        "device": listed[:ranks] if isinstance(listed, list) and isinstance(ranks, int) else listed,
        "tensor_parallel_size": ranks,
        "spin_budget_us": driver.get("spin_budget_us", _spin_budget(driver)),
        "options": driver.get("options", {}),
    }
    named = {key: model[key] for key in ("name", "hf_repo") if key in model}
    snapshot = str(_snapshot(repository))
    return {"model": {**named, "snapshot_dir": snapshot}, "driver": section}


def _spin_budget(driver: Mapping[str, Any]) -> int:
    profile = driver.get("ipc_profile", "balanced")
    if profile not in SPIN_BUDGETS:
        raise ConfigError(
            f"`ipc_profile` is {quoted(profile)}, expected one of {', '.join(SPIN_BUDGETS)}",
            'set `ipc_profile = "balanced"` under [model.driver], or remove it',
        )
    return SPIN_BUDGETS[profile]


def _snapshot(repository: str) -> Path:
    folder = local_path(repository)
    if folder is not None and folder.is_dir():
        return folder
    cached = cached_snapshot(repository)
    if cached is None and not is_repository_name(repository):
        raise ConfigError(
            f"the model {quoted(repository)} is neither a folder nor the name of a repository",
            "name a folder, or a repository as `owner/name`",
        )
    if cached is None:
        raise ConfigError(
            f"the model {quoted(repository)} is neither a folder nor in the Hugging Face cache",
            f"run `hf download {repository}`, or name a folder",
        )
    return cached
