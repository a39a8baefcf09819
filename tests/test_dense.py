"""Fused dense layers without a GPU: kernels against float64, and tile configs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pie_driver_sglang.kernels.comm.all_reduce_norm import TUNINGS, residency_error
from pie_driver_sglang.kernels.gemm.linear import MAX_SHARED_BYTES, MAX_SPLIT_K, find_linear_config
from pie_driver_sglang.kernels.gemm.small_m import find_small_m_config
from pie_driver_sglang.kernels.gemm.tiled import find_tiled_config
from pie_driver_sglang.kernels.gemm.types import Epilogue, LinearWeights, Norm
from support import versions


@pytest.mark.interpreted("tests/support/kernels/lora_rows.py")
def test_adapters_of_any_ranks_rows_and_slots_match_float64(interpreted: str) -> None:
    assert "lora rows ok" in interpreted


@pytest.mark.interpreted("tests/support/kernels/dense_layers.py")
def test_the_kernels_match_float64(interpreted: str) -> None:
    assert "all close" in interpreted


@pytest.mark.interpreted("tests/support/kernels/small_m_gemm.py")
def test_small_m_gemms_and_moe_kernels_match_float64(interpreted: str) -> None:
    assert "all close" in interpreted


@pytest.mark.interpreted("tests/support/kernels/single_decode.py")
def test_batch_1_decode_attention_matches_float64(interpreted: str) -> None:
    assert "all close" in interpreted


@pytest.mark.interpreted("tests/support/kernels/tiled_gemm.py")
def test_tiled_and_fp8_gemms_match_float64(interpreted: str) -> None:
    assert "all close" in interpreted


SHAPES = {
    "0.6B": ((4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
    "8B": ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    "14B": ((7168, 5120), (5120, 5120), (17408, 5120), (5120, 17408)),
}
"""Outputs and inputs of a layer's matrices, half of those of the gate and up projection."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 16, 32])
def test_small_m_tile_configs_fit_and_fill_a_gpu(name: str, rows: int) -> None:
    for number, (outputs, inputs) in enumerate(SHAPES[name]):
        swiglu = number == 2
        config = find_small_m_config(
            rows, outputs, inputs, Epilogue.of(swiglu=swiglu, add_residual=number in (1, 3))
        )
        assert config is not None
        assert config.fits(outputs, inputs)
        assert outputs // config.block_n * config.split_k >= 48
        assert config.num_stages == 1 or rows > 1
        tile = 16 if rows <= 16 else 32
        held = (
            (tile + config.block_n * (2 if swiglu else 1)) * config.block_k * 2 * config.num_stages
        )
        assert held <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(65, 4096, 4096), (1, 4096, 4104), (2, 4100, 4096)]
)
def test_other_gemms_have_no_tile_config(rows: int, outputs: int, inputs: int) -> None:
    assert find_small_m_config(rows, outputs, inputs) is None


@pytest.mark.parametrize(
    ("rows", "itemsize", "own"),
    [
        (64, 2, True),
        (80, 2, False),
        (112, 2, False),
        (113, 2, True),
        (129, 2, False),
        (96, 1, True),
    ],
)
def test_tiled_gemm_where_tiles_are_nearly_full(rows: int, itemsize: int, own: bool) -> None:
    assert (find_tiled_config(rows, 4096, 4096, itemsize, Epilogue.ADD_RESIDUAL) is not None) == own


@pytest.mark.interpreted("tests/support/kernels/all_reduce.py")
def test_all_reduce_over_ranks(interpreted: str) -> None:
    assert "all close" in interpreted


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "parts", "own"),
    [
        (64, 3072, 1024, 1, True),
        (32, 17408, 5120, 1, True),
        (33, 17408, 5120, 1, False),
        (64, 5120, 17408, MAX_SPLIT_K, False),
        (64, 1792, 5120, MAX_SPLIT_K, True),
        (64, 1792, 5120, 1, False),
        (32, 1792, 5120, 1, True),
        (256, 3072, 1024, 1, False),
    ],
    ids=["0.6B", "14B", "14B, more rows", "14B, down", "in parts", "a quarter of 14B's",
         "a quarter, fewer rows", "0.6B, many rows"],
)  # fmt: skip
def test_which_gemms_use_own_kernels(
    rows: int, outputs: int, inputs: int, parts: int, own: bool
) -> None:
    config = find_linear_config(rows, outputs, inputs, parts, swiglu=outputs > inputs)
    assert (config is not None) == own


