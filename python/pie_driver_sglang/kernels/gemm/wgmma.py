"""WGMMA GEMM for Hopper in CUDA C++ (``cuda/wgmma_gemm.cu``): ``rows @ weight.T``.

Weights of 16 bits, or FP8 with a scale for each row and output. Operands are swapped: outputs are
the M dimension of the instruction and rows the N dimension, so a step is padded to 8, 16 or a
multiple of 32 rows instead of 64. Epilogues are those of `small_m`: deferred RMSNorm or FP8 scales,
SwiGLU, residual add in place. cuBLAS has no such epilogues, and does not load weights before the
previous kernel has ended (PDL).

It is the fastest for 2 to 224 rows. With configs of :func:`find_batch_invariant_config` any number
of rows gives each row the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy
import torch

from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Residual,
)

if TYPE_CHECKING:
    from pie_driver_sglang.kernels.cuda.compiled import CudaKernel
    from pie_driver_sglang.kernels.gemm.lora import Shrunk

MAX_WGMMA_ROWS = 224
"""Most rows of a GEMM: the kernel supports 256, but there cuBLAS is as fast."""
_TILE_TIMES = {(256, 2): 512, (256, 1): 341, (128, 2): 320, (128, 1): 213}
"""Relative times of a tile by rows and warpgroups, measured on an H200."""
_MAX_BLOCK_M = 256
"""Most rows of a tile; more rows are further tiles."""
BLOCK_MS = (8, 16, *range(32, MAX_WGMMA_ROWS + 1, 32))
"""Supported numbers of padded rows."""
_HOPPER = 9
_SOURCE = "wgmma_gemm.cu"
ATOM_BYTES = 128
"""Bytes of K in a swizzle atom, of each row of an operand."""
WARPGROUP_OUTPUTS = 64
"""Outputs of a warpgroup."""
SQUARE_OUTPUTS = WARPGROUP_OUTPUTS
"""Outputs of a partial sum of squares of :func:`find_batch_invariant_config`."""
_STAGES_BYTES, _HALF_STAGES_BYTES = 205 << 10, 100 << 10
"""Bytes for the stages of a CTA, if it has an SM for itself or shares it with another one."""
_MAX_STAGES = 12
_SMS = 132
"""Of an H100 or H200."""
_MAX_SPLIT_K = 4
_MAX_SPLIT_CTAS = 100
"""Most CTAs of a GEMM with a split-K factor of 3 or more: clusters do not fill the GPU."""
_MEMORY_BOUND_ROWS = 192
"""Rows up to which reading 16-bit weights takes longer than multiplying; half as many in FP8."""
_LONG, _NARROW = 4096, 2048
"""Fewest inputs of a GEMM of more rows than that, and of one of more than 128."""
_MIN_FILL = 0.7
"""Least share of SMs that a GEMM of more rows than that must use, over its waves."""


@dataclass(frozen=True)
class WgmmaConfig:
    """Tile and cluster sizes of a GEMM."""

    block_m: int
    """Padded rows."""
    warpgroups: int
    """Consumer warpgroups of a CTA, each of which has 64 outputs."""
    num_stages: int
    """TMA pipeline stages."""
    k_atoms: int = 1
    """Swizzle atoms of 128 bytes of K in a stage."""
    multicast: int = 1
    """CTAs of a cluster that load rows for each other by TMA multicast; they have other outputs."""
    split_k: int = 1
    """CTAs of a cluster that divide the inputs."""
    sequential_splits: int = 1
    """Split-K factor of a CTA that has all inputs, and adds up their parts as a cluster would."""
    square_warpgroups: int = 0
    """Warpgroups whose outputs have one partial sum of squares; 0 for all of a CTA."""
    split_atoms: int = 2
    """Splits begin at multiples of so many swizzle atoms of K; a multiple of `k_atoms`."""

    @property
    def square_outputs(self) -> int:
        """Outputs of a partial sum of squares."""
        return (self.square_warpgroups or self.warpgroups) * WARPGROUP_OUTPUTS

    @property
    def block_n(self) -> int:
        """Outputs of a CTA; with SwiGLU both halves count."""
        return self.warpgroups * WARPGROUP_OUTPUTS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: its stages and their alignment."""
        return self.num_stages * stage_bytes(self.block_m, self.warpgroups, self.k_atoms) + 1024


