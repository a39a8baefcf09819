"""What the kernels of a driver depend on besides the GPU. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class DryLayers(NamedTuple):
    """The decoder layers of a Llama-like model."""

    width: int
    """Of hidden states."""
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Of the MLP, or of each expert."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether query and key heads are normalized."""
    experts: int = 0
    """0 for a dense MLP."""
    top_k: int = 0
    """Experts of a token."""
    renormalize: bool = False
    """Whether the weights of a token's experts are renormalized."""


class DryModel(NamedTuple):
    """What the kernels of a driver's steps depend on besides the GPU."""

    layers: DryLayers | None
    """None for layers that only the library has: what follows the logits is known."""
    dtype: str
    """Of weights, activations and KV, such as ``bfloat16``."""
    vocab_size: int
    head_rows: int
    """Rows of the LM head, which may be padded."""
    context_length: int
    page_size: int
    requests: int
    """Of the largest decode."""
    chunk_tokens: int
    """Of the largest pass."""
    graph_sizes: tuple[int, ...] = ()
    """Sizes of decode graphs, as the user has set them."""
    fuse_layers: bool = True
    deterministic: bool = False
    prefills_by_fa3: bool = False
    """Whether FlashAttention-3 attends in prefills."""
    ranks: int = 1
    """GPUs that share the model; layers and LM head are the part of one of them."""
