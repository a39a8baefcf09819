"""`ModelUpdates`: weights that change, sleep and wake, in step with the requests of a runtime.

While weights are written nothing is computed, and no request has tokens of both the old and the new
weights, unless its client has paused it to continue with the new ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.checkpoint.weight_files import memory_file
from pie_driver_sglang.errors import ConfigError, DriverError, WeightsError, quoted
from pie_driver_sglang.frontends.common.control_socket import ControlSocket, OwnedLock
from pie_driver_sglang.frontends.common.model_location import model_folder

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.02
_DRAIN_S: Final = 600.0
"""How long an update waits for the requests that run."""
_FORMATS: Final = (None, "auto", "safetensors")
_RANDOM: Final = "reset_tensors"
"""The action of `check` that writes weights."""
_TAGS: Final = ("kv_cache", "weights", "cuda_graph")
_NO_CATCH_UP: Final = (
    "the driver was restarted, and the weights of the last update came from tensors, which it "
    "cannot read again: update all weights"
)
_NOT_ROLLED_BACK: Final = (
    "an update failed on one replica, and another cannot load the former weights again: {}: update "
    "all weights, or restart the server"
)
_FOLDER_GONE: Final = (
    "the driver was restarted, and the folder of the last update, {}, is gone: update all weights"
)
_NOT_AGAIN: Final = (
    "the driver was restarted, and cannot load the weights of the last update again: {}: update "
    "all weights"
)
_UNANSWERED: Final = "{}, so its weights are unknown: update all weights, or restart the server"
_ASLEEP: Final = "the memory of {} is released: call `/resume_memory_occupation` before"


class UpdateResult(NamedTuple):
    """What came of an update; SGLang's pair."""

    success: bool
    message: str


