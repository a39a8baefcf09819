"""The process in the place of SGLang's scheduler: sockets on one side, the runtime on the other.

One thread takes messages, one sends outputs. Between them and the drivers is Rust.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from typing import Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang.offline.arguments import EngineArguments
from pie_driver_sglang.offline.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

_SPARE_POSITIONS: Final = 6
"""Positions that SGLang's front end keeps free of a prompt."""
_PUBLISH_S: Final = 0.5
"""How old the counts for `/v1/loads` may be while requests run."""
_SEND_WAIT_S: Final = 0.5
_OTHER_ENDS: Final = ("<|eom_id|>",)
"""Tokens that end a turn, which SGLang stops at although no configuration names them."""


def run_scheduler(plan: EngineArguments, *arguments: Any) -> None:
    """Runs in the process that SGLang starts for its scheduler.

    Args:
        plan: What the runtime starts with.
        arguments: Those of SGLang's ``run_scheduler_process``.
    """
    # transformers would import it, for what is not needed here: 700 modules.
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
    from pie_driver_sglang.server.seams import scheduling

    given = scheduling.SchedulerArguments(arguments)
    leads = given.rank == 0
    parent = scheduling.begin_process(given.settings, leads=leads)
    try:
        if leads:
            with SchedulerProcess(plan, given) as process:
                process.serve()
        else:
            # The driver starts its own ranks. SGLang waits for this process, and ends it.
            given.pipe.send(_ready(1, 1))
            signal.pause()
    except Exception:
        logger.exception("the scheduler failed")
        scheduling.report_failure(parent)


class SchedulerProcess:
    """The runtime, the sockets and the two threads. Use it as a context manager."""

    def __init__(self, plan: EngineArguments, given: Any) -> None:
        """Starts the drivers, and connects meanwhile.

        Args:
            plan: What the runtime starts with.
            given: SGLang's arguments.
        """
        settings = given.settings
        tokenizer = None if settings.skip_tokenizer_init else _tokenizer(plan)
        ends = _end_tokens(plan, tokenizer)
        keywords = dict(plan.runtime)
        if tokenizer is not None:
            keywords["vocabulary"] = tokenizer.vocabulary()
            keywords["special_tokens"] = tokenizer.special_tokens()
            keywords["eos_token_ids"] = sorted(ends)
        self._runtime = _core.Runtime(**keywords)
        from pie_driver_sglang.server.control import Control
        from pie_driver_sglang.server.seams import loads, messages, scheduling

        self._pipe = given.pipe
        self._sockets = scheduling.Sockets(settings, given.ports)
        self._loads = loads.LoadBoard(settings, given.ports, given.replica)
        self._wait_ready()
        able = self._runtime.capabilities()
        tokens = int(able["total_pages"]) * int(able["kv_page_size"])
        if plan.runtime.get("max_total_pages") is not None:
            tokens = min(tokens, plan.runtime["max_total_pages"] * int(able["kv_page_size"]))
        longest = min(scheduling.front_context_length(settings), int(able["max_model_len"]), tokens)
        self._limits = (tokens, max(1, longest - _SPARE_POSITIONS))
        thinking = _end_of_thinking(settings, tokenizer)
        self._front = _core.Front(
            self._runtime,
            messages.message_table(),
            eos_token_ids=sorted(ends),
            think_end_ids=thinking,
            stream_interval=settings.stream_interval,
            other_interval=messages.other_interval(),
            max_prompt_tokens=self._limits[1],
            truncate=bool(settings.allow_auto_truncate),
            vocab_size=int(able["vocab_size"]),
            speculate=plan.speculates,
            probe_prefix=messages.PROBE_PREFIX,
            dp_rank=given.replica,
        )
        facts = {
            "page_size": able["kv_page_size"],
            "max_running_requests": plan.runtime.get("max_running_requests")
            or able["max_forward_requests"],
            "context_len": longest,
        }
        self._control = Control(self._runtime, self._front, facts)
        self._failure: BaseException | None = None

    def serve(self) -> None:
        """Says that it is ready, and serves until SGLang says that it ends.

        Raises:
            StartError: The drivers are gone for good.
            FrontEndError: A message cannot be read.
        """
        self._pipe.send(_ready(*self._limits))
        sender = self._sockets.sender()
        outputs = threading.Thread(target=self._send_outputs, name="outputs", daemon=True)
        outputs.start()
        published, was_idle = 0.0, False
        while not self._control.is_stopping:
            self._check()
            received = self._sockets.receive(self._control.wait_ms)
            to_detokenizer, to_tokenizer, others = self._front.receive(received)
            for message in others:
                reply = self._control.obey(message)
                to_detokenizer += reply.to_detokenizer
                to_tokenizer += reply.to_tokenizer
            sender.send(to_detokenizer, [*to_tokenizer, *self._control.due()])
            is_idle = not self._front.open_requests
            # The last counts stay, so those of an idle scheduler must be the last.
            if time.monotonic() - published > _PUBLISH_S or is_idle != was_idle:
                self._loads.write(self._control.counts())
                published, was_idle = time.monotonic(), is_idle
            self._pass_on_log()

    def _send_outputs(self) -> None:
        try:
            sender = self._sockets.sender()
            while not self._control.is_stopping:
                to_detokenizer, to_tokenizer, _ = self._front.poll(_SEND_WAIT_S)
                sender.send(to_detokenizer, to_tokenizer)
        except BaseException as error:
            self._failure = error

    def _check(self) -> None:
        """Ends the process if it cannot serve any longer."""
        if self._failure is not None:
            raise self._failure
        self._runtime.wait_ready(0.0)

    def _wait_ready(self) -> None:
        while not self._runtime.wait_ready(0.5):
            self._pass_on_log()
        self._pass_on_log()

    def _pass_on_log(self) -> None:
        for line in self._runtime.log_lines():
            logger.info("driver: %s", line)

    def __enter__(self) -> SchedulerProcess:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the drivers and remove what is in shared memory."""
        self._runtime.shutdown()
        self._loads.close()
        self._sockets.close()


def _ready(tokens: int, longest: int) -> dict[str, Any]:
    """What SGLang waits for; `/server_info` shows it."""
    return {
        "status": "ready",
        "max_total_num_tokens": tokens,
        "max_req_input_len": longest,
        "startup_time": None,
        "scheduler": "pie",
    }


def _tokenizer(plan: EngineArguments) -> ModelTokenizer | None:
    return None if plan.tokenizer is None else ModelTokenizer(plan.tokenizer)


def _end_tokens(plan: EngineArguments, tokenizer: ModelTokenizer | None) -> set[int]:
    if tokenizer is None:
        from pie_driver_sglang.config.hf_config import load_hf_config

        ends = load_hf_config(plan.model).get("eos_token_id")
        return {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}
    others = (tokenizer.token(text) for text in _OTHER_ENDS)
    return {*tokenizer.end_tokens, *(end for end in others if end is not None)}


def _end_of_thinking(settings: Any, tokenizer: ModelTokenizer | None) -> list[int]:
    parser = settings.reasoning_parser
    if tokenizer is None or parser in (None, "auto"):
        return []
    from pie_driver_sglang.server.seams.messages import end_of_thinking

    return tokenizer.encode_plain(end_of_thinking(parser))
