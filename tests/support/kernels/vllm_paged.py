"""Logits of the GPU's path of the vLLM backend in Triton's interpreter, against vLLM's on the CPU.

    PYTHONPATH=tests:VLLM_SITE TRITON_INTERPRET=1 python tests/support/kernels/vllm_paged.py CONFIG

CONFIG is a `driver.toml` of a model in float32 on the CPU. vLLM's platform is that of a CPU, so
what only a GPU has is replaced: the kernels of prefills and of the KV store by torch, the packed
weights by plain ones.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.backends.vllm.library import LIBRARY
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.ranks.types import ALONE
from support.kernels import fast_interpreter
from support.kernels.model_decode import STEPS, TOLERANCE, Contexts, decode

DENSE = ("llama", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
"""Model types that fused layers know."""
MULTIPROCESSORS = 4
"""Of the device that Triton's interpreter is."""


def attend_by_torch(
    queries: Any,
    key_pages: Any,
    value_pages: Any,
    out: Any,
    *,
    starts: Any,
    kv_lens: Any,
    pages: Any,
    most_tokens: int,
    most_kv: int,
    scale: float,
    window: int,
    cap: float,
    sinks: Any,
    splits: int,
) -> None:
    """A `PagedPrefill`."""
    import torch

    assert starts.dtype == kv_lens.dtype == pages.dtype == torch.int32
    assert pages.stride(-1) == key_pages.stride(-1) == value_pages.stride(-1) == 1
    assert key_pages.dim() == value_pages.dim() == 4
    assert most_tokens >= int((starts[1:] - starts[:-1]).max())
    assert most_kv >= int(kv_lens.max())
    assert sinks is None
    assert splits == 0
    group, size = queries.shape[1] // key_pages.shape[2], key_pages.shape[1]
    for row, length in enumerate(kv_lens.tolist()):
        begin, end = starts[row : row + 2].tolist()
        used = pages[row, : -(-length // size)].long()
        k, v = (
            x[used].flatten(0, 1)[:length].repeat_interleave(group, 1)
            for x in (key_pages, value_pages)
        )
        scores = torch.einsum("qhd,khd->hqk", queries[begin:end], k) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        own = torch.arange(length - (end - begin), length)[:, None]
        seen = torch.arange(length)[None]
        hidden = seen > own
        if window >= 0:
            hidden |= seen < own - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)


def store_by_torch(
    keys: Any, values: Any, key_pages: Any, value_pages: Any, slots: Any, one: Any
) -> None:
    """The same as `compat.attention.store_pages`."""
    assert one.ndim == 0
    for new, stored in ((keys, key_pages), (values, value_pages)):
        assert new.shape[1:] == stored.shape[2:]
        stored.flatten(0, 1)[slots] = new


@contextlib.contextmanager
def gpu_like() -> Iterator[None]:
    """Within it vLLM loads a model as on a GPU, of whose kernels some are torch's."""
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pie_driver_sglang.backends.vllm.compat import attention, layers

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    split = CPUFusedMOE.init_moe_torch

    def kept(self: Any, layer: Any) -> None:
        gate_up, down = layer.w13_weight.data, layer.w2_weight.data
        split(self, layer)
        for name, weight in (("w13_weight", gate_up), ("w2_weight", down)):
            setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))

    kernels = (UnquantizedMoeBackend.CPU, *layers._ORDERED)
    # The platform of a CPU always answers this one, which honours overrides.
    backend = attention.PagedAttentionBackend
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backend.__module__}.{backend.__qualname__}")
    selector._cached_get_attn_backend.cache_clear()
    device = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with (
        mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", unpacked),
        mock.patch.object(CPUFusedMOE, "check_grouped_gemm", lambda *_: (False, "none")),
        mock.patch.object(CPUFusedMOE, "init_moe_torch", kept),
        mock.patch.object(layers, "_ORDERED", kernels),
        mock.patch.object(attention, "attend_by_triton", attend_by_torch),
        mock.patch.object(attention, "store_pages", store_by_torch),
        mock.patch.object(attention, "flash_attention_version", lambda: None),
        mock.patch("torch.cuda.get_device_properties", return_value=device),
    ):
        yield


