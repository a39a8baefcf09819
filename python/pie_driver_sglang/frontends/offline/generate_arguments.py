"""Arguments of SGLang's `generate` besides prompts: log-probabilities, and unsupported ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, nearest, quoted
from pie_driver_sglang.frontends.offline.logprobs import DEFAULTS, LogprobRequest, parse_logprobs

#: Unsupported arguments, which must be empty, and the reason.
REFUSED_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "audio_data": "the offline engine takes text and tokens",
        "bootstrap_host": "prefill and decode run in one driver",
        "bootstrap_port": "prefill and decode run in one driver",
        "bootstrap_room": "prefill and decode run in one driver",
        "custom_logit_processor": "the driver samples natively",
        "data_parallel_rank": "the runtime chooses the replica",
        "disagg_prefill_dp_rank": "prefill and decode run in one driver",
        "external_trace_header": "requests are not traced",
        "image_data": "the offline engine takes text and tokens",
        "mm_hashes": "the offline engine takes text and tokens",
        "return_hidden_states": "hidden states stay in the driver",
        "return_routed_experts": "the driver does not return them",
        "routed_dp_rank": "the runtime chooses the replica",
        "routed_experts_start_len": "the driver does not return them",
        "session_params": "name a conversation by `session_id`",
        "video_data": "the offline engine takes text and tokens",
    }
)


def parse_generate_arguments(others: Mapping[str, Any], count: int) -> list[LogprobRequest | None]:
    """The log-probabilities that each prompt requests.

    Args:
        others: Arguments by their names.
        count: Prompts.

    Raises:
        ConfigError: An argument is unknown, unsupported, or has a wrong value.
    """
    for name, value in others.items():
        if name not in DEFAULTS:
            _refuse(name, value)
    return parse_logprobs(others, count)


def _refuse(name: str, value: Any) -> None:
    if name not in REFUSED_ARGUMENTS:
        raise ConfigError(
            f"`generate` has no argument {quoted(name)}",
            nearest(name, (*DEFAULTS, *REFUSED_ARGUMENTS)),
        )
    if value is not None and value is not False and value != 0:
        raise ConfigError(f"`{name}` is not served: {REFUSED_ARGUMENTS[name]}", f"remove `{name}`")
