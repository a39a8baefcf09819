"""LoRA in CUDA C++ without a GPU: device code with lanes as threads, compilation, launches."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pie_driver_sglang.kernels.cuda import compiled
from pie_driver_sglang.kernels.gemm import lora as lora_kernels
from pie_driver_sglang.kernels.gemm import wgmma
from pie_driver_sglang.kernels.gemm.lora import LoraRows, LoraWeights, Shrunk, lora_shrink
from pie_driver_sglang.kernels.gemm.types import Epilogue, LinearWeights
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm
from support.kernels.lora_lanes import HostLanes, HostShrinkKernel
from support.kernels.nvrtc_log import nvrtc_makes

STORE, SWIGLU, ADD_RESIDUAL = Epilogue
NAN = float("nan")


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the device code")
@pytest.mark.parametrize(
    ("block_m", "count", "split_k", "swiglu"),
    [(8, 5, 1, False), (64, 64, 2, False), (96, 70, 1, False), (32, 32, 1, True)],
)
def test_a_warp_adds_the_adapters_of_its_rows(
    block_m: int, count: int, split_k: int, swiglu: bool, tmp_path: Path
) -> None:
    """Ranks of 0 to 24, more slots than are loaded at once; unused memory is NaN."""
    torch.manual_seed(block_m)
    lanes = HostLanes(tmp_path, block_m, split_k, swiglu=swiglu)
    max_rank, padded, outputs = 24, 32, 96
    ranks = torch.tensor([24, 0, 7, 16, 1, 17, 24, 8, 3], dtype=torch.int32)
    slots = torch.randint(-1, len(ranks), (count,), dtype=torch.int32)
    slots[: len(ranks)] = torch.arange(len(ranks))[:count]
    slots[-1] = -1
    parts = 2 if swiglu else 3
    ends = (outputs // 2, outputs) if swiglu else (32, 64)
    up = torch.full((len(ranks), outputs, max_rank), NAN, dtype=torch.bfloat16)
    values = torch.full((count, parts * padded), NAN, dtype=torch.bfloat16)
    for slot, rank in enumerate(ranks.tolist()):
        up[slot, :, :rank] = torch.randn(outputs, rank)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            own = values[row].view(parts, padded)
            own.zero_()
            own[:, : ranks[slot]] = torch.randn(parts, int(ranks[slot]))
    for upper in (8, 40) if swiglu else (16, 32, 80):
        found = lanes.sums(values, up, slots, ranks, upper, ends, padded)
        step = outputs // 2 if swiglu else 8
        columns = [*range(upper, upper + 8), *range(upper + step, upper + step + 8)]
        expected = torch.zeros(16, count, dtype=torch.float64)
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            rank = int(ranks[slot])
            for number, column in enumerate(columns):
                part = sum(column >= end for end in ends)
                own = values[row].view(parts, padded)[part, :rank].double()
                expected[number, row] = up[slot, column, :rank].double() @ own
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the device code")
def test_a_shrink_tiles_the_rows_of_each_slot(tmp_path: Path) -> None:
    """Any order of rows, more than a tile of some slot, inputs that steps do not divide."""
    kernel: Any = HostShrinkKernel(tmp_path)
    ranks = torch.tensor([24, 0, 7, 16, 1], dtype=torch.int32)
    for count, inputs, used in ((1, 72, 1), (40, 1160, 5), (130, 64, 1)):
        torch.manual_seed(count)
        slots = torch.randint(-1, used, (count,), dtype=torch.int32)
        slots[-1] = used - 1
        down = torch.full((len(ranks), 2 * 24, inputs), NAN, dtype=torch.bfloat16)
        for slot, rank in enumerate(ranks.tolist()):
            down[slot, : 2 * rank] = torch.randn(2 * rank, inputs) * inputs**-0.5
        weights = LoraWeights(down, torch.empty(len(ranks), 64, 24), (32, 32))
        x = torch.randn(count, inputs).bfloat16()
        with mock.patch.object(torch.Tensor, "new_empty", _nan_filled):
            values = lora_shrink(x, LoraRows(slots, ranks), weights, kernel).values
        assert values[slots < 0].isnan().all()
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            rank = int(ranks[slot])
            expected = torch.zeros(2, 32, dtype=torch.float64)
            own = down[slot, : 2 * rank].double() @ x[row].double()
            expected[:, :rank] = own.view(2, rank)
            found = values[row].view(2, 32).double()
            torch.testing.assert_close(found, expected, rtol=5e-3, atol=1e-3)
            assert not found[:, rank:].any()


def test_hopper_shrinks_the_rows_of_a_decode_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    made, triton = mock.Mock(), mock.Mock()
    monkeypatch.setattr(compiled, "CudaKernel", made)
    monkeypatch.setattr(lora_kernels, "_launch_triton_shrink", triton)
    device = torch.device("cpu")
    assert lora_kernels.load_shrink_kernel(torch.bfloat16, device) is None
    monkeypatch.setattr(lora_kernels, "supports_wgmma", lambda _: True)
    assert lora_kernels.load_shrink_kernel(torch.float32, device) is None
    kernel = lora_kernels.load_shrink_kernel(torch.float16, device)
    assert made.call_args.args == ("lora_shrink.cu", {"BF16": 0}, device)
    weights = LoraWeights(torch.zeros(9, 32, 64), torch.zeros(9, 64, 32), (64,))
    for count, tiles in ((1, 1), (9, 9), (64, 9 + 3), (256, 9 + 15)):
        rows = LoraRows(torch.zeros(count, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))
        lora_shrink(torch.zeros(count, 64), rows, weights, kernel)
        assert made.return_value.launch.call_args.args[0] == (2, tiles)
    triton.assert_not_called()
    lora_shrink(torch.zeros(257, 64), rows, weights, kernel)
    # Rows that are not aligned for loads of 16 bytes.
    lora_shrink(torch.zeros(2, 68)[:, :64], rows, weights, kernel)
    assert triton.call_count == 2


def _nan_filled(like: torch.Tensor, *sizes: int) -> torch.Tensor:
    return torch.full(sizes, NAN, dtype=like.dtype)


def test_a_shrink_lets_its_gemm_start_behind_the_wait() -> None:
    """The GEMM reads what the previous kernel has written, and shares the SM."""
    macros = lora_kernels.shrink_macros(torch.bfloat16)
    code, _ = nvrtc_makes("lora_shrink.cu", macros, "compute_90a")
    before, _, after = code.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after
    assert "griddepcontrol.launch_dependents" not in before
    assert "ld.global" in before and "st.global" not in before
    _, log = nvrtc_makes("lora_shrink.cu", macros, "sm_90a")
    assert "0 bytes spill stores" in log
    numbers = {unit: int(size) for size, unit in re.findall(r"(\d+) (registers|bytes smem)", log)}
    # Of a CTA of 256 threads: half of the registers, and what large stages leave of shared memory.
    assert numbers["registers"] <= 128
    assert numbers["bytes smem"] <= 10 << 10


@pytest.mark.parametrize(
    ("epilogue", "height", "inputs", "rows"),
    [(STORE, 6144, 4096, 8), (SWIGLU, 28672, 4096, 64), (ADD_RESIDUAL, 4096, 14336, 224)],
)
def test_adapters_are_expanded_behind_the_wait(
    epilogue: Epilogue, height: int, inputs: int, rows: int
) -> None:
    """Before it all but the adapters is multiplied; WGMMAs stay asynchronous."""
    config = wgmma.find_wgmma_config(rows, height, inputs, 2, epilogue)
    assert config is not None
    macros = wgmma.wgmma_macros(
        config, epilogue, torch.bfloat16, fp8=False, normed=epilogue != ADD_RESIDUAL, lora=True
    )
    code, _ = nvrtc_makes("wgmma_gemm.cu", macros, "compute_90a")
    before, wait, after = code.partition("griddepcontrol.wait")
    assert wait and "griddepcontrol.wait" not in after
    assert "prefetch.global.L2" in before
    # The shrink runs beside the loop over K.
    assert "wgmma.mma_async" in before and "wgmma.mma_async" not in after
    # What it writes, past L1.
    assert "ld.global.cg" in after and "ld.global.cg" not in before
    assert "mma.sync" in after and "mma.sync" not in before
    assert "st.global" not in before
    _, log = nvrtc_makes("wgmma_gemm.cu", macros, "sm_90a")
    assert "serialized" not in log
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled is not None and int(spilled[1]) <= 32
    with pytest.raises(Exception, match="adapters of FP8 weights"):
        compiled.compile_source("wgmma_gemm.cu", macros | {"FP8": 1}, "sm_90a")


def test_a_gemm_with_adapters_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    monkeypatch.setattr(compiled, "CudaKernel", made)
    monkeypatch.setattr(compiled, "tile_map", lambda *_: None)
    gemm = WgmmaGemm(torch.bfloat16, torch.device("cpu"))
    rows, matrix = torch.zeros(5, 256), LinearWeights(torch.zeros(128, 256))
    weights = LoraWeights(torch.zeros(4, 72, 256), torch.zeros(4, 128, 24), (64, 32, 32))
    bound = LoraRows(torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    shrunk = Shrunk(torch.zeros(5, 96), bound, weights)
    for lora in (shrunk, None):
        gemm.multiply(rows, matrix, WgmmaConfig(8, 1, 4), STORE, lora=lora)
    assert [call.args[1]["LORA"] for call in made.call_args_list] == [1, 0]
    with_lora, plain = (call.args for call in made.return_value.launch.call_args_list)
    values, up, slots, ranks, *numbers = with_lora[len(plain) :]
    assert values is shrunk.values and up is weights.up
    assert slots is bound.slots and ranks is bound.ranks
    # Strides of a slot and of an output, ends of two parts, columns of a row and of a part.
    assert numbers == [128 * 24, 24, 64, 96, 96, 32]
