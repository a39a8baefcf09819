"""Logits of a model with fused FP8 layers, against SGLang's computation of them.

    PYTHONPATH=tests TRITON_INTERPRET=1 python tests/support/kernels/fp8_model.py CONFIG KIND

CONFIG is a `driver.toml` of a Llama in float32 on the CPU, whose linear layers get FP8 weights of
SGLang's class for them. KIND is what has a scale: `channel`, `tensor` (rows have one, too) or
`block`. SGLang has no FP8 kernels on this device: torch computes what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.config.config_file import load_config
from support.kernels import fp8_rounding
from support.kernels.decode_variants import TorchBatches, alone
from support.kernels.fused_model import MULTIPROCESSORS
from support.kernels.model_decode import STEPS, Contexts, decode

TOLERANCE = 0.02
"""Of the largest logit: a number that float32 rounds to the other side is an FP8 step off."""
BLOCK = 128
ROW_SCALE = 0.02


def quantize_layers(runner: Any, kind: str) -> None:
    """Gives every linear layer of a decoder FP8 weights, as SGLang's loader leaves them."""
    import torch
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    from pie_driver_sglang.backends.sglang.compat.attention import attention_layers

    blocks = [BLOCK, BLOCK] if kind == "block" else None
    config = Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="static" if kind == "tensor" else "dynamic",
        weight_block_size=blocks,
    )
    for module in runner.model.model.layers.modules():
        if not isinstance(module, LinearBase):
            continue
        weight = module.weight.data
        outputs, inputs = weight.shape
        parts = weight.view(outputs, 1, 1, inputs)
        if kind == "block":
            parts = weight.view(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
        largest = parts.abs().amax((1, 3), keepdim=True)
        if kind == "tensor":
            largest = largest.max().expand_as(largest)
        scales = largest / 448
        rounded = (parts / scales).to(torch.float8_e4m3fn).view(outputs, inputs)
        module.input_scale = None
        method = Fp8LinearMethod(config)
        if kind == "block":
            module.weight = torch.nn.Parameter(rounded, requires_grad=False)
            module.weight_scale_inv = torch.nn.Parameter(scales[:, 0, :, 0], requires_grad=False)
        else:
            module.weight = torch.nn.Parameter(rounded.t(), requires_grad=False)
            scale = scales.reshape(-1, 1)
            scale = scale[:1, 0] if kind == "tensor" else scale
            module.weight_scale = torch.nn.Parameter(scale.clone(), requires_grad=False)
        if kind == "tensor":
            module.input_scale = torch.nn.Parameter(torch.tensor(ROW_SCALE), requires_grad=False)
        module.quant_method = method
    # A checkpoint's scales of KV in FP8, which this pool does not keep.
    for layer in attention_layers(runner):
        layer.k_scale = layer.v_scale = torch.tensor(0.5)
        layer.k_scale_float = layer.v_scale_float = 0.5


def apply_by_torch(method: Any, module: Any, rows: Any, bias: Any = None) -> Any:
    """In place of `Fp8LinearMethod.apply`: the same numbers by torch."""
    import torch

    assert bias is None
    width = BLOCK if method.block_quant else rows.shape[1]
    parts = rows.unflatten(1, (-1, width))
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    if module.input_scale is not None:
        scales = module.input_scale
    rounded = (parts / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    given = (rounded.float() * scales).flatten(1)
    if method.block_quant:
        scale = module.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = module.weight.float() * scale
    else:
        weight = module.weight.float().t() * module.weight_scale.reshape(-1, 1)
    return given @ weight.t()


def small_tile(rows: int, outputs: int, inputs: int, *_: int, **__: bool) -> Any:
    """A tile for every product of up to eight rows, whose prompts have more."""
    from pie_driver_sglang.kernels.gemm.types import TileConfig

    return TileConfig(16, 64, 128, 2 if inputs % 256 == 0 else 1) if rows <= 8 else None


class TorchProduct:
    """In place of `Fp8Gemv`, which takes a GPU: the same numbers by torch."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(
        self, inputs: int, kind: Any, dtype: Any, device: Any, config: Any, *, normed: bool,
        static_scale: bool, grouped: bool,
    ) -> None:  # fmt: skip
        assert config.fits(inputs)
        self._kind, self._inputs = kind, inputs
        self._what = (normed, static_scale, grouped)
        TorchProduct.made.append((inputs, kind))

    def multiply(self, row: Any, weights: Any, *, norm: Any = None, residual: Any = None) -> Any:
        import torch

        from pie_driver_sglang.kernels.gemm.fp8_rows import quantize
        from pie_driver_sglang.kernels.gemm.types import Epilogue

        grouped = weights.grouped
        assert self._what == (norm is not None, weights.row_scale is not None, grouped)
        assert row.shape == (1, self._inputs)
        given = quantize(row.clone(), norm=norm, grouped=grouped, scale=weights.row_scale)
        scales = weights.scales[:, None]
        if grouped:
            scales = weights.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        row_scale = given.scales.repeat_interleave(BLOCK, 1) if grouped else given.scales
        products = (given.rows.float() * row_scale) @ (weights.weight.float() * scales).t()
        if self._kind == Epilogue.SWIGLU:
            gate, up = products.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        if self._kind == Epilogue.STORE:
            return products
        return residual.add_(products)


def by_rows(server: Any, engine: Any, layers: Any, expected: Any) -> Any:
    """The expected logits, with those of the last context by the products of one row."""
    from pie_driver_sglang.engine.layers import fp8
    from pie_driver_sglang.engine.layers.fp8 import Fp8GemvLayers

    # On a CPU no model has any.
    assert layers._gemv is None
    assert Fp8GemvLayers.of(layers._layers, layers._norm, layers._attention) is None
    gemv = Fp8GemvLayers(layers._layers, layers._norm, layers._attention)
    with (
        mock.patch.object(layers, "_gemv", gemv),
        mock.patch.object(fp8, "Fp8Gemv", TorchProduct),
    ):
        found = alone(server, engine, layers, expected)
    # One for each of four kinds of matrices, of which two are alike in some models.
    assert len(TorchProduct.made) == len(set(TorchProduct.made)) in (3, 4)
    return found


def by_batches(server: Any, engine: Any, layers: Any) -> Iterator[Any]:
    """Logits of prompts and steps whose products are those of batches, then half of the steps'.

    Blocks with scales have no such products.
    """
    from pie_driver_sglang.engine.layers import fp8
    from pie_driver_sglang.kernels.gemm import wgmma
    from pie_driver_sglang.kernels.gemm.types import Epilogue

    # On a CPU no model has any.
    assert layers._wgmma is None
    grouped = layers._layers[0].qkv.weights.grouped
    usual = wgmma.find_wgmma_config
    layer = [Epilogue.STORE, Epilogue.ADD_RESIDUAL, Epilogue.SWIGLU, Epilogue.ADD_RESIDUAL]
    for whole in (True,) if grouped else (True, False):

        def find(
            rows: int, height: int, inputs: int, itemsize: int, kind: Epilogue,
            whole: bool = whole,
        ) -> Any:  # fmt: skip
            # Of some shapes and rows a library has the products that add.
            taken = whole or kind != Epilogue.ADD_RESIDUAL
            return usual(rows, height, inputs, itemsize, kind) if taken else None

        products, finder, info = TorchBatches(), mock.Mock(side_effect=find), engine.model_info
        with (
            mock.patch.object(layers, "_wgmma", products),
            mock.patch.object(layers, "_prefills", whole),
            mock.patch.object(fp8, "_supports_cublas", lambda _: not grouped),
            mock.patch.object(wgmma, "find_wgmma_config", finder),
            # Else so few inputs are a library's where prompts have many rows.
            mock.patch.object(wgmma, "_NARROW", 0),
            mock.patch.object(wgmma, "_MEMORY_BOUND_ROWS", 512),
        ):
            engine.fused = layers
            contexts = Contexts(256, info.page_size, info.vocab_size)
            yield decode(server, engine, contexts, layers.patched_decode)
            engine.fused = None
        kinds = layer if whole else [Epilogue.STORE, Epilogue.SWIGLU]
        # Prompts are a step, too.
        passes = 0 if grouped else STEPS + whole
        assert products.epilogues == kinds * len(layers._layers) * passes
        assert finder.called != grouped


def main() -> None:
    """Prefills and decodes, fused and not."""
    config, kind = load_config(Path(sys.argv[1])), sys.argv[2]
    environment.prepare("cpu", config.model.hf_config["architectures"], spins=False)
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    from pie_driver_sglang.backends.sglang.attention import paged
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.engine.layers import fp8
    from pie_driver_sglang.engine.layers.fp8 import Fp8Layers
    from pie_driver_sglang.engine.layers.selection import FROZEN_SCALES, fuse_layers
    from pie_driver_sglang.kernels.gemm import tiled

    fp8_rounding.correct()
    name = f"/pie_shmem_g{config.driver.group_id}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    # The region has no client: only its planner is used.
    server.unlink()
    planner, engine = load_engine(config)
    server.serve(planner, engine.block, print)
    runner = engine.backend.runner
    quantize_layers(runner, kind)
    page_size, vocab = engine.model_info.page_size, engine.model_info.vocab_size
    with mock.patch.object(Fp8LinearMethod, "apply", apply_by_torch):
        expected = decode(server, engine, Contexts(0, page_size, vocab))
        paged.install(runner, engine.block_table)
        device = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        with mock.patch("torch.cuda.get_device_properties", return_value=device):
            runner.init_attention_backends()
        layers = fuse_layers(engine.backend)
        assert isinstance(layers, Fp8Layers)
        accepted, reason = runner.weight_updater.update_weights_from_tensor([], "direct")
        assert (accepted, reason) == (False, FROZEN_SCALES)
        # By SGLang's products, by the driver's of one row or a batch, by those without scales, then
        # by tiles where rows are few.
        variants = [decode(server, engine, Contexts(64, page_size, vocab), layers.patched_decode)]
        variants.append(alone(server, engine, layers, expected))
        variants.append(by_rows(server, engine, layers, expected))
        variants += by_batches(server, engine, layers)
        unscaled = mock.Mock(wraps=fp8.unscaled_fp8_gemm)
        with (
            mock.patch.object(fp8, "_supports_cublas", lambda linear: kind != "block"),
            mock.patch.object(fp8, "unscaled_fp8_gemm", unscaled),
        ):
            variants.append(
                decode(server, engine, Contexts(192, page_size, vocab), layers.patched_decode)
            )
        matrices = 4 * len(runner.model.model.layers)
        assert unscaled.call_count == (STEPS * matrices if kind != "block" else 0)
        product = mock.Mock(wraps=tiled.tiled_gemm)
        with (
            mock.patch.object(tiled, "find_tiled_config", small_tile),
            mock.patch.object(tiled, "tiled_gemm", product),
            mock.patch.object(layers, "_prefills", True),
        ):
            engine.fused = layers
            variants.append(
                decode(server, engine, Contexts(128, page_size, vocab), layers.patched_decode)
            )
            engine.fused = None
        assert product.call_count == STEPS * matrices
    for found in variants:
        error = float((found - expected).abs().max() / expected.abs().max())
        print(f"{kind}: off by {error:.1e}")
        assert error < TOLERANCE, error
    print("quantized model: close")


if __name__ == "__main__":
    main()
