"""Kernels of SGLang that nvcc compiles at their first use, by `tvm_ffi.cpp`.

Layers that are not fused need some: RoPE, SwiGLU and the store of KV. On a machine without
`~/.cache/tvm-ffi` each of them costs seconds of the start.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pie_driver_sglang.kernels.compile_times import RecordTime

logger = logging.getLogger(__name__)


def report_builds(record: RecordTime) -> None:
    """From now on each build in this process is logged and recorded, also one that fails.

    SGLang's `load_jit` looks these functions up for each kernel that is in no cache.
    """
    try:
        from tvm_ffi import cpp
    except ImportError as error:
        logger.debug("builds of nvcc are not reported: %s", error)
        return

    for name in ("load", "load_inline"):
        setattr(cpp, name, _reported(getattr(cpp, name), record))


def _reported(build: Callable[..., Any], record: RecordTime) -> Callable[..., Any]:
    @functools.wraps(build)
    def reported(name: str, *arguments: Any, **named: Any) -> Any:
        logger.info("nvcc compiles SGLang's %s, which is in no cache", name)
        begin = time.monotonic()
        try:
            return build(name, *arguments, **named)
        finally:
            record(f"compile {name}", begin, time.monotonic())

    return reported
