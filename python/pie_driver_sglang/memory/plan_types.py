"""The types of memory plans: device, model sizes, settings, and the plan. Sizes are in bytes."""

from __future__ import annotations

from typing import Final, NamedTuple

REPLICATED: Final = 1
"""`Part.most` of tensors that are replicated on every rank."""
SHARDED: Final = 2**20
"""`Part.most` of tensors that any number of ranks shard."""


class Part(NamedTuple):
    """Bytes, or elements, that ranks shard."""

    size: int
    most: int
    """Maximum number of shards; further ranks have copies."""

    def per_rank(self, ranks: int) -> int:
        """The size of one rank's shard."""
        return -(-self.size // min(self.most, ranks))


class Device(NamedTuple):
    """The device of a rank."""

    name: str
    """`cpu` or `cuda:N`."""
    total: int
    """Bytes."""
    free: int
    """Free bytes."""

    @property
    def is_host(self) -> bool:
        """Whether it is the CPU."""
        return self.name == "cpu"


class ModelSizes(NamedTuple):
    """Sizes of a model over all ranks."""

    weights: tuple[Part, ...]
    token_bytes: Part
    """Keys and values of a token in all layers."""
    row_numbers: tuple[Part, ...]
    """Elements per token that the widest layer holds at once, besides hidden states."""
    itemsize: int
    """Bytes of an activation."""
    hidden_size: int
    layers: int
    vocabulary: int
    heads: int
    """Query heads; ranks divide them evenly."""
    head_dim: int
    chosen_experts: int = 0
    """Experts of a mixture that a row takes; 0 for a dense model."""
    state_bytes: int = 0
    """Recurrent state of a request, in one rank."""
    adapter_bytes: int = 0
    """Bytes of an adapter slot of rank 1."""
    image_bytes: int = 0
    """Bytes per image token in the vision encoder."""
    layer_weights: tuple[Part, ...] = ()
    """Of `weights`, those of the layers, which may stay in host memory."""


class MemorySettings(NamedTuple):
    """The settings that a memory plan depends on."""

    context_length: int
    page_size: int
    requests: int
    """Maximum batch size: of the block table and of the largest decode graph."""
    chunk_tokens: int
    """Tokens of the largest pass."""
    slots: int
    """Maximum rows of logits."""
    ranks: int = 1
    fraction: float | None = None
    """`mem_fraction_static`; None for the largest safe value."""
    captures: bool = True
    """Whether CUDA graphs are captured."""
    prompts: bool = True
    """Whether prefill graphs are captured."""
    graph_sizes: tuple[int, ...] = ()
    """Sizes of the decode graphs, `cuda_graph_bs_decode`; empty for the default ones."""
    triton_tables: bool = False
    """Whether SGLang's triton backend decodes, which needs index tables."""
    workspace_bytes: int = 0
    """Workspace of the attention backends."""
    partial_splits: int = 0
    """Partial results of a row and head in batch-invariant decodes, float32; 0 without these."""
    swap_bytes: int = 0
    """Host memory of this rank for swapped pages."""
    adapter_slots: int = 0
    adapter_rank: int = 0
    fused_adapters: bool = False
    """Whether fused layers may apply adapters."""
    draft_passes: int = 0
    """Passes of an EAGLE head in a step that drafts; 0 without a head."""
    image_tokens: int = 0
    offload_bytes: int = 0
    """Weights of layers that a rank keeps in host memory, at most."""
    max_pages: int = 0
    """Most pages of the pool, which has one context at least; 0 for all that fit."""
    kept_pages: int = 0
    """Pages of the pool if they fit, even from the reserve; 0 for as many as planned."""

    @property
    def context_tokens(self) -> int:
        """Tokens of one context, rounded up to whole pages."""
        return -(-self.context_length // self.page_size) * self.page_size


class Plan(NamedTuple):
    """The memory plan of a rank, in bytes. The rows add up to the free memory."""

    device: Device
    fraction: float
    """Fraction of the free memory for weights, adapters, state and KV."""
    weights: int
    copied: int
    """Weights that every rank has a full copy of; 0 for a single rank."""
    adapters: int
    state: int
    activations: int
    graphs: int
    tables: int
    """Block table, staging areas and input buffers."""
    reserve: int
    """The rest; negative if there is too little memory."""
    tokens: int
    """Tokens of the KV pool, in whole pages."""
    token_bytes: int
    page_size: int
    offloaded: int = 0
    """Weights in host memory, besides `weights`."""
    user_share: float | None = None
    """What the user gives of the free memory, where that is not `fraction`: the device has as much
    free, and a hint names another share."""

    @property
    def kv(self) -> int:
        """Bytes of the KV pool."""
        return self.tokens * self.token_bytes

    def fits(self, settings: MemorySettings) -> bool:
        """Whether the model can start: one context fits, and the reserve is not negative."""
        return self.tokens >= settings.context_tokens and self.reserve >= 0


class Loaded(NamedTuple):
    """The measured memory of a loaded model, in bytes."""

    weights: int
    adapters: int
    state: int
    graphs: int
    tokens: int
    """Tokens of the KV pool."""
    kv: int
    free: int | None
    """Memory left for passes; None if it was not measured."""
