"""Weights as files of memory, which other processes of this user open by their path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from pie_driver_sglang.errors import WeightsError


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[str]:
    """A file (memfd) with these bytes; yields its path, which is valid within.

    Raises:
        WeightsError: There is too little memory.
    """
    descriptor = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            raise WeightsError(f"there is no memory for the tensors: {error}") from error
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