def find_wgmma_config(
    rows: int, height: int, inputs: int, itemsize: int, epilogue: Epilogue
) -> WgmmaConfig | None:
    """Chooses the config of a GEMM, by measurements on an H100.

    Args:
        rows: Rows of the step.
        height: Rows of the weight; both halves with SwiGLU.
        inputs: Inputs of the weight.
        itemsize: Bytes of a weight.
        epilogue: The epilogue.

    Returns:
        None where the kernel does not support the GEMM, or cuBLAS is as fast.
    """
    block_m = next((block_m for block_m in BLOCK_MS if rows <= block_m), None)
    if block_m is None or rows < 2 or height % WARPGROUP_OUTPUTS or inputs * itemsize % 256:
        return None
    units = height // WARPGROUP_OUTPUTS
    groups, split_k = _divide(units, epilogue)
    # A split begins at a multiple of two atoms.
    split_k = min(split_k, inputs * itemsize // (2 * ATOM_BYTES))
    few = block_m <= (_MEMORY_BOUND_ROWS if itemsize > 1 else _MEMORY_BOUND_ROWS // 2)
    fills = inputs >= _LONG and _fill(units // groups * split_k) >= _MIN_FILL
    if (block_m > 128 and inputs < _NARROW) or not (few or fills):
        return None
    two = _share_an_sm(units // groups, groups, block_m, epilogue)
    k_atoms = 2 if block_m <= 64 and not two else 1
    steps = inputs * itemsize // (k_atoms * ATOM_BYTES)
    stages_bytes = _HALF_STAGES_BYTES if two else _STAGES_BYTES
    fitting = stages_bytes // stage_bytes(block_m, groups, k_atoms)
    stages = min(fitting, _MAX_STAGES, max(2, steps // split_k))
    multicast = 2 if two and units % 4 == 0 else 1
    config = WgmmaConfig(block_m, groups, stages, k_atoms, multicast, split_k)
    return config if fits_split_sums(config) else None


@functools.lru_cache(maxsize=4096)
def find_batch_invariant_config(
    rows: int, height: int, inputs: int, itemsize: int, epilogue: Epilogue
) -> WgmmaConfig | None:
    """Chooses a config of which no choice that changes bits depends on the number of rows.

    Those are the split-K factor, of clusters or sequential, and the outputs of a partial sum of
    squares.

    Args:
        rows: Rows of the step, any number.
        height: Rows of the weight; both halves with SwiGLU.
        inputs: Inputs of the weight.
        itemsize: Bytes of a weight.
        epilogue: The epilogue.

    Returns:
        None where the kernel does not support the weight.
    """
    if height % WARPGROUP_OUTPUTS or inputs * itemsize % ATOM_BYTES:
        return None
    units, atoms = height // WARPGROUP_OUTPUTS, inputs * itemsize // ATOM_BYTES
    split_atoms = 2 - atoms % 2
    groups, split_k = _divide(units, epilogue)
    split_k = min(split_k, atoms // split_atoms)
    sequential = 1
    block_m = next((block_m for block_m in BLOCK_MS if rows <= block_m), _MAX_BLOCK_M)
    if rows > _MAX_BLOCK_M:
        sequential, split_k = split_k, 1
        block_m, groups = _many_rows_tile(rows, units, sequential)
    two = _share_an_sm(units // groups * -(-rows // block_m), groups, block_m, epilogue)
    k_atoms = split_atoms if block_m <= 64 and not two else 1
    steps = atoms // k_atoms
    stages_bytes = _HALF_STAGES_BYTES if two else _STAGES_BYTES
    fitting = stages_bytes // stage_bytes(block_m, groups, k_atoms)
    stages = min(fitting, _MAX_STAGES, max(2, steps // split_k))
    shares_rows = units % 4 == 0 and groups == 2 and 64 <= block_m <= 128
    multicast = 2 if shares_rows and (two or rows > block_m) else 1
    config = WgmmaConfig(
        block_m, groups, stages, k_atoms, multicast, split_k, sequential, 1, split_atoms
    )
    # Few inputs fill few stages, and split-K sums need the memory of more.
    while not fits_split_sums(config) and config.num_stages < fitting:
        config = replace(config, num_stages=config.num_stages + 1)
    return config if fits_split_sums(config) else None


def _many_rows_tile(rows: int, units: int, sequential_splits: int) -> tuple[int, int]:
    """Rows and warpgroups of a tile of more rows than :data:`_MAX_BLOCK_M`, by waves of CTAs."""
    # Sums of two splits fit the registers beside 128 rows only.
    tiles = [tile for tile in _TILE_TIMES if tile[0] == 128 or sequential_splits == 1]

    def time(tile: tuple[int, int]) -> int:
        ctas = -(-rows // tile[0]) * -(-units // tile[1])
        return -(-ctas // _SMS) * _TILE_TIMES[tile]

    return min((tile for tile in tiles if units % tile[1] == 0), key=time)


def fits_split_sums(config: WgmmaConfig) -> bool:
    """Whether split-K sums fit the memory of the stages, in which they are reduced."""
    if config.split_k == 1:
        return True
    blocks = -(-config.block_m // 8 // config.split_k) * config.split_k
    return blocks * 8 * config.block_n * 4 < config.shared_bytes


def _divide(units: int, epilogue: Epilogue) -> tuple[int, int]:
    """Warpgroups of a CTA and split-K factor, for so many times 64 outputs."""
    if epilogue == SWIGLU:
        return 2 if units % 2 == 0 and _fill(units // 2) >= _fill(units) else 1, 1
    if epilogue == ADD_RESIDUAL:
        groups = 2 if units * 2 > _SMS and units % 2 == 0 else 1
        return groups, max(2, min(_MAX_SPLIT_K, _MAX_SPLIT_CTAS * groups // units))
    return 1, max(1, min(_MAX_SPLIT_K, _MAX_SPLIT_CTAS // units)) if units < 64 else 1


def _share_an_sm(ctas: int, groups: int, block_m: int, epilogue: Epilogue) -> bool:
    """Whether two CTAs run on an SM: they overlap tiles that one computes one after the other."""
    return epilogue == SWIGLU and groups == 2 and 64 <= block_m <= 128 and ctas > _SMS


def stage_bytes(rows: int, warpgroups: int, k_atoms: int) -> int:
    """Bytes of a stage."""
    return k_atoms * (warpgroups * WARPGROUP_OUTPUTS + rows) * ATOM_BYTES


def _fill(ctas: int) -> float:
    """Share of SMs that CTAs use, one on each, over their waves."""
    return ctas / (-(-ctas // _SMS) * _SMS)


def supports_wgmma(device: torch.device) -> bool:
    """Whether a device has WGMMA instructions (sm_90a)."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER
    )  # fmt: skip


class WgmmaGemm:
    """The GEMM kernels of one GPU, each compiled at its first launch."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compiles nothing yet.

        Args:
            dtype: Of rows and outputs: bfloat16 or float16.
            device: One that :func:`supports_wgmma`.
        """
        self._dtype = dtype
        self._device = device
        self._kernels: dict[tuple[tuple[str, int], ...], CudaKernel] = {}

    def multiply(
        self,
        given: torch.Tensor | QuantizedRows,
        matrix: LinearWeights | QuantizedWeights,
        config: WgmmaConfig,
        epilogue: Epilogue,
        *,
        sum_squares: torch.Tensor | None = None,
        epsilon: float = 0.0,
        residual: Residual | torch.Tensor | None = None,
        lora: Shrunk | None = None,
    ) -> torch.Tensor:
        """Computes ``rows @ weight.T`` with an epilogue. Can be captured.

        Grid: (height / block_n * split_k, rows / block_m), in clusters of multicast * split_k.

        Args:
            given: ``[rows, inputs]``, contiguous.
            matrix: Of the rows' dtype, with a bias only for `STORE`. FP8 if the rows are, with a
                scale for each row and output.
            config: That of :func:`find_wgmma_config` or :func:`find_batch_invariant_config`.
            epilogue: The epilogue.
            sum_squares: ``[rows, tiles]`` float32: partial sums of squares of the rows, whose
                RMSNorm is applied; None for no norm.
            epsilon: Of that norm.
            residual: ``[rows, outputs]``, added to in place by `ADD_RESIDUAL`; a `Residual` also
                gets new sums of squares.
            lora: What LoRA adapters add to the sums before the epilogue; not with FP8.

        Returns:
            ``[rows, outputs]``, half of them with SwiGLU; the residual's rows if given.

        Raises:
            ValueError: The residual has an unexpected number of sums of squares.
        """
        from pie_driver_sglang.kernels.cuda.compiled import tile_map

        quantized = given if isinstance(given, QuantizedRows) else None
        rows = given.rows if isinstance(given, QuantizedRows) else given
        (count, inputs), height = rows.shape, len(matrix.weight)
        tiles, parts = height // config.block_n, height // config.square_outputs
        outputs = height // 2 if epilogue == SWIGLU else height
        out, out_sum_squares = residual if isinstance(residual, Residual) else (residual, None)
        if out_sum_squares is not None and out_sum_squares.shape[1] != parts:
            raise ValueError(f"{out_sum_squares.shape[1]} sums of squares for {parts} tiles")
        if out is None:
            out = rows.new_empty(count, outputs, dtype=self._dtype)
        assert isinstance(out, torch.Tensor)
        bias = matrix.bias if isinstance(matrix, LinearWeights) else None
        row_scales = output_scales = None
        if quantized is not None and isinstance(matrix, QuantizedWeights):
            row_scales, output_scales = quantized.scales, matrix.scales
        elif sum_squares is not None:
            row_scales = sum_squares
        unscaled = quantized is None and sum_squares is None
        weight, atom = matrix.weight, ATOM_BYTES // matrix.weight.itemsize
        box: tuple[int, ...] = (config.block_n, atom)
        if epilogue == SWIGLU:
            # 8 rows of the gate alternate with 8 of the up projection, so that a thread has both.
            weight = weight.view(2, outputs // 8, 8, inputs).permute(1, 0, 2, 3)
            box = (config.block_n // 16, 2, 8, atom)
        kernel = self._kernel(
            config, epilogue, fp8=quantized is not None, normed=sum_squares is not None,
            biased=bias is not None, lora=lora is not None,
        )  # fmt: skip
        threads = config.warpgroups * 128 + (32 if unscaled else 64)
        # A valid address in place of what this kernel does not read.
        scales_and_bias = (
            out if pointer is None else pointer for pointer in (output_scales, row_scales, bias)
        )
        kernel.launch(
            (tiles * config.split_k, -(-count // config.block_m)), threads, tile_map(weight, box),
            tile_map(rows, (config.block_m // config.multicast, atom)), *scales_and_bias,
            out, 0 if out_sum_squares is None else out_sum_squares, numpy.float32(epsilon),
            numpy.int32(count), numpy.int32(outputs), numpy.int32(inputs),
            numpy.int32(0 if sum_squares is None else sum_squares.shape[1]), *_lora_args(lora),
        )  # fmt: skip
        return out

    def compile(
        self, config: WgmmaConfig, epilogue: Epilogue, *, normed: bool, biased: bool
    ) -> None:
        """Compiles the kernel of a config for 16-bit weights into the cache of kernels."""
        from pie_driver_sglang.kernels.cuda.compiled import arch_of, compile_source

        macros = wgmma_macros(
            config, epilogue, self._dtype, fp8=False, normed=normed, biased=biased
        )
        compile_source(_SOURCE, macros, arch_of(self._device))

    def _kernel(self, config: WgmmaConfig, epilogue: Epilogue, **flags: bool) -> CudaKernel:
        from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

        macros = wgmma_macros(config, epilogue, self._dtype, **flags)
        key = tuple(macros.items())
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(
                _SOURCE, macros, self._device, shared_bytes=config.shared_bytes,
                cluster=config.multicast * config.split_k,
            )  # fmt: skip
        return self._kernels[key]


def _lora_args(lora: Shrunk | None) -> tuple[object, ...]:
    """Further arguments of a kernel that applies adapters."""
    if lora is None:
        return ()
    values, (slots, ranks), weights = lora
    up, ends = weights.up, weights.ends
    sizes = (up.stride(1), *ends, values.stride(0), weights.rank)
    return values, up, slots, ranks, up.stride(0), *map(numpy.int32, sizes)


def wgmma_macros(
    config: WgmmaConfig,
    epilogue: Epilogue,
    dtype: torch.dtype,
    *,
    fp8: bool,
    normed: bool,
    biased: bool = False,
    lora: bool = False,
) -> dict[str, int]:
    """Macros of the source."""
    return {
        "FP8": int(fp8), "BF16": int(dtype is torch.bfloat16), "BLOCK_M": config.block_m,
        "WARPGROUPS": config.warpgroups, "MULTICAST": config.multicast,
        "SPLIT_K": config.split_k, "K_ATOMS": config.k_atoms, "STAGES": config.num_stages,
        "EPILOGUE": int(epilogue), "RMS_NORM": int(normed),
        "SEQUENTIAL_SPLITS": config.sequential_splits,
        "SQUARE_WARPGROUPS": config.square_warpgroups or config.warpgroups,
        "SPLIT_ATOMS": config.split_atoms, "BIAS": int(biased), "LORA": int(lora),
    }  # fmt: skip
