"""Names in ``/dev/shm`` and the temporary folder that tell whose they are.

SGLang ends its processes by SIGKILL, and what they had in shared memory stays under names that say
nothing of their owner. Containers may share ``/dev/shm``, so neither a process id nor what is open
somewhere tells. A server therefore draws a token, which every one of its names has in it.
"""

from __future__ import annotations

import os
import secrets
import string
import tempfile
from multiprocessing import process, shared_memory
from typing import Any, Final

TOKEN_VARIABLE: Final = "PIE_SGLANG_SERVER"
"""The environment variable that gives a server's processes its token."""
TOKEN_LENGTH: Final = 10
"""About 52 bits. The paths of sockets, which have it twice, are limited to 107 bytes."""
_LETTERS: Final = string.ascii_lowercase + string.digits


def make_token() -> str:
    """A token that no other server has."""
    return "".join(secrets.choice(_LETTERS) for _ in range(TOKEN_LENGTH))


def use_token() -> None:
    """Gives what this process makes from now on, and its children, names with the server's token.

    These are semaphores and shared memory of ``multiprocessing``, and temporary files: SGLang names
    its sockets by them, and the counts of its schedulers after those.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token or tempfile.template == token:
        return
    tempfile.template = token
    configuration: dict[str, Any] = vars(process.current_process())["_config"]
    configuration["semprefix"] = f"/mp-{token}"
    _name_shared_memory(token)


def _reserve(block: Any) -> None:
    """Has the kernel find room for a new block: where there is none, a write would be a SIGBUS.

    Raises:
        OSError: There is none; the block is removed.
    """
    try:
        os.posix_fallocate(block._fd, 0, block.size)
    except OSError as error:
        block.close()
        block.unlink()
        text = f"no room for {block.size} bytes of shared memory: {error.strerror}"
        raise OSError(error.errno, text, "/dev/shm") from error


def _name_shared_memory(token: str) -> None:
    """Has each block of shared memory named with the token, and its room reserved."""
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
