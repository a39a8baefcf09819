"""SGLang's command line, its HTTP server, and the schedulers that it starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import HTTPException
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.multimodal.mm_utils import has_valid_data
from sglang.srt.multimodal.processors import base_processor
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.server_args_config_parser import ConfigArgumentMerger
from sglang.srt.utils import kill_process_tree

from pie_driver_sglang.server import refusals
from pie_driver_sglang.server.flow import Acknowledger
from pie_driver_sglang.server.seams import forking, replicas, workers

_LOOK_S: Final = 0.1

Scheduler = Callable[..., None]
"""What runs in a scheduler's process, with the arguments of SGLang's ``run_scheduler_process``."""


def given_flags(words: Sequence[str]) -> dict[str, Any]:
    """The flags that differ from their defaults, by the names of their fields."""
    parser = _flag_parser()
    merged = list(words)
    if "--config" in merged:
        merged = ConfigArgumentMerger(parser).merge_config_with_args(merged)
    values = vars(parser.parse_args(merged))
    return {
        name: value
        for name, value in values.items()
        if name != "config" and value != parser.get_default(name)
    }


@functools.cache
def _flag_parser() -> argparse.ArgumentParser:
    """SGLang's: hundreds of flags take a tenth of a second."""
    parser = argparse.ArgumentParser(prog="pie-sglang serve")
    ServerArgs.add_cli_args(parser)
    return parser


def parse_flags(words: Sequence[str]) -> ServerArgs:
    """SGLang's settings, resolved."""
    load_plugins()
    return prepare_server_args(list(words))


def launch(
    arguments: ServerArgs, scheduler: Scheduler, ready: Callable[[], None], *, is_ours: bool
) -> None:
    """Serves until the process is ended.

    Args:
        arguments: SGLang's settings.
        scheduler: What runs in the scheduler's process; it can be pickled. One of ours is given
            acknowledgements first, as `flow.Window` takes them, by replica.
        ready: Called when the server has answered its first request.
        is_ours: Whether the scheduler is this package's.
    """
    kind: Callable[..., TokenizerManager] = StatusManager
    telling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if arguments.tokenizer_worker_num > 1:
        # They are processes of their own, which share no pipe: they acknowledge nothing.
        workers.set_worker_class(arguments, is_ours=is_ours)
        telling = workers.telling(arguments, ready)
        if is_ours:
            scheduler = functools.partial(scheduler, ())
    elif is_ours:
        acknowledger = Acknowledger(arguments.dp_size)
        kind = functools.partial(PieManager, acknowledger=acknowledger)
        scheduler = functools.partial(scheduler, acknowledger.schedulers)
    manager = functools.partial(init_tokenizer_manager, TokenizerManagerClass=kind)
    forks = forking.forks(arguments.device) if is_ours else contextlib.nullcontext()
    try:
        with telling, forks, replicas.waiting():
            launch_server(
                arguments,
                init_tokenizer_manager_func=manager,
                run_scheduler_process_func=functools.partial(forking.run_afresh, scheduler),
                run_detokenizer_process_func=functools.partial(
                    forking.run_afresh, run_detokenizer_process
                ),
                launch_callback=ready,
            )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


class StatusManager(TokenizerManager):
    """SGLang's tokenizer manager, for messages in msgpack.

    A status arrives as a number there, and the OpenAI layer takes only an ``HTTPStatus`` for an
    error: a stream that fails would end like one that was stopped.
    """

    def __init__(self, server_args: ServerArgs, *arguments: Any, **keywords: Any) -> None:
        """Takes what SGLang's manager takes."""
        if server_args.device == "cpu":
            # Or processors of images ask for CUDA.
            base_processor._is_cpu = True
        super().__init__(server_args, *arguments, **keywords)

    async def sigterm_watchdog(self) -> None:
        """Ends the server soon after SIGTERM: SGLang looks every five seconds whether it came."""
        while not self.gracefully_exit:
            await asyncio.sleep(_LOOK_S)
        await super().sigterm_watchdog()

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        for reason in recv_obj.finished_reasons:
            _name_status(reason)
        await super()._handle_batch_output(recv_obj)

    def _handle_abort_req(self, recv_obj: Any) -> None:
        _name_status(recv_obj.finished_reason)
        super()._handle_abort_req(recv_obj)


class RefusingManager(StatusManager):
    """The tokenizer manager in front of our scheduler: it refuses what no answer could refuse."""

    async def _tokenize_one_request(self, obj: Any) -> Any:
        # SGLang would leave out what a model cannot see, except in chats.
        if self.mm_processor is None and obj.contains_mm_input():
            raise ValueError("Model only supports text input; received images, audio or video.")
        return await super()._tokenize_one_request(obj)

    def _validate_mm_limits(self, obj: Any) -> None:
        for name in ("audio_data", "video_data"):
            if has_valid_data(getattr(obj, name)):
                raise ValueError(refusals.why_no_medium(f"`{name}`"))
        super()._validate_mm_limits(obj)

    async def _execute_profile(self, req: Any) -> Any:
        result = (await self.profile_communicator(req))[0]
        if not result.success:
            raise HTTPException(HTTPStatus.BAD_REQUEST, result.message)
        return result


class PieManager(RefusingManager):
    """The only tokenizer manager of a server: it says when it has handled outputs."""

    def __init__(self, *arguments: Any, acknowledger: Acknowledger, **keywords: Any) -> None:
        """Takes what SGLang's manager takes, and where outputs are acknowledged."""
        self._acknowledger = acknowledger
        super().__init__(*arguments, **keywords)

    async def _handle_batch_output(self, recv_obj: Any) -> None:
        try:
            await super()._handle_batch_output(recv_obj)
        finally:
            self._acknowledger.handled(recv_obj.dp_ranks)


class StatusWorker(StatusManager, TokenizerWorker):
    """One of several tokenizer managers, in front of SGLang's own scheduler."""


class PieWorker(RefusingManager, TokenizerWorker):
    """One of several tokenizer managers, in front of ours."""


def _refuse(reason: str) -> Callable[..., Any]:
    async def refuse(*_: Any, **__: Any) -> None:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"not served: {reason}; {refusals.INSTEAD}")

    return refuse


for _name, _reason in refusals.CALLS.items():
    # A name that SGLang does not have would refuse nothing.
    getattr(TokenizerManager, _name)
    setattr(RefusingManager, _name, _refuse(_reason))


def _name_status(reason: dict[str, Any] | None) -> None:
    status = (reason or {}).get("status_code")
    if reason is not None and isinstance(status, int):
        reason["status_code"] = HTTPStatus(status)


def sglang_scheduler(*, on_cpu: bool) -> Scheduler:
    """SGLang's own scheduler; on the CPU with what it lacks there."""
    return functools.partial(run_sglang_scheduler, on_cpu)


def run_sglang_scheduler(on_cpu: bool, *arguments: Any) -> None:
    """Runs in the scheduler's process."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if on_cpu:
        from pie_driver_sglang.srt.seams.model import take_cpu_for_one

        take_cpu_for_one()
    run_scheduler_process(*arguments)
