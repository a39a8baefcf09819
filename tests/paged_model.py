"""A model's decodes by the backend `pie`, by few kernels, and by SGLang; prints the differences.

    TRITON_INTERPRET=1 python tests/paged_model.py CONFIG

CONFIG is a `driver.toml` of a model in float32 on the CPU, where the driver itself does not offer
that backend. Few kernels run models that are built as Llama is.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig

LENGTHS = (1, 16, 17, 45, 100)
STEPS = 2
DRAWN = 3
"""Tokens of a context after its prompt. Others would make others of quantized rows ties."""
TOLERANCE = 1e-4
DENSE = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Of which model types decodes are few kernels."""
MULTIPROCESSORS = 4
"""Of the device that Triton's interpreter is."""


class Contexts:
    """Contexts of random tokens, in pages of their own, that are decoded together; or one alone."""

    def __init__(
        self, first_page: int, page_size: int, vocab: int, *, only: int | None = None
    ) -> None:
        draw = random.Random(11)
        self._numbers = range(len(LENGTHS)) if only is None else [only]
        self._tokens = [[draw.randrange(vocab) for _ in range(n + DRAWN)] for n in LENGTHS]
        self._page_size = page_size
        pages = list(range(first_page, first_page + 64))
        draw.shuffle(pages)
        self._pages = [pages[8 * number : 8 * number + 8] for number in range(len(LENGTHS))]

    def frame(self, step: int) -> bytes:
        """The prompts (-1), or the decode of this number."""
        return _core.encode_forward([self._request(c, step) for c in self._numbers])

    def _request(self, context: int, step: int) -> Request:
        length = LENGTHS[context]
        start, end = (0, length) if step < 0 else (length + step, length + step + 1)
        used = self._pages[context][: -(-end // self._page_size)]
        return Request(
            self._tokens[context][start:end],
            list(range(start, end)),
            used,
            (end - 1) % self._page_size + 1,
            [(end - start - 1, Sampler.greedy())],
        )


def decode(
    server: Any,
    engine: Any,
    contexts: Contexts,
    way: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """``[steps, contexts, vocabulary]`` logits, decodes in some way."""
    import torch

    found = []
    for step in range(-1, STEPS):
        batch = server.warm_up(contexts.frame(step))
        while (staged := batch.stage()) is not None:
            assert staged.decode == (step >= 0)
            with way() if staged.decode else nullcontext():
                engine.forward(staged)
            with torch.inference_mode():
                logits = engine.logits(torch.arange(staged.tokens))
            while (group := batch.stage_slots()) is not None:
                batch.put_outputs(engine.sample(group).tokens.numpy())
        batch.commit()
        if step >= 0:
            found.append(logits)
    return torch.stack(found)


def found_layers(backend: Any) -> Any:
    """The fused layers of a model; None where there are none."""
    from pie_driver_sglang.engine.layers.selection import fuse_layers
    from pie_driver_sglang.engine.layers.weights import UnsupportedLayer

    try:
        return fuse_layers(backend)
    except UnsupportedLayer:
        return None


def differences(config: DriverConfig) -> list[float]:
    """The largest difference of a logit, of each way but SGLang's."""
    from pie_driver_sglang.backends.sglang.attention import paged
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.engine.layers import dense as dense_module
    from pie_driver_sglang.engine.layers.small_batch import MoeLayers
    from pie_driver_sglang.kernels.gemm import linear

    name = f"/pie_shmem_g{config.driver.group_id}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    # The region has no client: only its planner is used.
    server.unlink()
    planner, engine = load_engine(config)
    server.serve(planner, engine.block, print)
    page_size, vocab = engine.model_info.page_size, engine.model_info.vocab_size
    expected = decode(server, engine, Contexts(0, page_size, vocab))
    own = engine.backend
    runner = own.runner
    paged.install(runner, engine.block_table)
    # There is no device to ask on the CPU.
    device = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with mock.patch("torch.cuda.get_device_properties", return_value=device):
        runner.init_attention_backends()
    assert isinstance(runner.attn_backend.decode_backend, paged.PagedDecodeBackend)
    assert runner.server_args.get_attention_backends() == ("torch_native", "pie")
    found = [decode(server, engine, Contexts(64, page_size, vocab))]
    dense = found_layers(own)
    assert (dense is None) == (config.model.hf_config["model_type"] not in DENSE)
    if isinstance(dense, MoeLayers):
        assert dense.supports(64)
        assert not dense.supports(65)
        found.append(decode(server, engine, Contexts(128, page_size, vocab), dense.patched_decode))
        with dense.patched_prefill():
            assert "forward" not in vars(runner.model.model)
        with by_libraries() as unscaled:
            found.append(
                decode(server, engine, Contexts(128, page_size, vocab), dense.patched_decode)
            )
        assert unscaled.called
        found.append(by_batches(server, engine, dense, "_layers"))
        found.append(alone(server, engine, dense, expected))
        check_experts(own)
    elif dense is not None:
        few = dense._small_batch
        # The kernels of few rows, where norms are folded; then the others.
        if few is not None:
            with mock.patch.object(few, "run", wraps=few.run) as run:
                found.append(
                    decode(server, engine, Contexts(128, page_size, vocab), dense.patched_decode)
                )
            assert run.call_count == STEPS
            found += by_tiles(server, engine, dense, few)
            found.append(by_batches(server, engine, dense, "_small_batch"))
            found.append(alone(server, engine, dense, expected))
        with (
            mock.patch.object(linear, "find_linear_config", small_tiling),
            mock.patch.object(dense, "_small_batch", None),
        ):
            found.append(
                decode(server, engine, Contexts(320, page_size, vocab), dense.patched_decode)
            )
        # Models whose products have no biases, which are all but one, and that take no adapters.
        folds = config.model.hf_config["model_type"] != "qwen2"
        folds = folds and not config.driver.options.enable_lora
        assert (few is not None) == folds
        many = mock.Mock(wraps=dense._run_folded)
        with (
            mock.patch.object(dense_module, "_MAX_ROWS", 0),
            mock.patch.object(dense, "_run_folded", many),
        ):
            found.append(
                decode(server, engine, Contexts(192, page_size, vocab), dense.patched_decode)
            )
        assert many.called == folds
        # Where a backend attends to keys and values that are not stored yet, SGLang prefills.
        for stored in (False, True):
            many.reset_mock()
            with (
                mock.patch.object(dense, "_prefills", stored),
                mock.patch.object(dense, "_run_folded", many),
            ):
                engine.fused = dense
                found.append(decode(server, engine, Contexts(256, page_size, vocab)))
                engine.fused = None
            # Prompts alone: decodes are SGLang's unless they are captured.
            expected_calls = stored and folds
            assert many.call_count == expected_calls, many.call_count
        check_ways(engine, dense)
        check_weights(own)
        with (
            mock.patch.object(linear, "find_linear_config", small_tiling),
            ranked(own) as ranks,
        ):
            contexts = Contexts(128, page_size, vocab)
            found.append(decode(server, engine, contexts, ranks.patched_decode))
        check_ranks(own)
    check_fa3()
    check_vision()
    check_prefills(runner)
    check_choice(runner)
    return [float((logits - expected).abs().max()) for logits in found]


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
            return TileConfig(16, 16, 16, 1 if swiglu else 2) if own else None

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
        if isinstance(given, QuantizedRows):
            assert (given.scales.shape, matrix.scales.shape) == ((count, 1), (height,))
            assert sum_squares is None
            products *= given.scales * matrix.scales
        elif sum_squares is not None:
            products *= torch.rsqrt(sum_squares.sum(1, keepdim=True) / inputs + epsilon)
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
    assert few._wgmma is None
    assert not few.has_wgmma
    layers = few._layers
    products = TorchBatches()
    with (
        mock.patch.object(wgmma, "_WARPGROUP_OUTPUTS", 16),
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
            assert others._wgmma is None
        # One row, and more than all products take in batches.
        for rows in (1, 9):
            assert isinstance(batches._find_configs(rows, layers[0])[0], TileConfig)
        info = engine.model_info
        contexts = Contexts(384, info.page_size, info.vocab_size)
        with mock.patch.object(dense, name, batches):
            found = decode(server, engine, contexts, dense.patched_decode)
    kinds = [Epilogue.STORE, Epilogue.ADD_RESIDUAL]
    if name == "_small_batch":
        kinds += [Epilogue.SWIGLU, Epilogue.ADD_RESIDUAL]
    assert products.epilogues == kinds * len(layers) * STEPS
    return found


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


def check_ranks(backend: Any) -> None:
    """Two or four ranks add up in the norm where they share memory."""
    import torch
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    from pie_driver_sglang.backends.sglang.compat.ranks import TensorGroup
    from pie_driver_sglang.engine.layers import selection
    from pie_driver_sglang.kernels.comm.all_reduce_norm import PeerMemory

    reaches = mock.Mock(spec=CustomAllReduceV2, disabled=False)
    disabled = mock.Mock(spec=CustomAllReduceV2, disabled=True)
    fails = mock.patch.object(
        selection.all_reduce_norm, "map_peer_memory", side_effect=RuntimeError("no")
    )
    cases = ((3, reaches), (2, None), (2, object()), (2, disabled), (2, reaches), (4, reaches))
    for ranks, reach in cases:
        group = TensorGroup(mock.Mock(ca_comm=reach, world_size=ranks, rank_in_group=0))
        with mock.patch.object(backend, "group", group), fails as share:
            assert found_layers(backend) is None
            assert share.called == (ranks != 3 and reach is reaches)
    for ranks in (2, 4):

        def memory(group: Any, device: Any, size: int, ranks: int = ranks) -> PeerMemory:
            return PeerMemory([torch.zeros(size, dtype=torch.uint8, device=device)] * ranks)

        group = mock.Mock(ca_comm=reaches, world_size=ranks, rank_in_group=ranks - 1)
        with (
            mock.patch.object(backend, "group", TensorGroup(group)),
            mock.patch.object(selection.all_reduce_norm, "map_peer_memory", memory),
        ):
            layers = selection.fuse_layers(backend)
        assert layers is not None
        assert layers.supports(256)
        assert not layers.supports(257)


def check_ways(engine: Any, dense: Any) -> None:
    """Few kernels for prefills, unless a mask says who sees whom."""
    plain, step = (SimpleNamespace(mask=None, decode=decode) for decode in (False, True))
    with_mask = SimpleNamespace(mask=object(), decode=False)
    with (
        mock.patch.object(dense, "patched_prefill") as prefilling,
        mock.patch.object(engine, "fused", dense),
    ):
        assert engine._layers_of(plain) is prefilling.return_value
        for batch in (with_mask, step):
            assert isinstance(engine._layers_of(batch), nullcontext)
    model = engine.backend.runner.model.model
    own = model.forward
    with dense.patched_decode(), pytest.raises(ValueError, match="tokens and nothing else"):
        model.forward(None, None, None, input_embeds=[0.0])
    assert model.forward == own


def check_weights(backend: Any) -> None:
    """Weights elsewhere, or of other types, leave a model as it is."""
    import torch

    linear = backend.runner.model.model.layers[-1].mlp.down_proj
    linear = getattr(linear, "base_layer", linear)
    own = linear.weight

    class Other(torch.Tensor):
        """Computes in a way of its own."""

    for weight in (own.data.to("meta"), own.data.as_subclass(Other)):
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        assert found_layers(backend) is None
    linear.weight = own
    assert found_layers(backend) is not None


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


def check_experts(backend: Any) -> None:
    """Experts that compute or are chosen in another way leave a model as it is."""
    import torch

    layer = backend.runner.model.model.layers[-1]
    block = getattr(layer, "block_sparse_moe", None) or layer.mlp
    experts = block.experts
    for owner, name, value in (
        (block.topk.topk_config, "scoring_func", "sigmoid"),
        (block.topk.topk_config, "correction_bias", torch.zeros(4)),
        (block, "tp_size", 2),
        (block, "experts", torch.nn.Identity()),
        (experts.moe_runner_config, "activation", "gelu"),
        (experts.moe_runner_config, "routed_scaling_factor", 2.0),
        (experts.quant_method, "use_triton_kernels", True),
    ):
        with mock.patch.object(owner, name, value):
            assert found_layers(backend) is None, name
    assert found_layers(backend) is not None


def small_tiling(
    rows: int, outputs: int, inputs: int, max_split_k: int = 1, *, swiglu: bool = False
) -> Any:
    """Takes the kernels where the matrix allows; a library those of the MLPs' gates, say."""
    from pie_driver_sglang.kernels.gemm.types import TileConfig

    config = TileConfig(16, 16, 16, min(2, max_split_k))
    return config if config.fits(outputs, inputs) else None


def check_choice(runner: Any) -> None:
    """Whether it decodes where it is asked for, where it is not, and where nothing is said."""
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool

    from pie_driver_sglang.backends.sglang import support
    from pie_driver_sglang.errors import StartError

    def choices() -> tuple[str, bool]:
        """What asking for it says, and what is chosen otherwise."""
        assert support.paged_decode_refusal(runner, False)
        said = ""
        try:
            assert support.paged_decode_refusal(runner, True) is None
        except StartError as error:
            said = str(error)
        return said, support.paged_decode_refusal(runner, None) is None

    assert choices() == ("", True)
    latent = MLATokenToKVPool(
        size=16, page_size=16, dtype=torch.float32, kv_lora_rank=4, qk_rope_head_dim=2,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    hybrid = HybridLinearKVPool.__new__(HybridLinearKVPool)
    hybrid.full_kv_pool = runner.token_to_kv_pool
    layer = support.attention_layers(runner)[-1]
    for owner, name, value, reason in (
        (runner, "token_to_kv_pool", latent, "its KV pool is a MLATokenToKVPool"),
        (runner.token_to_kv_pool, "dtype", torch.uint8, "its KV pool keeps torch.uint8"),
        (layer, "use_irope", True, "some of its layers attend in a way of their own"),
        # These are left to SGLang, unless the user asks for the backend.
        (runner, "token_to_kv_pool", hybrid, ""),
        (layer, "v_head_dim", 512, ""),
    ):
        with mock.patch.object(owner, name, value):
            said, chosen = choices()
            assert (reason in said, bool(said), chosen) == (True, bool(reason), False), said
    runner.server_args.override("test", enable_deterministic_inference=True)
    said, chosen = choices()
    assert "enable_deterministic_inference" in said, said
    assert not chosen


def check_fa3() -> None:
    """Its library may be absent, broken or there."""
    from pie_driver_sglang.backends.sglang import support

    contents = ((None, False), ("flash_ops.abi3.so", False), ("flash_ops.py", True))
    for name, found in contents:
        with tempfile.TemporaryDirectory() as folder:
            package = ModuleType("sgl_kernel")
            package.__path__ = [folder]
            if name is not None:
                Path(folder, name).touch()
            with mock.patch.dict(sys.modules, {"sgl_kernel": package}):
                sys.modules.pop("sgl_kernel.flash_ops", None)
                assert support.has_fa3() == found, name


def check_vision() -> None:
    """Images are encoded by triton where SGLang's own choice is not installed."""
    import torch

    from pie_driver_sglang.backends.sglang import support

    def chosen(device: str, image: bool, named: str | None, hopper: bool, there: bool) -> object:
        args = SimpleNamespace(device=device, mm_attention_backend=named)
        args.override = lambda _, **fields: vars(args).update(fields)
        capability = (9 if hopper else 8, 0)
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability),
            mock.patch.object(support, "has_fa3", lambda: there),
        ):
            model: Any = SimpleNamespace(is_multimodal=image)
            support.choose_vision_backend(args, model, 0)  # type: ignore[arg-type]
        return args.mm_attention_backend

    assert chosen("cuda", True, None, True, False) == "triton_attn"
    assert chosen("cuda", True, "sdpa", True, False) == "sdpa"
    for others in (
        ("cpu", True, None, True, False),
        ("cuda", False, None, True, False),
        ("cuda", True, None, False, False),
        ("cuda", True, None, True, True),
    ):
        assert chosen(*others) is None, others


def check_prefills(runner: Any) -> None:
    """Where FlashAttention-3 computes prefills, and where steps may have prompts in them."""
    import torch

    from pie_driver_sglang.backends.sglang import support

    assert support.takes_prompts(runner)
    layer, pool = support.attention_layers(runner)[-1], runner.token_to_kv_pool
    fits = (
        (torch.cuda, "get_device_capability", lambda _: (9, 0)),
        (support, "has_fa3", lambda: True),
        (support, "attention_layers", lambda _: [layer]),
        (runner, "device", "cuda"),
        (runner, "dtype", torch.bfloat16),
        (pool, "dtype", torch.bfloat16),
        (layer, "qk_head_dim", 128),
        (layer, "v_head_dim", 128),
        (layer, "sliding_window_size", -1),
        (layer, "logit_cap", 0.0),
    )
    does_not = (
        (torch.cuda, "get_device_capability", lambda _: (8, 0)),
        (support, "has_fa3", lambda: False),
        (runner, "device", "cpu"),
        (pool, "dtype", torch.float8_e4m3fn),
        (layer, "qk_head_dim", 80),
        (layer, "v_head_dim", 64),
        (layer, "sliding_window_size", 16),
        (layer, "logit_cap", 30.0),
    )
    with contextlib.ExitStack() as patches:
        for owner, name, value in fits:
            patches.enter_context(mock.patch.object(owner, name, value))
        assert support.prefills_by_fa3(runner)
        for owner, name, value in does_not:
            with mock.patch.object(owner, name, value):
                assert not support.prefills_by_fa3(runner), name
        decodes = SimpleNamespace(decode_attention_backend=support.PAGED_DECODE)
        for args, taken in ((decodes, True), (SimpleNamespace(decode_attention_backend=""), False)):
            with mock.patch.object(runner, "server_args", args):
                assert support.takes_prompts(runner) == taken
                with mock.patch.object(runner, "ps", SimpleNamespace(tp_size=2, tp_rank=0)):
                    assert not support.takes_prompts(runner)


if __name__ == "__main__":
    loaded = load_config(Path(sys.argv[1]))
    environment.prepare("cpu", loaded.model.hf_config["architectures"], spins=False)
    errors = differences(loaded)
    print(*(f"{error:.1e}" for error in errors))
    sys.exit(not max(errors) < TOLERANCE)
