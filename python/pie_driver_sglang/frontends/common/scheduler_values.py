"""Values of the native scheduler's arguments, checked before anything is imported or loaded.

The runtime checks them again; it starts when the HTTP server and SGLang are there already.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError, Unsupported, invalid_value, quoted

logger = logging.getLogger(__name__)

_LARGEST: Final = 2**31 - 1
_LEAST: Final[Mapping[str, int]] = MappingProxyType(
    {
        "decode_log_interval": 1,
        "max_prefill_tokens": 1,
        "max_queued_requests": 0,
        "max_running_requests": 1,
        "max_total_tokens": 1,
        "priority_scheduling_preemption_threshold": -_LARGEST,
        "stream_interval": 1,
    }
)
"""The least value of each argument that is an integer."""
NAMED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "radix_eviction_policy": ("fifo", "filo", "lfu", "lru", "mru", "priority", "slru"),
        "schedule_policy": ("dfs-weight", "fcfs", "lof", "lpm", "random", "routing-key"),
    }
)
"""The policies of the native runtime."""
_WITH_PRIORITIES: Final = ("fcfs", "lof")
"""Policies of requests with priorities, as in SGLang."""
_PREEMPTION: Final = "priority_scheduling_preemption_threshold"
_PREEMPTION_THRESHOLD: Final = 10
"""SGLang's default."""


def check_scheduler(values: Mapping[str, Any]) -> None:
    """Check the arguments of the scheduler by their own values.

    Args:
        values: Arguments by name.

    Raises:
        Unsupported: Only SGLang's scheduler has the policy.
        ConfigError: A value is wrong.
    """
    for name, least in _LEAST.items():
        require_integer(values, name, least)
    for name, ours in NAMED.items():
        value = values.get(name)
        if value is None or value in ours:
            continue
        if isinstance(value, str) and value in SERVER_ARGS[name].choices:
            raise Unsupported(
                f"`{name}` is {quoted(value)}, which our scheduler does not have",
                f"set one of {', '.join(ours)}",
            )
        raise invalid_value(f"`{name}`", value, "one of " + ", ".join(ours))
    policy = values.get("schedule_policy", "fcfs")
    if values.get("enable_priority_scheduling") and policy not in _WITH_PRIORITIES:
        raise ConfigError(
            f"`schedule_policy` is {quoted(policy)}, and `enable_priority_scheduling` is set",
            "set `schedule_policy` to fcfs or lof, or remove one of them",
        )
    seed = values.get("random_seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise invalid_value("`random_seed`", seed, "an integer of 64 bits")
    _require_number(values, "schedule_conservativeness", "0 or more", least=0.0)
    _require_number(values, "watchdog_timeout", "seconds above 0", least=math.ulp(0.0))


def require_integer(values: Mapping[str, Any], name: str, least: int) -> None:
    """Check that an argument that is set is an integer of 32 bits, from `least` on.

    Raises:
        ConfigError: It is not.
    """
    value = values.get(name, least)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        raise ConfigError(
            f"`{name}` is {quoted(value)}, expected an integer from {least} to {_LARGEST}",
            f"set `{name}` to one, or remove it",
        )


def _require_number(values: Mapping[str, Any], name: str, wanted: str, *, least: float) -> None:
    value = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and least <= value < math.inf):
        raise invalid_value(f"`{name}`", value, wanted)


def preemption(values: Mapping[str, Any]) -> dict[str, int | None]:
    """The threshold of priorities from which on running requests are preempted; as in SGLang."""
    if values.get("disable_priority_preemption"):
        if not values.get("enable_priority_scheduling"):
            logger.warning(
                "`disable_priority_preemption` has no effect without `enable_priority_scheduling`"
            )
        return {_PREEMPTION: None}
    return {_PREEMPTION: values.get(_PREEMPTION, _PREEMPTION_THRESHOLD)}
