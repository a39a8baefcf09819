"""`pie-vllm serve`: `pie-sglang serve --engine vllm` for those who come from `vllm serve`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from pie_driver_sglang.cli import main as cli
from pie_driver_sglang.cli.vllm_numbers import READABLE, plain_number
from pie_driver_sglang.config.engine_args import ENGINE_ARGS
from pie_driver_sglang.config.flag_names import field_of
from pie_driver_sglang.config.vllm_options import VLLM_OPTIONS
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.common.vllm_arguments import ENGINE_NAMES
from pie_driver_sglang.frontends.gateway.gateway_flags import FRONT
from pie_driver_sglang.frontends.gateway.smg import is_installed
from pie_driver_sglang.interpreter import refusal

_PROGRAM: Final = "pie-vllm"
_PORT: Final = "8000"
"""The port of `vllm serve`."""
_HELP: Final = f"""\
usage: {_PROGRAM} serve MODEL [options]

Serve a model by vLLM's model classes on this package's scheduler: `pie-sglang serve MODEL
--engine vllm` with vLLM's names of flags and its port, {_PORT}. The frontend is the gateway smg if
it is installed and there are no adapters, else SGLang's HTTP server; `--front` names one of them.

vLLM's flags of the model and the driver (docs/vllm.md) are passed on, and so are those of
`pie-sglang serve --help`.
"""
_SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "-dp": "--data-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-q": "--quantization",
        "-tp": "--tensor-parallel-size",
    }
)
_RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--data-parallel-size": "--dp-size",
        # Both frontends read it, and the driver gets it by their arguments.
        "--max-model-len": "--context-length",
        "--model": "--model-path",
        "--no-enable-prefix-caching": "--disable-radix-cache",
        "--seed": "--random-seed",
        "--tensor-parallel-size": "--tp-size",
        "--tokenizer": "--tokenizer-path",
    }
)
"""Flags of `vllm serve` that `pie-sglang serve` has by another name."""
_DEFAULTS: Final = frozenset(
    {
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--no-enable-lora",
        "--no-trust-remote-code",
    }
)
"""Flags of `vllm serve` that change nothing here."""
_NAMES: Final = "--served-model-name"
_OF_BOTH: Final = frozenset(
    {"enable_lora", "lora_target_modules", "max_lora_rank", "trust_remote_code"}
)
"""Settings that SGLang's frontend reads, too, so that they are passed on as its flags."""


