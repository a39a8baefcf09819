"""Constants of several kernels."""

from __future__ import annotations

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""The exponentials of kernels are powers of 2: ``exp(x)`` is ``exp2(x * LOG2E)``."""
