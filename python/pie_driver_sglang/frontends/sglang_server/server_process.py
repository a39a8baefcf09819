"""The process of SGLang's HTTP server: whose scheduler it gets, and its start."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.backends.sglang.version import check_versions
from pie_driver_sglang.checkpoint.hub_cache import local_path
from pie_driver_sglang.checkpoint.packaged import MODELS, packaged_folder
from pie_driver_sglang.config.api_keys import ApiKeys, take_keys
from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.config.http_limits import EdgeSettings, take_edge_flags
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.console import announce_server, print_notice
from pie_driver_sglang.errors import ConfigError, DriverError, Unsupported
from pie_driver_sglang.frontends.common.arguments import (
    EngineArguments,
    has_gpu,
    model_folder,
    parse_arguments,
)
from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from pie_driver_sglang.frontends.sglang_server.served_flags import (
    TRANSPORT,
    WATCHDOG,
    served_arguments,
    unserved_flag,
)
from pie_driver_sglang.observability.spans import check_tracing

SCHEDULERS: Final = ("auto", "pie", "sglang")
_MODEL_FLAGS: Final = ("--model-path", "--model")


class OwnArguments(NamedTuple):
    """The flags of this command, and the words of SGLang's.

    Attributes:
        scheduler: One of `SCHEDULERS`.
        options: Arguments of the engine that SGLang has no flags for.
        words: SGLang's command line.
        edge: What the server accepts from the network.
        keys: What clients must send.
    """

    scheduler: str
    options: dict[str, Any]
    words: list[str]
    edge: EdgeSettings = EdgeSettings()
    keys: ApiKeys = ApiKeys()


def run(words: Sequence[str]) -> int:
    """Serves until it is ended."""
    try:
        own = split_words(with_packaged_model(words))
        _serve(own)
    except DriverError as error:
        hint = f"\nhint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"pie-sglang: {error}\n{hint}")
        return 1
    return 0


def split_words(words: Sequence[str]) -> OwnArguments:
    """Takes this command's flags out of a command line.

    Raises:
        ConfigError: A flag has no value, or a wrong one.
    """
    scheduler, options, rest = "auto", {}, []
    keys, queue = take_keys(words)
    edge, queue = take_edge_flags(queue)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name not in ("--scheduler", "--option"):
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise ConfigError(f"`{name}` has no value", "see `pie-sglang serve --help`")
            value = queue.pop(0)
        if name == "--option":
            key, parsed = parse_option(value)
            options[key] = parsed
        else:
            scheduler = value
    if scheduler not in SCHEDULERS:
        raise ConfigError(
            f"`--scheduler` is {scheduler!r}", f"expected one of {', '.join(SCHEDULERS)}"
        )
    return OwnArguments(scheduler, options, rest, edge, keys)


def named_value(words: Sequence[str], *flags: str) -> str | None:
    """The value that a command line gives to a flag of several names; None if it gives none."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in flags:
            found = value if equals else following
    return found


def with_packaged_model(words: Sequence[str]) -> list[str]:
    """Replaces the name of a packaged model by its folder. Clients still see the name.

    Raises:
        ConfigError: The model cannot be downloaded.
    """
    name = named_value(words, *_MODEL_FLAGS)
    if name is None or name not in MODELS or Path(name).is_dir():
        return list(words)
    rest, queue = [], list(words)
    while queue:
        word = queue.pop(0)
        flag, equals, _ = word.partition("=")
        if flag in _MODEL_FLAGS:
            del queue[: not equals]
        else:
            rest.append(word)
    if named_value(rest, "--served-model-name") is None:
        rest += ["--served-model-name", name]
    return ["--model-path", str(packaged_folder(name)), *rest]


def _serve(own: OwnArguments) -> None:
    device = named_value(own.words, "--device")
    place = {
        "model_path": named_value(own.words, *_MODEL_FLAGS),
        "revision": named_value(own.words, "--revision"),
        "download_dir": named_value(own.words, "--download-dir"),
    }
    architectures: Sequence[str] = ()
    if place["model_path"] is not None:
        model = model_folder(place, with_weights=False)
        architectures = load_hf_config(model).get("architectures") or ()
    on_cpu = device == "cpu" if device is not None else not has_gpu()
    check_versions()
    server_environment.prepare_server(architectures, on_cpu=on_cpu)
    with server_environment.importing_server():
        from pie_driver_sglang.frontends.sglang_server.compat import http_app, http_launch

    given = http_launch.given_flags(own.words)
    sees = takes_images({"architectures": architectures})
    if sees:
        # SGLang serves the images of such a model with the flag and without it.
        given.pop("enable_multimodal", None)
    plan, reason = choose_scheduler(own, given)
    if plan is None:
        words = [*own.words, *server_environment.with_prefix_index(given)]
        arguments = http_launch.parse_flags(words)
        print_notice(f"SGLang's own scheduler serves ({reason}), {_cache_of(words, own.words)}")
        scheduler = http_launch.sglang_scheduler(reason, on_cpu=arguments.device == "cpu")
    else:
        from pie_driver_sglang.frontends.sglang_server.scheduler_process import run_scheduler

        flag, value = TRANSPORT
        transport = [f"--{flag.replace('_', '-')}", value] if sees else []
        words = [*own.words, *pinned_revision(plan, given), *transport]
        arguments = http_launch.parse_flags(words)
        scheduler = functools.partial(run_scheduler, plan)
    http_app.attach_edge(arguments, own.edge, own.keys)
    ready = functools.partial(_announce, arguments)
    http_launch.launch(arguments, scheduler, ready, is_ours=plan is not None)


def _cache_of(words: Sequence[str], given: Sequence[str]) -> str:
    return "with our prefix index" if len(words) > len(given) else "with its own prefix cache"


def choose_scheduler(
    own: OwnArguments, given: Mapping[str, Any]
) -> tuple[EngineArguments | None, str]:
    """What our scheduler starts with, or None and the reason why SGLang's serves.

    Args:
        own: This command's flags.
        given: The flags of SGLang that the user set.

    Raises:
        ConfigError: A value is wrong, or the model cannot be had; our scheduler was asked for and
            does not serve this; or neither can trace.
    """
    if given.get("enable_trace"):
        # SGLang's processes would end one after the other, each with a message of its own.
        check_tracing()
    if own.scheduler == "sglang":
        return None, "as `--scheduler sglang` says"
    reason = unserved_flag(given)
    if reason is None:
        try:
            plan = parse_arguments({**served_arguments(given), **own.options})
            if WATCHDOG in given:
                plan.runtime["step_timeout_s"] = float(given[WATCHDOG])
            return plan, ""
        except Unsupported as error:
            reason = " ".join(str(error).split())
    if own.scheduler == "pie" or own.options:
        raise ConfigError(
            f"our scheduler does not serve {reason}",
            "remove the flag, or start with `--scheduler sglang`, which takes no `--option`",
        )
    return None, reason


def pinned_revision(plan: EngineArguments, given: Mapping[str, Any]) -> list[str]:
    """Flags by which SGLang's front end reads the same commit of a repository as our driver.

    Args:
        plan: What our scheduler starts with.
        given: The flags of SGLang that the user set.
    """
    # The flag would be that of the tokenizer's repository, too.
    own_tokenizer = given.get("tokenizer_path") not in (None, given["model_path"])
    if own_tokenizer or local_path(given["model_path"]) is not None:
        return []
    return ["--revision", plan.model.name]


def _announce(arguments: Any) -> None:
    announce_server(arguments.url(), arguments.served_model_name or arguments.model_path)
