"""Decodes of the fused layers by each kernel that a GPU may choose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.kernels.model_decode import LENGTHS, STEPS, TOLERANCE, Contexts, decode


def alone(server: Any, engine: Any, dense: Any, expected: Any) -> Any:
    """The expected logits, with those of the last context as it is decoded alone."""
    from pie_driver_sglang.kernels.attention import single_decode

    last, info = len(LENGTHS) - 1, engine.model_info
    contexts = Contexts(128, info.page_size, info.vocab_size, only=last)
    kernel = mock.Mock(wraps=single_decode.attend_single)
    with (
        # Halves of such heads are too small for a GPU.
        mock.patch.object(single_decode, "_DIMS", (8, 16, 32, 64, 128)),
        mock.patch.object(single_decode, "_MAX_KV_HEADS", 64),
        mock.patch.object(single_decode, "attend_single", kernel),
    ):
        found = expected.clone()
        found[:, last:] = decode(server, engine, contexts, dense.patched_decode)
        calls = STEPS * len(engine.backend.runner.model.model.layers)
        assert kernel.call_count == calls
        # Models do not differ in who finds the kernel.
        if engine.backend.runner.model_config.hf_config.model_type == "qwen3":
            with clustered(engine.backend) as clusters:
                again = decode(server, engine, contexts, dense.patched_decode)
            assert clusters.call_count == calls
            assert float((again - found[:, last:]).abs().max()) < TOLERANCE
    return found


@contextlib.contextmanager
def clustered(backend: Any) -> Iterator[mock.Mock]:
    """Within, rows alone are attended to as by clusters, which take a GPU: by Triton's kernel."""
    import torch

    from pie_driver_sglang.kernels.attention import cluster_decode, single_decode

    def attend(qkv: Any, heads: Any, row: Any, scale: float) -> Any:
        # What a kernel in CUDA C++ takes, which knows no types of its arguments.
        assert [each.dtype for each in row] == [torch.int32] + [torch.int64] * 4
        assert heads.cos_sin_cache.dtype is torch.float32
        assert (
            heads.cos_sin_cache.stride(1) == heads.k_cache.stride(2) == heads.v_cache.stride(2) == 1
        )
        semaphores = torch.zeros(heads.k_cache.shape[1], 1, dtype=torch.int32)
        tuning = single_decode.SingleDecodeConfig(16, 4, 1, 128, 256)
        return single_decode.attend_single(qkv, heads, row, semaphores, scale, tuning)

    kernel = SimpleNamespace(attend=mock.Mock(side_effect=attend))
    found: Any = backend.decode_attention
    # No kernel was found for its heads, as they are on no GPU.
    assert set(found._clustered_heads.values()) == {None}
    found._clustered_heads.clear()
    with mock.patch.object(cluster_decode, "make_cluster_decode", lambda *_: kernel):
        yield kernel.attend
    found._clustered_heads.clear()


def by_tiles(server: Any, engine: Any, dense: Any, few: Any) -> Iterator[Any]:
    """Logits of steps whose products go by tiles, all of them or two of a layer."""
    from pie_driver_sglang.kernels.gemm import tiled
    from pie_driver_sglang.kernels.gemm.types import Epilogue, TileConfig

    page_size, vocab = engine.model_info.page_size, engine.model_info.vocab_size
    layers = len(engine.backend.runner.model.model.layers)
    intermediate = engine.backend.runner.model.config.intermediate_size
    for whole in (True, False):

        def small(
            rows: int, outputs: int, inputs: int, itemsize: int, epilogue: Epilogue,
            whole: bool = whole,
        ) -> Any:  # fmt: skip
            # Of the projections that add to the residual, that of attention.
            swiglu = epilogue == Epilogue.SWIGLU
            own = whole or swiglu or (epilogue == Epilogue.ADD_RESIDUAL and inputs != intermediate)
            splits = 1 if swiglu or inputs % 32 else 2
            return TileConfig(16, 16, 16, splits) if own else None

        product = mock.Mock(wraps=tiled.tiled_gemm)
        with (
            mock.patch.object(few, "_max_small_m_rows", 0),
            mock.patch.object(tiled, "find_tiled_config", small),
            mock.patch.object(tiled, "tiled_gemm", product),
        ):
            yield decode(server, engine, Contexts(384, page_size, vocab), dense.patched_decode)
        assert product.call_count == STEPS * layers * (4 if whole else 2)


