"""SGLang's sampling parameters for the native runtime; unsupported ones are rejected by name.

Types are checked here, ranges and limits in the runtime for every frontend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import ConfigError, invalid_value, nearest, quoted
from pie_driver_sglang.frontends.offline.logprobs import is_integer

_META: Final = frozenset(".^$*+?{}[]\\|()")
"""Metacharacters of regular expressions."""

GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
"""Parameters of constrained decoding; at most one may be set."""

#: Unsupported parameters of SGLang, with the value that has no effect, and the reason.
REFUSED_PARAMETERS: Final[Mapping[str, tuple[Any, str]]] = MappingProxyType(
    {
        "beam_width": (None, "there is no beam search"),
        "spaces_between_special_tokens": (True, "tokenizers of tokenizer.json decide it"),
        "stream_interval": (None, "tokens are streamed as they come"),
        "watermark": (None, "tokens are sampled without a watermark"),
    }
)

#: Supported parameters.
SERVED_PARAMETERS: Final = frozenset(
    {
        *GRAMMARS,
        "custom_params",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)


#: The ranges of numbers, as `SamplingParams::check` of the runtime has them.
_RANGES: Final[Mapping[str, tuple[Callable[[float], bool], str]]] = MappingProxyType(
    {
        "frequency_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2"),
        "max_new_tokens": (lambda value: value >= 0, "an integer from 0 on"),
        "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
        "n": (lambda value: value >= 1, "an integer from 1 on"),
        "presence_penalty": (lambda value: -2 <= value <= 2, "a number from -2 to 2"),
        "repetition_penalty": (lambda value: 0 < value <= 2, "a number above 0, at most 2"),
        "temperature": (lambda value: value >= 0, "a number from 0 on"),
        "top_k": (lambda value: value >= -1, "-1 for all tokens, or an integer from 1 on"),
        "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    }
)


class SamplingParameters(NamedTuple):
    """Validated sampling parameters, with SGLang's defaults.

    Attributes:
        max_new_tokens: None for the rest of the context.
        temperature: 0 for greedy.
        top_k: -1 for all.
        logit_bias: Token ids, and the values that are added to their logits.
        stop: Stop strings.
        stop_regex: Regular expressions that stop at a match.
        grammar: One of `GRAMMARS`, and its text.
        custom_params: Parameters of a custom logit processor, as JSON.
        no_stop_trim: Keep stop strings and stop tokens in the text.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    sampling_seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: tuple[str, str] | None = None
    custom_params: str | None = None

    @property
    def trimmed(self) -> tuple[str, ...]:
        """The stop strings that are trimmed; as in SGLang also expressions that are plain texts."""
        return self.stop + tuple(text for text in self.stop_regex if _META.isdisjoint(text))

    def runtime_arguments(self, context_left: int) -> dict[str, Any]:
        """The keyword arguments of `_core.Runtime.submit`.

        Args:
            context_left: Tokens that the context has left for the output.
        """
        wanted = self.max_new_tokens
        most = max(0, context_left) if wanted is None else min(max(0, context_left), wanted)
        least = self.min_new_tokens
        if wanted is None or least <= wanted:
            least = min(least, most)
        return {
            "max_new_tokens": most,
            "min_new_tokens": least,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": self.sampling_seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": list(self.logit_bias),
            "stop": list(self.stop),
            "stop_regex": list(self.stop_regex),
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "n": self.n,
            "grammar": self.grammar,
            "custom_params": self.custom_params,
        }


