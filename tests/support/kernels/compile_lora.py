"""Kernels with LoRA compiled for compute capability 9.0: launch order and shared memory."""

from __future__ import annotations

import re
from typing import Any

import torch

from pie_driver_sglang.kernels.gemm import linear, small_m
from pie_driver_sglang.kernels.gemm.lora import (
    LoraRows,
    LoraWeights,
    lora_expand,
    lora_shrink,
)
from pie_driver_sglang.kernels.gemm.types import LinearWeights, Residual, TileConfig, Workspace
from support.kernels.compile_harness import check_order, recorded

CASES = ((16, 1), (16, 64), (128, 64), (128, 1024))
"""Ranks and rows."""


def check_lora(dtype: torch.dtype) -> None:
    """The places in a layer of Llama-3.1-8B, of adapters of small and large ranks."""
    for rank, count in CASES:
        kernels = recorded(lambda: launch(rank, count, dtype))  # noqa: B023
        assert len(kernels) == (3 if count > small_m.MAX_ROWS else 7)
        for kernel in kernels:
            if "gemm" in kernel.name:
                check_gemm_order(kernel)
            else:
                # A shrink loads slots, its rank and weights of adapters; the GEMM starts behind
                # its wait.
                shrinks = "shrink" in kernel.name
                check_order(kernel, None if shrinks else 0, leads=not shrinks)
            assert kernel.metadata.shared <= linear.MAX_SHARED_BYTES, kernel.metadata.shared
            print(f"rank {rank}, {count} rows: {kernel.metadata.shared} bytes of shared memory")


def check_gemm_order(kernel: Any) -> None:
    """The shrink is awaited behind the loop over K, and nothing is written before."""
    before, wait, behind = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.wait" not in behind
    assert "griddepcontrol.launch_dependents" in before
    assert not re.search(r"\b(?:st|red|atom)\S*\.global", before)
    assert re.search(r"\bst\S*\.global", behind)
    loop, after = (len(re.findall("mma|fma.rn.f32", part)) for part in (before, behind))
    assert loop > 0 and after > 0, (loop, after)


def launch(rank: int, count: int, dtype: torch.dtype) -> None:
    """Launches what a layer does."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(1, dtype=dtype).expand(shape)

    def weights(parts: tuple[int, ...], inputs: int) -> LoraWeights:
        return LoraWeights(zeros(9, len(parts) * rank, inputs), zeros(9, sum(parts), rank), parts)

    rows = LoraRows(torch.zeros(count, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))
    qkv, down = weights((4096, 1024, 1024), 4096), weights((4096,), 14336)
    gate_up = weights((14336, 14336), 4096)
    workspace = Workspace(torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    x, inner = torch.zeros(count, 4096, dtype=dtype), torch.zeros(count, 14336, dtype=dtype)
    of_x, of_inner = lora_shrink(x, rows, qkv), lora_shrink(inner, rows, down)
    lora_expand(torch.zeros(count, 6144, dtype=dtype), of_x)
    if count > small_m.MAX_ROWS:
        return
    config = (
        TileConfig(1, 16, 512, num_stages=1)
        if count == 1
        else TileConfig(64, 64, 256, num_stages=3)
    )
    small_m.small_m_gemm(x, LinearWeights(zeros(6144, 4096)), config, workspace, lora=of_x)
    residual = Residual(x, torch.zeros(count, 4096 // config.block_n))
    small_m.small_m_gemm(
        inner, LinearWeights(zeros(4096, 14336)), config, workspace,
        residual=residual, lora=of_inner,
    )  # fmt: skip
    config = (
        TileConfig(1, 4, 512, num_stages=1) if count == 1 else TileConfig(64, 32, 128, num_stages=3)
    )
    small_m.small_m_gemm(
        x, LinearWeights(zeros(28672, 4096)), config, workspace, swiglu=True,
        lora=lora_shrink(x, rows, gate_up),
    )  # fmt: skip