def loaded(config: DriverConfig) -> tuple[Any, Any]:
    """A planner's server without a client, and the executor."""
    server = _core.Server(
        f"/pie_shmem_g{config.driver.group_id}", _core.ExitGuard.inert(), spin_budget_us=0
    )
    server.unlink()
    planner, executor = LIBRARY.load_rank(config, ALONE)
    server.serve(planner, executor.block, print)
    return server, executor


def with_backend(config: DriverConfig, name: str) -> DriverConfig:
    """The configuration with another attention backend, which options on the CPU refuse."""
    options = msgspec.structs.replace(config.driver.options, attention_backend=name)
    return msgspec.structs.replace(
        config, driver=msgspec.structs.replace(config.driver, options=options)
    )


def differences(config: DriverConfig) -> list[float]:
    """The largest difference of a logit, of each path but vLLM's."""
    server, executor = loaded(config)
    size, vocabulary = executor.model_info.page_size, executor.model_info.vocab_size
    expected = decode(server, executor, Contexts(0, size, vocabulary))
    del server, executor
    found = []
    with gpu_like():
        for name in ("TRITON_ATTN", "pie"):
            server, executor = loaded(with_backend(config, name))
            backend, own = executor.backend, name == "pie"
            wanted = "TRITON_ATTN,pie" if own else "TRITON_ATTN"
            assert backend.info.attention_backend == wanted
            assert backend.info.graphs_take_prompts == own
            assert (backend.decode_attention is not None) == own
            found.append(decode(server, executor, Contexts(0, size, vocabulary)))
            check_pages(backend)
            check_captured(executor)
        found += fused(server, executor, config, Contexts(64, size, vocabulary))
    return [float((logits - expected).abs().max()) for logits in found]


def fused(server: Any, executor: Any, config: DriverConfig, contexts: Contexts) -> list[Any]:
    """Logits of decodes and of prefills by fused layers; none of a model that they do not know."""
    from pie_driver_sglang.engine.layers.selection import fuse_layers
    from pie_driver_sglang.engine.layers.weights import UnsupportedLayer

    backend = executor.backend
    adapts = backend.lora is not None
    assert adapts == config.driver.options.enable_lora
    if adapts:
        disturb_slots(backend.lora)
    try:
        layers = fuse_layers(backend)
    except UnsupportedLayer as reason:
        assert config.model.hf_config["model_type"] not in (*DENSE, *MIXTURES), reason
        return []
    if config.model.hf_config["model_type"] in MIXTURES:
        with mock.patch.object(layers._layers, "run", wraps=layers._layers.run) as run:
            found = [decode(server, executor, contexts, layers.patched_decode)]
        assert run.call_count == STEPS
        return found
    assert config.model.hf_config["model_type"] in DENSE
    with mock.patch.object(layers, "_run", wraps=layers._run) as run:
        found = [decode(server, executor, contexts, layers.patched_decode)]
    assert run.call_count == STEPS
    if adapts:
        # LoRA needs normalized rows, so no norm is folded, and prefills run vLLM's layers.
        assert backend.folded is None
        return found
    executor.fused = layers
    with mock.patch.object(layers, "_run_folded", wraps=layers._run_folded) as run:
        found.append(decode(server, executor, contexts, layers.patched_decode))
    assert run.called
    assert "forward" not in vars(backend._model.model)
    return found


def disturb_slots(lora: Any) -> None:
    """Fills slots and applies one, so that a step would show what it takes of them."""
    layers = lora._wrapped
    assert len(layers.layers) > 4
    for layer in layers.layers:
        for slots in layer.slots:
            slots.normal_()
    layers.apply([0, 1])
    lora.unbind()


def check_pages(backend: Any) -> None:
    """Pages are the first dimension, and copies of them are all that a layer has."""
    pages = backend.kv_pages()
    assert {len(stored) for stored in pages} == {backend.info.total_pages + 1}
    assert all(stored.is_contiguous() for stored in pages)
    assert any(bool(stored[1:].any()) for stored in pages)


