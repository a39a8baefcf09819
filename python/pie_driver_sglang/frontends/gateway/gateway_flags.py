"""SGLang's flags for this frontend: which the gateway takes, which the engine, and which none."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.config import flag_names
from pie_driver_sglang.config.api_keys import ApiKeys, take_keys
from pie_driver_sglang.config.http_limits import EDGE_FLAGS, EdgeSettings, take_edge_flags
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.config.server_args import SERVER_ARGS, ServerArg
from pie_driver_sglang.errors import ConfigError, nearest, quoted
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag

CONTRACTS: Final = ("vllm", "sglang")

#: Other names of SGLang's command line, and the short ones of this package's commands.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {**flag_names.SGLANG_ALIASES, "tp": "tp_size", "dp": "dp_size"}
)
#: Flags that are the gateway's, or say something to this command.
FRONT: Final = frozenset(
    {
        "chat_template",
        "enable_metrics",
        "enable_trace",
        "host",
        "log_level",
        "otlp_traces_endpoint",
        "port",
        "preferred_sampling_params",
        "reasoning_parser",
        "sampling_defaults",
        "served_model_name",
        "ssl_certfile",
        "ssl_keyfile",
        "tool_call_parser",
        "watchdog_timeout",
        "weight_version",
    }
)
_LORA: Final = "the gateway passes no adapter's name on"
_PRIORITY: Final = "the gateway passes no priority on"
#: Flags that the engine or SGLang's server support, and this frontend does not.
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enable_lora": _LORA,
        "lora_paths": _LORA,
        "max_loaded_loras": _LORA,
        "max_loras_per_batch": _LORA,
        "enable_priority_scheduling": _PRIORITY,
        "priority_scheduling_preemption_threshold": _PRIORITY,
        "schedule_low_priority_values_first": _PRIORITY,
        "kv_events_config": "changes of the prefix index go to the gateway by themselves",
        "skip_tokenizer_init": "the gateway tokenizes",
    }
)
#: Limits and permissions for which the gateway has no flag.
_UNLIMITED: Final = frozenset(
    {
        "allow-pickled-adapters",
        "allowed-local-media-path",
        "max-buffered-bytes",
        "max-connections",
        "max-header-bytes",
        "media-timeout",
        "write-timeout",
    }
)
#: Flags whose owner is refused, but that the engine reads.
_READ: Final = frozenset({"tokenizer_path"})
_OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "server": "it is a flag of SGLang's HTTP server",
        "tokenizer": "it is a flag of SGLang's tokenizer process",
        "observability": "the gateway logs and measures by itself",
    }
)
_REMEDY: Final = "remove it, or start without `--front gateway`"


class GatewayArguments(NamedTuple):
    """A command line.

    Attributes:
        engine: What the engine starts with, by SGLang's names.
        front: The gateway's flags among SGLang's, by their names.
        contract: One of `CONTRACTS`.
        grpc_host: Where the services listen.
        grpc_port: The first service's port; 0 for any. Each replica has the next one.
        prometheus_port: Of the metrics; 0 for any; None if it was not named.
        words: Words for the gateway, as they are.
        starts_gateway: Whether the gateway is to be started.
        edge: What the gateway accepts from the network.
        keys: What its clients must send.
    """

    engine: dict[str, Any]
    front: dict[str, Any]
    contract: str
    grpc_host: str
    grpc_port: int
    prometheus_port: int | None
    words: tuple[str, ...]
    starts_gateway: bool
    edge: EdgeSettings = EdgeSettings()
    keys: ApiKeys = ApiKeys()


#: Flags of this command: name, reader, default. A reader of None takes no value.
GATEWAY_FLAGS: Final[Mapping[str, tuple[Callable[[str], Any] | None, Any]]] = MappingProxyType(
    {
        "grpc_contract": (str, "vllm"),
        "grpc_host": (str, "127.0.0.1"),
        "grpc_port": (int, 0),
        "grpc_allow_remote": (None, False),
        "prometheus_port": (int, None),
        "no_gateway": (None, False),
    }
)


def parse_words(words: Sequence[str]) -> GatewayArguments:
    """Reads a command line, without `--front`.

    Raises:
        ConfigError: A flag is unknown, wrong, or not supported by this frontend.
    """
    given: dict[str, Any] = {}
    own = {name: default for name, (_, default) in GATEWAY_FLAGS.items()}
    options: dict[str, Any] = {}
    passed: list[str] = []
    keys, queue = take_keys(words)
    edge, queue = take_edge_flags(queue)
    while queue:
        name, value = _split(queue.pop(0))
        if name == "option":
            key, parsed = parse_option(_value(name, value, queue))
            options[key] = parsed
        elif name == "gateway_arg":
            passed.append(_value(name, value, queue))
        elif name in GATEWAY_FLAGS:
            own[name] = _read_own(name, value, queue)
        else:
            given[name] = _read(name, value, queue)
    if own["grpc_contract"] not in CONTRACTS:
        raise ConfigError(
            f"`--grpc-contract` is {quoted(own['grpc_contract'])}",
            f"expected one of {', '.join(CONTRACTS)}",
        )
    refuse(given)
    _check_edge(edge, own["grpc_host"], allow_remote=own["grpc_allow_remote"])
    front = {name: value for name, value in given.items() if name in FRONT}
    engine = {name: value for name, value in given.items() if name not in FRONT}
    return GatewayArguments(
        engine={**engine, **options},
        front=front,
        contract=own["grpc_contract"],
        grpc_host=own["grpc_host"],
        grpc_port=own["grpc_port"],
        prometheus_port=own["prometheus_port"],
        words=tuple(passed),
        starts_gateway=not own["no_gateway"],
        edge=edge,
        keys=keys,
    )


def _check_edge(edge: EdgeSettings, grpc_host: str, *, allow_remote: bool) -> None:
    for name in sorted(edge.given & _UNLIMITED):
        raise ConfigError(
            f"`--{name}` is not honoured by the gateway: smg has no flag for it", _REMEDY
        )
    if not allow_remote and not _is_loopback(grpc_host):
        raise ConfigError(
            f"`--grpc-host` is {quoted(grpc_host)}, and the gRPC services have no authentication: "
            "everyone who reaches them can use the model and end others' requests",
            "leave them on the loopback, or add `--grpc-allow-remote` in a network of their own",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def refuse(given: Mapping[str, Any]) -> None:
    """Refuses what this frontend does not support; what the engine does not, it refuses itself.

    Args:
        given: Flags by SGLang's names.

    Raises:
        ConfigError: One is refused.
    """
    for name in sorted(given.keys() - FRONT - _READ):
        owner = SERVER_ARGS[name].owner
        reason = REFUSED.get(name) or _OWNERS.get(owner or "")
        if reason is not None:
            raise ConfigError(f"{_flag(name)} is not honoured by the gateway: {reason}", _REMEDY)


def _split(word: str) -> tuple[str, str | None]:
    """The name of a flag, and its value if it is in the same word."""
    name, equals, value = word.partition("=")
    if not name.startswith("--") or len(name) == 2:
        raise ConfigError(f"{quoted(word)} belongs to no flag", "flags begin with `--`")
    bare = name[2:].replace("-", "_")
    return ALIASES.get(bare, bare), value if equals else None


def _value(name: str, value: str | None, queue: list[str]) -> str:
    if value is not None:
        return value
    if not queue:
        raise ConfigError(f"{_flag(name)} has no value", "see `pie-sglang serve --help`")
    return queue.pop(0)


def _read_own(name: str, value: str | None, queue: list[str]) -> Any:
    reader, _ = GATEWAY_FLAGS[name]
    if reader is None:
        if value is not None:
            raise ConfigError(f"{_flag(name)} takes no value", f"write {_flag(name)} alone")
        return True
    return _convert(name, reader, _value(name, value, queue))


def _read(name: str, value: str | None, queue: list[str]) -> Any:
    """The value of a flag of SGLang's, as its type says."""
    field = SERVER_ARGS.get(name)
    if field is None:
        if name == "config":
            raise ConfigError(
                "`--config` is not read by this frontend", "name the flags themselves"
            )
        names = (
            _bare(known)
            for known in {*SERVER_ARGS, *GATEWAY_FLAGS, *EDGE_FLAGS, "option", "gateway_arg"}
        )
        raise ConfigError(
            f"there is no flag {_flag(name)}",
            other_engines_flag(_bare(name))
            or nearest(_bare(name), names)
            or "the names are those of SGLang's server",
        )
    kind = field.type
    if kind.startswith("bool"):
        if value is None:
            return True
        return _convert(name, _boolean, value)
    if kind.startswith("list") and value is None:
        values = []
        while queue and not queue[0].startswith("--"):
            values.append(queue.pop(0))
        return [_convert(name, _scalar(kind), word) for word in values]
    read = _convert(name, _scalar(kind), _value(name, value, queue))
    if kind.startswith("list"):
        read = [read]
    _check_choice(name, field, read)
    return read


def _check_choice(name: str, field: ServerArg, value: Any) -> None:
    if field.choices and not field.open_choices and value not in field.choices:
        raise ConfigError(
            f"{_flag(name)} is {quoted(value)}", f"expected one of {', '.join(field.choices)}"
        )


def _convert(name: str, reader: Callable[[str], Any], word: str) -> Any:
    try:
        return reader(word)
    except ValueError:
        wanted = {int: "an integer", float: "a number", _boolean: "true or false"}
        expected = wanted.get(reader, "a JSON object")
        raise ConfigError(f"{_flag(name)} is {quoted(word)}", f"expected {expected}") from None


def _scalar(kind: str) -> Callable[[str], Any]:
    inner = kind.removeprefix("list[").split("]")[0].split("|")[0].strip()
    readers: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float}
    if inner == "table":
        return json.loads
    return readers.get(inner, str)


def _boolean(word: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if word.lower() not in values:
        raise ValueError
    return values[word.lower()]


def _bare(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag(name: str) -> str:
    return f"`{_bare(name)}`"
