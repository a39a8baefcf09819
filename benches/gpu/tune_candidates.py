"""What `tune_check.py` compiles ahead: all candidates of shapes, in as many processes as cores."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from shapes_check import SHAPES, Shape

from pie_driver_sglang.engine.layers.random_layers import LayerShape
from pie_driver_sglang.kernels.cuda import compiled
from pie_driver_sglang.kernels.gemm import small_m, wgmma
from pie_driver_sglang.kernels.gemm.search_space import (
    INVARIANT_BUCKETS,
    GemmProblem,
    candidates,
    invariant_candidates,
)
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    LinearWeights,
    Residual,
    TileConfig,
    Workspace,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

STEP_ROWS: Final = (1, 16, 64)
"""Rows of the steps that are timed, whose LM heads are measured, too."""
INVARIANT_ROWS: Final = INVARIANT_BUCKETS
ARCH: Final = "sm_90a"
EPSILON: Final = 1e-5


def layer_shape(shape: Shape) -> LayerShape:
    """The sizes of a shape's layers."""
    config = shape.config
    return LayerShape(
        config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"],
        config["head_dim"], config["intermediate_size"], config["model_type"] == "qwen2",
    )  # fmt: skip


def problems(shape: Shape, rows: int) -> list[tuple[GemmProblem, bool]]:
    """The GEMMs of a layer, and whether they have a bias."""
    layer = layer_shape(shape)
    return [(each, layer.has_bias and name == "qkv") for name, each in
            layer.problems(rows).items()]  # fmt: skip


def head_problem(shape: Shape, rows: int) -> GemmProblem:
    """The LM head."""
    return GemmProblem(STORE, rows, shape.config["vocab_size"], shape.config["hidden_size"])


def compile_wgmma(macros: dict[str, int]) -> float:
    """Compiles a kernel into the cache; returns its seconds."""
    began = time.perf_counter()
    compiled.compile_source("wgmma_gemm.cu", macros, ARCH)
    return time.perf_counter() - began


def wgmma_jobs(names: Sequence[str], rows: Sequence[int], most: int) -> list[dict[str, int]]:
    """Macros of all candidates, those of the first rows first."""
    found: dict[tuple[Any, ...], dict[str, int]] = {}
    for count in rows:
        for name in names:
            for problem, biased in problems(SHAPES[name], count):
                normed = problem.epilogue != ADD_RESIDUAL
                for config in candidates(problem, hopper=True, most=most):
                    if isinstance(config, WgmmaConfig):
                        macros = wgmma.wgmma_macros(
                            config, problem.epilogue, torch.bfloat16,
                            fp8=False, normed=normed, biased=biased,
                        )  # fmt: skip
                        found.setdefault(tuple(macros.items()), macros)
            if count in STEP_ROWS:
                for config in candidates(head_problem(SHAPES[name], count), hopper=True, most=most):
                    if isinstance(config, WgmmaConfig):
                        macros = wgmma.wgmma_macros(
                            config, STORE, torch.bfloat16, fp8=False, normed=False
                        )
                        found.setdefault(tuple(macros.items()), macros)
    return list(found.values())


def invariant_jobs(names: Sequence[str]) -> list[dict[str, int]]:
    """Macros of the candidates of batch-invariant GEMMs."""
    found: dict[tuple[Any, ...], dict[str, int]] = {}
    for name in names:
        for rows in INVARIANT_ROWS:
            for plain in layer_shape(SHAPES[name]).problems(rows).values():
                for config in invariant_candidates(plain._replace(invariant=True)):
                    macros = wgmma.wgmma_macros(
                        config, plain.epilogue, torch.bfloat16,
                        fp8=False, normed=plain.epilogue != ADD_RESIDUAL,
                    )  # fmt: skip
                    found.setdefault(tuple(macros.items()), macros)
    return list(found.values())


Gemv = tuple[TileConfig, int, int, int, int, bool]
"""A config, the epilogue, outputs, inputs, partial sums of squares and whether it has a bias."""


