"""The search for GEMM configs, without a GPU.

What configs compute is checked on one: `benches/gpu/tune_check.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from pie_driver_sglang.cli import tune
from pie_driver_sglang.cli.main import main
from pie_driver_sglang.cli.tune import layer_shape
from pie_driver_sglang.engine.layers import batch_invariant, gemm_search, invariant_search
from pie_driver_sglang.engine.layers.batch_invariant import BatchInvariantGemm
from pie_driver_sglang.engine.layers.gemm_runner import GemmRunner
from pie_driver_sglang.engine.layers.gemm_search import GemmSearch, LayerChain, tune_layers
from pie_driver_sglang.engine.layers.gemm_table import GemmTable, TunedGemm
from pie_driver_sglang.engine.layers.invariant_search import search_invariant
from pie_driver_sglang.engine.layers.random_layers import LayerShape
from pie_driver_sglang.engine.layers.rank_gemms import RankGemms
from pie_driver_sglang.engine.layers.small_batch import LayerConfigs, SmallBatchLayers
from pie_driver_sglang.engine.layers.weights import Layer
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.kernels.comm.all_reduce_norm import TUNINGS
from pie_driver_sglang.kernels.gemm import small_m, wgmma
from pie_driver_sglang.kernels.gemm.search_space import (
    GemmConfig,
    GemmProblem,
    candidates,
    invariant_candidates,
)
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Norm,
    Residual,
    TileConfig,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, find_batch_invariant_config
from support import REPOSITORY

WIDTH, ATTENDED, MIDDLE = 512, 384, 768
"""Of hidden states, of attention's output, and of the MLP."""
MATRICES = {
    "qkv": (640, WIDTH), "out": (WIDTH, ATTENDED), "gate_up": (2 * MIDDLE, WIDTH),
    "down": (WIDTH, MIDDLE),
}  # fmt: skip
LAYERS = 3
H200 = "NVIDIA H200"


class TorchGemm:
    """In place of `WgmmaGemm` and `small_m_gemm`, which take a GPU: the same by torch."""

    def __init__(self, *_: object) -> None:
        self.wrong: set[GemmConfig] = set()
        """Configs whose sums are wrong."""
        self.failing: set[GemmConfig] = set()
        """Configs that do not run."""
        self.compiled = 0

    def compile(self, *_: object, **__: object) -> None:
        self.compiled += 1

    def small_m(
        self, rows: Any, matrix: Any, config: Any, _: Any, *, swiglu: bool, residual: Any = None,
        **named: Any,
    ) -> Any:  # fmt: skip
        epilogue = Epilogue.of(swiglu=swiglu, add_residual=residual is not None)
        return self.multiply(rows, matrix, config, epilogue, residual=residual, **named)

    def multiply(
        self, rows: Any, matrix: Any, config: Any, epilogue: Epilogue, *, sum_squares: Any = None,
        epsilon: float = 0.0, residual: Residual | None = None,
    ) -> Any:  # fmt: skip
        if config in self.failing:
            raise RuntimeError("too many resources requested for launch")
        out = rows @ matrix.weight.t()
        if sum_squares is not None:
            out *= torch.rsqrt(sum_squares.sum(1, keepdim=True) / rows.shape[1] + epsilon)
        if matrix.bias is not None:
            out += matrix.bias
        if config in self.wrong:
            out[0, 0] += 1e3
        if epilogue == SWIGLU:
            gate, up = out.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        if residual is None:
            return out
        tiles = residual.rows.add_(out).unflatten(1, (-1, config.block_n))
        residual.sum_squares.copy_(tiles.square().sum(-1))
        return residual.rows


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations wait for each other's threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> TorchGemm:
    made = TorchGemm()
    monkeypatch.setattr(wgmma, "supports_wgmma", lambda _: True)
    monkeypatch.setattr("pie_driver_sglang.engine.layers.small_batch.WgmmaGemm", lambda *_: made)
    monkeypatch.setattr(small_m, "small_m_gemm", made.small_m)
    monkeypatch.setattr(small_m, "start_residual", start_residual)
    monkeypatch.setattr(gemm_search, "swiglu_folded_norm", lambda _, x: x.new_zeros(len(x), MIDDLE))
    monkeypatch.setattr(gemm_search, "CHAIN_BYTES", 1)
    return made


