"""Control messages of SGLang's frontend, and the replies to them.

SGLang waits for each reply without a timeout, so every message gets one: an unsupported message is
answered with the reason.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates
from pie_driver_sglang.frontends.sglang_server import weight_messages
from pie_driver_sglang.frontends.sglang_server.compat import adapter_tensors, messages
from pie_driver_sglang.frontends.sglang_server.flow_control import SendWindow
from pie_driver_sglang.frontends.sglang_server.profile import Profiler
from pie_driver_sglang.frontends.sglang_server.server_adapters import ServerAdapters
from pie_driver_sglang.frontends.sglang_server.unsupported import (
    unsupported_reason,
)

logger = logging.getLogger(__name__)

#: Messages that are also forwarded to the detokenizer.
_FORWARDED: Final = frozenset({"FreezeGCReq", "ConfigureLoggingReq"})
_LOOK_S: Final = 0.05
"""Poll period while a flush or an adapter load is pending."""
_IDLE_S: Final = 0.5
"""Poll period otherwise."""
_LONGEST_S: Final = 1e9
"""A longer idle timeout of a session is none."""


class Replies(NamedTuple):
    """Messages to send after a control message.

    Attributes:
        to_detokenizer: Messages for the detokenizer.
        to_tokenizer: Messages for the tokenizer manager.
    """

    to_detokenizer: list[bytes]
    to_tokenizer: list[bytes]


class ControlHandler:
    """Handles control messages.

    Attributes:
        is_stopping: Whether the server shuts down.
    """

    def __init__(
        self,
        runtime: _core.Runtime,
        front: _core.SglangFrontend,
        server_info: Mapping[str, Any],
        adapters: ServerAdapters,
        updates: ModelUpdates,
        profiler: Profiler,
        window: SendWindow,
    ) -> None:
        """Handle messages for a runtime.

        Args:
            runtime: The native runtime.
            front: Its requests and sessions.
            server_info: The constant part of `/server_info`.
            adapters: LoRA adapters.
            updates: Weights that change, and memory that is released.
            profiler: Writes profiles.
            window: Counts the outputs in flight.
        """
        self._runtime, self._front, self._server_info = runtime, front, server_info
        self._adapters, self._profiler, self._window = adapters, profiler, window
        self._updates = updates
        self._weights = weight_messages.handlers(updates)
        self._working = 0
        self._done: queue.SimpleQueue[tuple[Any, dict[str, Any]]] = queue.SimpleQueue()
        self._throughput = Throughput()
        self.is_stopping = False
        self._flush_until: list[tuple[float, Any]] = []
        self._handlers: dict[str, Callable[[Any], dict[str, Any] | None]] = {
            "ShutdownReq": self._stop,
            "FlushCacheReqInput": self._flush,
            "GetInternalStateReq": self._state,
            "PauseGenerationReqInput": self._pause,
            "ContinueGenerationReqInput": self._resume,
            "OpenSessionReqInput": self._open_session,
            "CloseSessionReqInput": self._close_session,
            "LoadLoRAAdapterReqInput": self._load_adapter,
            "LoadLoRAAdapterFromTensorsReqInput": self._load_tensors,
            "UnloadLoRAAdapterReqInput": self._unload_adapter,
            "ProfileReq": self._profile,
            "UpdateWeightVersionReqInput": self._name_weights,
        }

    def handle(self, data: bytes) -> Replies:
        """Handle a message. One that cannot be decoded is logged, and has no reply."""
        try:
            message = messages.decode_message(data)
        except Exception as error:
            logger.error("a message of %d bytes cannot be read: %s", len(data), error)
            return Replies([], [])
        to_tokenizer = self.answer(message)
        name = type(message).__name__
        return Replies([data] if name in _FORWARDED else [], to_tokenizer)

    def answer(self, message: Any) -> list[bytes]:
        """The encoded replies to a message that are available at once."""
        name = type(message).__name__
        handler = self._handlers.get(name)
        if work := self._weights.get(name):
            self._run_in_thread(message, functools.partial(work, message))
            return []
        reason, said = None, None
        if handler is None:
            reason = unsupported_reason(name)
        else:
            try:
                said = handler(message)
            except Exception as error:
                # Clients send values of any type, such as a path with a zero byte. Our own faults
                # look the same, so the traceback is logged; the process continues.
                logger.warning("a %s is not taken", name, exc_info=error)
                reason = f"not taken: {error}"
        if reason is not None:
            said = {
                "success": False,
                "message": reason,
                "error_message": reason,
                "session_id": getattr(message, "session_id", None),
            }
        answer = None if said is None else messages.reply_to(message, said)
        return [] if answer is None else [messages.encode_message(answer)]

    def pending_replies(self) -> list[bytes]:
        """Replies to pending adapter loads and cache flushes that have ended."""
        answers = []
        for until, message in list(self._flush_until):
            flushed = self._runtime.flush_cache()
            if flushed or time.monotonic() >= until:
                self._flush_until.remove((until, message))
                answers.append((message, _flushed(flushed)))
        while not self._done.empty():
            self._working -= 1
            answers.append(self._done.get())
        found = (messages.reply_to(message, said) for message, said in answers)
        return [messages.encode_message(answer) for answer in found if answer is not None]

    @property
    def wait_ms(self) -> int:
        """The longest wait for the next message."""
        is_busy = self._flush_until or self._working
        return int((_LOOK_S if is_busy else _IDLE_S) * 1000)

    def counts(self) -> dict[str, Any]:
        """The load, by the names of SGLang's load snapshots."""
        stats = self._runtime.stats()
        size = int(self._server_info["page_size"])
        used = stats["pages_total"] - stats["pages_free"] - stats["pages_cached"]
        total = stats["pages_total"] * size
        seen = stats["prompt_tokens"]
        throughput = self._throughput.of(stats["output_tokens"])
        return {
            "num_running_reqs": stats["running"],
            "num_waiting_reqs": stats["waiting"],
            "num_used_tokens": used * size,
            "num_total_tokens": used * size,
            "num_active_tokens": used * size,
            "max_total_num_tokens": total,
            "max_running_requests": int(self._server_info["max_running_requests"]),
            "token_usage": used * size / total if total else 0.0,
            "gen_throughput": throughput if stats["running"] else 0.0,
            "cache_hit_rate": stats["cached_tokens"] / seen if seen else 0.0,
        }

    def _stop(self, _: Any) -> None:
        self.is_stopping = True

    def _flush(self, message: Any) -> dict[str, Any] | None:
        flushed = self._runtime.flush_cache()
        wait_s = getattr(message, "timeout_s", None) or 0.0
        if not flushed and wait_s > 0:
            self._flush_until.append((time.monotonic() + wait_s, message))
            return None
        return _flushed(flushed)

    def _name_weights(self, message: Any) -> dict[str, Any]:
        """Of SGLang 0.5.23; in 0.5.17 the tokenizer manager alone has the name."""
        self._front.set_weight_version(message.new_version)
        return {}

    def _state(self, _: Any) -> dict[str, Any]:
        counts = self.counts()
        state = {
            "last_gen_throughput": counts["gen_throughput"],
            "memory_usage": {"token_capacity": counts["max_total_num_tokens"]},
            "effective_max_running_requests_per_dp": counts["max_running_requests"],
            "scheduler": "pie",
            "open_requests": self._front.open_requests,
            "outputs_in_flight": self._window.in_flight,
            **self._server_info,
            **self._runtime.stats(),
        }
        return {"internal_state": state}

    def _open_session(self, message: Any) -> dict[str, Any]:
        name = message.session_id
        opened = name is not None and self._front.open_session(
            name, streaming=bool(message.streaming), timeout_s=_idle_timeout(message.timeout)
        )
        return {"success": opened, "session_id": name}

    def _close_session(self, message: Any) -> None:
        self._front.close_session(message.session_id)

    def _load_adapter(self, message: Any) -> None:
        given = (message.lora_id, message.lora_name, message.lora_path)
        self._run_in_thread(message, lambda: self._adapters.load(*given))

    def _load_tensors(self, message: Any) -> None:
        write = functools.partial(adapter_tensors.write_adapter, message)
        given = (message.lora_id, message.lora_name, write)
        self._run_in_thread(message, lambda: self._adapters.load_tensors(*given))

    def _unload_adapter(self, message: Any) -> None:
        given = (message.lora_id, message.lora_name)
        self._run_in_thread(message, lambda: self._adapters.unload(*given))

    def _profile(self, message: Any) -> None:
        # Drivers take seconds to write what they have recorded.
        self._run_in_thread(message, lambda: _profiled(self._profiler, message))

    def _run_in_thread(self, message: Any, work: Callable[[], dict[str, Any]]) -> None:
        """Run blocking work in a thread; `pending_replies` has its reply."""

        def run() -> None:
            try:
                said = work()
            except BaseException as error:
                said = {"success": False, "error_message": f"{type(error).__name__}: {error}"}
                self._done.put((message, said))
                raise
            self._done.put((message, said))

        self._working += 1
        threading.Thread(target=run, name="control", daemon=True).start()

    def _pause(self, message: Any) -> None:
        self._updates.pause(message.mode)

    def _resume(self, _: Any) -> None:
        self._updates.resume()


def _idle_timeout(timeout_s: float | None) -> float | None:
    """The idle timeout of a session, from any number of a client; None for no limit."""
    if timeout_s is None or not timeout_s < _LONGEST_S:
        return None
    return max(0.0, timeout_s)


def _profiled(profiler: Profiler, message: Any) -> dict[str, Any]:
    try:
        starts = messages.starts_profile(message)
        text = profiler.start(message) if starts else profiler.stop()
    except ConfigError as error:
        return {"success": False, "message": error.with_hint}
    return {"success": True, "message": text}


def _flushed(flushed: bool) -> dict[str, Any]:
    message = "the prefix index is empty" if flushed else "requests run or wait: try again later"
    return {"success": flushed, "message": message}


class Throughput:
    """Tokens per second since the last call, over at least a second."""

    def __init__(self) -> None:
        """Count from now on."""
        self._at, self._tokens, self._last = time.monotonic(), 0, 0.0

    def of(self, tokens: int) -> float:
        """The throughput, given the total number of tokens."""
        now = time.monotonic()
        if now - self._at >= 1.0:
            self._last = (tokens - self._tokens) / (now - self._at)
            self._at, self._tokens = now, tokens
        return self._last