def check_captured(executor: Any) -> None:
    """A decode planned as in a graph, of which the host knows no length, gives the same."""
    import torch

    from pie_driver_sglang.engine.backend import PassInputs

    backend, table = executor.backend, executor.block_table
    table.slots[1, :32] = torch.arange(16, 48)
    one = torch.ones(1, dtype=torch.int64)
    inputs = PassInputs(
        input_ids=5 * one,
        positions=20 * one,
        mrope_positions=None,
        out_cache_loc=36 * one,
        req_pool_indices=one,
        seq_lens=21 * one,
        # As blank rows have it when a graph is captured.
        seq_lens_cpu=one,
        seq_lens_sum=1,
    )
    with torch.inference_mode():
        eager = backend.forward(backend.make_context(inputs._replace(seq_lens_cpu=21 * one)))
        context = backend.make_context(inputs)
        with backend.capturing(None, 1):
            backend.plan_in_graph(context)
            captured = backend.run_model(context)
    assert torch.allclose(eager.states, captured.states, atol=1e-6)


def check_choice() -> None:
    """FlashAttention 3 prefills where it can; asked for by name it must."""
    import torch

    from pie_driver_sglang.backends.vllm.support import prefill_backend
    from pie_driver_sglang.engine.attention.paged import AttentionLayer
    from pie_driver_sglang.errors import StartError

    def layer(dim: int, dtype: torch.dtype, value_dim: int | None = None) -> AttentionLayer:
        keys, values = (torch.empty(16, 1, n, dtype=dtype) for n in (dim, value_dim or dim))
        return AttentionLayer(0, 1, 1, dim, value_dim or dim, 1.0, 0.0, -1, keys, values)

    plain = [layer(64, torch.bfloat16)]
    assert prefill_backend(plain, "pie", 3) == "FLASH_ATTN"
    assert prefill_backend(plain, "TRITON_ATTN", 3) == "TRITON_ATTN"
    cannot = (
        (plain, 2, "needs a Hopper GPU"),
        ([*plain, layer(64, torch.float32)], 3, "bfloat16 and float16"),
        ([layer(60, torch.float16)], 3, "a multiple of 8"),
        ([layer(64, torch.float16, 32)], 3, "values as keys"),
    )
    for layers, version, reason in cannot:
        assert prefill_backend(layers, "pie", version) == "TRITON_ATTN"
        with pytest.raises(StartError, match=reason) as caught:
            prefill_backend(layers, "FLASH_ATTN", version)
        assert "attention_backend" in caught.value.hint


def check_calls() -> None:
    """The kernels of the pinned vLLM have the parameters that they are called by."""
    import torch

    from pie_driver_sglang.backends.vllm.compat import attention

    library = "vllm.vllm_flash_attn"
    with mock.patch.dict(sys.modules, {f"{library}._vllm_fa3_C": ModuleType("_vllm_fa3_C")}):
        importlib.import_module(library)
        numbers = torch.zeros(1, dtype=torch.int32)
        arrays = [torch.zeros(2, 4, 8), *(torch.zeros(3, 16, 4, 8) for _ in range(2))]
        for window, pair in ((20, [20, 0]), (-1, [-1, -1])):
            rule: dict[str, Any] = {"scale": 1.0, "window": window, "cap": 30.0, "sinks": None}
            rule |= {"starts": numbers, "kv_lens": numbers, "pages": numbers[None]}
            rule |= {"most_tokens": 1, "most_kv": 2, "splits": 1}
            for name, path in (
                ("attend_by_fa3", f"{library}.flash_attn_varlen_func"),
                ("attend_by_triton", "vllm.v1.attention.ops.triton_unified_attention."
                 "unified_attention"),
            ):  # fmt: skip
                with mock.patch(path, autospec=True) as kernel:
                    getattr(attention, name)(*arrays, torch.zeros(2, 4, 8), **rule)
                given = kernel.call_args.kwargs
                assert list(given["window_size"]) == pair
                assert (given["softcap"], given["causal"]) == (30.0, True)
    with mock.patch("vllm._custom_ops.reshape_and_cache_flash", autospec=True) as kernel:
        attention.store_pages(*arrays[1:], *arrays[1:], numbers.long(), torch.ones(()))
    assert kernel.called


if __name__ == "__main__":
    fast_interpreter.install()
    check_choice()
    check_calls()
    errors = differences(load_config(Path(sys.argv[1]), LIBRARY.rules))
    print(*(f"{error:.1e}" for error in errors))
    sys.exit(not max(errors) < TOLERANCE)
