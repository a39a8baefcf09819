"""Views of the arrays that Rust lays out in one block of memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


def views(
    memory: torch.Tensor, layout: Mapping[str, tuple[str, int, int]]
) -> dict[str, torch.Tensor]:
    """For each array a view over its whole capacity.

    Args:
        memory: ``[bytes]`` uint8.
        layout: name to dtype, byte offset and capacity in elements.
    """
    return {
        name: memory[offset : offset + capacity * _DTYPES[dtype].itemsize].view(_DTYPES[dtype])
        for name, (dtype, offset, capacity) in layout.items()
    }