class TorchBatches:
    """In place of `WgmmaGemm`, which takes a GPU: the same numbers by torch."""

    def __init__(self, *_: object) -> None:
        self.epilogues: list[Any] = []
        """Of all products so far."""

    def multiply(
        self, given: Any, matrix: Any, config: Any, epilogue: Any, *, sum_squares: Any = None,
        epsilon: float = 0.0, residual: Any = None,
    ) -> Any:  # fmt: skip
        import torch

        from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedRows
        from pie_driver_sglang.kernels.gemm.types import Epilogue, Residual

        self.epilogues.append(epilogue)
        rows = given.rows if isinstance(given, QuantizedRows) else given
        (count, inputs), height = rows.shape, len(matrix.weight)
        assert rows.is_contiguous()
        assert matrix.weight.shape == (height, inputs)
        assert (count <= config.block_m, height % config.block_n) == (True, 0)
        assert (residual is not None) == (epilogue == Epilogue.ADD_RESIDUAL)
        products = rows.float() @ matrix.weight.float().t()
        bias = None if isinstance(given, QuantizedRows) else matrix.bias
        assert bias is None or epilogue == Epilogue.STORE
        if isinstance(given, QuantizedRows):
            assert (given.scales.shape, matrix.scales.shape) == ((count, 1), (height,))
            assert sum_squares is None
            products *= given.scales * matrix.scales
        elif sum_squares is not None:
            products *= torch.rsqrt(sum_squares.sum(1, keepdim=True) / inputs + epsilon)
        if bias is not None:
            products += bias
        if epilogue == Epilogue.SWIGLU:
            gate, up = products.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        if residual is None:
            return products
        if not isinstance(residual, Residual):
            return residual.add_(products)
        assert residual.sum_squares.shape == (count, height // config.block_n)
        tiles = residual.rows.add_(products).unflatten(1, (-1, config.block_n))
        residual.sum_squares.copy_(tiles.square().sum(-1))
        return residual.rows


def by_batches(server: Any, engine: Any, dense: Any, name: str) -> Any:
    """Logits of steps whose products are those of batches, which take a GPU.

    Args:
        name: The attribute of `dense` that has the kernels of few rows.
    """
    from pie_driver_sglang.engine.layers import small_batch
    from pie_driver_sglang.kernels.gemm import wgmma
    from pie_driver_sglang.kernels.gemm.types import Epilogue, TileConfig
    from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

    def small(rows: int, height: int, inputs: int, itemsize: int, kind: Epilogue) -> Any:
        return WgmmaConfig(8, 2 if kind == Epilogue.SWIGLU else 1, 2) if rows <= 8 else None

    few = getattr(dense, name)
    # On a CPU no model has any.
    assert few.runner.wgmma_gemm is None
    assert not few.has_wgmma
    layers = few.layers
    products = TorchBatches()
    with (
        mock.patch.object(wgmma, "WARPGROUP_OUTPUTS", 16),
        mock.patch.object(wgmma, "find_wgmma_config", small),
        mock.patch.object(wgmma, "supports_wgmma", lambda _: True),
        mock.patch.object(small_batch, "WgmmaGemm", lambda *_: products),
    ):
        batches = small_batch.SmallBatchLayers.of(layers, few._norm, few._attention)
        assert batches is not None
        assert batches.has_wgmma
        with mock.patch.object(wgmma, "find_wgmma_config", lambda *_: None):
            # Matrices of other shapes have what GPUs without the kernel have.
            others = small_batch.SmallBatchLayers.of(layers, few._norm, few._attention)
            assert others is not None
            assert others.runner.wgmma_gemm is None
        # One row, and more than all products take in batches.
        for rows in (1, 9):
            assert isinstance(batches.find_configs(rows, layers[0])[0], TileConfig)
        info = engine.model_info
        contexts = Contexts(384, info.page_size, info.vocab_size)
        with mock.patch.object(dense, name, batches):
            found = decode(server, engine, contexts, dense.patched_decode)
    kinds = [Epilogue.STORE, Epilogue.ADD_RESIDUAL]
    if name == "_small_batch":
        kinds += [Epilogue.SWIGLU, Epilogue.ADD_RESIDUAL]
    assert products.epilogues == kinds * len(layers) * STEPS
    return found


def kept_inputs(server: Any, engine: Any, dense: Any) -> float:
    """The largest difference between the inputs of layers that an EAGLE-3 head takes.

    SGLang's layers keep the expected ones. Fused layers run by the kernels of few rows, and by
    cuBLAS GEMMs with folded norms.
    """
    import torch

    own, layers = engine.backend, dense._layers
    model, info = own.runner.model, engine.model_info
    captured = sorted({1, len(layers) - 1})
    finish, kept = type(own)._finish_pass, list[torch.Tensor]()

    def keep(backend: Any, batch: Any) -> Any:
        if batch.forward_mode.is_decode():
            kept.append(torch.cat(backend._aux, dim=-1).clone())
        return finish(backend, batch)

    def of(patch: Any) -> torch.Tensor:
        kept.clear()
        decode(server, engine, Contexts(128, info.page_size, info.vocab_size), patch)
        assert len(kept) == STEPS
        return torch.stack(kept)

    with (
        mock.patch.object(type(own), "_finish_pass", keep),
        mock.patch.object(model, "capture_aux_hidden_states", True),
        mock.patch.object(model.model, "layers_to_capture", captured),
    ):
        # A head does not keep the layers from being fused.
        assert len(own.decoder_weights().layers) == len(layers)
        expected = of(contextlib.nullcontext)
        found = [of(dense.patched_decode)]
        with mock.patch.object(dense, "_max_small_rows", lambda: 0):
            found.append(of(dense.patched_decode))
        if not dense._folded:
            found = found[:1]
    assert expected.shape[-1] == len(captured) * model.config.hidden_size
    return max(float((states - expected).abs().max()) for states in found)


def batch_invariant_logits(server: Any, engine: Any, dense: Any) -> Iterator[Any]:
    """Logits of decodes by the layers whose rows do not depend on their batch, then of all passes.

    Then by those of one of two ranks, last by SGLang's layers. GEMMs are torch's, since theirs take
    a GPU.
    """
    from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
    from pie_driver_sglang.engine.layers import batch_invariant, selection
    from pie_driver_sglang.kernels.gemm import wgmma
    from pie_driver_sglang.kernels.gemm.types import Epilogue
    from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

    def small(_: int, weight: Any, epilogue: Any) -> WgmmaConfig:
        assert weight.dim() == 2
        return WgmmaConfig(1 << 20, 1, 2, square_warpgroups=1)

    products, paged = TorchBatches(), dense._attention
    attention = BatchInvariantAttention(engine.block_table, paged._layers, 2)
    hybrid, info = engine.backend.runner.attn_backend, engine.model_info
    backend = hybrid.decode_backend
    with (
        mock.patch.object(wgmma, "WARPGROUP_OUTPUTS", 16),
        mock.patch.object(wgmma, "SQUARE_OUTPUTS", 16),
        mock.patch.object(batch_invariant, "WgmmaGemm", lambda *_: products),
        mock.patch.object(batch_invariant, "_config", small),
        mock.patch.object(backend, "attention", attention),
        mock.patch.object(hybrid, "prefill_backend", backend),
    ):
        layers = dense._layers
        batch_invariant.check_weights(layers)
        gemm = batch_invariant.BatchInvariantGemm(layers[0].qkv.weight.dtype, engine.backend.device)
        fused = batch_invariant.BatchInvariantLayers(
            dense._decoder, layers, dense._norms[-1], attention, gemm
        )
        contexts = Contexts(384, info.page_size, info.vocab_size)
        yield decode(server, engine, contexts, fused.patched_decode)
        assert len(products.epilogues) == 4 * len(layers) * STEPS
        contexts, engine.fused = Contexts(448, info.page_size, info.vocab_size), fused
        yield decode(server, engine, contexts, fused.patched_decode)
        engine.fused = None
        # Of the prompts, too.
        assert len(products.epilogues) > 4 * len(layers) * 2 * STEPS
        products.epilogues.clear()
        group = two_ranks()
        with mock.patch.object(engine.backend, "group", group):
            engine.fused = selection.fuse_layers(engine.backend)
        assert isinstance(engine.fused, batch_invariant.BatchInvariantLayers)
        yield decode(server, engine, Contexts(576, info.page_size, info.vocab_size))
        engine.fused = None
        assert Epilogue.ADD_RESIDUAL not in products.epilogues
        assert 2 * group.all_reduce.call_count == len(products.epilogues)
        products.epilogues.clear()
        with unreplaced(engine.backend.runner.model):
            engine.backend.replace_gemms(gemm, lambda _: True)
            contexts = Contexts(512, info.page_size, info.vocab_size)
            yield decode(server, engine, contexts, contextlib.nullcontext)
        assert len(products.epilogues) > 5 * len(layers) * STEPS
        assert set(products.epilogues) == {Epilogue.STORE}


def two_ranks() -> mock.Mock:
    """A group whose other rank adds nothing; what it was given is lost, as it may be."""

    def all_reduce(part: Any) -> Any:
        summed = part.clone()
        part.fill_(float("nan"))
        return summed

    return mock.Mock(world_size=2, rank_in_group=0, all_reduce=mock.Mock(side_effect=all_reduce))


@contextlib.contextmanager
def unreplaced(model: Any) -> Iterator[None]:
    """Afterwards, a model multiplies by its own linear layers and LM head again."""
    methods = {module: module.quant_method for module in model.modules() if is_linear(module)}
    try:
        yield
    finally:
        for module, method in methods.items():
            module.quant_method = method
        del model.logits_processor._compute_lm_head


def is_linear(module: Any) -> bool:
    """Whether it is one of SGLang's linear layers."""
    from sglang.srt.layers.linear import LinearBase

    return isinstance(module, LinearBase)


@contextlib.contextmanager
def ranked(backend: Any) -> Iterator[Any]:
    """The layers of one rank that adds up as several do."""
    from pie_driver_sglang.engine.layers import selection
    from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
    from pie_driver_sglang.kernels.gemm import norm_rope

    def add_rms_norm(buffer: int, part: Any, residual: Any, norm: Any) -> Any:
        assert buffer == sums.add_rms_norm.call_count % 2 ^ 1
        return norm_rope.add_rms_norm(part[None], residual, norm)

    sums = mock.Mock(spec=LamportAllReduceNorm, max_rows=256)
    sums.add_rms_norm.side_effect = add_rms_norm
    with mock.patch.object(selection, "_make_all_reduce", lambda *_: sums):
        dense = selection.fuse_layers(backend)
    assert dense is not None
    assert dense.supports(256)
    assert not dense.supports(257)
    model = backend.runner.model.model
    with mock.patch.object(dense, "_prefills", True), dense.patched_prefill():
        assert "forward" not in vars(model)
    yield dense
    assert sums.add_rms_norm.call_count == 2 * STEPS * len(model.layers)


@contextlib.contextmanager
def by_libraries() -> Iterator[mock.Mock]:
    """Within, a library multiplies in mixtures of experts, as it does in steps of many rows."""
    from pie_driver_sglang.engine.layers import small_batch
    from pie_driver_sglang.kernels.gemm import small_m as kernels

    with (
        mock.patch.object(kernels, "MAX_ROWS", 2),
        mock.patch.object(
            small_batch, "attend_folded_norm", wraps=small_batch.attend_folded_norm
        ) as unscaled,
    ):
        yield unscaled


def small_tiling(
    rows: int, outputs: int, inputs: int, max_split_k: int = 1, *, swiglu: bool = False
) -> Any:
    """Takes the kernels where the matrix allows; a library those of the MLPs' gates, say."""
    from pie_driver_sglang.kernels.gemm.types import TileConfig

    config = TileConfig(16, 16, 16, min(2, max_split_k))
    return config if config.fits(outputs, inputs) else None
