"""Options of the driver that arguments of the engine set, the same for SGLang and vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, Unsupported, quoted
from pie_driver_sglang.frontends.common import eagle_arguments

logger = logging.getLogger(__name__)

DRAFTERS: Final[Mapping[str, str]] = MappingProxyType(
    {"ngram": "n-grams", "suffix": "suffixes", "eagle": "EAGLE heads", "eagle3": "EAGLE-3 heads"}
)
"""Values of `speculative_algorithm` in lower case, with what they draft by."""


def common_options(values: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Any]:
    """The options for the log and for drafts.

    Args:
        values: The arguments.
        drafters: Which of `DRAFTERS` the driver has.

    Raises:
        Unsupported: `speculative_algorithm` is another.
    """
    options: dict[str, Any] = {}
    if "log_level" in values:
        level = str(values["log_level"]).lower()
        # Python's highest level, which the driver does not have.
        options["log_level"] = "error" if level == "critical" else level
    algorithm = values.get("speculative_algorithm")
    of_heads = [name for name in eagle_arguments.ARGUMENTS if name in values]
    if of_heads and not eagle_arguments.is_eagle(values):
        raise Unsupported(
            f"`{of_heads[0]}` is for an EAGLE head, and `speculative_algorithm` is "
            f"{quoted(algorithm)}",
            f"remove `{of_heads[0]}`, or set `speculative_algorithm` to EAGLE3",
        )
    if algorithm is None:
        if "speculative_num_draft_tokens" in values:
            logger.warning(
                "`speculative_num_draft_tokens` has no effect without `speculative_algorithm`"
            )
        return options
    drafter = str(algorithm).lower()
    if drafter not in drafters:
        means = " or ".join(DRAFTERS[name] for name in drafters)
        names = " or ".join(f'"{name.upper()}"' for name in drafters)
        raise Unsupported(
            f"`speculative_algorithm` is {quoted(algorithm)}: the driver drafts by {means} only",
            f"set `speculative_algorithm` to {names}, or remove it",
        )
    if drafter in eagle_arguments.ALGORITHMS:
        return options | eagle_arguments.eagle_options(values)
    _check_drafter(drafter, values)
    options[f"spec_{drafter}_enabled"] = True
    if "speculative_num_draft_tokens" in values:
        options[f"spec_{drafter}_num_drafts"] = values["speculative_num_draft_tokens"]
    return options


def _check_drafter(drafter: str, values: Mapping[str, Any]) -> None:
    """Refuse options by which another drafter would draft than the algorithm says."""
    others = {f"spec_{drafter}_enabled": False}
    if drafter == "ngram":
        others["spec_suffix_enabled"] = True
    for name, value in others.items():
        if values.get(name) is value:
            raise ConfigError(
                f"`speculative_algorithm` is {quoted(drafter.upper())}, and `{name}` is {value}",
                "set one of them",
            )
