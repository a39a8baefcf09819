"""The checked configuration of a driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pie_driver_sglang.config.options import DriverOptions

#: Supported activation dtypes.
ACTIVATION_DTYPES: Final = ("bfloat16", "float16", "float32")

#: Maximum devices of one model, all of one host.
MAX_RANKS: Final = 64

NEVER_PARK = 2**64 - 1
"""The `spin_budget_us` of the latency profile."""


class ModelSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[model]`.

    Attributes:
        name: Display name.
        hf_repo: Repository id or path as the user wrote it.
        snapshot_dir: Local directory with the config and the weights.
        hf_config: The model's `config.json`.
    """

    name: str = ""
    hf_repo: str = ""
    snapshot_dir: Path
    hf_config: dict[str, Any] = {}


class DriverSection(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[driver]`.

    Attributes:
        group_id: Global index of this group; determines the name of the region.
        device: The devices that the model is spread over, all `cpu` or different `cuda:N`.
        tensor_parallel_size: How many there are.
        activation_dtype: One of `ACTIVATION_DTYPES`.
        random_seed: The user's 64-bit seed; may be negative.
        master_port: TCP port for a rendezvous; unused, the ranks of one host meet without a port.
        ready_timeout_s: How long the runtime waits for the handshake, in seconds.
        spin_budget_us: How long to spin for a request before parking, in microseconds; 2**64 - 1
            for ever.
        kept_pages: KV pages of the driver that this one replaces; it has as many if they fit. 0 if
            it replaces none.
        max_pages: Most KV pages of the pool, which has one context at least; 0 for all that fit.
        options: The checked `[driver.options]`.
    """

    group_id: int
    device: tuple[str, ...]
    tensor_parallel_size: int = 1
    activation_dtype: str = "bfloat16"
    random_seed: int = 42
    master_port: int = 29500
    ready_timeout_s: float = 1200.0
    spin_budget_us: int = 1000
    kept_pages: int = 0
    max_pages: int = 0
    options: DriverOptions


class DriverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A checked configuration file."""

    model: ModelSection
    driver: DriverSection
