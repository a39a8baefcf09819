"""What the processes of `vllm_check.py` print."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from typing import Any


def find(**figures: Any) -> None:
    """Tells `vllm_check.py`."""
    print(f"found {json.dumps(figures)}", flush=True)


@contextlib.contextmanager
def tried(what: str, failed: list[str]) -> Iterator[None]:
    """Prints the traceback of what fails within it, and continues."""
    begin = time.perf_counter()
    try:
        yield
        print(f"{what}: {time.perf_counter() - begin:.1f} s", flush=True)
    except BaseException:
        failed.append(what)
        print(f"{what} FAILED:\n{traceback.format_exc()}", flush=True)
