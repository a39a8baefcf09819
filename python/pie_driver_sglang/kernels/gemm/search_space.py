"""The configs that a GEMM can run with: what a search measures, ordered by a roofline estimate.

On Hopper those are the configs of `wgmma`, for one row also those of `small_m`. Elsewhere they are
those of `small_m` and `tiled`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from pie_driver_sglang.kernels.gemm import small_m, tiled, wgmma
from pie_driver_sglang.kernels.gemm.types import SWIGLU, Epilogue, TileConfig
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

GemmConfig = TileConfig | WgmmaConfig
ROW_BUCKETS = (1, *wgmma.BLOCK_MS)
"""Largest numbers of rows that share a config."""
INVARIANT_BUCKETS = tuple(1 << power for power in range(9, 15))
"""The same of batch-invariant GEMMs of more than 256 rows; the last one is for all above, too."""
_INVARIANT_TILES = ((256, 2), (256, 1), (192, 2), (192, 1), (128, 2), (128, 1))
"""Rows and warpgroups of their tiles."""
_SMS = 132
"""Of an H100 or H200."""
_SM_SHARED_BYTES, _CTA_RESERVED_BYTES = 228 << 10, 1 << 10
"""Shared memory of an SM, and what each CTA takes of it besides its own."""
_DRAM_BYTES_PER_US, _L2_BYTES_PER_US, _SM_BYTES_PER_US = 4.3e6, 6.5e6, 6.0e4
"""Bandwidths of an H200: of memory, of the L2 cache, and of a single SM."""
_SPLIT_US = 0.6
"""Time to reduce split-K sums in a cluster."""
_CLUSTER_US = 0.1
"""And for each CTA of the cluster."""
_FILL_US = 1.5
"""Time until the first stage of a CTA has arrived."""
_MAX_CLUSTER = 8
_MAX_STAGES = 12
_MIN_STAGES = 3
_GEMV_VALUES = (32, 64)
"""Weights that a thread of a GEMV loads at once."""


class GemmProblem(NamedTuple):
    """A GEMM whose config is searched."""

    epilogue: Epilogue
    rows: int
    """Largest number of rows: one of :data:`ROW_BUCKETS`."""
    height: int
    """Rows of the weight; both halves with SwiGLU."""
    inputs: int
    itemsize: int = 2
    """Bytes of a weight."""
    invariant: bool = False
    """Whether the rows' bits must be those of any other number of rows; of one of
    :data:`INVARIANT_BUCKETS`."""

    @property
    def outputs(self) -> int:
        """Outputs of the weight, or of its gate half."""
        return self.height // 2 if self.epilogue == SWIGLU else self.height

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.height * self.inputs * self.itemsize

    def at(self, rows: int) -> GemmProblem | None:
        """The same GEMM with so many rows; None above the largest bucket."""
        bucket = next((bucket for bucket in ROW_BUCKETS if rows <= bucket), None)
        return None if bucket is None else self._replace(rows=bucket)


def candidates(problem: GemmProblem, *, hopper: bool, most: int = 24) -> list[GemmConfig]:
    """The configs to measure, those with the least estimated time first.

    Args:
        problem: The GEMM.
        hopper: Whether the GPU has WGMMA instructions.
        most: Most configs of a kernel.
    """
    found: list[GemmConfig] = []
    if problem.rows == 1:
        found += _gemv_configs(problem)
    elif problem.rows <= small_m.MAX_ROWS and not hopper:
        found += _small_m_configs(problem)
    if hopper:
        configs = sorted(_wgmma_configs(problem), key=lambda each: estimate_us(problem, each))
        found += configs[: most // 2 if problem.rows == 1 else most]
    elif problem.rows > 1:
        found += _tiled_configs(problem)
    return found


def invariant_problem(
    epilogue: Epilogue, rows: int, height: int, inputs: int, itemsize: int
) -> GemmProblem | None:
    """A batch-invariant GEMM; None for few rows, which have one config each."""
    if rows <= INVARIANT_BUCKETS[0] // 2:
        return None
    bucket = min(1 << (rows - 1).bit_length(), INVARIANT_BUCKETS[-1])
    return GemmProblem(epilogue, bucket, height, inputs, itemsize, invariant=True)


def invariant_candidates(problem: GemmProblem) -> list[WgmmaConfig]:
    """The configs of a batch-invariant GEMM that give the same bits as the rule's, which is first.

    They share its split-K factor, where splits begin, and the outputs of a sum of squares.
    """
    epilogue, rows, height, inputs, itemsize, _ = problem
    rule = wgmma.find_batch_invariant_config(rows, height, inputs, itemsize, epilogue)
    if rule is None:
        return []
    found = [rule]
    units = height // wgmma.WARPGROUP_OUTPUTS
    for (block_m, groups), per_sm, multicast, k_atoms in itertools.product(
        _INVARIANT_TILES, (1, 2), (1, 2), (1, 2)
    ):
        fits = (
            units % (groups * multicast) == 0
            and rule.split_atoms % k_atoms == 0
            # Sums of two splits fit the registers beside 128 rows only, and so do two CTAs.
            and (block_m == 128 or (rule.sequential_splits == 1 and per_sm == 1))
        )
        other_bytes = 1536 + 4 * block_m + groups * block_m * 16
        memory = _SM_SHARED_BYTES // per_sm - _CTA_RESERVED_BYTES - other_bytes
        stages = min(memory // wgmma.stage_bytes(block_m, groups, k_atoms), _MAX_STAGES)
        config = WgmmaConfig(
            block_m, groups, stages, k_atoms, multicast, 1, rule.sequential_splits,
            rule.square_warpgroups, rule.split_atoms,
        )  # fmt: skip
        if fits and stages >= 2 and config not in found:
            found.append(config)
    return found


def has_same_bits(config: WgmmaConfig, rule: WgmmaConfig) -> bool:
    """Whether two configs compute the same bits, if neither's splits are a cluster's."""
    return (
        config.split_k == rule.split_k == 1
        and config.sequential_splits == rule.sequential_splits
        and config.split_atoms == rule.split_atoms
        and config.square_outputs == rule.square_outputs
    )


def estimate_us(problem: GemmProblem, config: WgmmaConfig) -> float:
    """Roofline estimate of a GEMM by `wgmma`, in microseconds on an H200."""
    tiles = problem.height // config.block_n
    ctas = tiles * config.split_k
    slots = _SMS * ctas_per_sm(config)
    # CTAs of the fullest SM.
    most = -(-ctas // _SMS) if ctas <= slots else -(-ctas // slots) * (slots // _SMS)
    weight_bytes = problem.weight_bytes
    row_bytes = config.block_m * problem.inputs * problem.itemsize
    read_by_tiles = tiles * row_bytes / config.multicast
    dram_us = weight_bytes / _DRAM_BYTES_PER_US
    l2_us = (weight_bytes + read_by_tiles) / _L2_BYTES_PER_US
    sm_us = most * (weight_bytes / ctas + row_bytes / config.split_k) / _SM_BYTES_PER_US
    # A larger cluster waits longer for its slowest CTA, and is scheduled later.
    split_us = 0.0 if config.split_k == 1 else _SPLIT_US + _CLUSTER_US * config.split_k
    return max(dram_us, l2_us, sm_us) + _FILL_US + split_us + _CLUSTER_US * config.multicast


def ctas_per_sm(config: WgmmaConfig) -> int:
    """CTAs that fit on an SM, by shared memory and threads."""
    by_memory = _SM_SHARED_BYTES // (config.shared_bytes + 3 * _CTA_RESERVED_BYTES)
    by_threads = 2048 // (config.warpgroups * 128 + 64)
    # Registers: accumulators, and as many others.
    registers = (config.block_m // 2 + 80) * (config.warpgroups * 128 + 64)
    return max(1, min(by_memory, by_threads, 65536 // registers))


def _wgmma_configs(problem: GemmProblem) -> Iterator[WgmmaConfig]:
    """All configs of `wgmma` that fit a GEMM."""
    block_m = next(size for size in wgmma.BLOCK_MS if problem.rows <= size)
    row_bytes = problem.inputs * problem.itemsize
    if problem.height % wgmma.WARPGROUP_OUTPUTS or row_bytes % (2 * wgmma.ATOM_BYTES):
        return
    units, atoms = problem.height // wgmma.WARPGROUP_OUTPUTS, row_bytes // wgmma.ATOM_BYTES
    seen = set()
    for groups, per_sm, split_k, multicast in itertools.product(
        (1, 2, 4), (1, 2, 3), range(1, _MAX_CLUSTER + 1), (1, 2, 4)
    ):
        fits = (
            units % (groups * multicast) == 0
            and block_m % (multicast * 8) == 0
            and multicast * split_k <= _MAX_CLUSTER
            and atoms // 2 >= 2 * split_k
            and not (block_m > 64 and groups == 4)
            and not (block_m > 32 and per_sm == 3)
            and not (block_m < 32 and multicast > 1)
        )
        if not fits:
            continue
        # Besides the stages: their alignment, barriers, scales, and sums of squares of all warps.
        blocks = -(-block_m // (8 * split_k))
        other_bytes = 1024 + 512 + 4 * block_m + groups * blocks * 128
        memory = _SM_SHARED_BYTES // per_sm - _CTA_RESERVED_BYTES - other_bytes
        # Two atoms a stage need fewer barriers, where they leave enough stages.
        atom_bytes = wgmma.stage_bytes(block_m, groups, 1)
        k_atoms = 2 if block_m <= 64 and memory // (2 * atom_bytes) >= _MIN_STAGES else 1
        stages = min(
            memory // (k_atoms * atom_bytes), _MAX_STAGES, max(2, atoms // (k_atoms * split_k))
        )
        config = WgmmaConfig(block_m, groups, stages, k_atoms, multicast, split_k)
        if stages >= 2 and config not in seen and wgmma.fits_split_sums(config):
            seen.add(config)
            yield config


def _gemv_configs(problem: GemmProblem) -> Iterator[TileConfig]:
    """Configs of `small_m` for one row."""
    halves = 2 if problem.epilogue == SWIGLU else 1
    splits = (1,) if problem.epilogue == SWIGLU else (1, 2)
    heights = (2, 4, 8) if problem.epilogue == SWIGLU else (4, 8, 16)
    for values, block_n, block_k, num_warps, split_k in itertools.product(
        _GEMV_VALUES, heights, (512, 1024, 2048), (1, 2, 4, 8), splits
    ):
        config = TileConfig(1, block_n, block_k, split_k, num_warps, num_stages=1)
        loaded = block_n * block_k * halves == values * 32 * num_warps
        if loaded and config.fits(problem.outputs, problem.inputs):
            yield config


def _small_m_configs(problem: GemmProblem) -> Iterator[TileConfig]:
    """Configs of `small_m` for several rows."""
    block_m = max(16, problem.rows)
    splits = (1, 2, 4) if problem.epilogue != SWIGLU else (1,)
    for block_n, block_k, split_k, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), splits, (3, 5)
    ):
        config = TileConfig(block_m, block_n, block_k, split_k, num_stages=stages)
        small = config.shared_bytes(problem.itemsize, problem.epilogue) <= tiled.SHARED_BYTES
        if small and config.fits(problem.outputs, problem.inputs):
            yield config


def _tiled_configs(problem: GemmProblem) -> Iterator[TileConfig]:
    """Configs of `tiled`."""
    block_m = next((size for size in (16, 64, 128) if problem.rows <= size), None)
    if block_m is None or problem.itemsize > 2:
        return
    splits = (1, 2) if problem.epilogue != SWIGLU else (1,)
    for block_n, block_k, split_k, stages, swap_ab in itertools.product(
        (32, 64, 128), (64, 128, 256), splits, (3, 4, 6), (False, True)
    ):
        # Outputs are at least 64 where they are the M dimension of the instruction.
        if (block_n if swap_ab else block_m) < 64:
            continue
        config = TileConfig(
            block_m, block_n, block_k, split_k, num_stages=stages, swap_ab=swap_ab, tma=True
        )
        small = config.shared_bytes(problem.itemsize, problem.epilogue) <= tiled.SHARED_BYTES
        if small and config.fits(problem.outputs, problem.inputs):
            yield config
