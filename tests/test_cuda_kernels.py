"""CUDA C++ kernels without a GPU: compilation by NVRTC, and tile configs.

What they compute is checked on one: `benches/gpu/lone_check.py` and `batch_check.py`.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import nvrtc
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.kernels.attention import cluster_decode
from pie_driver_sglang.kernels.attention.single_decode import LoneRow
from pie_driver_sglang.kernels.cuda import compiled
from pie_driver_sglang.kernels.cuda.compiled import compile_source, read_source
from pie_driver_sglang.kernels.gemm import fp8_gemv, wgmma
from pie_driver_sglang.kernels.gemm.dense_layers import Heads, LinearWeights, Norm
from pie_driver_sglang.kernels.gemm.fp8_gemv import ROW_CUTS, ProductKind, find_row_cut
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, GROUP, QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.small_m import Stream
from pie_driver_sglang.kernels.gemm.wgmma import BatchCut, BatchProducts, find_batch_cut

ARCH = "sm_90a"
STORES, JOINS, ADDS = ProductKind
LAYERS = {
    "8B": ((STORES, 6144, 4096), (ADDS, 4096, 4096), (JOINS, 28672, 4096), (ADDS, 4096, 14336)),
    "14B": ((STORES, 7168, 5120), (ADDS, 5120, 5120), (JOINS, 34816, 5120), (ADDS, 5120, 17408)),
    "0.6B": ((STORES, 4096, 1024), (ADDS, 1024, 2048), (JOINS, 6144, 1024), (ADDS, 1024, 3072)),
    "30B-A3B": ((STORES, 5120, 2048), (ADDS, 2048, 4096)),
}
"""Kind, outputs and inputs of the matrices of a layer, both halves of a gate and an up projection;
of a mixture of experts those of its attention."""
SHARED_BYTES = 227 << 10
"""Most shared memory of a CTA. A multiprocessor has one KiB more, and takes one for each CTA."""
REGISTERS = 1 << 16
"""Of a multiprocessor."""


def nvrtc_makes(file: str, constants: dict[str, int], arch: str) -> tuple[str, str]:
    """The kernel in PTX if `arch` is a virtual one, and what the compilers said."""

    def call(function: Any, *arguments: Any) -> Any:
        status, *found = function(*arguments)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function, status)
        return found[0] if found else None

    source = read_source(file).encode()
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


def batch_cut(name: str, number: int, rows: int, *, fp8: bool = False) -> BatchCut:
    """The cut of a batch and a matrix of a layer."""
    kind, height, inputs = LAYERS[name][number]
    cut = find_batch_cut(rows, height, inputs, 1 if fp8 else 2, kind)
    assert cut is not None
    return cut


def batch(
    name: str, number: int, rows: int, dtype: torch.dtype = torch.bfloat16, *, fp8: bool = False
) -> dict[str, int]:
    """The constants of the same, as a layer has them."""
    kind, *_ = LAYERS[name][number]
    cut = batch_cut(name, number, rows, fp8=fp8)
    normed = not fp8 and kind != ADDS
    return wgmma.constants(cut, kind, dtype, fp8=fp8, normed=normed)


def unstaged_bytes(cut: BatchCut) -> int:
    """Shared memory of a CTA except its stages: barriers, scales and sums of squares."""
    blocks = -(-cut.rows // 8 // cut.parts)
    warps = cut.warpgroups * 4
    used = (2 * cut.stages + 1) * 8 + cut.rows * 4 + warps * blocks * 8 * 4
    return -(-used // 16) * 16


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"GROUP": 1}, {"GROUP": 8, "CLUSTER": 16}, {"GROUP": 5, "NORMED": 0}, {"BF16": 0},
        {"DIM": 64, "GROUP": 7}, {"DIM": 64, "BF16": 0, "NORMED": 0},
    ],
)  # fmt: skip
def test_attention_by_clusters_compiles_and_loads_early(changed: dict[str, int]) -> None:
    code = ptx("single_decode.cu", attention(**changed))
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
def test_gemv_kernels_compile_and_load_weights_early(
    inputs: int, cut: Any, kind: int, grouped: int
) -> None:
    constants = product(
        KIND=kind, GROUPED=grouped, INPUTS=inputs, THREADS=cut.threads, BATCH=cut.batch,
        RESIDENT=cut.resident, NORMED=int(kind != ProductKind.ADDS),
    )  # fmt: skip
    code = ptx("fp8_gemv.cu", constants)
    before, wait, behind = code.partition("griddepcontrol.wait")
    assert wait
    # The two outputs' pieces of a batch.
    assert before.count("ld.global.nc.L1::no_allocate.v4.u32") == 2 * cut.batch
    assert "st." not in before.replace("st.param", "")
    assert "e4m3.e4m3" in behind


@pytest.mark.parametrize(
    ("name", "number", "rows", "dtype", "fp8"),
    [
        ("8B", 0, 8, torch.bfloat16, False), ("0.6B", 0, 32, torch.bfloat16, True),
        ("30B-A3B", 0, 96, torch.float16, False), ("8B", 0, 224, torch.float16, True),
        ("14B", 2, 16, torch.float16, True), ("8B", 2, 96, torch.bfloat16, False),
        ("8B", 2, 224, torch.bfloat16, True), ("0.6B", 1, 8, torch.bfloat16, False),
        ("30B-A3B", 1, 96, torch.bfloat16, False), ("14B", 3, 32, torch.float16, True),
        ("8B", 3, 224, torch.float16, False), ("0.6B", 3, 16, torch.bfloat16, True),
    ],
)  # fmt: skip
def test_wgmma_gemms_compile_and_load_weights_early(
    name: str, number: int, rows: int, dtype: torch.dtype, fp8: bool
) -> None:
    cut = batch_cut(name, number, rows, fp8=fp8)
    code = ptx("wgmma_gemm.cu", batch(name, number, rows, dtype, fp8=fp8))
    before, wait, after = code.partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.launch_dependents" in before
    # Weights of a stage, which have a hint; rows, which have none, are asked for later.
    assert before.count("cp.async.bulk.tensor") == before.count("L2::cache_hint") == cut.slabs
    assert after.count("cp.async.bulk.tensor") - after.count("L2::cache_hint") >= cut.slabs
    # Nothing that another kernel writes is read, and nothing that it reads is written.
    assert "ld.global" not in before
    assert "st.global" not in before
    assert "wgmma" not in before
    kind = "e4m3" if fp8 else {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    instruction = f"m64n{cut.rows}k{32 if fp8 else 16}.f32.{kind}.{kind}"
    assert after.count(f"wgmma.mma_async.sync.aligned.{instruction} ") == 4 * cut.slabs
    assert after.count("wgmma.mma_async") == 4 * cut.slabs
    assert ("multicast::cluster" in after) == (cut.across > 1)
    assert ("st.async.shared::cluster" in after) == (cut.parts > 1)


@pytest.mark.parametrize(
    ("file", "constants"),
    [
        ("single_decode.cu", attention(GROUP=8, CLUSTER=16)),
        *(
            ("fp8_gemv.cu", product(KIND=kind, THREADS=cut.threads, BATCH=cut.batch,
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


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "FP8"])
@pytest.mark.parametrize("rows", [64, 128, 224])
@pytest.mark.parametrize("number", [0, 2, 3], ids=["stores", "joins", "adds"])
def test_wgmma_gemms_keep_accumulators_in_registers(number: int, rows: int, fp8: bool) -> None:
    cut = batch_cut("8B", number, rows, fp8=fp8)
    _, log = nvrtc_makes("wgmma_gemm.cu", batch("8B", number, rows, fp8=fp8), ARCH)
    assert " 0 bytes spill stores" in log
    # The compiler waits for each instruction where it cannot prove that nothing uses the sums.
    assert "serialized" not in log
    used = re.search(r"Used (\d+) registers.* (\d+) bytes smem", log)
    assert used is not None
    registers, shared_bytes = (int(number) for number in used.groups())
    assert shared_bytes <= unstaged_bytes(cut)
    if cut.shared_bytes <= SHARED_BYTES // 2 - 4096:
        # Two CTAs run at once on a multiprocessor, which gives registers by eights.
        threads = cut.warpgroups * 128 + 64
        assert 2 * threads * -(-registers // 8) * 8 <= REGISTERS
        assert 2 * (cut.shared_bytes + shared_bytes + 1024) <= SHARED_BYTES + 1024


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    assert compile_source("fp8_gemv.cu", product(), ARCH).code


def test_a_mistake_in_a_source_is_quoted() -> None:
    with pytest.raises(Exception, match="identifier"):
        compile_source("single_decode.cu", {"DIM": 128}, ARCH)
    # What its constants must keep to is in it.
    with pytest.raises(Exception, match="no such heads"):
        compile_source("single_decode.cu", attention(DIM=96), ARCH)
    with pytest.raises(Exception, match="inputs are not divided"):
        compile_source("fp8_gemv.cu", product(INPUTS=4096 + 64), ARCH)
    for changed, said in (
        ({"ROWS": 40}, "no such rows"),
        ({"ROWS": 8, "ACROSS": 2}, "rows are not divided"),
        ({"ROWS": 224, "PARTS": 4, "SLABS": 1, "STAGES": 2}, "sums have no room"),
    ):
        with pytest.raises(Exception, match=said):
            compile_source("wgmma_gemm.cu", batch("14B", 3, 64) | changed, ARCH)


@given(inputs=st.integers(1, 400).map(lambda count: count * 64))
def test_gemv_tile_configs_divide_the_inputs(inputs: int) -> None:
    cut = find_row_cut(inputs)
    if cut is None:
        # Two warps have a group each.
        assert inputs % (2 * GROUP) != 0
        return
    groups = inputs // GROUP // (cut.threads // 32)
    assert groups * GROUP * (cut.threads // 32) == inputs
    assert groups * GROUP % (cut.batch * 64) == 0


def multiples(*units: int, most: int) -> st.SearchStrategy[int]:
    """Multiples of one of some numbers."""
    return st.sampled_from(units).flatmap(
        lambda unit: st.integers(1, most // unit).map(lambda count: count * unit)
    )


@given(
    rows=st.integers(1, 300),
    height=multiples(8, 64, 256, most=40_000),
    inputs=multiples(32, 256, most=20_000),
    itemsize=st.sampled_from((1, 2)),
    kind=st.sampled_from(ProductKind),
)
@settings(max_examples=500)
def test_wgmma_tile_configs_divide_the_gemm(
    rows: int, height: int, inputs: int, itemsize: int, kind: ProductKind
) -> None:
    cut = find_batch_cut(rows, height, inputs, itemsize, kind)
    if rows == 1 or rows > wgmma.MOST_BATCH_ROWS:
        assert cut is None
    if cut is None:
        return
    assert rows <= cut.rows
    assert cut.rows in wgmma.ROWS
    assert cut.rows % (8 * cut.across) == 0
    # As many numbers of a dimension as the copy engine brings.
    assert cut.outputs <= 256
    assert height % (cut.outputs * cut.across) == 0
    # CTAs of a cluster that every GPU with clusters takes.
    assert cut.across * cut.parts <= 8
    step_bytes = cut.slabs * 128
    assert inputs * itemsize % step_bytes == 0
    assert cut.parts <= inputs * itemsize // step_bytes
    assert cut.stages >= 2
    assert cut.shared_bytes + unstaged_bytes(cut) <= SHARED_BYTES
    # As the source says.
    own_blocks = (cut.rows // 8 + cut.parts - 1) // cut.parts
    sums = cut.parts * own_blocks * cut.warpgroups * 128 * 16
    assert cut.parts == 1 or sums <= cut.stages * step_bytes * (cut.outputs + cut.rows)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(
    ("name", "most_fp8", "most"),
    [("8B", 224, 224), ("14B", 96, 192), ("0.6B", 96, 128), ("30B-A3B", 96, 192)],
)
def test_batches_of_measured_layers_have_a_tile_config(
    name: str, most_fp8: int, most: int, itemsize: int
) -> None:
    taken = [
        rows
        for rows in range(301)
        if all(
            find_batch_cut(rows, height, inputs, itemsize, kind) is not None
            for kind, height, inputs in LAYERS[name]
        )
    ]
    assert taken == list(range(2, (most_fp8 if itemsize == 1 else most) + 1))


@pytest.mark.parametrize("device", [(8, 0), (9, 0), (10, 0)])
def test_batches_run_on_one_generation(
    device: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not wgmma.runs_on(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)
    assert not wgmma.runs_on(torch.device("cpu"))
    assert wgmma.runs_on(torch.device("cuda", 0)) == (device == (9, 0))


class TestBatchProducts:
    """What the host does for a kernel, without one."""

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
        """In place of kernels, and of the copy engine's descriptors."""
        made = mock.Mock()
        monkeypatch.setattr(compiled, "CudaKernel", made)
        monkeypatch.setattr(compiled, "tile_map", lambda matrix, box: (tuple(matrix.shape), box))
        return made

    @pytest.fixture
    def products(self) -> BatchProducts:
        return BatchProducts(torch.bfloat16, torch.device("cpu"))

    def test_too_many_tokens_are_refused(self, products: BatchProducts) -> None:
        rows, matrix = torch.zeros(17, 256), LinearWeights(torch.zeros(128, 256))
        with pytest.raises(ValueError, match="17 rows are more than the 16 of the kernel"):
            products.multiply(rows, matrix, BatchCut(16, 1, 4), STORES)
        quantized = QuantizedRows(rows.to(FP8), torch.ones(17, 1))
        weights = QuantizedWeights(matrix.weight.to(FP8), torch.ones(128))
        with pytest.raises(ValueError, match="17 rows are more than the 16 of the kernel"):
            products.multiply(quantized, weights, BatchCut(16, 1, 4), STORES)

    def test_other_sums_of_squares_are_refused(self, products: BatchProducts) -> None:
        rows, matrix = torch.zeros(16, 256), LinearWeights(torch.zeros(128, 256))
        into = Stream(torch.zeros(16, 128), torch.zeros(16, 1))
        with pytest.raises(ValueError, match="1 sums of squares for 2 tiles"):
            products.multiply(rows, matrix, BatchCut(16, 1, 4), ADDS, into=into)

    def test_a_gate_lies_next_to_its_up_projection(
        self, products: BatchProducts, made: mock.Mock
    ) -> None:
        rows = torch.zeros(3, 256, dtype=torch.bfloat16)
        matrix = LinearWeights(torch.zeros(512, 256, dtype=torch.bfloat16))
        cut, stream = BatchCut(16, 2, 4, across=2), Stream(rows, torch.ones(3, 5))
        for _ in range(2):
            found = products.multiply(rows, matrix, cut, JOINS, stream=stream, epsilon=0.5)
        assert found.shape == (3, 256)
        # Compiled once.
        [made_once] = made.call_args_list
        assert made_once.args[1]["NORMED"] == 1
        assert made_once.kwargs == {"shared_bytes": cut.shared_bytes, "cluster": 2}
        grid, threads, weights, given, _, squares, out, left, *numbers = (
            made.return_value.launch.call_args.args
        )
        assert (grid, threads) == ((4,), 2 * 128 + 64)
        # Eights of rows of both halves, of which a CTA has eight of each.
        assert weights == ((32, 2, 8, 256), (8, 2, 8, 64))
        assert given == ((3, 256), (8, 64))
        assert squares is stream.squares
        assert out is found
        assert left == 0
        # The norm's epsilon, rows, outputs, inputs, and sums of squares of a row.
        assert numbers == [0.5, 3, 256, 256, 5]

    def test_parts_are_added_in_place(self, products: BatchProducts, made: mock.Mock) -> None:
        rows = QuantizedRows(torch.zeros(9, 512, dtype=FP8), torch.ones(9, 1))
        matrix = QuantizedWeights(torch.zeros(192, 512, dtype=FP8), torch.ones(192))
        into = torch.zeros(9, 192, dtype=torch.bfloat16)
        cut = BatchCut(16, 1, 4, slabs=2, parts=2)
        assert products.multiply(rows, matrix, cut, ADDS, into=into) is into
        launched = made.return_value.launch.call_args.args
        grid, threads, weights, given, of_outputs, of_rows, out, left, *numbers = launched
        assert (grid, threads) == ((6,), 128 + 64)
        assert (weights, given) == (((192, 512), (64, 128)), ((9, 512), (16, 128)))
        assert (of_outputs is matrix.scales, of_rows is rows.scales) == (True, True)
        assert (out is into, left) == (True, 0)
        assert numbers == [0.0, 9, 192, 512, 0]

    def test_unquantized_activations_need_no_scales(
        self, products: BatchProducts, made: mock.Mock
    ) -> None:
        rows, matrix = torch.zeros(2, 256), LinearWeights(torch.zeros(128, 256))
        into = Stream(torch.zeros(2, 128), torch.zeros(2, 2))
        assert products.multiply(rows, matrix, BatchCut(8, 1, 4), ADDS, into=into) is into.rows
        [constants] = [call.args[1] for call in made.call_args_list]
        assert (constants["FP8"], constants["NORMED"]) == (0, 0)
        _, threads, *_, left = made.return_value.launch.call_args.args[:8]
        assert threads == 128 + 32
        assert left is into.squares