def gemv_jobs(names: Sequence[str], most: int) -> list[Gemv]:
    """One launch of each kernel that GEMVs of these shapes may need."""
    found: dict[tuple[Any, ...], Gemv] = {}
    for name in names:
        width = SHAPES[name].config["hidden_size"]
        for problem, biased in problems(SHAPES[name], 1):
            for config in candidates(problem, hopper=True, most=most):
                if not isinstance(config, TileConfig):
                    continue
                blocks = (4, 8, 16, 64) if problem.epilogue != ADD_RESIDUAL else (0,)
                for block in blocks:
                    tiles = width // block if block else 0
                    power = 1 << max(0, tiles - 1).bit_length()
                    job = (config, int(problem.epilogue), problem.outputs, problem.inputs, tiles,
                           biased)  # fmt: skip
                    # What Triton specializes by.
                    split = problem.inputs // config.split_k
                    key = (config, problem.epilogue, power if tiles else 0, tiles % 16 == 0, biased,
                           split % 16 == 0)  # fmt: skip
                    found.setdefault(key, job)
    return list(found.values())


def compile_gemv(job: Gemv) -> float:
    """Launches a kernel once, so that it lies in Triton's cache."""
    config, epilogue, outputs, inputs, tiles, biased = job
    began = time.perf_counter()
    device, bf16 = torch.device("cuda:0"), torch.bfloat16
    height = outputs * (2 if epilogue == SWIGLU else 1)
    rows = torch.zeros(1, inputs, device=device, dtype=bf16)
    weight = torch.empty(height, inputs, device=device, dtype=bf16)
    bias = torch.zeros(height, device=device, dtype=bf16) if biased else None
    workspace = make_workspace(outputs, device)
    squares = torch.ones(1, tiles, device=device) if tiles else None
    residual = None
    if epilogue == ADD_RESIDUAL:
        sums = torch.empty(1, outputs // config.block_n, device=device)
        residual = Residual(torch.zeros(1, outputs, device=device, dtype=bf16), sums)
    small_m.small_m_gemm(
        rows, LinearWeights(weight, bias), config, workspace,
        sum_squares=squares, epsilon=EPSILON, residual=residual, swiglu=epilogue == SWIGLU,
    )  # fmt: skip
    torch.cuda.synchronize()
    return time.perf_counter() - began


def make_workspace(outputs: int, device: torch.device) -> Workspace:
    """For split-K of up to 64 rows."""
    floats = torch.zeros(4 * 64 * outputs, device=device)
    return Workspace(floats, torch.zeros(outputs, dtype=torch.int32, device=device))


def compile_all(arguments: argparse.Namespace, names: Sequence[str], rows: Sequence[int]) -> None:
    """Compiles in several processes, as long as there is time."""
    context = multiprocessing.get_context("fork")
    cores = len(os.sched_getaffinity(0))
    parts = arguments.parts.split(",")
    gemvs = gemv_jobs(names, arguments.most) if 1 in rows else []
    cubins = invariant_jobs(arguments.invariant.split(",")) if "invariant" in parts else []
    cubins += wgmma_jobs(names, rows, arguments.most) if "search" in parts else []
    print(f"compile: {len(cubins)} of wgmma, {len(gemvs)} of small_m, {cores} cores", flush=True)
    began = time.monotonic()
    pool = concurrent.futures.ProcessPoolExecutor(max(2, cores - 1), mp_context=context)
    jobs = [pool.submit(compile_wgmma, each) for each in cubins]
    jobs += [pool.submit(compile_gemv, each) for each in gemvs]
    done, left = concurrent.futures.wait(jobs, timeout=arguments.compile_s)
    for job in left:
        job.cancel()
    errors = [str(job.exception()) for job in done if job.exception() is not None]
    took = [job.result() for job in done if job.exception() is None]
    print(
        f"compile: {len(done)} in {time.monotonic() - began:.1f} s, {len(left)} left out, "
        f"{sum(took) / max(1, len(took)):.2f} s each; {len(errors)} failed: {errors[:2]}",
        flush=True,
    )
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    if left:
        for process in processes:
            process.kill()
