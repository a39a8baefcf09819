"""Batch-invariant inference without a GPU: kernels, configurations and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pie_driver_sglang.kernels.attention import batch_invariant, fixed_splits
from pie_driver_sglang.kernels.gemm import wgmma
from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, STORE, SWIGLU, Epilogue
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, find_batch_invariant_config
from pie_driver_sglang.memory.sizes import PARTIAL_SPLITS
from support.process import scripts

SHARED_BYTES = 227 << 10
"""Of a CTA on Hopper, at most."""
ROWS = (*range(1, 300), 511, 1000, 4096, 16_384)


@pytest.mark.engine
@pytest.mark.interpreted("tests/support/kernels/batch_invariant.py")
def test_rows_attend_alike_in_any_company(interpreted: str) -> None:
    assert "checked" in interpreted


@example(64 * 68, 256, ADD_RESIDUAL)
@given(
    st.integers(1, 600).map(lambda units: 64 * units),
    st.integers(1, 400).map(lambda atoms: 64 * atoms),
    st.sampled_from([STORE, SWIGLU, ADD_RESIDUAL]),
)
def test_no_choice_that_changes_bits_depends_on_the_rows(
    height: int, inputs: int, epilogue: Epilogue
) -> None:
    found = [find_batch_invariant_config(rows, height, inputs, 2, epilogue) for rows in ROWS]
    configs = [config for config in found if config is not None]
    # All of them or none: a model is refused before it runs.
    assert len(configs) in (0, len(ROWS))
    assert (
        len({(each.split_k * each.sequential_splits, each.square_outputs) for each in configs}) <= 1
    )
    for rows, config in zip(ROWS, configs, strict=False):
        check_config(config, rows, height, inputs, epilogue)


def check_config(
    config: WgmmaConfig, rows: int, height: int, inputs: int, epilogue: Epilogue
) -> None:
    """What ``cuda/wgmma_gemm.cu`` asserts, and that the grid covers the matrix."""
    assert config.block_m in (*wgmma.BLOCK_MS, 256)
    assert config.block_m >= min(rows, 128)
    assert height % (config.block_n * config.multicast) == 0
    assert config.shared_bytes <= SHARED_BYTES
    assert 1 in (config.split_k, config.sequential_splits)
    assert config.split_atoms % config.k_atoms == 0 and inputs % (64 * config.split_atoms) == 0
    assert config.split_k * config.sequential_splits <= inputs // (64 * config.split_atoms)
    assert config.multicast * config.split_k <= 8
    assert config.block_m % (8 * config.multicast) == 0
    # A thread's sums, twice with sequential splits, fit its registers.
    assert config.block_m // 2 * (1 + (config.sequential_splits > 1)) <= 128
    assert epilogue == ADD_RESIDUAL or config.sequential_splits == 1 or config.split_k == 1


@pytest.mark.parametrize(("height", "inputs"), [(100, 1024), (4096, 4000)])
def test_other_matrices_are_refused(height: int, inputs: int) -> None:
    assert find_batch_invariant_config(1, height, inputs, 2, STORE) is None


def test_splits_depend_on_the_length_only() -> None:
    lengths = {length: fixed_splits.split_len(length) for length in (1, 4096, 4097, 8193, 131_072)}
    assert list(lengths.values()) == [256, 256, 512, 1024, 8192]
    for length, split in lengths.items():
        assert -(-length // split) <= fixed_splits.MAX_SPLITS
        assert split % batch_invariant.BLOCK_KV == 0


def test_partial_results_are_planned() -> None:
    assert PARTIAL_SPLITS == fixed_splits.MAX_SPLITS


@pytest.mark.engine
def test_two_ranks_are_served_and_keep_the_custom_all_reduce() -> None:
    assert "checked" in scripts.run("tests/support/sglang_scripts/deterministic_ranks.py")
