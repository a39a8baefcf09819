"""Names in ``/dev/shm`` and the temporary folder that identify their server.

SGLang ends its processes by SIGKILL, which leaves shared memory under anonymous names. Containers
may share ``/dev/shm``, so process ids and open files do not identify an owner. Therefore each
server has a random token, which is part of all of its names.
"""

from __future__ import annotations

import os
import secrets
import string
import tempfile
from multiprocessing import process, shared_memory
from typing import Any, Final

TOKEN_VARIABLE: Final = "PIE_SGLANG_SERVER"
"""The environment variable with the server's token."""
TOKEN_LENGTH: Final = 10
"""About 52 bits. Socket paths, which have it twice, are limited to 107 bytes."""
_LETTERS: Final = string.ascii_lowercase + string.digits


def make_token() -> str:
    """A random token."""
    return "".join(secrets.choice(_LETTERS) for _ in range(TOKEN_LENGTH))


def use_token() -> None:
    """Use the server's token in all names that this process and its children create.

    These are semaphores and shared memory of ``multiprocessing``, and temporary files, by which
    SGLang names its sockets and load snapshots.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token or tempfile.template == token:
        return
    tempfile.template = token
    configuration: dict[str, Any] = vars(process.current_process())["_config"]
    configuration["semprefix"] = f"/mp-{token}"
    _name_shared_memory(token)


def _reserve(block: Any) -> None:
    """Allocate a new block: without space, a write would raise SIGBUS.

    Raises:
        OSError: There is no space; the block is removed.
    """
    try:
        os.posix_fallocate(block._fd, 0, block.size)
    except OSError as error:
        block.close()
        block.unlink()
        text = f"no room for {block.size} bytes of shared memory: {error.strerror}"
        raise OSError(error.errno, text, "/dev/shm") from error


def _name_shared_memory(token: str) -> None:
    """Name every block of shared memory with the token, and allocate it."""
    initialize: Any = shared_memory.SharedMemory.__init__

    def begin(
        self: Any, name: str | None = None, create: bool = False, size: int = 0, **options: Any
    ) -> None:
        if name is None:
            name = f"psm_{secrets.token_hex(4)}"
        if token not in name:
            name = f"{name}_{token}"
        initialize(self, name, create, size, **options)
        if create:
            _reserve(self)

    shared_memory.SharedMemory.__init__ = begin  # type: ignore[method-assign]
