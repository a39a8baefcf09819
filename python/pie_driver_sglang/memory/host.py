"""Checks of the host's memory, made before anything slow is imported."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory.units import GIB

_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def check_budget(gib: int, offload_gib: int = 0, ranks: int = 1) -> None:
    """Refuses swapped pages and weights that exceed the host's memory.

    Args:
        gib: The option `cpu_mem_budget_in_gb`.
        offload_gib: The option `cpu_offload_gb`, of each rank; 0 on a CPU.
        ranks: How many there are.

    Raises:
        StartError: They exceed the host's free memory, or its container's limit.
    """
    available = available_bytes() if gib or offload_gib else 0
    if (gib + offload_gib * ranks) << 30 <= available:
        return
    name, size, other, most = "cpu_mem_budget_in_gb", gib, "", available >> 30
    if offload_gib:
        name, size = "cpu_offload_gb", offload_gib
        other = f" for each of {ranks} ranks" if ranks > 1 else ""
        other += f", and `cpu_mem_budget_in_gb` is {gib}" if gib else ""
        most = max(0, most - gib) // ranks
    raise StartError(
        f"option `{name}` is {size}{other}, but the host has only "
        f"{available / GIB:.1f} GiB of memory available",
        f"set `{name}` to at most {most}",
    )


class Budget:
    """A limit on temporary host memory of all threads: half of the available memory."""

    def __init__(self) -> None:
        """Starts with nothing reserved."""
        self._lock = threading.Lock()
        self._taken = 0

    @contextlib.contextmanager
    def take(self, size: int, what: str) -> Iterator[None]:
        """Reserves memory within the `with` block.

        Args:
            size: Bytes.
            what: The purpose, for the message.

        Raises:
            MemoryError: The reservations would exceed the limit.
        """
        with self._lock:
            most = available_bytes() // 2
            if self._taken + size > most:
                others = f" in addition to {self._taken:,} that others take" if self._taken else ""
                raise MemoryError(
                    f"{what} needs {size:,} bytes{others}, more than half of the memory "
                    f"available, {most:,} bytes"
                )
            self._taken += size
        try:
            yield
        finally:
            with self._lock:
                self._taken -= size


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Within it no other process of this installation is within it.

    What a process finds available so stays available until it has allocated it.
    """
    # No file of its own, which would stay. A file system that locks none is used as if it did.
    descriptor = os.open(__file__, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def available_bytes() -> int:
    """Available memory without swapping, within the container's limit if there is one."""
    import psutil

    # Without a limit the file is missing, says "max" or gives a huge number.
    texts = [path.read_text().strip() for path in _CONTAINER_LIMITS if path.is_file()]
    limits = [int(text) for text in texts if text.isdecimal()]
    return int(min([psutil.virtual_memory().available, *limits]))
