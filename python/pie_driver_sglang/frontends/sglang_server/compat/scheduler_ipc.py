"""What SGLang expects of a scheduler's process: its name, settings, sockets, and how it fails."""

from __future__ import annotations

import signal
from typing import Any, Final

import psutil
import setproctitle
import zmq
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import publish
from sglang.srt.utils import configure_logger, kill_itself_when_parent_died
from sglang.srt.utils.network import get_zmq_socket

_PIPE: Final = {10: 9, 13: 9}
"""Where the pipe stands, by the number of arguments."""


class SchedulerArguments:
    """The arguments of SGLang's ``run_scheduler_process``.

    Attributes:
        settings: ``ServerArgs``.
        ports: The names of the sockets.
        rank: Of tensor parallelism.
        replica: Of data parallelism; None without.
        pipe: Takes the message that the scheduler is ready.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        """Takes them by their places.

        Raises:
            RuntimeError: There are more or fewer than this version of SGLang has.
        """
        place = _PIPE.get(len(arguments))
        if place is None:
            raise RuntimeError(
                f"SGLang gives a scheduler {len(arguments)} arguments, expected 10 or 13: install "
                "the version that this package names"
            )
        self.settings, self.ports = arguments[0], arguments[1]
        self.rank, self.replica = int(arguments[3]), arguments[8]
        self.pipe = arguments[place]

    @property
    def adapters(self) -> list[tuple[str, str, str]]:
        """Those of `--lora-paths`, each with SGLang's id of it, its name and its path."""
        refs = self.settings.lora_paths if self.settings.enable_lora else None
        return [(ref.lora_id, ref.lora_name, ref.lora_path) for ref in refs or ()]

    @property
    def limits(self) -> dict[str, float]:
        """How long requests may wait and run, in seconds, as SGLang's variables say."""
        limits = {
            "waiting_limit_s": float(envs.SGLANG_REQ_WAITING_TIMEOUT.get()),
            "running_limit_s": float(envs.SGLANG_REQ_RUNNING_TIMEOUT.get()),
        }
        return {name: limit for name, limit in limits.items() if limit > 0}


def begin_process(settings: Any, *, leads: bool) -> psutil.Process:
    """Makes this process a scheduler of SGLang's, and returns the one that started it.

    Args:
        settings: ``ServerArgs``.
        leads: Whether it is the one that SGLang waits for when it ends.
    """
    load_plugins()
    kill_itself_when_parent_died()
    # SGLang finds those that end by themselves under this name.
    setproctitle.setproctitle("sglang::scheduler" if leads else "sglang::rank")
    # Ctrl-C is for the process that started this one, which lets requests finish first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logger(settings, prefix="")
    publish(settings, role="scheduler")
    parent = psutil.Process().parent()
    if parent is None:
        raise RuntimeError("the process that started this scheduler has ended")
    return parent


def report_failure(parent: psutil.Process) -> None:
    """Tells SGLang's server that the scheduler has failed; it ends with all of its processes."""
    parent.send_signal(signal.SIGQUIT)


class Sockets:
    """The sockets of a scheduler. Sending takes one of them for each thread."""

    def __init__(self, settings: Any, ports: Any) -> None:
        """Connects to the tokenizer manager and the detokenizer."""
        self._context = zmq.Context(2)
        self._ports = ports
        self._skips_detokenizer = bool(settings.skip_tokenizer_init)
        name = ports.scheduler_input_ipc_name
        self._input = get_zmq_socket(self._context, zmq.PULL, name, False)

    def receive(self, timeout_ms: int) -> list[bytes]:
        """Every message that is there, after a wait for the first."""
        if not self._input.poll(timeout_ms):
            return []
        messages: list[bytes] = []
        while True:
            try:
                messages.append(self._input.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def sender(self) -> SocketSender:
        """Sockets to send by, for one thread."""
        to_tokenizer = self._push(self._ports.tokenizer_ipc_name)
        if self._skips_detokenizer:
            return SocketSender(to_tokenizer, to_tokenizer)
        return SocketSender(to_tokenizer, self._push(self._ports.detokenizer_ipc_name))

    def _push(self, name: str) -> Any:
        return get_zmq_socket(self._context, zmq.PUSH, name, False)

    def close(self) -> None:
        """Drops what was not sent."""
        self._context.destroy(linger=0)


class SocketSender:
    """Sends messages to the tokenizer manager and the detokenizer."""

    def __init__(self, to_tokenizer: Any, to_detokenizer: Any) -> None:
        """Takes the sockets."""
        self._to_tokenizer, self._to_detokenizer = to_tokenizer, to_detokenizer

    def send(self, to_detokenizer: list[bytes], to_tokenizer: list[bytes]) -> None:
        """Sends messages in their order."""
        for message in to_detokenizer:
            self._to_detokenizer.send(message)
        for message in to_tokenizer:
            self._to_tokenizer.send(message)


def front_context_length(settings: Any) -> int:
    """Positions of a context, as SGLang's front end checks requests by it."""
    return int(ModelConfig.from_server_args(settings).context_len)


def refuses_priority(settings: Any) -> bool:
    """Whether requests with a priority are refused, because the scheduler does not look at it."""
    return settings.abort_on_priority_when_disabled and not settings.enable_priority_scheduling
