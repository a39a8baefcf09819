"""Searches configs of batch-invariant GEMMs of many rows, as prefills have them.

Only what changes no bits is varied: tiles, pipeline stages, and clusters that share rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pie_driver_sglang.engine.layers.gemm_search import time_graphs
from pie_driver_sglang.engine.layers.gemm_table import GemmTable, TunedGemm
from pie_driver_sglang.kernels.gemm import small_m, wgmma
from pie_driver_sglang.kernels.gemm.search_space import GemmProblem, invariant_candidates
from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, LinearWeights, Residual
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm

_MIN_GAIN = 0.01
"""Least share of the time for which a config replaces the rule's."""


class InvariantGain(NamedTuple):
    """What a search found for a GEMM."""

    config: WgmmaConfig
    us: float
    rule_us: float
    measured: int
    """Configs that were measured."""
    differing: int
    """Configs whose bits were others, which must not be."""


def search_invariant(
    gemm: WgmmaGemm,
    problem: GemmProblem,
    weight: torch.Tensor,
    table: GemmTable,
    note: Callable[[dict[str, Any]], None] = lambda _: None,
) -> InvariantGain | None:
    """Measures a GEMM and puts the fastest config into the table.

    Args:
        gemm: The kernels.
        problem: A batch-invariant GEMM.
        weight: ``[height, inputs]`` of random numbers.
        table: The table.
        note: Is called with each measurement, and before with what is tried.

    Returns:
        None where the kernels do not support the weight.
    """
    tried = invariant_candidates(problem)
    if not tried:
        return None
    run = _Run(gemm, problem, weight)
    times: dict[WgmmaConfig, float] = {}
    expected = run.result(tried[0])
    differing = 0
    for config in tried:
        note({"trying": problem, "config": config})
        try:
            same = all(map(torch.equal, run.result(config), expected))
        except RuntimeError:
            torch.cuda.synchronize()
            continue
        if not same:
            differing += 1
            continue
        [times[config]] = time_graphs([lambda config=config: run(config)], 2)  # type: ignore[misc]
        note({"problem": problem, "config": config, "us": times[config]})
    best, rule = min(times, key=times.__getitem__), tried[0]
    best_us, rule_us = time_graphs([lambda: run(best), lambda: run(rule)], 3)
    if best_us > rule_us * (1 - _MIN_GAIN):
        best, best_us = rule, rule_us
    table.put(problem, TunedGemm(best, rule_us - best_us))
    return InvariantGain(best, best_us, rule_us, len(times), differing)


class _Run:
    """Runs a GEMM as a layer does."""

    def __init__(self, gemm: WgmmaGemm, problem: GemmProblem, weight: torch.Tensor) -> None:
        self._gemm, self._problem, self._matrix = gemm, problem, LinearWeights(weight)
        size = (problem.rows, problem.inputs)
        self._rows = torch.randn(size, device=weight.device).to(weight.dtype)
        self._sums: torch.Tensor | None = None
        self._residual: Residual | None = None
        if problem.epilogue == ADD_RESIDUAL:
            rows = torch.zeros(problem.rows, problem.height, device=weight.device)
            parts = problem.height // wgmma.SQUARE_OUTPUTS
            sums = torch.zeros(problem.rows, parts, device=weight.device)
            self._residual = Residual(rows.to(weight.dtype), sums)
        else:
            parts = problem.inputs // wgmma.SQUARE_OUTPUTS
            self._sums = small_m.start_residual(self._rows, parts).sum_squares

    def __call__(self, config: WgmmaConfig) -> torch.Tensor:
        return self._gemm.multiply(
            self._rows, self._matrix, config, self._problem.epilogue,
            sum_squares=self._sums, epsilon=1e-6, residual=self._residual,
        )  # fmt: skip

    def result(self, config: WgmmaConfig) -> tuple[torch.Tensor, ...]:
        """What a layer reads of it."""
        if self._residual is None:
            return (self(config),)
        self._residual.rows.copy_(self._rows[:, :1])
        self._residual.sum_squares.zero_()
        self(config)
        return self._residual.rows.clone(), self._residual.sum_squares.clone()
