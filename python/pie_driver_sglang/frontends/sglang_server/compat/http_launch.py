"""Launches SGLang's HTTP server, with our scheduler or its own."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from unittest import mock

from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import kill_process_tree
from uvicorn import _subprocess

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.config.api_keys import ApiKeys
from pie_driver_sglang.config.flag_names import field_of, pop_flags
from pie_driver_sglang.config.http_limits import HttpSettings
from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError, quoted, reason
from pie_driver_sglang.frontends.sglang_server.compat import (
    dp_controller,
    forking,
    http_app,
    load_snapshots,
    tokenizer_workers,
)
from pie_driver_sglang.frontends.sglang_server.compat.front_forks import ForkingContext
from pie_driver_sglang.frontends.sglang_server.compat.offline_batch import OfflineServer
from pie_driver_sglang.frontends.sglang_server.compat.selection import (
    scheduler_compat,
)
from pie_driver_sglang.frontends.sglang_server.compat.tokenizer_managers import (
    MsgpackManager,
    PieManager,
)
from pie_driver_sglang.frontends.sglang_server.flow_control import Acknowledger
from pie_driver_sglang.frontends.sglang_server.served_flags import (
    FLAG_LIST,
    OWN_NAMES,
    refuse_other_engines_flags,
    unknown_flags,
)
from pie_driver_sglang.observability.active import SGLANG, Active, active_line

Scheduler = Callable[..., None]
"""Runs in a scheduler process; called with the arguments of ``run_scheduler_process``."""


def given_flags(words: Sequence[str]) -> dict[str, Any]:
    """The flags that differ from their defaults, by the names of their fields.

    Raises:
        ConfigError: One is unknown, or has a wrong value.
    """
    parser = _flag_parser()
    refuse_other_engines_flags(words)
    try:
        values = vars(parser.parse_args(words))
    except (AssertionError, ValueError) as error:
        # Of SGLang's own types of arguments, as `--lora-paths` has one.
        raise ConfigError(f"wrong flags: {error}", FLAG_LIST) from error
    return {name: value for name, value in values.items() if value != parser.get_default(name)}


class _FlagParser(argparse.ArgumentParser):
    """Raises errors of one line instead of printing a usage of hundreds."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise ConfigError(f"wrong flags: {message}", FLAG_LIST)
        # Values belong to the flag before them.
        names = [word.partition("=")[0] for word in unknown.split() if word.startswith("-")]
        if not names:
            raise ConfigError(f"{quoted(unknown)} belongs to no flag", FLAG_LIST)
        raise unknown_flags(names, [*self._option_string_actions, *OWN_NAMES])


@functools.cache
def _flag_parser() -> argparse.ArgumentParser:
    """SGLang's parser, cached: its flags take 0.1 s to add."""
    parser = _FlagParser(prog="pie-sglang serve")
    ServerArgs.add_cli_args(parser)
    return parser


def parse_flags(
    words: Sequence[str], http: HttpSettings, keys: ApiKeys, without: str | None = None
) -> ServerArgs:
    """SGLang's settings, resolved, with our HTTP configuration and without keys.

    Args:
        words: The command line.
        http: Limits and permissions.
        keys: Of command line and environment.
        without: A switch that SGLang is not told, by the name of its field.

    Raises:
        ConfigError: SGLang refuses the settings, or would serve without these limits.
    """
    load_plugins()
    if without is not None:
        _, words = pop_flags(words, lambda flag: False if field_of(flag) == without else None)
    try:
        arguments = prepare_server_args(list(words))
        # Before: later versions refuse changes of resolved settings.
        http_app.attach_http_config(arguments, http, keys)
        selection.settings().resolve(arguments)
    except (ValueError, AssertionError) as error:
        if not str(error):
            raise
        raise ConfigError(f"SGLang refuses these flags: {reason(error)}", FLAG_LIST) from error
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError) as error:
        # What its code for the model's family misses: in `config.json`, among the packages, a GPU.
        raise ConfigError(
            f"SGLang cannot serve the model with these flags: {type(error).__name__}: "
            f"{reason(error)}",
            "check the model's config.json and the device, and install a package that is missing",
        ) from error
    return arguments


