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

    last, facts = len(LENGTHS) - 1, engine.facts
    contexts = Contexts(128, facts.page_size, facts.vocab_size, only=last)
    kernel = mock.Mock(wraps=single_decode.attend_lone)
    with (
        # Halves of such heads are too small for a GPU.
        mock.patch.object(single_decode, "_DIMS", (8, 16, 32, 64, 128)),
        mock.patch.object(single_decode, "_MOST_KV_HEADS", 64),
        mock.patch.object(single_decode, "attend_lone", kernel),
    ):
        found = expected.clone()
        found[:, last:] = decode(server, engine, contexts, dense.applied)
        calls = STEPS * len(engine.runner.model.model.layers)
        assert kernel.call_count == calls
        # Models do not differ in who finds the kernel.
        if engine.runner.model_config.hf_config.model_type == "qwen3":
            with clustered(engine.runner) as clusters:
                again = decode(server, engine, contexts, dense.applied)
            assert clusters.call_count == calls
            assert float((again - found[:, last:]).abs().max()) < TOLERANCE
    return found


@contextlib.contextmanager
def clustered(runner: Any) -> Iterator[mock.Mock]:
    """Within, rows alone are attended to as by clusters, which take a GPU: by Triton's kernel."""
    import torch

    from pie_driver_sglang.backends.sglang.compat.attention import decode_backend
    from pie_driver_sglang.kernels.attention import cluster_decode, single_decode

    def attend(qkv: Any, heads: Any, row: Any, scale: float) -> Any:
        # What a kernel in CUDA C++ takes, which knows no types of its arguments.
        assert [each.dtype for each in row] == [torch.int32] + [torch.int64] * 4
        assert heads.rotations.dtype is torch.float32
        assert heads.rotations.stride(1) == heads.keys.stride(2) == heads.values.stride(2) == 1
        arrived = torch.zeros(heads.keys.shape[1], 1, dtype=torch.int32)
        tuning = single_decode.LoneTuning(16, 4, 1, 128, 256)
        return single_decode.attend_lone(qkv, heads, row, arrived, scale, tuning)

    kernel = SimpleNamespace(attend=mock.Mock(side_effect=attend))
    found: Any = decode_backend(runner) or runner.attn_backend
    # No kernel was found for its heads, as they are on no GPU.
    assert set(found._clustered_heads.values()) == {None}
    found._clustered_heads.clear()
    with mock.patch.object(cluster_decode, "find_clusters", lambda *_: kernel):
        yield kernel.attend
    found._clustered_heads.clear()


def by_tiles(server: Any, engine: Any, dense: Any, few: Any) -> Iterator[Any]:
    """Logits of steps whose products go by tiles, all of them or two of a layer."""
    from pie_driver_sglang.kernels.gemm import tiled

    page_size, vocab = engine.facts.page_size, engine.facts.vocab_size
    layers = len(engine.runner.model.model.layers)
    middle = engine.runner.model.config.intermediate_size
    for whole in (True, False):

        def small(
            rows: int, outputs: int, inputs: int, itemsize: int, *, adds: bool, gated: bool,
            whole: bool = whole,
        ) -> Any:  # fmt: skip
            # Of those that add, that of attention.
            own = whole or gated or (adds and inputs != middle)
            return tiled.Tile(16, 16, 16, parts=1 if gated else 2) if own else None

        product = mock.Mock(wraps=tiled.tiled_product)
        with (
            mock.patch.object(few, "_most_cut", 0),
            mock.patch.object(tiled, "find_tile", small),
            mock.patch.object(tiled, "tiled_product", product),
        ):
            yield decode(server, engine, Contexts(384, page_size, vocab), dense.applied)
        assert product.call_count == STEPS * layers * (4 if whole else 2)