def parse_sampling(given: Mapping[str, Any] | None) -> SamplingParameters:
    """Validate sampling parameters; as in SGLang, None means the default.

    Raises:
        ConfigError: One is unknown, unsupported, or has a wrong value.
    """
    given = given or {}
    for name, value in given.items():
        if name in REFUSED_PARAMETERS:
            _refuse_served(name, value)
        elif name not in SERVED_PARAMETERS:
            raise ConfigError(
                f"there is no sampling parameter {quoted(name)}",
                nearest(name, SERVED_PARAMETERS)
                or f"there are: {', '.join(sorted(SERVED_PARAMETERS))}",
            )
    values = {
        name: value
        for name, value in given.items()
        if name in SERVED_PARAMETERS and value is not None
    }
    return SamplingParameters(
        max_new_tokens=_limit(given),
        min_new_tokens=_integer(values, "min_new_tokens", 0),
        temperature=_number(values, "temperature", 1.0),
        top_k=_integer(values, "top_k", -1),
        top_p=_number(values, "top_p", 1.0),
        min_p=_number(values, "min_p", 0.0),
        n=_integer(values, "n", 1),
        sampling_seed=_seed(values),
        frequency_penalty=_number(values, "frequency_penalty", 0.0),
        presence_penalty=_number(values, "presence_penalty", 0.0),
        repetition_penalty=_number(values, "repetition_penalty", 1.0),
        logit_bias=_biases(values.get("logit_bias", {})),
        stop=_texts("stop", values.get("stop", ())),
        stop_regex=_texts("stop_regex", values.get("stop_regex", ())),
        stop_token_ids=_tokens(values.get("stop_token_ids", ())),
        **{name: _flag(values, name) for name in ("ignore_eos", "no_stop_trim")},
        grammar=_grammar(values),
        custom_params=_custom_params(values.get("custom_params")),
        skip_special_tokens=_flag(values, "skip_special_tokens", True),
    )


def check_ranges(parameters: SamplingParameters) -> None:
    """Check the ranges by the runtime's limits, for commands that start it later.

    Raises:
        ConfigError: A parameter is out of range.
    """
    for name, (fits, wanted) in _RANGES.items():
        value = getattr(parameters, name)
        if value is not None and not (math.isfinite(value) and fits(value)):
            raise _wrong(name, value, wanted)


def _refuse_served(name: str, value: Any) -> None:
    neutral, why = REFUSED_PARAMETERS[name]
    if value is not None and value != neutral:
        raise ConfigError(
            f"the sampling parameter `{name}` is not served: {why}",
            f"remove `{name}`" + ("" if neutral is None else f", or set it to {neutral!r}"),
        )


def _limit(given: Mapping[str, Any]) -> int | None:
    if "max_new_tokens" in given and given["max_new_tokens"] is None:
        return None
    return _integer(given, "max_new_tokens", 128)


def _seed(values: Mapping[str, Any]) -> int | None:
    if "sampling_seed" not in values:
        return None
    seed = _integer(values, "sampling_seed", 0)
    if seed < 0:
        raise _wrong("sampling_seed", seed, "an integer from 0 to 2**63 - 1")
    return seed


def _integer(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    if not is_integer(value):
        raise _wrong(name, value, "an integer of 64 bits")
    return int(value)


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, value, "a number that a float can hold") from None


def _flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = values.get(name, default)
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias; ids may be strings, as in SGLang."""
    wanted = "a mapping from token ids, such as '42', to numbers"
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, wanted)
    biases = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_integer(token) or not is_number:
            raise _wrong("logit_bias", {key: bias}, wanted)
        biases[token] = _number({"logit_bias": bias}, "logit_bias", 0.0)
    return tuple(biases.items())


def _texts(name: str, value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
        raise _wrong(name, value, "a string or a list of strings")
    return tuple(text for text in listed if text)


def _grammar(values: Mapping[str, Any]) -> tuple[str, str] | None:
    given = [(name, values[name]) for name in GRAMMARS if values.get(name)]
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name, _ in given)
        raise ConfigError(
            f"{names} are set: only one of {', '.join(GRAMMARS)} can be", "keep one of them"
        )
    for name, text in given:
        if not isinstance(text, str):
            raise _wrong(name, text, "a string")
        return name, text
    return None


def _custom_params(value: Any) -> str | None:
    """The JSON of a custom logit processor's parameters."""
    if value is None:
        return None
    expected = "a dictionary of what JSON has"
    if not isinstance(value, Mapping):
        raise _wrong("custom_params", value, expected)
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the sampling parameter `custom_params` cannot be sent: {error}", f"give {expected}"
        ) from None


def _tokens(value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not all(map(is_integer, value)):
        raise _wrong("stop_token_ids", value, "a list of token ids")
    return tuple(value)


def _wrong(name: str, value: Any, expected: str) -> ConfigError:
    return invalid_value(f"the sampling parameter `{name}`", value, expected)
