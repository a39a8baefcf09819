"""The interface of a scheduler process to SGLang: arguments, title, sockets, failure signal."""

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
"""Index of the pipe, by the number of arguments."""


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
        """Read the positional arguments.

        Raises:
            RuntimeError: Their number is that of another version of SGLang.
        """
        pipe = _PIPE.get(len(arguments))
        if pipe is None:
            raise RuntimeError(
                f"SGLang gives a scheduler {len(arguments)} arguments, expected 10 or 13: install "
                "the version that this package names"
            )
        self.settings, self.ports = arguments[0], arguments[1]
        self.rank, self.replica = int(arguments[3]), arguments[8]
        self.pipe = arguments[pipe]

    @property
    def adapters(self) -> list[tuple[str, str, str]]:
        """The adapters of `--lora-paths`: SGLang's id, name and path."""
        refs = self.settings.lora_paths if self.settings.enable_lora else None
        return [(ref.lora_id, ref.lora_name, ref.lora_path) for ref in refs or ()]

    @property
    def limits(self) -> dict[str, float]:
        """Timeouts of waiting and running requests in seconds, from SGLang's variables."""
        limits = {
            "waiting_limit_s": float(envs.SGLANG_REQ_WAITING_TIMEOUT.get()),
            "running_limit_s": float(envs.SGLANG_REQ_RUNNING_TIMEOUT.get()),
        }
        return {name: limit for name, limit in limits.items() if limit > 0}


def begin_process(settings: Any, replica: int | None, *, leads: bool) -> psutil.Process:
    """Set this process up as a scheduler of SGLang, and return its parent.

    Args:
        settings: ``ServerArgs``.
        replica: Of data parallelism; None without.
        leads: Whether it is the scheduler that SGLang waits for at shutdown.
    """
    load_plugins()
    kill_itself_when_parent_died()
    # SGLang recognizes schedulers that end by themselves by this title.
    setproctitle.setproctitle("sglang::scheduler" if leads else "sglang::rank")
    # Ctrl-C is for the process that started this one, which lets requests finish first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As SGLang's schedulers name themselves in each line.
    replica_name = "" if replica is None else f" DP{replica}"
    configure_logger(settings, prefix=replica_name + (" TP0" if settings.tp_size > 1 else ""))
    publish(settings, role="scheduler")
    parent = psutil.Process().parent()
    if parent is None:
        raise RuntimeError("the process that started this scheduler has ended")
    return parent


def report_failure(parent: psutil.Process) -> None:
    """Signal the failure to SGLang's server, which ends with all of its processes."""
    parent.send_signal(signal.SIGQUIT)


class Sockets:
    """The ZeroMQ sockets of a scheduler; each thread needs its own sender."""

    def __init__(self, settings: Any, ports: Any) -> None:
        """Connect to the tokenizer manager and the detokenizer."""
        self._context = zmq.Context(2)
        self._ports = ports
        self._skips_detokenizer = bool(settings.skip_tokenizer_init)
        name = ports.scheduler_input_ipc_name
        self._input = get_zmq_socket(self._context, zmq.PULL, name, False)

    def receive(self, timeout_ms: int) -> list[bytes]:
        """All available messages, after a wait for the first."""
        if not self._input.poll(timeout_ms):
            return []
        messages: list[bytes] = []
        while True:
            try:
                messages.append(self._input.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def sender(self) -> SocketSender:
        """A sender for one thread."""
        to_tokenizer = self._push(self._ports.tokenizer_ipc_name)
        if self._skips_detokenizer:
            return SocketSender(to_tokenizer, to_tokenizer)
        return SocketSender(to_tokenizer, self._push(self._ports.detokenizer_ipc_name))

    def _push(self, name: str) -> Any:
        return get_zmq_socket(self._context, zmq.PUSH, name, False)

    def close(self) -> None:
        """Close the sockets, and drop unsent messages."""
        self._context.destroy(linger=0)


class SocketSender:
    """Sends messages to the tokenizer manager and the detokenizer."""

    def __init__(self, to_tokenizer: Any, to_detokenizer: Any) -> None:
        """Use these sockets."""
        self._to_tokenizer, self._to_detokenizer = to_tokenizer, to_detokenizer

    def send(self, to_detokenizer: list[bytes], to_tokenizer: list[bytes]) -> None:
        """Send messages in order."""
        for message in to_detokenizer:
            self._to_detokenizer.send(message)
        for message in to_tokenizer:
            self._to_tokenizer.send(message)


def front_context_length(settings: Any) -> int:
    """The context length by which SGLang's frontend validates requests."""
    return int(ModelConfig.from_server_args(settings).context_len)


def refuses_priority(settings: Any) -> bool:
    """Whether requests with a priority are rejected, because the scheduler ignores it."""
    return settings.abort_on_priority_when_disabled and not settings.enable_priority_scheduling
