"""Arguments of an engine whose drivers run vLLM, by vLLM's names or SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.config.engine_args import ENGINE_ARGS
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.config.vllm_options import (
    LORA_RANKS,
    VLLM_NAMES,
    VLLM_OPTIONS,
    VLLM_OWNERS,
)
from pie_driver_sglang.errors import ConfigError, Unsupported, quoted
from pie_driver_sglang.frontends.common.argument_names import (
    BOTH,
    OWN,
    READ,
    SCHEDULER,
    unknown_argument,
)
from pie_driver_sglang.frontends.common.driver_options import common_options
from pie_driver_sglang.frontends.common.lora_adapters import largest_rank, parse_paths

LIBRARY_FOLDER: Final = "PIE_VLLM_SITE"
"""Environment variable: a folder with vLLM that only drivers search; unset if the interpreter of
this process finds vLLM by itself."""

_OURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "data_parallel_size": "dp_size",
        "lora_modules": "lora_paths",
        "model": "model_path",
        "seed": "random_seed",
        "tensor_parallel_size": "tp_size",
        "tokenizer": "tokenizer_path",
    }
)
"""Arguments of vLLM that the engine reads itself, by its own names."""
_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType({**_OURS, **VLLM_NAMES})
_UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enable_return_hidden_states": "it returns no hidden states yet",
        "json_model_override_args": "vLLM calls it `hf_overrides`",
        "return_hidden_states_mode": "it returns no hidden states yet",
        "speculative_config": "it drafts by n-grams alone: set `speculative_algorithm` to NGRAM",
    }
)
ENGINE_NAMES: Final = frozenset({*SCHEDULER, *READ, *OWN} - BOTH - _UNSERVED.keys())
"""Arguments of the engine that are no options of its drivers."""
_OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: field.owner
        for name, field in ENGINE_ARGS.items()
        if field.owner is not None and name not in ENGINE_NAMES | VLLM_OPTIONS.keys()
    }
)
"""Settings of vLLM that the driver or the engine decides, and who."""
_HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "device": "set `device` and remove the key",
        "parallel": "set `tp_size` or `dp_size` and remove the key",
        "snapshot": "name the folder of a snapshot as the model, and remove the key",
        "speculative": "set `speculative_algorithm` to NGRAM and remove the key",
    }
)
"""Hints of theirs that differ from those for Pie's configuration."""


def vllm_names() -> set[str]:
    """The names of all arguments, also of those that are refused with a reason."""
    return {*ENGINE_NAMES, *VLLM_OPTIONS, *ENGINE_ARGS, *_OTHER_NAMES, *_UNSERVED, *SERVER_ARGS}


def vllm_served(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of arguments, and name them as the engine and the driver on vLLM do.

    Raises:
        ConfigError: One is unknown, or given by both names.
        Unsupported: One is not served.
    """
    known = {*ENGINE_NAMES, *VLLM_OPTIONS, *ENGINE_ARGS}
    found: dict[str, Any] = {}
    for given, value in _with_max_loras(values).items():
        name = _OTHER_NAMES.get(given, given)
        if name in values and name != given:
            raise ConfigError(f"`{given}` and `{name}` are the same argument", "set one of them")
        if name in _UNSERVED:
            raise _unserved(name, value, _UNSERVED[name])
        if name in _OWNED:
            raise _owned(name, value)
        if name in known:
            found[name] = value
        elif name in SERVER_ARGS:
            raise _unserved(name, value, "it is a setting of SGLang")
        else:
            raise unknown_argument(name, known | _OTHER_NAMES.keys())
    return found


def _with_max_loras(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with SGLang's `max_loras_per_batch`, which counts the base model, as vLLM's."""
    if (slots := values.get("max_loras_per_batch")) is None:
        return values
    if "max_loras" in values:
        raise ConfigError(
            "`max_loras_per_batch` and `max_loras` are the same argument", "set one of them"
        )
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 2:
        raise ConfigError(
            f"`max_loras_per_batch` is {quoted(slots)}, and the base model counts as one",
            "set it to an integer from 2, or set `max_loras`, which counts without it",
        )
    rest = {name: value for name, value in values.items() if name != "max_loras_per_batch"}
    return {**rest, "max_loras": slots - 1}


def _owned(name: str, value: Any) -> Unsupported:
    owner = _OWNED[name]
    why, hint = VLLM_OWNERS[owner]
    error = _unserved(name, value, why)
    error.hint = _HINTS.get(owner, hint).replace("the key", f"`{name}`")
    return error


def _unserved(name: str, value: Any, why: str) -> Unsupported:
    return Unsupported(
        f"the argument `{name}` = {quoted(value)} is not served by the driver on vLLM: {why}",
        f'remove `{name}`, or `engine="vllm"`',
    )


def vllm_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The table `[driver.options]` of the driver on vLLM."""
    options = {name: value for name, value in values.items() if name not in ENGINE_NAMES}
    if values.get("lora_paths"):
        options.setdefault("enable_lora", True)
        largest = largest_rank(parse_paths(values["lora_paths"]))
        if largest > VLLM_OPTIONS["max_lora_rank"].default:
            fitting = next((rank for rank in LORA_RANKS if rank >= largest), largest)
            options.setdefault("max_lora_rank", fitting)
    return options | common_options(values, ("ngram",))