@pytest.mark.parametrize(
    ("multiprocessors", "fits"), [(132, True), (128, True), (127, False), (114, False), (78, False)]
)
def test_all_reduce_norm_needs_enough_multiprocessors(multiprocessors: int, fits: bool) -> None:
    for tuning in TUNINGS.values():
        assert (residency_error(multiprocessors, tuning) == "") == fits
    if not fits:
        message = f"{multiprocessors} SMs hold {2 * multiprocessors} of 256 rows at once"
        assert residency_error(multiprocessors, TUNINGS[2]) == message


UPDATE_METHODS = {
    *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
    "update_weights_from_distributed" if versions.IS_OLDEST else "load_weights_from_distributed",
}
"""SGLang's methods that update weights."""


class Model(torch.nn.Module):
    """A model that SGLang can update."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.weight.data.copy_(weight)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What newer versions of SGLang's updater ask of the process: a rank, no shared weights."""
    if versions.IS_OLDEST:
        yield
        return
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.runtime_context import get_parallel

    settings = SimpleNamespace(weight_cache_mode="off")
    monkeypatch.setattr(weight_updater, "get_model", lambda: settings)
    with get_parallel().override(tp_rank=0):
        yield


def make_runner(model: Model) -> Any:
    """A runner with SGLang's own updater, without what loads or serves."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    runner = SimpleNamespace(model=model)
    runner.server_args = SimpleNamespace(weight_cache_mode="off")
    runner.weight_updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: runner.model,
        update_model_fields=lambda **_: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: runner,
    )
    return runner


def make_layer(dtype: torch.dtype = torch.float32, *, biased: bool = False) -> Any:
    """The parts of a layer that matter for folding: norms of twos before matrices of threes."""
    norm, matrix = (
        torch.full(size, value, dtype=dtype) for size, value in (((3,), 2), ((4, 3), 3))
    )
    bias = torch.full((4,), 5.0) if biased else None
    return SimpleNamespace(
        before=Norm(norm, 1e-6),
        qkv=LinearWeights(matrix, bias),
        between=Norm(norm.clone(), 1e-6),
        gate_up=LinearWeights(matrix.clone()),
    )


# SGLang warns while it is imported.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.engine
class TestFolding:
    """Norms whose weights go into the matrices after them."""

    @pytest.mark.usefixtures("published")
    def test_weights_are_updated_no_more(self) -> None:
        from pie_driver_sglang.backends.sglang.compat.loading import refuse_updates
        from pie_driver_sglang.engine.layers import selection

        runner, layer = make_runner(Model()), make_layer()
        backend: Any = SimpleNamespace(freeze_weights=lambda reason: refuse_updates(runner, reason))
        update = runner.weight_updater.update_weights_from_tensor
        # So SGLang does it otherwise.
        assert update([("weight", torch.ones(3))]) == (True, "Success")
        assert runner.model.weight.tolist() == [1, 1, 1]
        assert selection._fold(backend, [layer])
        assert layer.qkv.weight.unique().tolist() == layer.gate_up.weight.unique().tolist() == [6]
        assert (
            layer.before.weight.unique().tolist() == layer.between.weight.unique().tolist() == [1]
        )
        updater = runner.weight_updater
        found = {name for name, _ in inspect.getmembers(updater, callable)}
        names = {name for name in found if name.startswith(("update_weights", "load_weights"))}
        assert names == UPDATE_METHODS
        for name in names:
            accepted, reason = getattr(updater, name)([("weight", torch.zeros(3))], "direct")
            assert (accepted, reason) == (False, selection.FROZEN_NORMS)
            assert "`fuse_layers = false`" in reason
        with pytest.raises(RuntimeError, match="cannot be updated"):
            runner.model.load_weights([("weight", torch.zeros(3))])
        assert runner.model.weight.tolist() == [1, 1, 1]
        # The rest of it stays.
        assert updater.destroy_weights_update_group("none")[0] is False
        assert updater.get_model() is runner.model

    def test_a_bias_is_not_scaled(self) -> None:
        from pie_driver_sglang.engine.layers import selection

        layer = make_layer(biased=True)
        bias = layer.qkv.bias.clone()
        backend: Any = SimpleNamespace(freeze_weights=lambda _: None)
        assert selection._fold(backend, [layer])
        assert layer.qkv.weight.unique().tolist() == [6]
        assert torch.equal(layer.qkv.bias, bias)

    @pytest.mark.usefixtures("published")
    def test_what_keeps_its_norms_can_be_updated(self) -> None:
        from pie_driver_sglang.engine.layers import selection

        runner, layer = make_runner(Model()), make_layer(torch.float16)
        assert not selection._fold(runner, [layer])
        assert layer.before.weight.unique().tolist() == [2]
        assert runner.weight_updater.update_weights_from_tensor([("weight", torch.ones(3))])[0]
        assert runner.model.weight.tolist() == [1, 1, 1]
