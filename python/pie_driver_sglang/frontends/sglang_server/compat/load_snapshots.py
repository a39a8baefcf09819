"""Load snapshots in shared memory, which `/v1/loads` and data-parallel routing read."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.server_args import PortArgs

from pie_driver_sglang.errors import ConfigError, StartError, reason
from pie_driver_sglang.frontends.sglang_server.compat.scheduler_ipc import SchedulerArguments
from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat
from pie_driver_sglang.frontends.sglang_server.served_flags import FLAG_LIST
from pie_driver_sglang.shared_names import TOKEN_VARIABLE


@contextlib.contextmanager
def token_names() -> Iterator[None]:
    """Within it, SGLang names these files with the server's token (`shared_names`).

    Raises:
        ConfigError: Ports or addresses among the flags are wrong or missing.
    """

    def init_new(*arguments: Any, **options: Any) -> PortArgs:
        try:
            ports = make(*arguments, **options)
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"SGLang refuses these flags: {reason(error)}", FLAG_LIST) from error
        ports.instance_id = os.environ.get(TOKEN_VARIABLE, "") + ports.instance_id
        return ports

    make = PortArgs.init_new
    with mock.patch.object(PortArgs, "init_new", staticmethod(init_new)):
        yield


def _reserve(path: str, size: int) -> None:
    """Allocate the file, which SGLang maps: without space a write would raise SIGBUS."""
    try:
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StartError(
            f"no room for {path}, {size} bytes: {error.strerror}",
            "delete stale files in /dev/shm, or give the container more by `--shm-size`",
        ) from error


class LoadSnapshots:
    """Publishes the load of the scheduler."""

    def __init__(self, given: SchedulerArguments) -> None:
        """Open the file of a scheduler's process.

        Raises:
            StartError: There is no space for it.
        """
        self._rank, replicas = given.replica or 0, int(given.settings.dp_size)
        if not scheduler_compat().uses_zmq(given.record):
            path = load_snapshot.shm_path_for(given.ports.instance_id)
            _reserve(path, load_snapshot.file_size(replicas))
        self._writer = scheduler_compat().make_load_writer(
            given.record, given.ports, replicas, self._rank
        )

    def write(self, counts: dict[str, Any]) -> None:
        """Publish counts, by the names of SGLang's ``LoadSnapshot``."""
        self._writer.write(LoadSnapshot(timestamp=time.time(), dp_rank=self._rank, **counts))

    def close(self) -> None:
        """Remove the file, which SGLang leaves behind."""
        path = getattr(self._writer, "path", None)
        self._writer.close()
        if path is not None:
            with contextlib.suppress(OSError):
                Path(path).unlink()
