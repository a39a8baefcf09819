"""Hidden states: the requested ones, and SGLang's form of their output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np

from pie_driver_sglang.errors import invalid_value
from pie_driver_sglang.frontends.common.lora_adapters import require_count
from pie_driver_sglang.frontends.offline.logprobs import LogprobRequest

ARGUMENT: Final = "return_hidden_states"

Wanted = bool | Literal["last"]
"""Those of all rows, of none, or of the last one."""


def parse_hidden_states(others: Mapping[str, Any], count: int) -> list[Wanted]:
    """Which hidden states each prompt requests.

    Args:
        others: Arguments of `generate` by their names.
        count: Prompts.

    Raises:
        ConfigError: A value is wrong, or a list has another length.
    """
    given = others.get(ARGUMENT)
    listed = list(given) if isinstance(given, list | tuple) else [given] * count
    require_count(ARGUMENT, listed, count)
    for value in listed:
        if value not in (None, False, True, "last") or isinstance(value, int | float) != isinstance(
            value, bool
        ):
            raise invalid_value(f"`{ARGUMENT}`", value, 'True, False or "last"')
    return [value or False for value in listed]


class OutputHiddenStates:
    """The hidden states of one sequence, in the form of SGLang's `meta_info`."""

    def __init__(self, wanted: Wanted, logprobs: LogprobRequest | None, hidden_size: int) -> None:
        """None yet.

        Args:
            wanted: Which ones.
            logprobs: The log-probabilities that it requests as well.
            hidden_size: Numbers of a state.
        """
        top, given = (0, 0) if logprobs is None else (logprobs.top, len(logprobs.given))
        self._shape = (top, given, hidden_size)
        self._wanted = wanted
        self._prompt: list[list[float]] = []
        self._states: list[Any] = []

    @property
    def hidden_size(self) -> int:
        """Numbers of a state."""
        return self._shape[2]

    def add(self, output: Any) -> None:
        """Append those of a `_core.Output`."""
        of_prompt, of_tokens = (
            np.frombuffer(states, np.float32).reshape(-1, self._shape[2]).tolist()
            for states in output.hidden_states(*self._shape)
        )
        self._prompt += of_prompt
        if not self._states and of_tokens:
            # The first token comes from the last row of the prompt.
            self._states.append([*self._prompt, of_tokens.pop(0)])
        self._states += of_tokens

    def meta_info(self) -> dict[str, Any]:
        """The entry of `meta_info`: rows of the prompt in a list, then a row of each token."""
        if not self._states:
            return {}
        if self._wanted == "last":
            last = self._states[-1]
            return {"hidden_states": [last if len(self._states) > 1 else last[-1]]}
        return {"hidden_states": list(self._states)}
