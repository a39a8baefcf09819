"""CUDA C++ kernels without a GPU: compilation by NVRTC, and tile configs.

What they compute is checked on one: `benches/gpu/lone_check.py` and `batch_check.py`.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.kernels.cuda import compiled
from pie_driver_sglang.kernels.cuda.compiled import compile_source
from pie_driver_sglang.kernels.gemm import wgmma
from pie_driver_sglang.kernels.gemm.fp8_gemv import GEMV_CONFIGS, find_gemv_config
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, GROUP, QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.types import Epilogue, LinearWeights, Residual
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm, find_wgmma_config
from support.kernels.nvrtc_log import nvrtc_makes

ARCH = "sm_90a"
STORE, SWIGLU, ADD_RESIDUAL = Epilogue
LAYERS = {
    "8B": (
        (STORE, 6144, 4096),
        (ADD_RESIDUAL, 4096, 4096),
        (SWIGLU, 28672, 4096),
        (ADD_RESIDUAL, 4096, 14336),
    ),
    "14B": (
        (STORE, 7168, 5120),
        (ADD_RESIDUAL, 5120, 5120),
        (SWIGLU, 34816, 5120),
        (ADD_RESIDUAL, 5120, 17408),
    ),
    "0.6B": (
        (STORE, 4096, 1024),
        (ADD_RESIDUAL, 1024, 2048),
        (SWIGLU, 6144, 1024),
        (ADD_RESIDUAL, 1024, 3072),
    ),
    "30B-A3B": ((STORE, 5120, 2048), (ADD_RESIDUAL, 2048, 4096)),
}
"""Kind, outputs and inputs of the matrices of a layer, both halves of a gate and an up projection;
of a mixture of experts those of its attention."""
SHARED_BYTES = 227 << 10
"""Most shared memory of a CTA. A multiprocessor has one KiB more, and takes one for each CTA."""
REGISTERS = 1 << 16
"""Of a multiprocessor."""


def ptx(file: str, constants: dict[str, int]) -> str:
    """The kernel in PTX."""
    code, _ = nvrtc_makes(file, constants, ARCH.replace("sm", "compute"))
    return code


def attention_macros(**changed: int) -> dict[str, int]:
    usual = {"BF16": 1, "DIM": 128, "GROUP": 4, "CLUSTER": 9, "THREADS": 256, "QK_NORM": 1}
    return usual | changed


def gemv_macros(**changed: int) -> dict[str, int]:
    usual = {
        "BF16": 1, "INPUTS": 4096, "THREADS": 256, "UNROLL": 4, "CTAS_PER_SM": 2, "EPILOGUE": 0,
        "RMS_NORM": 1, "STATIC_SCALE": 0, "GROUPED": 0,
    }  # fmt: skip
    return usual | changed


def wgmma_config(name: str, number: int, rows: int, *, fp8: bool = False) -> WgmmaConfig:
    """The config of a GEMM of a layer."""
    epilogue, height, inputs = LAYERS[name][number]
    config = find_wgmma_config(rows, height, inputs, 1 if fp8 else 2, epilogue)
    assert config is not None
    return config


def layer_macros(
    name: str, number: int, rows: int, dtype: torch.dtype = torch.bfloat16, *, fp8: bool = False
) -> dict[str, int]:
    """Its macros, as a layer has them."""
    epilogue, *_ = LAYERS[name][number]
    config = wgmma_config(name, number, rows, fp8=fp8)
    normed = not fp8 and epilogue != ADD_RESIDUAL
    return wgmma.wgmma_macros(config, epilogue, dtype, fp8=fp8, normed=normed)


def unstaged_bytes(config: WgmmaConfig) -> int:
    """Shared memory of a CTA except its stages: barriers, scales and sums of squares."""
    blocks = -(-config.block_m // 8 // config.split_k)
    warps = config.warpgroups * 4
    used = (2 * config.num_stages + 1) * 8 + config.block_m * 4 + warps * blocks * 8 * 4
    return -(-used // 16) * 16


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"GROUP": 1}, {"GROUP": 8, "CLUSTER": 16}, {"GROUP": 5, "QK_NORM": 0}, {"BF16": 0},
        {"DIM": 64, "GROUP": 7}, {"DIM": 64, "BF16": 0, "QK_NORM": 0},
    ],
)  # fmt: skip
def test_cluster_decode_compiles_and_loads_early(changed: dict[str, int]) -> None:
    code = ptx("cluster_decode.cu", attention_macros(**changed))
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
    ("inputs", "config", "epilogue", "grouped"),
    list(zip((4096, 17408, 2560, 768), GEMV_CONFIGS, (0, 1, 2, 0), (0, 1, 0, 1), strict=True)),
)
def test_gemv_kernels_compile_and_load_weights_early(
    inputs: int, config: Any, epilogue: int, grouped: int
) -> None:
    constants = gemv_macros(
        EPILOGUE=epilogue, GROUPED=grouped, INPUTS=inputs, THREADS=config.threads,
        UNROLL=config.unroll, CTAS_PER_SM=config.ctas_per_sm,
        RMS_NORM=int(epilogue != Epilogue.ADD_RESIDUAL),
    )  # fmt: skip
    code = ptx("fp8_gemv.cu", constants)
    before, wait, behind = code.partition("griddepcontrol.wait")
    assert wait
    # The two outputs' pieces of a batch.
    assert before.count("ld.global.nc.L1::no_allocate.v4.u32") == 2 * config.unroll
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
    config = wgmma_config(name, number, rows, fp8=fp8)
    code = ptx("wgmma_gemm.cu", layer_macros(name, number, rows, dtype, fp8=fp8))
    before, wait, after = code.partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.launch_dependents" in before
    # Weights of a stage, which have a hint; rows, which have none, are asked for later.
    assert before.count("cp.async.bulk.tensor") == before.count("L2::cache_hint") == config.k_atoms
    assert after.count("cp.async.bulk.tensor") - after.count("L2::cache_hint") >= config.k_atoms
    # Nothing that another kernel writes is read, and nothing that it reads is written.
    assert "ld.global" not in before
    assert "st.global" not in before
    assert "wgmma." not in before
    kind = "e4m3" if fp8 else {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    instruction = f"m64n{config.block_m}k{32 if fp8 else 16}.f32.{kind}.{kind}"
    assert after.count(f"wgmma.mma_async.sync.aligned.{instruction} ") == 4 * config.k_atoms
    assert after.count("wgmma.mma_async") == 4 * config.k_atoms
    assert ("multicast::cluster" in after) == (config.multicast > 1)
    assert ("st.async.shared::cluster" in after) == (config.split_k > 1)


@pytest.mark.parametrize("rows", [8, 64])
def test_a_bias_is_added_after_the_scale_and_before_rounding(rows: int) -> None:
    macros = layer_macros("8B", 0, rows)
    plain, biased = (ptx("wgmma_gemm.cu", macros | {"BIAS": bias}) for bias in (0, 1))
    before, wait, after = biased.partition("griddepcontrol.wait")
    assert wait and "ld.global" not in before
    # Two of a thread's outputs, each widened from 16 bits.
    assert after.count("ld.global.u16") - plain.count("ld.global.u16") == 2
    assert biased.count("add.f32") + biased.count("fma.rn.f32") > plain.count(
        "add.f32"
    ) + plain.count("fma.rn.f32")
    with pytest.raises(Exception, match="a bias with another epilogue"):
        compile_source("wgmma_gemm.cu", layer_macros("8B", 1, rows) | {"BIAS": 1}, ARCH)


@pytest.mark.parametrize(
    ("file", "constants"),
    [
        ("cluster_decode.cu", attention_macros(GROUP=8, CLUSTER=16)),
        *(
            ("fp8_gemv.cu", gemv_macros(EPILOGUE=epilogue, THREADS=config.threads,
                                        UNROLL=config.unroll, CTAS_PER_SM=config.ctas_per_sm))
            for epilogue, config in zip((1, 2), GEMV_CONFIGS[:2], strict=True)
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
@pytest.mark.parametrize("number", [0, 2, 3], ids=["store", "swiglu", "residual"])
def test_wgmma_gemms_keep_accumulators_in_registers(number: int, rows: int, fp8: bool) -> None:
    config = wgmma_config("8B", number, rows, fp8=fp8)
    _, log = nvrtc_makes("wgmma_gemm.cu", layer_macros("8B", number, rows, fp8=fp8), ARCH)
    assert " 0 bytes spill stores" in log
    # The compiler waits for each instruction where it cannot prove that nothing uses the sums.
    assert "serialized" not in log
    used = re.search(r"Used (\d+) registers.* (\d+) bytes smem", log)
    assert used is not None
    registers, shared_bytes = (int(number) for number in used.groups())
    assert shared_bytes <= unstaged_bytes(config)
    if config.shared_bytes <= SHARED_BYTES // 2 - 4096:
        # Two CTAs run at once on a multiprocessor, which gives registers by eights.
        threads = config.warpgroups * 128 + 64
        assert 2 * threads * -(-registers // 8) * 8 <= REGISTERS
        assert 2 * (config.shared_bytes + shared_bytes + 1024) <= SHARED_BYTES + 1024


@pytest.mark.parametrize(
    ("file", "macros"),
    [
        ("cluster_decode.cu", attention_macros()), ("fp8_gemv.cu", gemv_macros()),
        ("wgmma_gemm.cu", layer_macros("8B", 0, 8)),
    ],
)  # fmt: skip
def test_a_source_has_a_kernel_of_its_name(file: str, macros: dict[str, int]) -> None:
    assert f".entry {file.removesuffix('.cu')}(" in ptx(file, macros)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    assert compile_source("fp8_gemv.cu", gemv_macros(), ARCH).code


def test_a_mistake_in_a_source_is_quoted() -> None:
    with pytest.raises(Exception, match="identifier"):
        compile_source("cluster_decode.cu", {"DIM": 128}, ARCH)
    # What its constants must keep to is in it.
    with pytest.raises(Exception, match="unsupported DIM or GROUP"):
        compile_source("cluster_decode.cu", attention_macros(DIM=96), ARCH)
    with pytest.raises(Exception, match="warps do not divide INPUTS"):
        compile_source("fp8_gemv.cu", gemv_macros(INPUTS=4096 + 64), ARCH)
    for changed, said in (
        ({"BLOCK_M": 40}, "unsupported BLOCK_M"),
        ({"BLOCK_M": 8, "MULTICAST": 2}, "MULTICAST does not divide BLOCK_M"),
        ({"BLOCK_M": 224, "SPLIT_K": 4, "K_ATOMS": 1, "STAGES": 2}, "split-K sums exceed"),
    ):
        with pytest.raises(Exception, match=said):
            compile_source("wgmma_gemm.cu", layer_macros("14B", 3, 64) | changed, ARCH)


@given(inputs=st.integers(1, 400).map(lambda count: count * 64))
def test_gemv_tile_configs_divide_the_inputs(inputs: int) -> None:
    config = find_gemv_config(inputs)
    if config is None:
        # Two warps have a group each.
        assert inputs % (2 * GROUP) != 0
        return
    groups = inputs // GROUP // (config.threads // 32)
    assert groups * GROUP * (config.threads // 32) == inputs
    assert groups * GROUP % (config.unroll * 64) == 0


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
    epilogue=st.sampled_from(Epilogue),
)
@settings(max_examples=500)
def test_wgmma_tile_configs_divide_the_gemm(
    rows: int, height: int, inputs: int, itemsize: int, epilogue: Epilogue
) -> None:
    config = find_wgmma_config(rows, height, inputs, itemsize, epilogue)
    if rows == 1 or rows > wgmma.MAX_WGMMA_ROWS:
        assert config is None
    if config is None:
        return
    assert rows <= config.block_m
    assert config.block_m in wgmma.BLOCK_MS
    assert config.block_m % (8 * config.multicast) == 0
    # As many numbers of a dimension as the copy engine brings.
    assert config.block_n <= 256
    assert height % (config.block_n * config.multicast) == 0
    # CTAs of a cluster that every GPU with clusters takes.
    assert config.multicast * config.split_k <= 8
    step_bytes = config.k_atoms * 128
    assert inputs * itemsize % step_bytes == 0
    assert config.split_k <= inputs * itemsize // step_bytes
    assert config.num_stages >= 2
    assert config.shared_bytes + unstaged_bytes(config) <= SHARED_BYTES
    # As the source says.
    own_blocks = (config.block_m // 8 + config.split_k - 1) // config.split_k
    sums = config.split_k * own_blocks * config.warpgroups * 128 * 16
    assert config.split_k == 1 or sums <= config.num_stages * step_bytes * (
        config.block_n + config.block_m
    )


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
            find_wgmma_config(rows, height, inputs, itemsize, epilogue) is not None
            for epilogue, height, inputs in LAYERS[name]
        )
    ]
    assert taken == list(range(2, (most_fp8 if itemsize == 1 else most) + 1))


@pytest.mark.parametrize("rows", [64, 96, 128])
def test_ctas_share_an_sm_only_where_there_are_more_of_them(rows: int) -> None:
    """An H200 has 132 SMs, of 228 KiB of shared memory each."""
    for height, share in ((14336, False), (16384, False), (28672, True)):
        config = find_wgmma_config(rows, height, 4096, 2, SWIGLU)
        assert config is not None
        assert (height // config.block_n > 132) == share
        assert (2 * config.shared_bytes <= 227 << 10) == share


class TestWgmmaGemm:
    """What the host does for a kernel, without one."""

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
        """In place of kernels, and of the copy engine's descriptors."""
        made = mock.Mock()
        monkeypatch.setattr(compiled, "CudaKernel", made)
        monkeypatch.setattr(compiled, "tile_map", lambda matrix, box: (tuple(matrix.shape), box))
        return made

    @pytest.fixture
    def products(self) -> WgmmaGemm:
        return WgmmaGemm(torch.bfloat16, torch.device("cpu"))

    def test_more_rows_are_further_tiles(self, products: WgmmaGemm, made: mock.Mock) -> None:
        rows, matrix = torch.zeros(17, 256), LinearWeights(torch.zeros(128, 256))
        quantized = QuantizedRows(rows.to(FP8), torch.ones(17, 1))
        weights = QuantizedWeights(matrix.weight.to(FP8), torch.ones(128))
        assert products.multiply(rows, matrix, WgmmaConfig(16, 1, 4), STORE).shape == (17, 128)
        products.multiply(quantized, weights, WgmmaConfig(16, 1, 4), STORE)
        assert [call.args[0] for call in made.return_value.launch.call_args_list] == [(2, 2)] * 2

    def test_other_sums_of_squares_are_refused(self, products: WgmmaGemm) -> None:
        rows, matrix = torch.zeros(16, 256), LinearWeights(torch.zeros(128, 256))
        residual = Residual(torch.zeros(16, 128), torch.zeros(16, 1))
        with pytest.raises(ValueError, match="1 sums of squares for 2 tiles"):
            products.multiply(rows, matrix, WgmmaConfig(16, 1, 4), ADD_RESIDUAL, residual=residual)

    def test_gate_and_up_projection_are_interleaved(
        self, products: WgmmaGemm, made: mock.Mock
    ) -> None:
        rows = torch.zeros(3, 256, dtype=torch.bfloat16)
        matrix = LinearWeights(torch.zeros(512, 256, dtype=torch.bfloat16))
        config, squares = WgmmaConfig(16, 2, 4, multicast=2), torch.ones(3, 5)
        for _ in range(2):
            found = products.multiply(
                rows, matrix, config, SWIGLU, sum_squares=squares, epsilon=0.5
            )
        assert found.shape == (3, 256)
        # Compiled once.
        [made_once] = made.call_args_list
        assert made_once.args[1]["RMS_NORM"] == 1
        assert made_once.kwargs == {"shared_bytes": config.shared_bytes, "cluster": 2}
        grid, threads, weights, given, _, sum_squares, bias, out, left, *numbers = (
            made.return_value.launch.call_args.args
        )
        assert (grid, threads) == ((4, 1), 2 * 128 + 64)
        # Eights of rows of both halves, of which a CTA has eight of each.
        assert weights == ((32, 2, 8, 256), (8, 2, 8, 64))
        assert given == ((3, 256), (8, 64))
        assert sum_squares is squares
        assert made_once.args[1]["BIAS"] == 0
        assert bias is out is found
        assert left == 0
        # The norm's epsilon, rows, outputs, inputs, and sums of squares of a row.
        assert numbers == [0.5, 3, 256, 256, 5]

    def test_residual_is_added_in_place(self, products: WgmmaGemm, made: mock.Mock) -> None:
        rows = QuantizedRows(torch.zeros(9, 512, dtype=FP8), torch.ones(9, 1))
        matrix = QuantizedWeights(torch.zeros(192, 512, dtype=FP8), torch.ones(192))
        residual = torch.zeros(9, 192, dtype=torch.bfloat16)
        config = WgmmaConfig(16, 1, 4, k_atoms=2, split_k=2)
        assert products.multiply(rows, matrix, config, ADD_RESIDUAL, residual=residual) is residual
        launched = made.return_value.launch.call_args.args
        grid, threads, weights, given, output_scales, of_rows, _, out, left, *numbers = launched
        assert (grid, threads) == ((6, 1), 128 + 64)
        assert (weights, given) == (((192, 512), (64, 128)), ((9, 512), (16, 128)))
        assert (output_scales is matrix.scales, of_rows is rows.scales) == (True, True)
        assert (out is residual, left) == (True, 0)
        assert numbers == [0.0, 9, 192, 512, 0]

    def test_unquantized_activations_need_no_scales(
        self, products: WgmmaGemm, made: mock.Mock
    ) -> None:
        rows, matrix = torch.zeros(2, 256), LinearWeights(torch.zeros(128, 256))
        residual = Residual(torch.zeros(2, 128), torch.zeros(2, 2))
        assert (
            products.multiply(rows, matrix, WgmmaConfig(8, 1, 4), ADD_RESIDUAL, residual=residual)
            is residual.rows
        )
        [constants] = [call.args[1] for call in made.call_args_list]
        assert (constants["FP8"], constants["RMS_NORM"]) == (0, 0)
        _, threads, *_, left = made.return_value.launch.call_args.args[:9]
        assert threads == 128 + 32
        assert left is residual.sum_squares

    def test_a_bias_has_a_kernel_of_its_own(self, products: WgmmaGemm, made: mock.Mock) -> None:
        rows, weight, bias = torch.zeros(5, 256), torch.zeros(128, 256), torch.ones(128)
        squares = torch.ones(5, 4)
        for matrix in (LinearWeights(weight, bias), LinearWeights(weight)):
            products.multiply(rows, matrix, WgmmaConfig(8, 1, 4), STORE, sum_squares=squares)
        assert [call.args[1]["BIAS"] for call in made.call_args_list] == [1, 0]
        first, second = (call.args[6] for call in made.return_value.launch.call_args_list)
        assert first is bias
        assert second is not bias