class ModelUpdates:
    """Updates of one runtime's model. Any thread may call it; updates run one after the other."""

    def __init__(
        self,
        runtime: Any,
        socket: ControlSocket,
        folder: Path,
        *,
        on_pause: Callable[[bool], object] = lambda paused: None,
        on_unavailable: Callable[[str | None], object] = lambda reason: None,
        on_version: Callable[[str], object] = lambda version: None,
    ) -> None:
        """Control a runtime.

        Args:
            runtime: The native runtime.
            socket: Connects to its drivers.
            folder: The weights that its drivers start with.
            on_pause: Called with whether nothing is computed for now.
            on_unavailable: Called with the reason why requests cannot be served, or None.
            on_version: Called with the name of new weights, before anything is computed with them.
        """
        self._runtime, self._socket, self._start = runtime, socket, str(folder)
        self._on_pause, self._on_unavailable = on_pause, on_unavailable
        self._on_version = on_version
        self._updating = OwnedLock()
        self._state = threading.Condition(threading.RLock())
        self._pause: str | None = None
        """How the client has paused; None where it has not."""
        self._busy = False
        self.is_draining = False
        """Whether an update waits for running requests, or runs: new ones would delay it."""
        self._awaits_requests = False
        """Whether an update waits for running requests, which must be computed meanwhile."""
        self._asleep: tuple[str, ...] = ()
        self._source: str | None = ""
        """The folder of the last update; empty before the first, None after one by tensors."""
        self._lost: str | None = None
        """Why the drivers do not have the weights of the last update."""
        self._last_reason: str | None = None
        socket.on_restart(self._catch_up, self._restarted, self._not_caught_up)

    @property
    def unavailable(self) -> str | None:
        """Why no request can be served."""
        if self._lost is not None:
            return self._lost
        if self._asleep and self._pause is None:
            return _ASLEEP.format(" and ".join(f"`{tag}`" for tag in self._asleep))
        return None

    @contextlib.contextmanager
    def admitting(self) -> Iterator[None]:
        """Within it requests may be submitted; blocks while an update is under way.

        Raises:
            WeightsError: Requests cannot be served.
        """
        self._updating.refuse_owner()
        with self._state:
            while self._busy:
                self._state.wait()
            if (reason := self.unavailable) is not None:
                raise WeightsError(reason)
            yield

    def pause(self, mode: str) -> None:
        """Compute nothing until :meth:`resume`: `in_place`, or `retract`."""
        with self._state:
            self._pause = mode
            self._runtime.pause(retract=mode == "retract")
            self._apply_pause()

    def resume(self) -> None:
        """Continue, unless an update is under way or memory is released: then afterwards."""
        with self._state:
            self._pause = None
            self._apply_pause()

    def update_from_disk(
        self,
        path: str,
        load_format: str | None = None,
        *,
        flush: bool = True,
        version: str | None = None,
    ) -> UpdateResult:
        """Replace all weights by those of a folder or a repository.

        Args:
            path: The folder, or the repository's name.
            load_format: None, `auto` or `safetensors`.
            flush: Refuse while requests are paused in place.
            version: Names these weights; None keeps the name.
        """
        if load_format not in _FORMATS:
            text = f"`load_format` is {quoted(load_format)}: weights are read from safetensors"
            return UpdateResult(False, f"{text}; leave it out")

        try:
            # A download must not hold up other updates, or a wake.
            folder = str(_folder(path))
        except DriverError as error:
            return UpdateResult(False, error.with_hint)

        def update() -> str:
            with self._without_requests(flush), self._socket.steady():
                self._ask_all({"command": "DiskUpdate", "folder": folder})
                self._source, self._lost = folder, None
                self._name_weights(version)
            return "Succeeded to update model weights."

        return self._result(update)

    def update_from_tensors(
        self, data: bytes, *, flush: bool = True, version: str | None = None
    ) -> UpdateResult:
        """Replace some weights by the tensors of a safetensors file.

        Args:
            data: The bytes of the file.
            flush: Refuse while requests are paused in place.
            version: Names these weights; None keeps the name.
        """

        def update() -> str:
            with memory_file(data) as file, self._without_requests(flush), self._socket.steady():
                return self._update_part({"command": "TensorUpdate", "file": file}, version)

        return self._result(update)

    def update_from_group(
        self, fields: Mapping[str, Any], *, flush: bool = True, version: str | None = None
    ) -> UpdateResult:
        """Replace some weights by tensors that a trainer broadcasts; see `GroupUpdate`."""

        def update() -> str:
            with self._without_requests(flush), self._socket.steady():
                return self._update_part({"command": "GroupUpdate", **fields}, version)

        return self._result(update)

    def join_group(self, fields: Mapping[str, Any]) -> UpdateResult:
        """Join a process group for updates; see `JoinGroup`. Drivers wait for its other members."""

        def join() -> str:
            with self._without_requests(False):
                return self._run_command({"command": "JoinGroup", **fields}, "initialize")

        return self._result(join)

    def leave_group(self, name: str) -> UpdateResult:
        """Leave such a group."""
        return self._result(
            lambda: self._run_command({"command": "LeaveGroup", "name": name}, "destroy")
        )

    def read(self, name: str, rows: int) -> list[Any]:
        """The first rows of a tensor, by its name in the checkpoint.

        Raises:
            WeightsError: The model has none of this name, or it cannot be read.
        """
        if type(rows) is not int:
            raise WeightsError(f"the number of rows is {quoted(rows)}", "use an integer")
        with self._updating:
            found: list[Any] = self._ask_all({"command": "ReadWeight", "name": name, "rows": rows})[
                0
            ]["rows"]
        return found

    def check(self, action: str) -> list[dict[str, str]] | None:
        """Checksums of each rank's tensors, or None for another of SGLang's actions.

        Raises:
            WeightsError: The action is unknown, or a comparison found a difference.
        """
        if action == _RANDOM:
            with self._updating, self._without_requests(True):
                answers = self._ask_all({"command": "CheckWeights", "action": action})
        else:
            # A step that waited for it would take too long.
            with self._updating, self._paused_in_place():
                answers = self._ask_all({"command": "CheckWeights", "action": action})
        return [sums for answer in answers for sums in answer.get("ranks", [])] or None

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Release memory once no request runs; requests are refused until it is resumed.

        Raises:
            WeightsError: A tag is unknown, the device cannot, or requests are paused in place.
        """
        names = _checked_tags(tags)
        with self._updating, self._without_requests(True), self._socket.steady():
            try:
                self._ask_all({"command": "ReleaseMemory", "tags": names})
            except WeightsError:
                self._resume_partial_release([tag for tag in names if tag not in self._asleep])
                raise
            self._asleep = tuple(tag for tag in _TAGS if tag in {*self._asleep, *names})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again; requests are served once all of it is there.

        Raises:
            WeightsError: A tag is unknown, or there is too little memory.
        """
        names = _checked_tags(tags)
        with self._updating:
            with self._socket.steady():
                self._ask_all({"command": "ResumeMemory", "tags": names})
                self._asleep = tuple(tag for tag in self._asleep if tag not in names)
            with self._state:
                self._apply_pause()

    def _resume_partial_release(self, tags: Sequence[str]) -> None:
        """Have all replicas take memory again that only some have released."""
        with contextlib.suppress(WeightsError):
            answers = self._socket.call({"command": "ResumeMemory", "tags": tags})
            if not all(answer["success"] for answer in answers):
                self._asleep = tuple(tag for tag in _TAGS if tag in {*self._asleep, *tags})

    def _name_weights(self, version: str | None) -> None:
        if version is not None:
            self._on_version(version)

    def _update_part(self, command: Mapping[str, Any], version: str | None) -> str:
        answers = self._ask_all(command)
        lacking = max(int(answer["lacking"]) for answer in answers)
        self._source = None
        self._name_weights(version)
        if lacking == 0:
            self._lost = None
        return "Success" if self._lost is None else f"Success; {lacking} tensors are still lacking"

    def _run_command(self, command: Mapping[str, Any], verb: str) -> str:
        self._ask_all(command)
        return f"Succeeded to {verb} custom process group."

    def _result(self, work: Callable[[], str]) -> UpdateResult:
        try:
            with self._updating:
                return UpdateResult(True, work())
        except DriverError as error:
            return UpdateResult(False, error.with_hint)

    def _ask_all(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every driver answers to a command.

        Raises:
            WeightsError: One has refused it; the others are as they were.
        """
        answers = self._socket.call(command)
        failed = [answer for answer in answers if not answer["success"]]
        if not failed:
            return answers
        is_update = command["command"].endswith("Update") or command.get("action") == _RANDOM
        late = [answer["message"] for answer in failed if answer.get("timed_out")]
        if is_update and late:
            self._source, self._lost = None, _UNANSWERED.format(late[0])
        elif is_update and len(failed) < len(answers):
            self._roll_back()
        raise WeightsError(failed[0]["message"], failed[0]["hint"])

    def _roll_back(self) -> None:
        """Have all replicas serve the same weights after only some have taken an update."""
        if self._source is None:
            # Tensors cannot be read again.
            self._lost = _NO_CATCH_UP
            return
        folder = self._source or self._start
        answers = self._socket.call({"command": "DiskUpdate", "folder": folder})
        # One that is being restarted loads this folder by itself.
        failed = [answer for answer in answers if not (answer["success"] or answer.get("gone"))]
        if failed:
            self._lost = _NOT_ROLLED_BACK.format(failed[0]["message"])

    @contextlib.contextmanager
    def _without_requests(self, flush: bool) -> Iterator[None]:
        """Within it nothing is computed, and no request has KV of the weights so far.

        Raises:
            WeightsError: Requests run for too long, or are paused in place.
        """
        try:
            with self._state:
                self._busy = True
                if self._pause is None and not self.unavailable:
                    self.is_draining = self._awaits_requests = True
                self._on_pause(True)
            self._drain()
            self._drop_kv(flush)
            yield
        finally:
            with self._state:
                self._busy = self.is_draining = self._awaits_requests = False
                self._apply_pause()
                self._state.notify_all()

    @contextlib.contextmanager
    def _paused_in_place(self) -> Iterator[None]:
        """Within it nothing is computed, and requests stay where they are."""
        with self._state:
            self._busy = True
        try:
            if not self._runtime.pause():
                raise WeightsError("a step is still running after a minute", "try again later")
            yield
        finally:
            with self._state:
                self._busy = False
                self._apply_pause()
                self._state.notify_all()

    def _drop_kv(self, flush: bool) -> None:
        if not self._runtime.pause(retract=self._pause == "retract"):
            raise WeightsError("a step is still running after a minute", "try again later")
        # Retracted requests have no KV, and the prefix index is empty then.
        if flush and self._pause == "in_place" and not self._runtime.flush_cache():
            raise WeightsError(
                "requests are paused in place, and keep KV of the former weights",
                'pause with the mode "retract" or "abort", or set `flush_cache` to false',
            )

    def _drain(self) -> None:
        """Wait until no request runs; not for those that a client has paused, or that are refused.

        Raises:
            WeightsError: Requests run for too long, or the socket is closed.
            StartError: The drivers cannot be started again.
        """
        until = time.monotonic() + _DRAIN_S
        while self._awaits_requests:
            self._socket.require_open()
            self._runtime.wait_ready(0.0)
            with self._state:
                self._awaits_requests = not (self._pause or self.unavailable or self._is_idle())
            if not self._awaits_requests:
                return
            if time.monotonic() > until:
                raise WeightsError(
                    f"requests still run after {_DRAIN_S:g} s",
                    "abort them by `abort_all_requests`, or pause them",
                )
            time.sleep(_LOOK_S)

    def _is_idle(self) -> bool:
        """Whether no request runs or waits; then the runtime is paused, with an empty cache."""
        stats = self._runtime.stats()
        if stats["running"] or stats["waiting"]:
            return False
        if not self._runtime.pause():
            raise WeightsError("a step is still running after a minute", "try again later")
        if self._runtime.flush_cache():
            return True
        self._runtime.resume()
        return False

    def _apply_pause(self) -> None:
        """Pause or resume the runtime, as the client, updates, and released memory want it."""
        refuses = bool(self._asleep) or self._lost is not None
        if refuses or (self._busy and not self._awaits_requests):
            self._runtime.pause()
        elif self._pause is None:
            self._runtime.resume()
        # A model without its weights is not healthy; one that sleeps is.
        waits = self._busy or bool(self._asleep) or self._pause is not None
        self._on_pause(waits and self._lost is None)
        if (reason := self.unavailable) != self._last_reason:
            self._last_reason = reason
            self._on_unavailable(reason)

    def _catch_up(self) -> list[dict[str, Any]]:
        """What a restarted driver has to do before it serves."""
        commands: list[dict[str, Any]] = []
        if self._source:
            commands.append({"command": "DiskUpdate", "folder": self._source})
        if self._asleep:
            commands.append({"command": "ReleaseMemory", "tags": list(self._asleep)})
        return commands

    def _restarted(self) -> None:
        if self._source and not Path(self._source).is_dir():
            self._mark_unavailable(_FOLDER_GONE.format(quoted(self._source)))
        elif self._source is None and self._lost is None:
            self._mark_unavailable(_NO_CATCH_UP)

    def _not_caught_up(self, reason: str) -> None:
        self._mark_unavailable(_NOT_AGAIN.format(reason))

    def _mark_unavailable(self, reason: str) -> None:
        """Refuse requests: a driver has been started with other weights."""
        logger.error("%s", reason)
        with self._state:
            self._source, self._lost = None, reason
            self._apply_pause()


def _checked_tags(tags: Sequence[str] | None) -> list[str]:
    for tag in tags or ():
        if tag not in _TAGS:
            raise WeightsError(f"the tag is {quoted(tag)}", f"use {', '.join(_TAGS)}")
    return [tag for tag in _TAGS if not tags or tag in tags]


def _folder(path: str) -> Path:
    """The folder of a path or a repository, which is downloaded if it is not there."""
    try:
        return model_folder({"model_path": path}, with_weights=True).absolute()
    except ConfigError as error:
        raise WeightsError(error.message, error.hint) from error
