"""The interface of a scheduler process to SGLang: arguments, title, sockets, failure signal."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import setproctitle
import zmq
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.utils import configure_logger, kill_itself_when_parent_died
from sglang.srt.utils.network import get_zmq_socket

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat


class SchedulerArguments:
    """The arguments of SGLang's ``run_scheduler_process``.

    Attributes:
        record: ``ServerArgs``, for SGLang's own functions.
        settings: The values in effect, by the names of the fields.
        ports: The names of the sockets.
        gpu_id: The device of SGLang's own scheduler.
        rank: Of tensor parallelism.
        replica: Of data parallelism; None without.
        pipe: Takes the message that the scheduler is ready.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        """Read the positional arguments.

        Raises:
            RuntimeError: Their number is that of another version of SGLang.
        """
        names = scheduler_compat().parameters()
        needed = names.index("pipe_writer") + 1
        if len(arguments) not in (needed, len(names)):
            raise RuntimeError(
                f"SGLang gives a scheduler {len(arguments)} arguments, expected {needed} or "
                f"{len(names)}: install a version that this package supports"
            )
        # Those for display are missing without data parallelism.
        given = dict(zip(names, arguments, strict=False))
        self.record, self.ports = given["server_args"], given["port_args"]
        self.settings: Any = selection.settings().values(self.record)
        self.gpu_id, self.rank = int(given["gpu_id"]), int(given["tp_rank"])
        self.replica, self.pipe = given["dp_rank"], given["pipe_writer"]

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


def begin_process(given: SchedulerArguments, *, leads: bool) -> psutil.Process:
    """Set this process up as a scheduler of SGLang, and return its parent.

    Args:
        given: The arguments of the process.
        leads: Whether it is the scheduler that SGLang waits for at shutdown.
    """
    load_plugins()
    kill_itself_when_parent_died()
    # SGLang recognizes schedulers that end by themselves by this title.
    setproctitle.setproctitle("sglang::scheduler" if leads else "sglang::rank")
    # Ctrl-C is for the process that started this one, which lets requests finish first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As SGLang's schedulers name themselves in each line.
    replica_name = "" if given.replica is None else f" DP{given.replica}"
    rank_name = " TP0" if given.settings.tp_size > 1 else ""
    configure_logger(given.record, prefix=replica_name + rank_name)
    selection.settings().publish(given.record, given.rank, given.gpu_id, given.replica)
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
        self._input = get_zmq_socket(self._context, socket_type=zmq.PULL, endpoint=name, bind=False)

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
        return get_zmq_socket(self._context, socket_type=zmq.PUSH, endpoint=name, bind=False)

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


def front_context_length(record: Any) -> int:
    """The context length by which SGLang's frontend validates requests."""
    return int(ModelConfig.from_server_args(record).context_len)


def refuses_priority(settings: Any) -> bool:
    """Whether requests with a priority are rejected, because the scheduler ignores it."""
    return settings.abort_on_priority_when_disabled and not settings.enable_priority_scheduling
