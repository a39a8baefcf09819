"""Log-probabilities: the requested ones, and SGLang's form of their output."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import invalid_value
from pie_driver_sglang.frontends.common.lora_adapters import require_count
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

ORIGINAL: Final = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""SGLang's variable: log-probabilities without the temperature."""

_TRUE: Final = ("1", "t", "true", "y", "yes")

#: SGLang's arguments and their defaults; each is one value for all prompts, or a list.
DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "return_text_in_logprobs": False,
    }
)

Entry = tuple[float | None, int, str | None]
"""SGLang's tuple for a token: log-probability, id, and text if requested."""


class LogprobRequest(NamedTuple):
    """The log-probabilities that a prompt requests."""

    top: int
    """Top tokens per position."""
    given: tuple[int, ...]
    """Token ids whose log-probabilities each position has."""
    start: int | None
    """First position of the prompt with log-probabilities; None for outputs only."""
    with_text: bool

    def runtime_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `_core.Runtime.submit`."""
        original = os.environ.get(ORIGINAL, "").lower() in _TRUE
        asked = (self.top, list(self.given), self.start)
        return {"logprobs": asked, "logprobs_original": original}


def parse_logprobs(given: Mapping[str, Any], count: int) -> list[LogprobRequest | None]:
    """Validate the arguments; one request per prompt, None without log-probabilities.

    Args:
        given: Values by the names of `DEFAULTS`; None is the default.
        count: Prompts.

    Raises:
        ConfigError: A value is wrong, or a list has another length.
    """
    listed = {name: _listed(name, given.get(name), count) for name in DEFAULTS}
    columns = zip(*listed.values(), strict=True)
    return [_request(dict(zip(DEFAULTS, values, strict=True))) for values in columns]


def _listed(name: str, value: Any, count: int) -> list[Any]:
    """A value for each prompt."""
    if value is None:
        return [DEFAULTS[name]] * count
    is_one = not isinstance(value, list | tuple)
    if name == "token_ids_logprob" and not is_one:
        # A list of tokens is for all prompts.
        is_one = not any(isinstance(one, list | tuple) for one in value)
    if is_one:
        return [value] * count
    require_count(name, value, count)
    return [DEFAULTS[name] if one is None else one for one in value]


def _request(asked: Mapping[str, Any]) -> LogprobRequest | None:
    for name in ("return_logprob", "return_text_in_logprobs"):
        if not isinstance(asked[name], bool):
            raise invalid_value(f"`{name}`", asked[name], "True or False")
    if not asked["return_logprob"]:
        return None
    start = _integer("logprob_start_len", asked)
    given = asked["token_ids_logprob"]
    given = [given] if is_integer(given) else given or []
    if isinstance(given, str) or not all(map(is_integer, given)):
        raise invalid_value("`token_ids_logprob`", given, "a list of token ids")
    return LogprobRequest(
        top=_integer("top_logprobs_num", asked),
        given=tuple(given),
        start=None if start == -1 else start,
        with_text=asked["return_text_in_logprobs"],
    )


def _integer(name: str, asked: Mapping[str, Any]) -> int:
    value = asked[name]
    if not is_integer(value):
        raise invalid_value(f"`{name}`", value, "an integer of 64 bits")
    return int(value)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of 64 bits, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


class OutputLogprobs:
    """The log-probabilities of one sequence, in the form of SGLang's `meta_info`."""

    def __init__(
        self,
        asked: LogprobRequest,
        prompt: Sequence[int],
        tokenizer: ModelTokenizer | None,
        hidden: int = 0,
    ) -> None:
        """No log-probabilities yet; `hidden` numbers of a hidden state come after each."""
        self._hidden = hidden
        self._asked = asked
        self._tokenizer = tokenizer if asked.with_text else None
        self._prompt = [] if asked.start is None else list(prompt[asked.start :])
        self._inputs = _TokenLogprobs()
        self._outputs = _TokenLogprobs()
        self._is_computed = False

    def add(self, output: Any) -> None:
        """Append those of a `_core.Output`."""
        shape = (self._asked.top, len(self._asked.given), self._hidden)
        tokens = output.token_ids
        scored = output.scored
        if not self._is_computed and (tokens or scored is not None):
            # A request that ends before its prefill has none of the prompt.
            self._is_computed = True
            if self._prompt:
                first, rest = self._prompt[0], self._prompt[1:]
                self._inputs.begin(self._entries([first], [None])[0])
                positions = output.prompt_logprobs(*shape)
                # Hidden states may come of more rows of the prompt.
                self._add(self._inputs, rest, positions[len(positions) - len(rest) :])
        if scored is not None:
            tokens = [scored]
        self._add(self._outputs, tokens, output.logprobs(*shape))

    def meta_info(self) -> dict[str, Any]:
        """The entries of `meta_info`."""
        inputs, outputs, asked = self._inputs, self._outputs, self._asked
        found: dict[str, Any] = {
            "input_token_logprobs": list(inputs.own),
            "output_token_logprobs": list(outputs.own),
            "output_token_logprobs_length": len(outputs.own),
        }
        if asked.top:
            found["input_top_logprobs"] = list(inputs.top)
            found["output_top_logprobs"] = list(outputs.top)
        if asked.given:
            found["input_token_ids_logprobs"] = list(inputs.given)
            found["output_token_ids_logprobs"] = list(outputs.given)
        return found

    def _add(self, side: _TokenLogprobs, tokens: Sequence[int], positions: Sequence[Any]) -> None:
        owns = [own for own, _, _ in positions]
        side.own += self._entries(tokens, owns)
        if self._asked.top:
            for _, top, _ in positions:
                values, ids = [value for value, _ in top], [token for _, token in top]
                side.top.append(self._entries(ids, values))
        if self._asked.given:
            for _, _, values in positions:
                side.given.append(self._entries(self._asked.given, values))

    def _entries(self, tokens: Sequence[int], values: Sequence[float | None]) -> list[Entry]:
        texts: Sequence[str | None] = [None] * len(tokens)
        if self._tokenizer is not None:
            texts = self._tokenizer.texts(tokens)
        return list(zip(values, tokens, texts, strict=True))


class _TokenLogprobs:
    """The entries of input tokens, or of output tokens."""

    def __init__(self) -> None:
        self.own: list[Entry] = []
        self.top: list[list[Entry] | None] = []
        self.given: list[list[Entry] | None] = []

    def begin(self, first: Entry) -> None:
        """Add the first token of a prompt, which has no log-probability."""
        self.own.append(first)
        self.top.append(None)
        self.given.append(None)
