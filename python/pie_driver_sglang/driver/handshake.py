"""The handshake: two lines of JSON on an inherited pipe, with the driver's capabilities.

The fields, their limits and the order of the lines are those of the Pie driver protocol.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

import msgspec

from pie_driver_sglang.driver.capabilities import Capabilities
from pie_driver_sglang.errors import ConfigError, StartError, quoted


class _GroupLine(msgspec.Struct, frozen=True):
    """The first line: which region serves which group."""

    group_id: int
    shmem_name: str
    caps: Capabilities


class Handshake:
    """The write end of the runtime's pipe.

    The runtime takes the end of the pipe for the end of the driver, so no child process may keep
    it open: the descriptor becomes close-on-exec at once.
    """

    def __init__(self, fd: int) -> None:
        """Take over the descriptor.

        Raises:
            ConfigError: `fd` is not open, or not open for writing.
        """
        hint = "the Pie runtime passes this descriptor; by hand, add `3>handshake.json`"
        try:
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            os.set_inheritable(fd, False)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"--handshake-fd {fd} is not an open descriptor", hint) from error
        if mode == os.O_RDONLY:
            raise ConfigError(f"--handshake-fd {fd} is not open for writing", hint)
        self._fd: int | None = fd

    def announce(self, group_id: int, shmem_name: str, caps: Capabilities) -> None:
        """Announce the driver to the runtime, and close the pipe.

        Call it when the region exists and every kernel is warm: the first request may follow at
        once.

        Args:
            group_id: The group of the configuration.
            shmem_name: The region, `/pie_shmem_g<group_id>`.
            caps: What the driver can do.

        Raises:
            StartError: The runtime is gone, the pipe is closed, or the name does not belong to the
                group.
        """
        if self._fd is None:
            raise StartError("the handshake is already over", "report this as a bug of the driver")
        if shmem_name != f"/pie_shmem_g{group_id}":
            raise StartError(
                f"region {quoted(shmem_name)} is not the region of group {group_id}",
                f"name it /pie_shmem_g{group_id}",
            )
        named = msgspec.structs.replace(caps, shmem_name=shmem_name)
        lines = msgspec.json.encode(_GroupLine(group_id, shmem_name, named))
        try:
            _write_all(self._fd, lines + b'\n{"ready":true,"num_groups":1}\n')
        except OSError as error:
            raise StartError(
                f"the handshake could not be written: {error.strerror or error}",
                "the Pie runtime that started this driver is gone or gave up; see its own log",
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the pipe; without `announce` the runtime takes this for a failed start."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """Write everything in one call if the pipe takes it, in several if it is full."""
    os.set_blocking(fd, True)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
