"""Logits of decodes by the backend `pie` and by the fused layers, against SGLang's.

    PYTHONPATH=tests TRITON_INTERPRET=1 python tests/support/kernels/fused_model.py CONFIG

CONFIG is a `driver.toml` of a model in float32 on the CPU, where the driver itself does not offer
that backend. Few kernels run models that are built as Llama is.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from support.kernels.backend_support import check_choice, check_fa3, check_prefills, check_vision
from support.kernels.decode_variants import (
    alone,
    batch_invariant_logits,
    by_batches,
    by_libraries,
    by_tiles,
    kept_inputs,
    ranked,
    small_tiling,
)
from support.kernels.model_decode import STEPS, TOLERANCE, Contexts, decode

DENSE = ("llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""Of which model types decodes are few kernels."""
MULTIPROCESSORS = 4
"""Of the device that Triton's interpreter is."""


def found_layers(backend: Any) -> Any:
    """The fused layers of a model; None where there are none."""
    from pie_driver_sglang.engine.layers.selection import fuse_layers
    from pie_driver_sglang.engine.layers.weights import UnsupportedLayer

    try:
        return fuse_layers(backend)
    except UnsupportedLayer:
        return None


def differences(config: DriverConfig) -> list[float]:
    """The largest difference of a logit, of each path but SGLang's."""
    from pie_driver_sglang.backends.sglang.attention import paged
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.engine.layers import dense as dense_module
    from pie_driver_sglang.engine.layers.rank_gemms import RankGemms
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
    backends = selection.settings().attention_backends(runner.server_args)
    assert backends == ("torch_native", "pie")
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
            found += batch_invariant_logits(server, engine, dense)
            found.append(alone(server, engine, dense, expected))
        with (
            mock.patch.object(linear, "find_linear_config", small_tiling),
            mock.patch.object(dense, "_small_batch", None),
        ):
            found.append(
                decode(server, engine, Contexts(320, page_size, vocab), dense.patched_decode)
            )
        # Models that take no adapters.
        folds = not config.driver.options.enable_lora
        assert (few is not None) == folds
        assert not dense.applies_adapters
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
        if hasattr(runner.model, "set_eagle3_layers_to_capture"):
            assert kept_inputs(server, engine, dense) < TOLERANCE
        check_paths(engine, dense)
        check_weights(own)
        # Steps of many rows.
        with (
            mock.patch.object(RankGemms, "find_config", return_value=None),
            mock.patch.object(linear, "find_linear_config", small_tiling),
            ranked(own) as ranks,
        ):
            contexts = Contexts(128, page_size, vocab)
            found.append(decode(server, engine, contexts, ranks.patched_decode))
        with ranked(own) as ranks:
            contexts = Contexts(128, page_size, vocab)
            with (
                mock.patch.object(dense_module, "_linear", side_effect=AssertionError),
                mock.patch.object(dense_module, "_linear_swiglu", side_effect=AssertionError),
            ):
                found.append(decode(server, engine, contexts, ranks.patched_decode))
        check_ranks(own)
    check_fa3()
    check_vision()
    check_prefills(runner)
    check_choice(runner)
    return [float((logits - expected).abs().max()) for logits in found]


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


def check_paths(engine: Any, dense: Any) -> None:
    """Few kernels for prefills, unless a mask says who sees whom, or some rows have adapters."""
    plain, step = (
        SimpleNamespace(mask=None, adapters=None, decode=decode) for decode in (False, True)
    )
    with_mask = SimpleNamespace(mask=object(), adapters=None, decode=False)
    with_adapters = SimpleNamespace(mask=None, adapters=b"", decode=False)
    with (
        mock.patch.object(dense, "patched_prefill") as prefilling,
        mock.patch.object(engine, "fused", dense),
    ):
        assert engine._layers_of(plain) is prefilling.return_value
        for batch in (with_mask, with_adapters, step):
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
        """Computes differently."""

    for weight in (own.data.to("meta"), own.data.as_subclass(Other)):
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        assert found_layers(backend) is None
    linear.weight = own
    assert found_layers(backend) is not None


def check_experts(backend: Any) -> None:
    """Experts that compute or are chosen differently leave a model as it is."""
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


if __name__ == "__main__":
    loaded = load_config(Path(sys.argv[1]))
    environment.prepare("cpu", loaded.model.hf_config["architectures"], spins=False)
    errors = differences(loaded)
    print(*(f"{error:.1e}" for error in errors))
    sys.exit(not max(errors) < TOLERANCE)