def start_residual(rows: torch.Tensor, tiles: int) -> Residual:
    sums = torch.zeros(len(rows), tiles)
    sums[:, 0] = rows.square().sum(1)
    return Residual(rows, sums)


@pytest.fixture
def layers(gemm: TorchGemm, monkeypatch: pytest.MonkeyPatch) -> SmallBatchLayers:
    """Three layers with a bias, as a GPU with WGMMA instructions runs them."""
    torch.manual_seed(0)
    norm = Norm(torch.ones(WIDTH), 1e-5)
    nothing: Any = None

    def layer() -> Layer:
        weights = {name: torch.randn(*size) / size[1] ** 0.5 for name, size in MATRICES.items()}
        qkv = LinearWeights(weights["qkv"], torch.randn(MATRICES["qkv"][0]))
        out, gate_up, down = (LinearWeights(weights[name]) for name in ("out", "gate_up", "down"))
        return Layer(norm, qkv, nothing, nothing, out, norm, gate_up, down)

    made = SmallBatchLayers.of([layer() for _ in range(LAYERS)], norm, nothing, GemmTable(H200))
    assert made is not None
    return made


class Clock:
    """Times of graphs: for each GEMM the cost of its config."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: dict[GemmConfig, float]) -> None:
        self.costs = costs
        self.measured: list[LayerConfigs] = []
        self.usual = 10.0
        self.cublas = 20.0
        monkeypatch.setattr(gemm_search, "_run", self._remember)
        monkeypatch.setattr(gemm_search, "time_graphs", self._time)

    def _remember(self, chain: LayerChain, configs: LayerConfigs) -> Any:
        # It must run, as in a capture.
        chain.run(configs)
        return (len(chain.layers), configs)

    def _time(self, runs: Sequence[Any], *_: object) -> list[float]:
        self.measured += [configs for _, configs in runs]
        return [count * sum(map(self._cost, configs)) for count, configs in runs]

    def _cost(self, config: GemmConfig | None) -> float:
        return self.cublas if config is None else self.costs.get(config, self.usual)


def of_layer(layers: SmallBatchLayers, rows: int) -> dict[str, GemmConfig | None]:
    configs = layers.find_configs(rows, layers.layers[0])
    assert configs is not None
    return configs._asdict()


def problem_of(name: str, rows: int) -> GemmProblem:
    kinds = {"qkv": STORE, "out": ADD_RESIDUAL, "gate_up": SWIGLU, "down": ADD_RESIDUAL}
    return GemmProblem(kinds[name], rows, *MATRICES[name], itemsize=4)


class TestSearch:
    @pytest.fixture
    def chosen(self) -> dict[str, GemmConfig]:
        """For each GEMM one of its candidates, which no other one has, nor the rule."""
        problems = {name: problem_of(name, 16) for name in MATRICES}
        taken = {
            wgmma.find_wgmma_config(16, each.height, each.inputs, 4, each.epilogue)
            for each in problems.values()
        }
        found: dict[str, GemmConfig] = {}
        for name, problem in problems.items():
            tried = candidates(problem, hopper=True)[2:]
            found[name] = next(config for config in tried if config not in taken)
            taken.add(found[name])  # type: ignore[arg-type]
        return found

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, GemmConfig]) -> Clock:
        return Clock(monkeypatch, {config: 4.0 for config in chosen.values()})

    def test_each_gemm_gets_the_fastest_config(
        self, layers: SmallBatchLayers, clock: Clock, chosen: dict[str, GemmConfig], gemm: TorchGemm
    ) -> None:
        search = GemmSearch(layers, budget_s=600)
        gains = search.run([16])
        costs = {name: clock._cost(config) for name, config in of_layer(layers, 13).items()}
        assert costs == dict.fromkeys(MATRICES, 4.0)
        # Of a layer, and with the others as they were found.
        assert {each.name: each.gain_us for each in gains} == dict.fromkeys(MATRICES, 6.0)
        assert {each.chain_us for each in gains} == {16.0}
        assert search.measured > 4 * 10
        assert gemm.compiled > 4 * 10
        # Other numbers of rows keep the rule's.
        for rows in (1, 8, 17, 64):
            assert of_layer(layers, rows) == default(layers, rows)

    def test_what_was_found_is_not_searched_again(
        self, layers: SmallBatchLayers, clock: Clock
    ) -> None:
        assert GemmSearch(layers, budget_s=600).run([16])
        measured = len(clock.measured)
        assert GemmSearch(layers, budget_s=600).run([16]) == []
        assert len(clock.measured) == measured

    @pytest.mark.parametrize("kind", ["wrong", "failing"])
    def test_a_config_that_does_not_work_is_not_chosen(
        self, kind: str, layers: SmallBatchLayers, clock: Clock, chosen: dict[str, GemmConfig],
        gemm: TorchGemm,
    ) -> None:  # fmt: skip
        getattr(gemm, kind).update(chosen.values())
        GemmSearch(layers, budget_s=600).run([16])
        assert not set(of_layer(layers, 16).values()) & set(chosen.values())

    def test_a_config_that_is_left_out_is_never_run(
        self, layers: SmallBatchLayers, clock: Clock, chosen: dict[str, GemmConfig]
    ) -> None:
        broken = [(problem_of(name, 16).epilogue, config) for name, config in chosen.items()]
        notes: list[dict[str, Any]] = []
        GemmSearch(layers, budget_s=600, note=notes.append, broken=broken).run([16])
        tried = {(note["trying"].epilogue, note["config"]) for note in notes if "trying" in note}
        assert tried and not tried & set(broken)

    def test_without_time_the_rule_stays(self, layers: SmallBatchLayers, clock: Clock) -> None:
        assert GemmSearch(layers, budget_s=0).run() == []
        assert len(layers.table) == 0
        assert clock.measured == []

    def test_a_slight_gain_is_noise(
        self, layers: SmallBatchLayers, clock: Clock, chosen: dict[str, GemmConfig]
    ) -> None:
        clock.costs = dict.fromkeys(chosen.values(), 9.95)
        GemmSearch(layers, budget_s=600).run([16])
        assert of_layer(layers, 16) == default(layers, 16)

    def test_what_loses_beside_the_others_is_taken_back(
        self, layers: SmallBatchLayers, clock: Clock, chosen: dict[str, GemmConfig]
    ) -> None:
        """`down` alone gains by its config, and loses beside the `qkv` of the search."""
        costs = clock._time

        def times(runs: Sequence[Any], *given: object) -> list[float]:
            both = [
                configs.down == chosen["down"] and configs.qkv == chosen["qkv"]
                for _, configs in runs
            ]
            return [us + 30 * pair for us, pair in zip(costs(runs, *given), both, strict=True)]

        clock.usual, clock.costs[chosen["qkv"]] = 10.0, -25.0
        clock._time = times  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gemm_search, "time_graphs", times)
            gains = GemmSearch(layers, budget_s=600).run([16])
        found = of_layer(layers, 16)
        assert (found["qkv"], found["down"]) == (chosen["qkv"], default(layers, 16)["down"])
        assert {each.name: each.gain_us for each in gains}["down"] == 0.0

    def test_weights_that_are_no_numbers_are_not_searched(
        self, layers: SmallBatchLayers, clock: Clock
    ) -> None:
        layers.layers[0].down.weight.fill_(torch.nan)
        found = {gain.name for gain in GemmSearch(layers, budget_s=600).run([16])}
        assert "down" not in found
        assert layers.table.get(problem_of("down", 16)) is None

    def test_a_load_searches_its_batch_sizes_and_says_so(
        self, layers: SmallBatchLayers, clock: Clock, monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        layers.table.path = tmp_path / "found.json"
        line = tune_layers(layers, [12, 14, 4096])
        assert line is not None
        assert re.fullmatch(
            r"GEMM configs: \d+ measured for 4 GEMMs in \d+ s, which gained \d+ µs in a layer at 1 "
            rf"batch sizes; kept in {layers.table.path}",
            line,
        )
        assert {problem.rows for problem, _ in layers.table} == {16}
        again = GemmTable(H200)
        again.update(layers.table.path.read_text())
        assert dict(again).keys() == dict(layers.table).keys()
        # The next load has nothing to search.
        assert tune_layers(layers, [12, 14, 4096]) is None

    def test_a_load_goes_on_where_the_search_fails(
        self, layers: SmallBatchLayers, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> list[float]:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(gemm_search, "time_graphs", fail)
        line = tune_layers(layers, [16])
        assert line == ("GEMM configs are those of the rule: the search failed: CUDA out of memory")
        assert of_layer(layers, 16) == default(layers, 16)

    def test_one_row_may_have_any_kernel(self, layers: SmallBatchLayers, clock: Clock) -> None:
        """A GEMV before a GEMM by `wgmma`, and the other way round."""
        of_wgmma = WgmmaConfig(8, 1, 12, 2)
        GemmSearch(layers, budget_s=600).run([1])
        assert {type(each) for each in clock_configs(clock)} == {TileConfig, WgmmaConfig}
        mixed = default_one(layers)._replace(out=of_wgmma, gate_up=of_wgmma)
        LayerChain(layers.layers, layers.runner, 1).run(mixed)

    def test_cublas_for_a_gemm_goes_with_the_norm_after_it(
        self, layers: SmallBatchLayers, clock: Clock
    ) -> None:
        clock.cublas = 1.0
        GemmSearch(layers, budget_s=600).run([64])
        assert of_layer(layers, 64) == dict.fromkeys(MATRICES)


def default(layers: SmallBatchLayers, rows: int) -> dict[str, GemmConfig | None]:
    configs = layers.default_configs(rows, layers.layers[0])
    assert configs is not None
    return configs._asdict()


def default_one(layers: SmallBatchLayers) -> LayerConfigs:
    configs = layers.default_configs(1, layers.layers[0])
    assert configs is not None
    return configs


def clock_configs(clock: Clock) -> Iterator[GemmConfig | None]:
    for configs in clock.measured:
        yield from configs


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", MATRICES)
def test_errors_are_seen(name: str, rows: int, layers: SmallBatchLayers, gemm: TorchGemm) -> None:
    chain = LayerChain(layers.layers, layers.runner, rows)
    right = default(layers, rows)[name]
    assert right is not None
    for exact in (None, torch.float64):
        assert chain.error(name, right, exact) < 1e-5
    gemm.wrong.add(right)
    assert chain.error(name, right, torch.float64) > 0.1


class TestBatchInvariant:
    PROBLEM = GemmProblem(STORE, 512, 640, 512, 4, invariant=True)

    def test_the_fastest_config_of_equal_bits_is_kept(
        self, gemm: TorchGemm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried = invariant_candidates(self.PROBLEM)
        fast, other = tried[2], tried[3]
        gemm.wrong.add(other)
        asked: list[WgmmaConfig] = []

        def multiply(*given: Any, **named: Any) -> Any:
            asked.append(given[2])
            return TorchGemm.multiply(gemm, *given, **named)

        def times(runs: Sequence[Any], *_: object) -> list[float]:
            found = []
            for run in runs:
                run()
                found.append({fast: 5.0, other: 1.0}.get(asked[-1], 10.0))
            return found

        monkeypatch.setattr(gemm, "multiply", multiply)
        monkeypatch.setattr(invariant_search, "time_graphs", times)
        table = GemmTable(H200)
        gain = search_invariant(cast(Any, gemm), self.PROBLEM, torch.randn(640, 512), table)
        assert gain is not None
        assert (gain.config, gain.us, gain.rule_us) == (fast, 5.0, 10.0)
        assert (gain.measured, gain.differing) == (len(tried) - 1, 1)
        found = table.get(self.PROBLEM)
        assert found is not None and found.config == fast

    @pytest.mark.parametrize("splits", [0, 2])
    def test_a_table_never_changes_bits(self, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """One for other splits, as another version may have left it, is not read."""
        products = TorchGemm()
        monkeypatch.setattr(batch_invariant, "WgmmaGemm", lambda *_: products)
        used: list[WgmmaConfig] = []

        def multiply(*given: Any, **named: Any) -> Any:
            used.append(given[2])
            return given[0]

        monkeypatch.setattr(products, "multiply", multiply)
        weight = torch.zeros(640, 512)
        [rule, *_, other] = invariant_candidates(self.PROBLEM)
        tuned = replace(other, sequential_splits=splits) if splits else other
        table = GemmTable(H200)
        table.put(self.PROBLEM, TunedGemm(tuned, 1.0))
        run = BatchInvariantGemm(torch.float32, torch.device("cpu"), table)
        for rows in (16, 300, 512, 513):
            run(torch.zeros(rows, 512), weight)
        expected = rule if splits else other
        assert used[1:3] == [expected, expected]
        assert used[0] == find_batch_invariant_config(16, 640, 512, 4, STORE)
        assert used[3] == find_batch_invariant_config(513, 640, 512, 4, STORE)


def test_runner_without_sums_of_squares(layers: SmallBatchLayers) -> None:
    """CuBLAS adds to the residual, and leaves none."""
    runner: GemmRunner = layers.runner
    rows = torch.randn(2, ATTENDED)
    residual = start_residual(torch.randn(2, WIDTH), 4)
    expected = residual.rows + rows @ layers.layers[0].out.weight.t()
    found = runner.project_add(rows, layers.layers[0].out, None, residual)
    assert found.sum_squares.shape == (2, 0)
    torch.testing.assert_close(found.rows, expected)


def test_a_rank_runs_cublas_where_it_was_the_fastest() -> None:
    """A config by rule, which the kernels have for this GEMM, is not taken then."""
    rows, matrix = torch.randn(8, 128).bfloat16(), LinearWeights(torch.randn(64, 128).bfloat16())
    table, runner = GemmTable(""), mock.Mock(wgmma_gemm=None)
    gemms = RankGemms(runner, table)
    assert gemms.find_config(8, matrix, ADD_RESIDUAL) is not None
    assert gemms.multiply(rows, matrix, ADD_RESIDUAL) is runner.multiply.return_value
    problem = GemmProblem(ADD_RESIDUAL, 1, 64, 128).at(8)
    assert problem is not None
    table.put(problem, TunedGemm(None, 1.0))
    found = gemms.multiply(rows, matrix, ADD_RESIDUAL)
    assert torch.equal(found, torch.nn.functional.linear(rows, matrix.weight))
    assert runner.multiply.call_count == 1


class TestCommand:
    def test_it_needs_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["tune", str(REPOSITORY / "models" / "pocket")]) == 1
        error = capsys.readouterr().err
        assert error.startswith("pie-sglang: device cuda:0 does not exist: no CUDA device is vis")
        assert "`pie-sglang doctor`" in error

    def test_layers_are_those_of_the_config(self) -> None:
        config = {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "model_type": "qwen2", "max_position_embeddings": 32768,
        }  # fmt: skip
        shape = layer_shape(config)
        assert shape == LayerShape(3584, 28, 4, 128, 18944, has_bias=True)
        assert shape.problems(16) == {
            "qkv": GemmProblem(STORE, 16, 4608, 3584),
            "out": GemmProblem(ADD_RESIDUAL, 16, 3584, 3584),
            "gate_up": GemmProblem(SWIGLU, 16, 37888, 3584),
            "down": GemmProblem(ADD_RESIDUAL, 16, 3584, 18944),
        }
        assert set(tune.TUNED_RANKS) == {1, *TUNINGS}
        # Of each of two GPUs; of each of four, of which two share KV heads.
        assert layer_shape(config, 2) == LayerShape(3584, 14, 2, 128, 9472, has_bias=True)
        assert layer_shape({**config, "num_key_value_heads": 2}, 4).kv_heads == 1
        for ranks, changes, refusal in (
            (8, {}, "`--tp-size` is 8: configs are read on 1, 2 or 4 GPUs"),
            (0, {}, "`--tp-size` is 0"),
            (4, {"num_attention_heads": 30}, "30 attention heads"),
            (4, {"num_attention_heads": 40, "num_key_value_heads": 10}, "40 attention heads"),
            (4, {"intermediate_size": 18942}, "`intermediate_size` of 18942"),
        ):
            with pytest.raises(ConfigError, match=refusal):
                layer_shape({**config, **changes}, ranks)
        with pytest.raises(ConfigError, match="mixtures of experts"):
            layer_shape({**config, "num_experts": 8})

    def test_what_it_prints_of_a_gemm(
        self, gemm: TorchGemm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        """The search itself, on layers of the embedded model's shape."""
        Clock(monkeypatch, {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(tune, "check_gpus", lambda _: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H200)
        made, cpu = torch.device, torch.device("cpu")
        monkeypatch.setattr(torch, "device", lambda *_: cpu)
        monkeypatch.setattr(gemm_search, "SEARCH_ROWS", (8,))
        assert main(["tune", str(REPOSITORY / "models" / "pocket")]) == 0
        monkeypatch.setattr(torch, "device", made)
        lines = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"NVIDIA H200: rows +GEMM +µs of a layer +gained µs", lines[0])
        assert [line.split()[:2] for line in lines[1:-1]] == [
            ["8", name] for name in ("down", "out", "gate_up", "qkv")
        ]
        assert re.fullmatch(rf"[\d,]+ configs measured; kept in {tmp_path}/.*\.json", lines[-1])