def launch(
    arguments: ServerArgs,
    scheduler: Scheduler,
    ready: Callable[[], None],
    *,
    is_ours: bool,
    forks: ForkingContext | None = None,
    offline: OfflineServer | None = None,
) -> None:
    """Serve until the process is ended.

    Args:
        arguments: SGLang's settings.
        scheduler: Runs in the scheduler process; can be pickled. Ours is called with
            the pipes of `flow_control.SendWindow` first, by replica.
        ready: Called when the server has answered its first request.
        is_ours: Whether the scheduler is this package's.
        forks: Starts processes where the server has threads, if it can.
        offline: What runs in place of the HTTP server, if any.
    """
    kind: Callable[..., TokenizerManager] = MsgpackManager
    notifying_ready: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    workers: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    values = selection.settings().values(arguments)
    if values.tokenizer_worker_num > 1:
        # Processes of their own, without the pipe: no flow control.
        tokenizer_workers.set_worker_class(arguments, is_ours=is_ours)
        notifying_ready = tokenizer_workers.notifying_ready(arguments, ready)
        if is_ours and forks is not None and not values.enable_metrics:
            # The metrics of several processes need a variable that their import reads.
            workers = mock.patch.object(_subprocess, "spawn", forks)
        if is_ours:
            scheduler = functools.partial(scheduler, ())
    elif is_ours:
        acknowledger = Acknowledger(values.dp_size)
        kind = functools.partial(PieManager, acknowledger=acknowledger)
        scheduler = functools.partial(scheduler, acknowledger.schedulers)
    manager = functools.partial(init_tokenizer_manager, TokenizerManagerClass=kind)
    token = http_app.http_config_of(arguments).keys.warm_up
    warm_up: Callable[..., bool] = functools.partial(http_app.send_warm_up, token)
    serving_with = http_app.serving_with
    if offline is not None:
        warm_up, serving_with = offline.warm_up, offline.serving_with
    # SGLang's own scheduler uses CUDA.
    can_fork = is_ours or values.device == "cpu"
    forking_children = forking.forks(values.device, forks) if can_fork else contextlib.nullcontext()
    run = forking.run_and_exit if is_ours else forking.run_with_default_signals
    try:
        counts = load_snapshots.token_names()
        with (
            workers,
            notifying_ready,
            forking_children,
            counts,
            dp_controller.blocking_controller(forks=is_ours),
            serving_with(arguments),
        ):
            launch_server(
                arguments,
                init_tokenizer_manager_func=manager,
                execute_warmup_func=warm_up,
                run_scheduler_process_func=functools.partial(run, scheduler),
                run_detokenizer_process_func=functools.partial(
                    forking.run_with_default_signals, run_detokenizer_process
                ),
                launch_callback=ready,
            )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def sglang_scheduler(reason: str, *, on_cpu: bool) -> Scheduler:
    """SGLang's own scheduler, with the reason why it serves; patched for the CPU."""
    return functools.partial(run_sglang_scheduler, reason, on_cpu)


def run_sglang_scheduler(reason: str, on_cpu: bool, *arguments: Any) -> None:
    """The entry point of the process of SGLang's scheduler."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler import Scheduler as SglangScheduler

    def init_info(self: SglangScheduler) -> dict[str, Any]:
        parts = _active_components(self.server_args, reason)
        if not any(scheduler_compat().ranks_of(self)):
            print_notice(active_line(parts))
        return {**own_info(self), "scheduler": SGLANG, "active": parts}

    def describe_failure() -> str:
        return failure_text(sys.exc_info()[1], own_traceback())

    own_info = SglangScheduler.get_init_info
    own_traceback = scheduler.get_exception_traceback
    if on_cpu:
        from pie_driver_sglang.backends.sglang.compat.model import take_cpu_for_one

        take_cpu_for_one()
    with (
        mock.patch.object(SglangScheduler, "get_init_info", init_info),
        mock.patch.object(scheduler, "get_exception_traceback", describe_failure),
    ):
        scheduler.run_scheduler_process(*arguments)


def failure_text(error: BaseException | None, traceback: str) -> str:
    """What SGLang's scheduler logs when it fails: the reason alone where a package is missing."""
    if error is None:
        return traceback
    line = f"SGLang's scheduler failed: {reason(error)}"
    is_missing = isinstance(error, ImportError) or isinstance(error.__cause__, ImportError)
    return line if is_missing else f"{traceback}\n{line}"


def _active_components(settings: ServerArgs, reason: str) -> dict[str, Any]:
    """The active components with SGLang's scheduler."""
    active, backends = Active(), selection.settings().attention_backends(settings)
    settings = selection.settings().values(settings)
    active.choose("scheduler", SGLANG, reason)
    active.choose("grammar", str(settings.grammar_backend))
    active.choose("attention", ",".join(dict.fromkeys(backends)))
    active.choose("layers", SGLANG)
    active.choose("steps", "eager" if settings.disable_cuda_graph else "graphs")
    active.choose("drafts", str(settings.speculative_algorithm or "off").lower())
    return active.as_dict()
