"""Arguments of SGLang's `generate` besides prompts, and unsupported ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, invalid_value, nearest, quoted
from pie_driver_sglang.frontends.common.lora_adapters import require_count
from pie_driver_sglang.frontends.offline.hidden_states import ARGUMENT
from pie_driver_sglang.frontends.offline.images import IMAGES
from pie_driver_sglang.frontends.offline.input_embeds import EMBEDS
from pie_driver_sglang.frontends.offline.logprobs import DEFAULTS, LogprobRequest, parse_logprobs

PROCESSOR: Final = "custom_logit_processor"
_SERVED: Final = (PROCESSOR, ARGUMENT, IMAGES, EMBEDS)

#: Unsupported arguments, which must be empty, and the reason.
REFUSED_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "audio_data": "the offline engine takes text and tokens",
        "bootstrap_host": "prefill and decode run in one driver",
        "bootstrap_port": "prefill and decode run in one driver",
        "bootstrap_room": "prefill and decode run in one driver",
        "data_parallel_rank": "the runtime chooses the replica",
        "disagg_prefill_dp_rank": "prefill and decode run in one driver",
        "external_trace_header": "requests are not traced",
        "mm_hashes": "the offline engine takes text and tokens",
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
        if name not in DEFAULTS and name not in _SERVED:
            _refuse(name, value)
    return parse_logprobs(others, count)


def parse_processors(others: Mapping[str, Any], count: int) -> list[str | None]:
    """The custom logit processor of each prompt, as SGLang's `to_str` returns it.

    Args:
        others: Arguments by their names.
        count: Prompts.

    Raises:
        ConfigError: One is no text, or there are more or fewer than prompts.
    """
    given = others.get(PROCESSOR)
    listed = list(given) if isinstance(given, list | tuple) else [given] * count
    require_count(PROCESSOR, listed, count)
    for text in listed:
        if text is not None and not isinstance(text, str):
            expected = "what `CustomLogitProcessor.to_str()` returns, or a list of that"
            raise invalid_value(f"`{PROCESSOR}`", text, expected)
    return [text or None for text in listed]


def _refuse(name: str, value: Any) -> None:
    if name not in REFUSED_ARGUMENTS:
        raise ConfigError(
            f"`generate` has no argument {quoted(name)}",
            nearest(name, (*DEFAULTS, *_SERVED, *REFUSED_ARGUMENTS)),
        )
    if value is not None and value is not False and value != 0:
        raise ConfigError(f"`{name}` is not served: {REFUSED_ARGUMENTS[name]}", f"remove `{name}`")
