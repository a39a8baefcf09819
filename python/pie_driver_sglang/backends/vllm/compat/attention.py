"""vLLM's side of attention over our pages on a GPU: a backend of its layers, and its kernels."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from pie_driver_sglang.engine.attention.paged import AttentionLayer

CUSTOM: str = AttentionBackendEnum.CUSTOM.name
"""vLLM's name for a backend that it does not have itself."""


class LayerAttention(Protocol):
    """The attention metadata of a pass: what its layers attend by."""

    def attend(
        self,
        name: str,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Stores new KV, unless the layer reads another one's, and attends.

        Args:
            name: The layer's, as the model has registered it.
            queries: ``[tokens, heads, dim]``, after RoPE.
            keys: ``[tokens, kv_heads, dim]``.
            values: ``[tokens, kv_heads, value_dim]``.
            out: ``[tokens, heads, value_dim]``; written.
        """


class PagedAttentionImpl(AttentionImpl[Any]):
    """The attention of one layer: the metadata of the pass computes it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise ValueError("its attention has ALiBi slopes, which no kernel of the driver adds")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LayerAttention,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Called by vLLM's layer; shapes are those of `LayerAttention.attend`."""
        attn_metadata.attend(layer.layer_name, query, key, value, output)
        return output


class PagedAttentionBackend(AttentionBackend):
    """vLLM's attention backend `CUSTOM`. Its KV is the driver's: vLLM allocates none."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """`CUSTOM`."""
        return CUSTOM

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        """The attention of a layer."""
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """None: metadata is made by the driver."""
        raise NotImplementedError("the driver makes the metadata of attention, not vLLM")

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Any: also layers with windows take the pages that the others have."""
        return []

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Of the keys; values are a tensor of their own."""
        return num_blocks, block_size, num_kv_heads, head_size

    @classmethod
    def supports_sink(cls) -> bool:
        """All kernels take sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """All kernels take windows."""
        return True


def register_paged() -> None:
    """Has vLLM's layers find the backend by its name; to be called before a model is built."""
    path = f"{PagedAttentionBackend.__module__}.{PagedAttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CUSTOM, path)


def read_paged_layer(
    number: int, module: AttentionLayerBase, keys: torch.Tensor, values: torch.Tensor
) -> AttentionLayer:
    """Sizes and rule of a layer of this backend.

    Args:
        number: The layer's, of the driver's choice.
        module: vLLM's `Attention`.
        keys: ``[slots, kv_heads, dim]``: its KV, or that of the layer that it shares.
        values: ``[slots, kv_heads, value_dim]``.
    """
    rule: PagedAttentionImpl = module.impl
    window = rule.sliding_window
    return AttentionLayer(
        number,
        rule.num_heads,
        rule.num_kv_heads,
        keys.shape[-1],
        values.shape[-1],
        rule.scale,
        rule.logits_soft_cap,
        # vLLM counts a row's own token.
        -1 if window is None else window - 1,
        keys,
        values,
    )


def sinks_of(module: AttentionLayerBase) -> torch.Tensor | None:
    """``[heads]``: one more logit of each head, of a layer of this backend."""
    sinks: torch.Tensor | None = module.impl.sinks
    return sinks


def store_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slots: torch.Tensor,
    one: torch.Tensor,
) -> None:
    """Stores the KV of tokens in one kernel. Can be captured.

    Args:
        keys: ``[tokens, kv_heads, dim]``.
        values: The same.
        key_pages: ``[pages, page_size, kv_heads, dim]``.
        value_pages: The same.
        slots: ``[tokens]`` int64.
        one: A scale of 1, float32 on the device.
    """
    from vllm._custom_ops import reshape_and_cache_flash

    reshape_and_cache_flash(keys, values, key_pages, value_pages, slots, "auto", one, one)


def flash_attention_version() -> int | None:
    """2, 3 or 4: the FlashAttention of vLLM that this GPU would run; None for none."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version: int | None = get_flash_attn_version()
    return version


def attend_by_fa3(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    out: torch.Tensor,
    *,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    pages: torch.Tensor,
    most_tokens: int,
    most_kv: int,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None,
    splits: int,
) -> None:
    """FlashAttention 3 of vLLM as a `PagedPrefill`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    flash_attn_varlen_func(
        q=queries, k=key_pages, v=value_pages, out=out, cu_seqlens_q=starts,
        max_seqlen_q=most_tokens, seqused_k=kv_lens, max_seqlen_k=most_kv, softmax_scale=scale,
        causal=True, window_size=[window, 0 if window >= 0 else -1], softcap=cap,
        block_table=pages, num_splits=splits, fa_version=3, s_aux=sinks,
    )  # fmt: skip


def attend_by_triton(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    out: torch.Tensor,
    *,
    starts: torch.Tensor,
    kv_lens: torch.Tensor,
    pages: torch.Tensor,
    most_tokens: int,
    most_kv: int,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None,
    splits: int,
) -> None:
    """Triton attention of vLLM as a `PagedPrefill`; it has no splits without buffers for them."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    unified_attention(
        q=queries, k=key_pages, v=value_pages, out=out, cu_seqlens_q=starts,
        max_seqlen_q=most_tokens, seqused_k=kv_lens, max_seqlen_k=most_kv, softmax_scale=scale,
        causal=True, window_size=(window, 0 if window >= 0 else -1), block_table=pages,
        softcap=cap, q_descale=None, k_descale=None, v_descale=None, sinks=sinks,
    )  # fmt: skip
