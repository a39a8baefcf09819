"""Corrects how Triton's interpreter rounds to FP8: it does not carry into the exponent.

To be called before a kernel runs; a GPU rounds as torch does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


def correct() -> None:
    """Has float32 numbers rounded to ``float8_e4m3fn`` by torch."""
    usual = interpreter._convert_float

    def convert(given: Any, given_type: Any, wanted: Any, rounding: Any) -> Any:
        if wanted.name != "fp8e4nv" or given_type.primitive_bitwidth != 32:
            return usual(given, given_type, wanted, rounding)
        numbers = torch.from_numpy(np.frombuffer(given.tobytes(), dtype=np.float32).copy())
        rounded = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        return rounded.numpy().reshape(given.shape)

    interpreter._convert_float = convert
