"""The flags of `serve --front gateway`: those of smg, of the engine, and the unsupported ones."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.config.api_keys import ApiKeys, take_keys
from pie_driver_sglang.config.flag_names import pop_flags
from pie_driver_sglang.config.http_limits import HTTP_FLAGS, HttpSettings, take_http_flags
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_FLAGS
from pie_driver_sglang.errors import ConfigError, nearest, quoted
from pie_driver_sglang.frontends.common.argument_names import other_engines_flag
from pie_driver_sglang.frontends.common.flag_values import (
    boolean,
    check_choice,
    convert_value,
    flag_name,
    scalar,
)

CONTRACTS: Final = ("vllm", "sglang")

#: Other names of SGLang's command line, and the short ones of this package's commands.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: about.field
        for flag, about in SGLANG_FLAGS.items()
        if about.nargs != "0" and (name := flag[2:].replace("-", "_")) != about.field
    }
    | {"tp": "tp_size", "dp": "dp_size"}
)
#: Flags of SGLang that smg or this command supports.
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
UNSUPPORTED_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "disable_priority_preemption": _PRIORITY,
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
#: Limits and permissions for which smg has no flag.
_UNLIMITED: Final = frozenset(
    {
        "allow-pickled-adapters",
        "allowed-local-media-path",
        "batch-concurrency",
        "max-batch-lines",
        "max-buffered-bytes",
        "max-connections",
        "max-file-bytes",
        "max-header-bytes",
        "max-stored-bytes",
        "media-timeout",
        "write-timeout",
    }
)
#: Flags of an unsupported owner that the engine reads.
_READ: Final = frozenset({"tokenizer_path"})
_OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "server": "it is a flag of SGLang's HTTP server",
        "tokenizer": "it is a flag of SGLang's tokenizer process",
        "observability": "the gateway logs and measures by itself",
    }
)
_LAST_PORT: Final = 0xFFFF
_REMEDY: Final = "remove it, or start without `--front gateway`"


class GatewayArguments(NamedTuple):
    """A parsed command line.

    Attributes:
        engine: Arguments of the engine, by SGLang's names.
        front: The flags of SGLang that the gateway supports, by their names.
        contract: One of `CONTRACTS`.
        grpc_host: Where the gRPC services listen.
        grpc_port: The first service's port; 0 for any. Each replica has the next one.
        prometheus_port: Of the metrics; 0 for any; None if it is not set.
        smg: Arguments for smg, passed on unchanged.
        starts_gateway: Whether smg is started.
        http: Limits of the gateway.
        keys: API keys.
    """

    engine: dict[str, Any]
    front: dict[str, Any]
    contract: str
    grpc_host: str
    grpc_port: int
    prometheus_port: int | None
    smg: tuple[str, ...]
    starts_gateway: bool
    http: HttpSettings = HttpSettings()
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


def parse_gateway_arguments(arguments: Sequence[str]) -> GatewayArguments:
    """Parse a command line, without `--front`.

    Raises:
        ConfigError: A flag is unknown, wrong, or not supported by this frontend.
    """
    keys, rest = take_keys(arguments)
    http, rest = take_http_flags(rest)
    given_own, rest = pop_flags(rest, _takes_value)
    own = {name: default for name, (_, default) in GATEWAY_FLAGS.items()}
    options: dict[str, Any] = {}
    smg: list[str] = []
    for flag, value in given_own:
        name = _field(flag)
        if name == "option":
            key, options[key] = parse_option(value)
        elif name == "gateway_arg":
            smg.append(value)
        else:
            reader = GATEWAY_FLAGS[name][0]
            own[name] = True if reader is None else convert_value(name, reader, value)
    given: dict[str, Any] = {}
    while rest:
        name, inline = _split(rest.pop(0))
        given[name] = _read(name, inline, rest)
    if own["grpc_contract"] not in CONTRACTS:
        raise ConfigError(
            f"`--grpc-contract` is {quoted(own['grpc_contract'])}",
            f"expected one of {', '.join(CONTRACTS)}",
        )
    for name, last in (("grpc_port", given.get("dp_size", 1) - 1), ("prometheus_port", 0)):
        _check_port(name, own[name], last)
    refuse(given)
    _check_http(http, own["grpc_host"], allow_remote=own["grpc_allow_remote"])
    front = {name: value for name, value in given.items() if name in FRONT}
    engine = {name: value for name, value in given.items() if name not in FRONT}
    return GatewayArguments(
        engine={**engine, **options},
        front=front,
        contract=own["grpc_contract"],
        grpc_host=own["grpc_host"],
        grpc_port=own["grpc_port"],
        prometheus_port=own["prometheus_port"],
        smg=tuple(smg),
        starts_gateway=not own["no_gateway"],
        http=http,
        keys=keys,
    )


def _takes_value(flag: str) -> bool | None:
    name = _field(flag)
    if name in GATEWAY_FLAGS:
        return GATEWAY_FLAGS[name][0] is not None
    return name in ("option", "gateway_arg") or None


def _field(flag: str) -> str:
    """The field of SGLang's settings, or the name in `GATEWAY_FLAGS`, of a flag."""
    name = flag.removeprefix("--").replace("-", "_")
    return ALIASES.get(name, name)


