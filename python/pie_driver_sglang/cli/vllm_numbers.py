"""Numbers of flags as `vllm serve` takes them: `8192`, `8k` (8,000), `8K` (8,192), `25.6k`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.errors import ConfigError, quoted

READABLE: Final = frozenset(
    {
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "safetensors_prefetch_block_size",
    }
)
"""The settings of vLLM whose flags take them."""
_AUTO: Final = frozenset({"-1", "auto"})
_NUMBER: Final = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgtKMGT]?)")
_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "": 1,
        **{unit: 1000**power for power, unit in enumerate("kmgt", 1)},
        **{unit: 1024**power for power, unit in enumerate("KMGT", 1)},
    }
)


def plain_number(flag: str, text: str) -> str | None:
    """The digits of a flag's number; None for `auto`, which is the default of `--max-model-len`.

    Raises:
        ConfigError: It is no number, or has a fraction.
    """
    if flag == "--max-model-len" and text.strip().lower() in _AUTO:
        return None
    if match := _NUMBER.fullmatch(text.strip()):
        number = Decimal(match[1]) * _UNITS[match[2]]
        # As vLLM: 1.5K would be taken for 1,500.
        if number == int(number) and not ("." in match[1] and match[2] in "KMGT"):
            return str(int(number))
    raise ConfigError(
        f"`{flag}` is {quoted(text)}, expected a whole number",
        "write digits, or a unit after them: 8k is 8,000, and 8K is 8,192",
    )
