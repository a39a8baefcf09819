"""Attention: SGLang's layers and backends, and how a backend of the driver's takes their place.

`AttentionBackend` is the base class of the driver's backends: SGLang calls them by its methods and
finds the pools in their fields. `RadixAttention` is what they get: widths, heads, scales, window.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components import attention_backend_setup

from pie_driver_sglang.backends.sglang.compat.model import attached_head
from pie_driver_sglang.backends.sglang.compat.pools import stored_kv
from pie_driver_sglang.engine.attention.paged import AttentionLayer

if TYPE_CHECKING:
    import torch

    from pie_driver_sglang.backends.sglang.compat.pools import KVCache
    from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
    from pie_driver_sglang.kernels.attention.prompt_rows import Prompts

__all__ = ["AttentionBackend", "RadixAttention"]

logger = logging.getLogger(__name__)


def attention_layers(runner: ModelRunner) -> list[RadixAttention]:
    """The layers that attend to pages: those of class `RadixAttention`, and an EAGLE head's."""
    head = attached_head(runner)
    return layers_of(runner.model) + ([] if head is None else layers_of(head))


def layers_of(model: torch.nn.Module) -> list[RadixAttention]:
    """Those of a part of a model."""
    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def is_plain(layer: RadixAttention) -> bool:
    """Whether a layer attends as the kernels here know; a new field may say that it does not."""
    return bool(
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and not layer.use_irope
        and layer.pos_encoding_mode == "NONE"
        and layer.xai_temperature_len <= 0
        and (not layer.logit_cap or layer.logit_capping_method == "tanh")
    )


def read_attention(layer: RadixAttention, pool: KVCache) -> AttentionLayer:
    """Sizes, scales and stored KV of a layer, which is one that :func:`is_plain`."""
    keys, values = stored_kv(pool, layer)
    window = layer.sliding_window_size
    scales = (layer.k_scale_float, layer.v_scale_float) if scales_kv(layer, keys) else ()
    return AttentionLayer(
        layer.layer_id,
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        layer.v_head_dim,
        layer.scaling,
        layer.logit_cap or 0.0,
        -1 if window is None else window,
        keys,
        values,
        *scales,
    )


def scales_kv(layer: RadixAttention, keys: torch.Tensor) -> bool:
    """Whether stored KV has a checkpoint's scales; KV that is not FP8 is stored as it is."""
    return keys.itemsize == 1 and layer.k_scale is not None and layer.v_scale is not None


def register_backend(name: str, backend: Callable[[ModelRunner], AttentionBackend]) -> None:
    """Makes a backend known by name, after SGLang has checked its settings against its own list."""
    register_attention_backend(name)(backend)
    # It calls every pair of backends experimental.
    logging.getLogger(attention_backend_setup.__name__).addFilter(_is_no_doubt)


def _is_no_doubt(record: logging.LogRecord) -> bool:
    return "hybrid attention backend is experimental" not in record.getMessage()


def has_fa3() -> bool:
    """Whether SGLang's own kernels, `sgl_kernel.flash_ops`, are there and can be loaded."""
    name = "sgl_kernel.flash_ops"
    try:
        importlib.import_module(name)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name in (name, "sgl_kernel")
        if not absent:
            logger.warning("nothing is computed by fa3: %s", error)
        return False
    return True


def attend_prompts(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    prompts: Prompts,
    rule: AttentionParams,
    page_size: int,
) -> None:
    """`PromptAttention` by FlashAttention-3."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    paged = (-1, page_size, *keys.shape[1:])
    flash_attn_with_kvcache(
        queries, keys.view(paged), values.view(paged), out=out, page_table=prompts.pages,
        cache_seqlens=prompts.kv_lens, cu_seqlens_q=prompts.starts, max_seqlen_q=len(queries),
        softmax_scale=rule.scale, causal=True, sinks=rule.sinks,
        # How many are best is computed on the host, from lengths that it does not know here.
        num_splits=1,
    )  # fmt: skip


def decode_backend(runner: ModelRunner) -> AttentionBackend | None:
    """The backend of decodes where prefills have another one; None where one has both."""
    return getattr(runner.attn_backend, "decode_backend", None)


def use_decode_backend(runner: ModelRunner) -> None:
    """Has prefills attend by the backend of decodes."""
    runner.attn_backend.prefill_backend = runner.attn_backend.decode_backend


@contextmanager
def attending(backend: AttentionBackend) -> Iterator[None]:
    """Within it passes attend by a backend, by `ForwardContext`, a global of the process."""
    with forward_context(ForwardContext(attn_backend=backend)):
        yield
