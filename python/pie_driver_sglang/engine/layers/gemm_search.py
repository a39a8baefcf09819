"""Searches the GEMM configs of a model on its GPU, for `gemm_table`.

A config is measured where it will run: in a CUDA graph of the GEMMs of several layers, one after
the other with PDL, over more weights than the L2 cache holds. Only attention is left out. One GEMM
is varied at a time while the others keep the best configs so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch

from pie_driver_sglang.engine.layers.attention import swiglu_folded_norm
from pie_driver_sglang.engine.layers.gemm_runner import GemmRunner, without_squares
from pie_driver_sglang.engine.layers.gemm_table import GemmTable, TunedGemm
from pie_driver_sglang.engine.layers.small_batch import (
    LayerConfigs,
    SmallBatchLayers,
    layer_problems,
)
from pie_driver_sglang.engine.layers.weights import ExpertLayer, Layer
from pie_driver_sglang.kernels.gemm import small_m
from pie_driver_sglang.kernels.gemm.search_space import (
    ROW_BUCKETS,
    GemmConfig,
    GemmProblem,
    candidates,
)
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Residual,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

logger = logging.getLogger(__name__)

SEARCH_ROWS: Final = (1, 64, 16, 32, 8, 128, 96, 160, 192, 224)
"""Row buckets in the order of their search, so that a short one has the most common."""
CHAIN_BYTES: Final = 400 << 20
"""Weights of a graph, at least: several times the L2 cache."""
LOAD_BUDGET_S: Final = 20.0
"""Seconds of the search at a load; later loads continue it."""
LOAD_CANDIDATES: Final = 8
"""Configs of a kernel that it measures for each GEMM."""
_ROUND_US: Final = 1500.0
"""Of a measurement's round."""
_ROUNDS: Final = 3
_MIN_GAIN: Final = 0.002
"""Least share of a graph's time for which a config replaces the default."""
_TOLERANCE: Final = 2e-2
"""Largest relative error of a GEMM in 16 bits, against cuBLAS."""
_FINALISTS: Final = 3
"""Configs that are measured again, in turns with the default."""
_CUBLAS_ROWS: Final = 64
"""Rows from which on cuBLAS is a candidate."""
_ORDER: Final = ("down", "out", "gate_up", "qkv")
"""The GEMMs of a layer; those first whose partial sums of squares the others read."""


class Gain(NamedTuple):
    """What a search gained for a GEMM."""

    name: str
    problem: GemmProblem
    config: GemmConfig | None
    gain_us: float
    chain_us: float
    """Time of a layer's GEMMs, all of them with the configs of the search."""