class _LoraModule(msgspec.Struct):
    """An adapter as `vllm serve` takes it in JSON; its `base_model_name` has no effect."""

    name: str
    path: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `pie-vllm`; returns its exit status, as `pie-sglang` does."""
    if message := refusal(sys.version_info[:2], sys.executable):
        sys.stderr.write(message)
        return 1
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["serve"] or "-h" in given or "--help" in given:
        text = sys.stdout if given[:1] in (["serve"], ["-h"], ["--help"]) else sys.stderr
        text.write(_HELP)
        return 0 if text is sys.stdout else cli.USAGE
    return cli.run_command(_serve, given[1:], _PROGRAM)


def _serve(arguments: Sequence[str]) -> int:
    from pie_driver_sglang.cli import serve

    return serve.main(translated(arguments))


def translated(arguments: Sequence[str]) -> list[str]:
    """The command line of `pie-sglang serve` for one of `vllm serve`.

    Raises:
        ConfigError: An option has no value, or there is one that the command does not take.
    """
    _check_names(arguments)
    words = list(_words(arguments))
    flags = {word.partition("=")[0] for word in words}
    fields = {field_of(flag) for flag in flags if flag.startswith("--")}
    if "config" in fields:
        raise ConfigError(f"`{_PROGRAM}` does not read `--config`", "name the flags themselves")
    if "--engine" in flags:
        raise ConfigError(
            f"`{_PROGRAM}` serves by vLLM and takes no `--engine`",
            "remove it, or start `pie-sglang serve MODEL --engine NAME`",
        )
    words += ["--engine", "vllm"]
    adapts = not fields.isdisjoint(("enable_lora", "lora_paths"))
    if adapts and any(word.replace("_", "-") == "--no-enable-lora" for word in arguments):
        raise ConfigError(
            "`--no-enable-lora` contradicts the flags that enable adapters",
            "remove it, or `--enable-lora` and `--lora-modules`",
        )
    if "lora_paths" not in fields and adapts:
        # SGLang's frontend wants both where no adapter is named.
        words += ["--max-lora-rank", "16"] * ("max_lora_rank" not in fields)
        words += ["--lora-target-modules", "all"] * ("lora_target_modules" not in fields)
    # The gateway passes no adapter's name on.
    if "--front" not in flags and is_installed() and not adapts:
        words += ["--front", "gateway"]
    if "port" not in fields:
        words += ["--port", _PORT]
    return words


def _words(arguments: Sequence[str]) -> Iterator[str]:
    queue = list(arguments)
    while queue:
        flag, equals, value = (word := queue.pop(0)).partition("=")
        flag = _SHORT.get(flag, flag)
        if flag.startswith("--"):
            # vLLM takes `--max_model_len`, too.
            flag = flag.replace("_", "-")
        name = flag.removeprefix("--").replace("-", "_")
        kind = _kind(name) if flag.startswith("--") else None
        # As `--no-enforce-eager`.
        is_off = name.startswith("no_") and _kind(name[3:]) == "bool"
        is_switch = kind == "bool" or is_off or flag in _DEFAULTS
        if is_switch and equals:
            raise ConfigError(f"`{flag}` takes no value", f"write `{flag}`, or its opposite, alone")
        if flag in _DEFAULTS:
            continue
        if flag.startswith("--") and name in READABLE:
            if not (equals or queue):
                raise _no_value(flag)
            yield from _numbered(flag, name, value if equals else queue.pop(0))
        elif flag == "--lora-modules":
            adapters = [value] if equals else _values(queue)
            if not any(adapters):
                raise ConfigError(f"`{flag}` names no adapter", f"write `{flag} NAME=PATH`")
            yield from ("--lora-paths", *map(_named_path, adapters))
        elif flag in _RENAMED:
            if not (equals or queue or flag.startswith("--no-")):
                raise _no_value(flag)
            yield f"{_RENAMED[flag]}{equals}{value}"
        elif is_switch:
            yield from ("--option", f"{name[3:]}=false" if is_off else f"{name}=true")
        elif kind is None:
            yield word
        elif not equals and not queue:
            raise _no_value(flag)
        elif kind.startswith("list") and not equals:
            yield from ("--option", f"{name}={json.dumps(_values(queue))}")
        else:
            yield from ("--option", f"{name}={value if equals else queue.pop(0)}")


def _numbered(flag: str, name: str, text: str) -> Sequence[str]:
    """The words of a flag with a number, which may have a unit."""
    if (number := plain_number(flag, text)) is None:
        return ()
    if flag in _RENAMED:
        return _RENAMED[flag], number
    return "--option", f"{name}={number}"


def _named_path(adapter: str) -> str:
    """`name=path` of an adapter, which `vllm serve` takes as JSON, too."""
    if not adapter.startswith("{"):
        return adapter
    try:
        entry = msgspec.json.decode(adapter, type=_LoraModule)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"`--lora-modules` has {quoted(adapter)}, which has no `name` and `path` as texts",
            'write `NAME=PATH`, or `{"name": "NAME", "path": "PATH"}`',
        ) from error
    return f"{entry.name}={entry.path}"


def _no_value(flag: str) -> ConfigError:
    return ConfigError(f"`{flag}` has no value", f"write `{flag} VALUE`")


def _check_names(arguments: Sequence[str]) -> None:
    """Reject several names of the model, of which `vllm serve` answers to each.

    Raises:
        ConfigError: There are.
    """
    words = list(arguments)
    if _NAMES not in words:
        return
    names = _values(words[words.index(_NAMES) + 1 :])
    if len(names) > 1:
        raise ConfigError(
            f"`{_NAMES}` has {len(names)} names ({', '.join(names)}), and a server has one",
            f"write `{_NAMES} {names[0]}`; SGLang's HTTP server (`--front sglang`) serves requests "
            "with any other name, too",
        )


def _values(queue: list[str]) -> list[str]:
    """Take the values of a list, up to the next flag."""
    values = []
    while queue and not queue[0].startswith("-"):
        values.append(queue.pop(0))
    return values


def _kind(name: str) -> str | None:
    """The type of an option of the driver, or of a setting of vLLM; None for what is neither."""
    if name in ENGINE_NAMES or name in FRONT or name in _OF_BOTH:
        return None
    if name in VLLM_OPTIONS:
        return VLLM_OPTIONS[name].type
    # What the driver decides is refused by it, with the reason.
    return ENGINE_ARGS[name].type if name in ENGINE_ARGS else None
