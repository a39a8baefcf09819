"""The kernels in CUDA C++ without a GPU: what NVRTC makes of them, and which rows they take.

What they compute is checked on one: `benches/gpu/lone_check.py`.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import torch
from cuda.bindings import nvrtc
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.kernels import cluster_attend, row_products
from pie_driver_sglang.kernels.cuda.compiled import compile_source
from pie_driver_sglang.kernels.dense_layers import Heads, Norm
from pie_driver_sglang.kernels.lone_attend import LoneRow
from pie_driver_sglang.kernels.quantize import FP8, GROUP, QuantizedWeights
from pie_driver_sglang.kernels.row_products import ROW_CUTS, ProductKind, find_row_cut

ARCH = "sm_90a"


def nvrtc_makes(file: str, constants: dict[str, int], arch: str) -> tuple[str, str]:
    """The kernel in PTX if `arch` is a virtual one, and what the compilers said."""

    def call(function: Any, *arguments: Any) -> Any:
        status, *found = function(*arguments)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function, status)
        return found[0] if found else None

    source = resources.files("pie_driver_sglang.kernels.cuda").joinpath(file).read_bytes()
    program = call(nvrtc.nvrtcCreateProgram, source, file.encode(), 0, [], [])
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    options += [] if arch.startswith("compute") else ["--ptxas-options=-v"]
    call(nvrtc.nvrtcCompileProgram, program, len(options), [each.encode() for each in options])
    log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
    call(nvrtc.nvrtcGetProgramLog, program, log)
    code = bytes(call(nvrtc.nvrtcGetPTXSize, program))
    call(nvrtc.nvrtcGetPTX, program, code)
    return code.decode(errors="replace"), log.decode()


def ptx(file: str, constants: dict[str, int]) -> str:
    """The kernel in PTX."""
    code, _ = nvrtc_makes(file, constants, ARCH.replace("sm", "compute"))
    return code


def attention(**changed: int) -> dict[str, int]:
    usual = {"BF16": 1, "DIM": 128, "GROUP": 4, "CLUSTER": 9, "THREADS": 256, "NORMED": 1}
    return usual | changed


def product(**changed: int) -> dict[str, int]:
    usual = {
        "BF16": 1, "INPUTS": 4096, "THREADS": 256, "BATCH": 4, "RESIDENT": 2, "KIND": 0,
        "NORMED": 1, "FIXED": 0, "GROUPED": 0,
    }  # fmt: skip
    return usual | changed


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"GROUP": 1}, {"GROUP": 8, "CLUSTER": 16}, {"GROUP": 5, "NORMED": 0}, {"BF16": 0},
        {"DIM": 64, "GROUP": 7}, {"DIM": 64, "BF16": 0, "NORMED": 0},
    ],
)  # fmt: skip
def test_attention_by_clusters_compiles_and_loads_early(changed: dict[str, int]) -> None:
    code = ptx("lone_attend.cu", attention(**changed))
    before, wait, behind = code.partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.launch_dependents" in before
    # Keys and values, and nothing is stored.
    assert "ld.global.v4" in before
    assert "st.global" not in before
    # Another CTA's memory is there before it is written to, and written before it is read.
    _, ready, written = behind.partition("barrier.cluster.wait.aligned")
    assert ready
    remote, arrive, _ = written.partition("barrier.cluster.arrive.release.aligned")
    assert arrive
    assert "st.shared::cluster" in remote
    assert "st.shared::cluster" not in behind.partition("barrier.cluster.wait.aligned")[0]


@pytest.mark.parametrize(
    ("inputs", "cut", "kind", "grouped"),
    list(zip((4096, 17408, 2560, 768), ROW_CUTS, (0, 1, 2, 0), (0, 1, 0, 1), strict=True)),
)
def test_products_of_a_row_compile_and_load_early(
    inputs: int, cut: Any, kind: int, grouped: int
) -> None:
    constants = product(
        KIND=kind, GROUPED=grouped, INPUTS=inputs, THREADS=cut.threads, BATCH=cut.batch,
        RESIDENT=cut.resident, NORMED=int(kind != ProductKind.ADDS),
    )  # fmt: skip
    code = ptx("row_product.cu", constants)
    before, wait, behind = code.partition("griddepcontrol.wait")
    assert wait
    # The two outputs' pieces of a batch.
    assert before.count("ld.global.nc.L1::no_allocate.v4.u32") == 2 * cut.batch
    assert "st." not in before.replace("st.param", "")
    assert "e4m3.e4m3" in behind


@pytest.mark.parametrize(
    ("file", "constants"),
    [
        ("lone_attend.cu", attention(GROUP=8, CLUSTER=16)),
        *(
            ("row_product.cu", product(KIND=kind, THREADS=cut.threads, BATCH=cut.batch,
                                       RESIDENT=cut.resident))
            for kind, cut in zip((1, 2), ROW_CUTS[:2], strict=True)
        ),
    ],
)  # fmt: skip
def test_no_register_is_spilled(file: str, constants: dict[str, int]) -> None:
    assert compile_source(file, constants, ARCH).code
    _, log = nvrtc_makes(file, constants, ARCH)
    assert "registers" in log
    assert " 0 bytes spill stores" in log


def test_a_mistake_in_a_source_is_quoted() -> None:
    with pytest.raises(Exception, match="identifier"):
        compile_source("lone_attend.cu", {"DIM": 128}, ARCH)
    # What its constants must keep to is in it.
    with pytest.raises(Exception, match="no such heads"):
        compile_source("lone_attend.cu", attention(DIM=96), ARCH)
    with pytest.raises(Exception, match="inputs are not divided"):
        compile_source("row_product.cu", product(INPUTS=4096 + 64), ARCH)


@given(inputs=st.integers(1, 400).map(lambda count: count * 64))
def test_cuts_of_a_row_divide_its_inputs(inputs: int) -> None:
    cut = find_row_cut(inputs)
    if cut is None:
        # Two warps have a group each.
        assert inputs % (2 * GROUP) != 0
        return
    groups = inputs // GROUP // (cut.threads // 32)
    assert groups * GROUP * (cut.threads // 32) == inputs
    assert groups * GROUP % (cut.batch * 64) == 0


def heads(queries: int, kv_heads: int, dim: int) -> Heads:
    storage = torch.zeros(4, kv_heads, dim, dtype=torch.bfloat16)
    return Heads(queries, None, None, torch.zeros(4, dim), True, storage, storage)


def test_without_a_gpu_nothing_is_taken() -> None:
    assert cluster_attend.find_clusters(heads(32, 8, 128), torch.bfloat16) is None
    weights = QuantizedWeights(torch.zeros(64, 4096, dtype=FP8), torch.ones(64))
    assert not row_products.quantizes_row(weights)


@pytest.mark.parametrize("device", [(8, 0), (9, 0), (10, 0)])
def test_which_heads_are_taken(device: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)

    def takes(given: Heads, dtype: torch.dtype = torch.bfloat16) -> bool:
        keys = _OnGpu(given.keys)
        return cluster_attend.knows_heads(given._replace(keys=keys), dtype)

    hopper = device == (9, 0)
    assert takes(heads(32, 8, 128)) == hopper
    assert takes(heads(28, 4, 64)) == hopper
    assert not takes(heads(36, 4, 128)), "nine query heads"
    assert not takes(heads(32, 8, 256))
    assert not takes(heads(32, 8, 128)._replace(halves=False))
    assert not takes(heads(32, 8, 128), torch.float16), "KV of another type"
    norm = Norm(torch.ones(128), 1e-6)
    assert not takes(heads(32, 8, 128)._replace(query_norm=norm, key_norm=norm)), "float32 norms"
    tunings = {
        count: cluster_attend.cluster_tuning(heads(count, count, 128)) for count in range(1, 17)
    }
    assert {count for count, tuning in tunings.items() if tuning} == {4, 5, 6, 7, 8}
    for count, tuning in tunings.items():
        assert tuning is None or tuning.cluster * count <= 132, "CTAs that run at once"


def test_a_row_of_other_types_is_refused() -> None:
    kernel = cluster_attend.ClusterAttention.__new__(cluster_attend.ClusterAttention)
    one = torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(2, 8, dtype=torch.int32)
    row = LoneRow(table, one, one.int(), one, one)
    with pytest.raises(ValueError, match="other numbers int64"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64), row, 1.0)
    with pytest.raises(ValueError, match="slots are int32"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64), LoneRow(one, *[one] * 4), 1.0)


class _OnGpu:
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