class LayerChain:
    """The GEMMs of a few layers for a number of rows."""

    def __init__(
        self, layers: Sequence[Layer | ExpertLayer], runner: GemmRunner, rows: int
    ) -> None:
        """Allocates activations.

        Args:
            layers: Whose weights exceed the L2 cache.
            runner: Runs the GEMMs.
            rows: Rows of the step.
        """
        self.layers, self._runner = layers, runner
        self.device, dtype = layers[0].qkv.weight.device, layers[0].qkv.weight.dtype
        self.problems = layer_problems(rows, layers[0])
        width, attended = layers[0].out.weight.shape

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=self.device).to(dtype)

        self._embedded, self._attended = randn(rows, width), randn(rows, attended)
        self._rows = torch.empty_like(self._embedded)
        if isinstance(layers[0], Layer):
            self._activated = randn(rows, layers[0].down.weight.shape[1])

    def run(self, configs: LayerConfigs) -> None:
        """Runs all layers. Can be captured."""
        residual = self._start(configs)
        for layer in self.layers:
            if configs.qkv is None:
                torch.nn.functional.linear(residual.rows, layer.qkv.weight)
            else:
                self._runner.project(residual, layer.before, layer.qkv, configs.qkv, STORE)
            residual = self._runner.project_add(self._attended, layer.out, configs.out, residual)
            if isinstance(layer, ExpertLayer):
                continue
            if configs.gate_up is None:
                activated = swiglu_folded_norm(layer, residual.rows)
            else:
                activated = self._runner.project(
                    residual, layer.between, layer.gate_up, configs.gate_up, SWIGLU
                )
            residual = self._runner.project_add(activated, layer.down, configs.down, residual)

    def _start(self, configs: LayerConfigs) -> Residual:
        self._rows.copy_(self._embedded)
        last = configs.down if isinstance(self.layers[0], Layer) else configs.out
        if last is None:
            return without_squares(self._rows)
        return small_m.start_residual(self._rows, self._rows.shape[1] // last.block_n)

    def error(self, name: str, config: GemmConfig, exact_dtype: torch.dtype | None = None) -> float:
        """Relative error of a GEMM of the first layer, against cuBLAS.

        Args:
            name: Of the GEMM.
            config: Its config.
            exact_dtype: What cuBLAS computes in; None for the weights' dtype.
        """
        layer = self.layers[0]
        matrix: LinearWeights = getattr(layer, name)
        epilogue = self.problems[name].epilogue
        rows = {"out": self._attended, "down": getattr(self, "_activated", None)}.get(name)
        rows = self._embedded if rows is None else rows
        weight = matrix.weight.to(exact_dtype or matrix.weight.dtype)
        exact_type = torch.promote_types(weight.dtype, torch.float32)
        if epilogue == ADD_RESIDUAL:
            residual = Residual(self._embedded.clone(), rows.new_empty(0))
            residual = residual._replace(sum_squares=torch.empty(0, device=self.device))
            found = self._runner.project_add(rows, matrix, config, residual).rows
            # What was there before would hide errors.
            found = found.to(exact_type) - self._embedded.to(exact_type)
            exact = (rows.to(weight.dtype) @ weight.t()).to(exact_type)
        else:
            norm = layer.before if name == "qkv" else layer.between
            start = small_m.start_residual(self._embedded.clone(), 4)
            found = self._runner.project(start, norm, matrix, config, epilogue)
            normed = rows.to(exact_type)
            normed *= torch.rsqrt(normed.square().mean(1, keepdim=True) + norm.epsilon)
            exact = (normed.to(weight.dtype) @ weight.t()).to(exact_type)
            if matrix.bias is not None:
                exact += matrix.bias.to(exact_type)
            if epilogue == SWIGLU:
                gate, up = exact.chunk(2, dim=-1)
                exact = torch.nn.functional.silu(gate) * up
        scale = float(exact.norm())
        return float((found.to(exact_type) - exact).norm()) / (scale or 1.0)


def time_graphs(
    runs: Sequence[Callable[[], object]], rounds: int = _ROUNDS, round_us: float = _ROUND_US
) -> list[float]:
    """Microseconds of each run as a CUDA graph: the best round, in turns."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    graphs = []
    with torch.cuda.stream(stream):
        for run in runs:
            run()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                run()
            finally:
                graph.capture_end()
            graphs.append(graph)
        start, end = _event(), _event()

        def took(graph: torch.cuda.CUDAGraph, launches: int) -> float:
            start.record()
            for _ in range(launches):
                graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1000 / launches

        launches = [max(3, int(round_us / took(graph, 2))) for graph in graphs]
        best = [float("inf")] * len(graphs)
        for _ in range(rounds):
            for number, graph in enumerate(graphs):
                best[number] = min(best[number], took(graph, launches[number]))
    return best


class GemmSearch:
    """One search for a model's layers."""

    def __init__(
        self,
        layers: SmallBatchLayers,
        *,
        budget_s: float,
        most: int = 24,
        note: Callable[[dict[str, Any]], None] = lambda _: None,
        broken: Iterable[tuple[Epilogue, GemmConfig]] = (),
    ) -> None:
        """Takes the layers, whose table it fills.

        Args:
            layers: Of the loaded model.
            budget_s: Seconds after which it stops.
            most: Most configs of a kernel for each GEMM.
            note: Is called with each measurement, and before with what is tried.
            broken: Configs that are left out.
        """
        self._layers = layers
        self._table: GemmTable = layers.table
        self._deadline = time.monotonic() + budget_s
        self._most = most
        self._note = note
        self._broken = set(broken)
        self.measured = 0
        """Configs that were measured."""

    def run(self, rows: Iterable[int] = SEARCH_ROWS) -> list[Gain]:
        """Searches the GEMMs that the table lacks, most common numbers of rows first.

        Args:
            rows: Of :data:`ROW_BUCKETS`, in the order of their search.
        """
        assert set(rows) <= set(ROW_BUCKETS)
        gains: list[Gain] = []
        for count in rows:
            if count <= self._layers.max_rows and not self._is_over():
                gains += self._search_rows(count)
        return gains

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def _search_rows(self, rows: int) -> list[Gain]:
        layer = self._layers.layers[0]
        default = self._layers.default_configs(rows, layer)
        missing = [
            name
            for name, problem in layer_problems(rows, layer).items()
            if self._table.get(problem) is None
        ]
        if default is None or not missing:
            return []
        chain = LayerChain(self._chain_layers(), self._layers.runner, rows)
        tried = {
            name: candidates(chain.problems[name], hopper=self._hopper, most=self._most)
            for name in missing
        }
        self._compile(chain, tried)
        best = self._layers.find_configs(rows, layer)
        assert best is not None
        searched = []
        for name in (name for name in _ORDER if name in tried):
            if self._is_over():
                break
            usual = getattr(default, name)
            if usual is not None and not self._works(chain, name, usual):
                # Weights that are no numbers, as before a checkpoint is loaded.
                continue
            best = self._search_gemm(chain, name, best, tried[name])
            searched.append(name)
        if rows >= _CUBLAS_ROWS and len(searched) == len(_ORDER):
            best = self._try_cublas(chain, best)
        return self._keep(chain, best, default, searched)

    def _search_gemm(
        self,
        chain: LayerChain,
        name: str,
        best: LayerConfigs,
        tried: Sequence[GemmConfig],
    ) -> LayerConfigs:
        """Varies one GEMM; returns the best configs."""
        times: dict[GemmConfig, float] = {}
        for config in tried:
            if self._is_over():
                break
            if not self._works(chain, name, config):
                continue
            [us] = time_graphs([_run(chain, best._replace(**{name: config}))], 2)
            times[config] = us
            self.measured += 1
            self._note({"gemm": name, "problem": chain.problems[name], "config": config, "us": us})
        finalists = sorted(times, key=times.__getitem__)[:_FINALISTS]
        variants = [best, *(best._replace(**{name: config}) for config in finalists)]
        found = time_graphs([_run(chain, variant) for variant in variants], 5)
        self._note({"gemm": name, "problem": chain.problems[name], "finals": found})
        number = min(range(len(found)), key=found.__getitem__)
        enough = found[number] < found[0] * (1 - _MIN_GAIN)
        return variants[number] if enough else best

    def _try_cublas(self, chain: LayerChain, best: LayerConfigs) -> LayerConfigs:
        """Tries cuBLAS for the GEMMs where it may be as fast."""
        for names in (("gate_up",), ("out", "gate_up"), ("down", "qkv")):
            variant = best._replace(**dict.fromkeys(names))
            ours, cublas = time_graphs([_run(chain, best), _run(chain, variant)], 5)
            self._note({"gemm": names, "rows": chain.problems["out"].rows, "cublas": cublas,
                        "ours": ours})  # fmt: skip
            if cublas < ours * (1 - 2 * _MIN_GAIN):
                best = variant
        return best

    def _keep(
        self,
        chain: LayerChain,
        best: LayerConfigs,
        default: LayerConfigs,
        searched: Sequence[str],
    ) -> list[Gain]:
        """Puts what was found into the table, with what each GEMM gained.

        A config that loses to the default beside those of the other GEMMs is taken back.
        """
        if not searched:
            return []
        taken_back: dict[str, GemmConfig | None] = {}
        us, without = self._without_each(chain, best, default, searched)
        for name, other in without.items():
            if other < us * (1 - 2 * _MIN_GAIN):
                taken_back[name] = getattr(default, name)
        if taken_back:
            best = best._replace(**taken_back).consistent()
            us, without = self._without_each(chain, best, default, searched)
        count = len(chain.layers)
        gains = []
        for name, other in without.items():
            config, problem = getattr(best, name), chain.problems[name]
            gain = max(0.0, (other - us) / count)
            self._table.put(problem, TunedGemm(config, gain))
            gains.append(Gain(name, problem, config, gain, us / count))
        return gains

    def _without_each(
        self,
        chain: LayerChain,
        best: LayerConfigs,
        default: LayerConfigs,
        searched: Sequence[str],
    ) -> tuple[float, dict[str, float]]:
        """Times the best configs, and for each GEMM those with the default of this one."""
        others = [best._replace(**{name: getattr(default, name)}).consistent() for name in searched]
        us, *without = time_graphs([_run(chain, each) for each in (best, *others)], 5)
        self._note({"rows": chain.problems["out"].rows, "us": us, "without": without})
        return us, dict(zip(searched, without, strict=True))

    def _works(self, chain: LayerChain, name: str, config: GemmConfig) -> bool:
        """Whether a config runs, and computes what cuBLAS does."""
        key = chain.problems[name].epilogue, config
        if key in self._broken:
            return False
        self._note({"trying": chain.problems[name], "config": config})
        try:
            error = chain.error(name, config)
        except (RuntimeError, ValueError) as failure:
            if chain.device.type == "cuda":
                # Raises again if the GPU's context is lost.
                torch.cuda.synchronize()
            logger.debug("%s does not run: %s", config, failure)
            error = float("inf")
        works = error < _TOLERANCE
        if not works:
            self._broken.add(key)
            self._note({"gemm": name, "problem": chain.problems[name], "config": config,
                        "error": error})  # fmt: skip
        return works

    def _compile(self, chain: LayerChain, tried: dict[str, list[GemmConfig]]) -> None:
        """Compiles kernels in CUDA C++ in parallel, ahead of their launches."""
        gemm = self._layers.runner.wgmma_gemm
        if gemm is None:
            return
        layer = chain.layers[0]
        wanted = [
            (config, chain.problems[name].epilogue, getattr(layer, name).bias is not None)
            for name, configs in tried.items()
            for config in configs
            if isinstance(config, WgmmaConfig)
        ]
        with ThreadPoolExecutor() as pool:
            for config, epilogue, biased in wanted:
                pool.submit(
                    gemm.compile, config, epilogue, normed=epilogue != ADD_RESIDUAL, biased=biased
                )

    @property
    def _hopper(self) -> bool:
        return self._layers.runner.wgmma_gemm is not None

    def _chain_layers(self) -> list[Layer | ExpertLayer]:
        """As many layers as exceed the L2 cache."""
        return list(_until_bytes(self._layers.layers, CHAIN_BYTES))


def tune_layers(layers: SmallBatchLayers, batch_sizes: Iterable[int]) -> str | None:
    """Searches what the table lacks for graphs of these sizes, within :data:`LOAD_BUDGET_S`.

    Returns:
        What was searched, in a line; None if nothing was.
    """
    problems = layer_problems(1, layers.layers[0]).values()
    buckets = {
        found.rows
        for size in batch_sizes
        for problem in problems
        if (found := problem.at(size)) is not None
    }
    began = time.monotonic()
    search = GemmSearch(layers, budget_s=LOAD_BUDGET_S, most=LOAD_CANDIDATES)
    try:
        gains = search.run([rows for rows in SEARCH_ROWS if rows in buckets])
    except RuntimeError as error:
        # Out of memory, say: the rule needs no search.
        return f"GEMM configs are those of the rule: the search failed: {error}"
    torch.cuda.empty_cache()
    if not gains:
        return None
    layers.table.save()
    gained = sum(gain.gain_us for gain in gains if gain.gain_us > 0)
    return (
        f"GEMM configs: {search.measured} measured for {len(gains)} GEMMs in "
        f"{time.monotonic() - began:.0f} s, which gained {gained:.0f} µs in a layer at "
        f"{len({gain.problem.rows for gain in gains})} batch sizes; kept in {layers.table.path}"
    )


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _run(chain: LayerChain, configs: LayerConfigs) -> Callable[[], None]:
    return lambda: chain.run(configs)


def _until_bytes(
    layers: Sequence[Layer | ExpertLayer], wanted: int
) -> Iterator[Layer | ExpertLayer]:
    """The first layers, two at least, up to so many bytes of weights."""
    total = 0
    for number, layer in enumerate(layers):
        if number >= 2 and total >= wanted:
            return
        matrices = [layer.qkv, layer.out]
        if isinstance(layer, Layer):
            matrices += [layer.gate_up, layer.down]
        total += sum(matrix.weight.nbytes for matrix in matrices)
        yield layer
