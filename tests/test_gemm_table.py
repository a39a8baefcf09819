"""Candidates of the search for GEMM configs, and the table of what it found, without a GPU."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang import kernels
from pie_driver_sglang.engine.layers import gemm_table
from pie_driver_sglang.engine.layers.gemm_table import GemmTable, TunedGemm
from pie_driver_sglang.kernels.gemm import wgmma
from pie_driver_sglang.kernels.gemm.search_space import (
    ROW_BUCKETS,
    GemmProblem,
    candidates,
    has_same_bits,
    invariant_candidates,
    invariant_problem,
)
from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, STORE, SWIGLU, Epilogue, TileConfig
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, find_batch_invariant_config

H200 = "NVIDIA H200"


class TestTable:
    FOUND = (
        (GemmProblem(STORE, 1, 5120, 3072), TileConfig(1, 4, 1024, 2, 2, num_stages=1)),
        (GemmProblem(ADD_RESIDUAL, 16, 3072, 8192), WgmmaConfig(16, 2, 7, 2, split_k=5)),
        (GemmProblem(SWIGLU, 64, 16384, 3072), TileConfig(64, 64, 128, swap_ab=True, tma=True)),
        (GemmProblem(ADD_RESIDUAL, 128, 3072, 3072), None),
        (
            GemmProblem(STORE, 8192, 4096, 1024, invariant=True),
            WgmmaConfig(192, 2, 4, square_warpgroups=1),
        ),
    )

    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def test_a_file_has_all_that_was_found(self) -> None:
        table = GemmTable.load("NVIDIA X1")
        assert len(table) == 0
        for problem, config in self.FOUND:
            table.put(problem, TunedGemm(config, 1.25))
        table.save()
        again = GemmTable.load("NVIDIA X1")
        assert dict(again) == {problem: TunedGemm(config, 1.25) for problem, config in self.FOUND}
        assert len(GemmTable.load("NVIDIA X2")) == 0

    def test_other_kernels_have_another_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = GemmTable.load("NVIDIA X1")
        table.put(self.FOUND[0][0], TunedGemm(None, 0.0))
        table.save()
        monkeypatch.setattr(gemm_table, "kernels_version", lambda: "other")
        assert len(GemmTable.load("NVIDIA X1")) == 0

    @pytest.mark.parametrize(
        "text",
        ["", "{}", '{"configs": {"store 1": {}}}', '{"configs": {"store 1 64x64 2": {}}}',
         '{"configs": {"store 1 64x64 2 x": {"kernel": "cublas", "gain_us": 0}}}',
         '{"configs": {"store 1 64x64 2": {"kernel": "wgmma", "gain_us": 0, "tiles": 1}}}'],
    )  # fmt: skip
    def test_a_broken_file_is_left_out(self, text: str, caplog: pytest.LogCaptureFixture) -> None:
        path = GemmTable.load("NVIDIA X1").path
        assert path is not None
        path.parent.mkdir(parents=True)
        path.write_text(text)
        assert len(GemmTable.load("NVIDIA X1")) == 0
        assert f"{path} is not readable" in caplog.text

    def test_a_folder_that_cannot_be_written_costs_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "pie-sglang").write_text("a file")
        table = GemmTable.load("NVIDIA X1")
        table.save()
        assert "GEMM configs are not kept" in caplog.text


SHARED_BYTES = 227 << 10
"""Most shared memory of a CTA."""


@given(
    epilogue=st.sampled_from(Epilogue),
    rows=st.sampled_from(ROW_BUCKETS),
    units=st.integers(1, 600),
    inputs=st.integers(1, 160).map(lambda count: 128 * count),
)
@settings(max_examples=60, deadline=None)
def test_candidates_fit_the_gemm(epilogue: Epilogue, rows: int, units: int, inputs: int) -> None:
    problem = GemmProblem(epilogue, rows, 128 * units, inputs)
    for config in candidates(problem, hopper=True):
        if isinstance(config, WgmmaConfig):
            check_wgmma(problem, config)
        else:
            assert config.fits(problem.outputs, problem.inputs)
            assert config.block_m == rows == 1


def check_wgmma(problem: GemmProblem, config: WgmmaConfig) -> None:
    """What ``cuda/wgmma_gemm.cu`` asserts, and what TMA, clusters and an SM allow."""
    assert config.block_m in wgmma.BLOCK_MS and problem.rows <= config.block_m
    assert config.block_m % (8 * config.multicast) == 0
    assert config.block_n <= 256
    assert problem.height % (config.block_n * config.multicast) == 0
    assert config.multicast * config.split_k <= 8
    atoms = problem.inputs * problem.itemsize // 128
    assert atoms % 2 == 0
    assert 2 % config.k_atoms == 0 and config.split_k <= atoms // 2
    assert config.num_stages >= 2
    blocks = -(-config.block_m // 8 // config.split_k)
    sums = config.split_k * blocks * config.warpgroups * 128 * 16
    stages = config.num_stages * config.k_atoms * 128 * (config.block_n + config.block_m)
    assert config.split_k == 1 or sums <= stages
    used = (2 * config.num_stages + 1) * 8 + config.block_m * 4
    used += config.warpgroups * 4 * blocks * 8 * 4
    assert config.shared_bytes + used <= SHARED_BYTES
    # Accumulators and others of all warps fit the registers of an SM.
    threads = config.warpgroups * 128 + 64
    assert (config.block_m // 2 + 40) * threads <= 65536


@given(
    epilogue=st.sampled_from(Epilogue),
    rows=st.integers(257, 40_000),
    units=st.integers(1, 600),
    atoms=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_batch_invariant_candidates_change_no_bits(
    epilogue: Epilogue, rows: int, units: int, atoms: int
) -> None:
    problem = invariant_problem(epilogue, rows, 64 * units, 64 * atoms, 2)
    assert problem is not None
    rule = find_batch_invariant_config(rows, 64 * units, 64 * atoms, 2, epilogue)
    found = invariant_candidates(problem)
    assert (rule is None) == (not found)
    for config in found:
        assert rule is not None
        assert has_same_bits(config, rule)
        assert config.block_m in (128, 192, 256)
        assert units % (config.warpgroups * config.multicast) == 0
        assert config.split_atoms % config.k_atoms == 0
        assert config.block_m // 2 * (1 + (config.sequential_splits > 1)) <= 128
        unstaged = 1536 + 4 * config.block_m + config.warpgroups * config.block_m * 16
        assert config.shared_bytes - 1024 + unstaged <= SHARED_BYTES
    assert invariant_problem(epilogue, 256, 64 * units, 64 * atoms, 2) is None


def test_elsewhere_candidates_are_those_of_triton() -> None:
    for rows in (1, 16, 64, 128):
        found = candidates(GemmProblem(ADD_RESIDUAL, rows, 4096, 4096), hopper=False)
        assert found
        assert not any(isinstance(config, WgmmaConfig) for config in found)


@pytest.mark.parametrize(
    "path",
    [each for each in resources.files(kernels).joinpath("gemm", "tuned").iterdir()]
    if resources.files(kernels).joinpath("gemm", "tuned").is_dir()
    else [],
    ids=lambda path: path.name,
)
def test_shipped_tables_fit_their_gemms(path: Any) -> None:
    content = json.loads(path.read_text())
    table = GemmTable(content["gpu"])
    table.update(path.read_text())
    assert len(table) == len(content["configs"]) > 0
    for problem, found in table:
        if problem.invariant:
            assert found.config in invariant_candidates(problem)
        elif isinstance(found.config, WgmmaConfig):
            check_wgmma(problem, found.config)
        elif found.config is not None:
            assert found.config.fits(problem.outputs, problem.inputs)