class TorchBatches:
    """In place of `BatchProducts`, which takes a GPU: the same numbers by torch."""

    def __init__(self, *_: object) -> None:
        self.kinds: list[Any] = []
        """Of all products so far."""

    def multiply(
        self, given: Any, matrix: Any, cut: Any, kind: Any, *, stream: Any = None,
        epsilon: float = 0.0, into: Any = None,
    ) -> Any:  # fmt: skip
        import torch

        from pie_driver_sglang.kernels.gemm.fp8_gemv import ProductKind
        from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedRows
        from pie_driver_sglang.kernels.gemm.small_m import Stream

        self.kinds.append(kind)
        rows = given.rows if isinstance(given, QuantizedRows) else given
        (count, inputs), height = rows.shape, len(matrix.weight)
        assert rows.is_contiguous()
        assert matrix.weight.shape == (height, inputs)
        assert (count <= cut.rows, height % cut.outputs) == (True, 0)
        assert (into is not None) == (kind == ProductKind.ADDS)
        products = rows.float() @ matrix.weight.float().t()
        if isinstance(given, QuantizedRows):
            assert (given.scales.shape, matrix.scales.shape) == ((count, 1), (height,))
            assert stream is None
            products *= given.scales * matrix.scales
        elif stream is not None:
            assert stream.rows is rows
            products *= torch.rsqrt(stream.squares.sum(1, keepdim=True) / inputs + epsilon)
        if kind == ProductKind.JOINS:
            gate, up = products.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up
        if into is None:
            return products
        if not isinstance(into, Stream):
            return into.add_(products)
        assert into.squares.shape == (count, height // cut.outputs)
        tiles = into.rows.add_(products).unflatten(1, (-1, cut.outputs))
        into.squares.copy_(tiles.square().sum(-1))
        return into.rows


def by_batches(server: Any, engine: Any, dense: Any, name: str) -> Any:
    """Logits of steps whose products are those of batches, which take a GPU.

    Args:
        name: The attribute of `dense` that has the kernels of few rows.
    """
    from pie_driver_sglang.backends.sglang.layers import small_batch
    from pie_driver_sglang.kernels.gemm import wgmma
    from pie_driver_sglang.kernels.gemm.fp8_gemv import ProductKind
    from pie_driver_sglang.kernels.gemm.small_m import Cut
    from pie_driver_sglang.kernels.gemm.wgmma import BatchCut

    def small(rows: int, height: int, inputs: int, itemsize: int, kind: ProductKind) -> Any:
        return BatchCut(8, 2 if kind == ProductKind.JOINS else 1, 2) if rows <= 8 else None

    few = getattr(dense, name)
    # On a CPU no model has any.
    assert few._batch is None
    assert not few.batches
    layers = few._layers
    products = TorchBatches()
    with (
        mock.patch.object(wgmma, "_GROUP_OUTPUTS", 16),
        mock.patch.object(wgmma, "find_batch_cut", small),
        mock.patch.object(wgmma, "runs_on", lambda _: True),
        mock.patch.object(small_batch, "BatchProducts", lambda *_: products),
    ):
        batches = small_batch.FewRows.of(layers, few._norm, few._attention)
        assert batches is not None
        assert batches.batches
        with mock.patch.object(wgmma, "find_batch_cut", lambda *_: None):
            # Matrices of other shapes have what GPUs without the kernel have.
            others = small_batch.FewRows.of(layers, few._norm, few._attention)
            assert others is not None
            assert others._batch is None
        # One row, and more than all products take in batches.
        for rows in (1, 9):
            assert isinstance(batches._find(rows, layers[0])[0], Cut)
        facts = engine.facts
        contexts = Contexts(384, facts.page_size, facts.vocab_size)
        with mock.patch.object(dense, name, batches):
            found = decode(server, engine, contexts, dense.applied)
    kinds = [ProductKind.STORES, ProductKind.ADDS]
    if name == "_few":
        kinds += [ProductKind.JOINS, ProductKind.ADDS]
    assert products.kinds == kinds * len(layers) * STEPS
    return found


@contextlib.contextmanager
def ranked(runner: Any) -> Iterator[Any]:
    """The layers of one rank that adds up as several do."""
    from pie_driver_sglang.backends.sglang.layers import selection
    from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm

    def add_norm(turn: int, part: Any, residual: Any, norm: Any) -> Any:
        assert turn == sums.add_norm.call_count % 2 ^ 1
        return selection.dense_layers.add_norm(part[None], residual, norm)

    sums = mock.Mock(spec=LamportAllReduceNorm, most_rows=256)
    sums.add_norm.side_effect = add_norm
    with mock.patch.object(selection, "_all_reduce", lambda *_: sums):
        dense = selection.fuse_layers(runner)
    assert dense is not None
    assert dense.takes(256)
    assert not dense.takes(257)
    model = runner.model.model
    with mock.patch.object(dense, "_prefills", True), dense.prefilling():
        assert "forward" not in vars(model)
    yield dense
    assert sums.add_norm.call_count == 2 * STEPS * len(model.layers)


@contextlib.contextmanager
def by_libraries() -> Iterator[mock.Mock]:
    """Within, a library multiplies in mixtures of experts, as it does in steps of many rows."""
    from pie_driver_sglang.backends.sglang.layers import small_batch
    from pie_driver_sglang.kernels.gemm import small_m as kernels

    with (
        mock.patch.object(kernels, "MOST_ROWS", 2),
        mock.patch.object(
            small_batch, "attend_unscaled", wraps=small_batch.attend_unscaled
        ) as unscaled,
    ):
        yield unscaled


def small_tiling(
    rows: int, outputs: int, inputs: int, most_parts: int = 1, *, gated: bool = False
) -> Any:
    """Takes the kernels where the matrix allows; a library those of the MLPs' gates, say."""
    from pie_driver_sglang.kernels.gemm.dense_layers import Tiling

    cut = Tiling(16, 16, 16, parts=min(2, most_parts))
    return cut if cut.fits(outputs, inputs) else None