def _check_port(name: str, port: int | None, further: int) -> None:
    """Check a port, and that `further` ones follow it."""
    if port and not 1 <= port <= _LAST_PORT - further:
        raise ConfigError(
            f"{flag_name(name)} is {port}",
            f"name a port from 1 to {_LAST_PORT - further}, or 0 for any",
        )


def _check_http(http: HttpSettings, grpc_host: str, *, allow_remote: bool) -> None:
    for name in sorted(http.given & _UNLIMITED):
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
    """Reject flags that this frontend does not support; the engine checks its own.

    Args:
        given: Flags by SGLang's names.

    Raises:
        ConfigError: One is refused.
    """
    for name in sorted(given.keys() - FRONT - _READ):
        owner = SERVER_ARGS[name].owner
        reason = UNSUPPORTED_FLAGS.get(name) or _OWNERS.get(owner or "")
        if reason is not None:
            raise ConfigError(
                f"{flag_name(name)} is not honoured by the gateway: {reason}", _REMEDY
            )


def _split(argument: str) -> tuple[str, str | None]:
    """The field of a flag, and its value if it is in the same argument."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--") or len(flag) == 2:
        raise ConfigError(f"{quoted(argument)} belongs to no flag", "flags begin with `--`")
    return _field(flag), value if equals else None


def _value(name: str, value: str | None, queue: list[str]) -> str:
    if value is not None:
        return value
    if not queue:
        raise ConfigError(f"{flag_name(name)} has no value", "see `pie-sglang serve --help`")
    return queue.pop(0)


def _read(name: str, value: str | None, queue: list[str]) -> Any:
    """The value of a flag of SGLang, converted to its type."""
    field = SERVER_ARGS.get(name)
    if field is None:
        names = (
            _bare(known)
            for known in {*SERVER_ARGS, *GATEWAY_FLAGS, *HTTP_FLAGS, "option", "gateway_arg"}
        )
        raise ConfigError(
            f"there is no flag {flag_name(name)}",
            other_engines_flag(_bare(name))
            or nearest(_bare(name), names)
            or "the names are those of SGLang's server",
        )
    kind = field.type
    if kind.startswith("bool"):
        if value is None:
            return True
        return convert_value(name, boolean, value)
    if kind.startswith("list") and value is None:
        values = []
        while queue and not queue[0].startswith("--"):
            values.append(queue.pop(0))
        return [convert_value(name, scalar(kind), each) for each in values]
    read = convert_value(name, scalar(kind), _value(name, value, queue))
    if kind.startswith("list"):
        read = [read]
    check_choice(name, field, read)
    return read


def _bare(name: str) -> str:
    return f"--{name.replace('_', '-')}"
