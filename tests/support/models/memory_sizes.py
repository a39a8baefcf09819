"""Qwen3-0.6B on an H200, as the memory plan sees it."""

from __future__ import annotations

from pie_driver_sglang.memory.plan_types import (
    REPLICATED,
    SHARDED,
    Device,
    MemorySettings,
    ModelSizes,
    Part,
)
from pie_driver_sglang.memory.units import GIB

PAGE = 16
H200 = Device("cuda:0", 140 * GIB, 139 * GIB)
# Qwen3-0.6B in bfloat16: 28 layers, 16 heads and 8 for keys and values, 128 wide.
QWEN = ModelSizes(
    weights=(Part(1_192_099_840, SHARDED), Part(21_102_592, REPLICATED)),
    token_bytes=Part(28 * 8 * 2 * 128 * 2, 8),
    row_numbers=(Part(9216, SHARDED),),
    itemsize=2,
    hidden_size=1024,
    layers=28,
    vocabulary=151_936,
    heads=16,
    head_dim=128,
)
USUAL = MemorySettings(
    context_length=40_960, page_size=PAGE, requests=256, chunk_tokens=8192, slots=512
)