def heads(queries: int, kv_heads: int, dim: int) -> Heads:
    storage = torch.zeros(4, kv_heads, dim, dtype=torch.bfloat16)
    return Heads(queries, None, None, torch.zeros(4, dim), True, storage, storage)


def test_without_a_gpu_nothing_is_taken() -> None:
    assert cluster_decode.find_clusters(heads(32, 8, 128), torch.bfloat16) is None
    weights = QuantizedWeights(torch.zeros(64, 4096, dtype=FP8), torch.ones(64))
    assert not fp8_gemv.quantizes_row(weights)


@pytest.mark.parametrize("device", [(8, 0), (9, 0), (10, 0)])
def test_which_heads_are_supported(
    device: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: device)

    def takes(given: Heads, dtype: torch.dtype = torch.bfloat16) -> bool:
        keys = _OnGpu(given.keys)
        return cluster_decode.knows_heads(given._replace(keys=keys), dtype)

    hopper = device == (9, 0)
    assert takes(heads(32, 8, 128)) == hopper
    assert takes(heads(28, 4, 64)) == hopper
    assert not takes(heads(36, 4, 128)), "nine query heads"
    assert not takes(heads(32, 8, 256))
    assert not takes(heads(32, 8, 128)._replace(halves=False))
    assert not takes(heads(32, 8, 128), torch.float16), "KV of another type"
    cast = heads(32, 8, 128).rotations.bfloat16()
    assert not takes(heads(32, 8, 128)._replace(rotations=cast)), "rotations in bfloat16"
    norm = Norm(torch.ones(128), 1e-6)
    assert not takes(heads(32, 8, 128)._replace(query_norm=norm, key_norm=norm)), "float32 norms"
    tunings = {
        count: cluster_decode.cluster_tuning(heads(count, count, 128)) for count in range(1, 17)
    }
    assert {count for count, tuning in tunings.items() if tuning} == {4, 5, 6, 7, 8}
    for count, tuning in tunings.items():
        assert tuning is None or tuning.cluster * count <= 132, "CTAs that run at once"


def test_a_row_of_other_types_is_refused() -> None:
    kernel = cluster_decode.ClusterAttention.__new__(cluster_decode.ClusterAttention)
    one = torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(2, 8, dtype=torch.int32)
    row = LoneRow(table, one, one.int(), one, one)
    with pytest.raises(ValueError, match="other numbers int64"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64), row, 1.0)
    row = LoneRow(table, *[one] * 4)
    cast = heads(4, 4, 64).rotations.bfloat16()
    with pytest.raises(ValueError, match=r"rotations in torch\.bfloat16"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64)._replace(rotations=cast), row, 1.0)
    with pytest.raises(ValueError, match="slots are int32"):
        kernel.attend(torch.zeros(1, 64), heads(4, 4, 64), LoneRow(one, *[one] * 4), 1.0)


class _OnGpu:
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
