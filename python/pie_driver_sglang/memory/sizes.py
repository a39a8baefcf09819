"""The memory sizes of a model by its shape, for every memory plan.

`cli/model_sizes.py` reads a shape from `config.json`, for a plan without SGLang;
`backends/sglang/measure.py` reads one from SGLang's `ModelConfig`, when a driver starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.config.draft_head import read_draft_head
from pie_driver_sglang.config.options import FUSED_LORA, DriverOptions
from pie_driver_sglang.memory.batch_sizes import (
    GRAPH_BACKENDS,
    MAX_SLOTS,
    chunk_tokens,
    scratch_pages,
)
from pie_driver_sglang.memory.plan_types import (
    REPLICATED,
    SHARDED,
    Device,
    MemorySettings,
    ModelSizes,
    Part,
)

FLASHINFER_BYTES: Final = 512 << 20
"""SGLang's workspace for flashinfer: some models take less."""
DETERMINISTIC_BYTES: Final = 2 << 30
"""The same with `enable_deterministic_inference`."""
PARTIAL_SPLITS: Final = 16
"""Most splits of a row in `kernels/attention/batch_invariant.py`."""
ROTARY_ROOM: Final = 256
"""Rows of SGLang's rotary tables beyond the context."""
RECURRENT_COPIES: Final = 12
"""Activations of a recurrent layer, in hidden states. A guess."""
ENCODER_COPIES: Final = 12
"""The same of a vision encoder layer, per patch. A guess."""
_FLOAT32_BYTES: Final = 4
_ATTENTION_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")
_FUSED_PROJECTIONS: Final = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("gate_proj", "up_proj", "gate_up_proj"),
)
"""Projections that SGLang fuses, and so adapts together."""
_OTHER_TARGETS: Final = ("all", "embed_tokens", "lm_head", "qkv_proj", "gate_up_proj")
"""Of `lora_target_modules`, those that are counted by other names."""


class Shape(NamedTuple):
    """The shape of a model, over all ranks."""

    hidden_size: int
    layers: int
    kv_layers: int
    """Layers with keys and values."""
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: int
    """KV elements per token and layer of latent attention (MLA); 0 without."""
    inner: int
    """Width of the widest dense MLP."""
    experts: int
    """Per layer; 0 for a dense model."""
    chosen_experts: int
    """Per token."""
    expert_inner: int
    tied: bool
    """Whether the LM head is the embedding table."""
    positions: int
    """Minimum rows of the rotary tables."""
    rotary_dim: int
    rotary_tables: int
    recurrent: bool = False
    """Whether some layers keep recurrent state."""


def sizes_of_shape(
    shape: Shape,
    weights: Sequence[Part],
    options: DriverOptions,
    hf_config: Mapping[str, Any],
    *,
    itemsize: int,
    kv_itemsize: int,
    state_bytes: int = 0,
    layer_weights: Sequence[Part] = (),
    adapted_mlps: int | None = None,
    table_copies: int = 2,
    splits_inputs: bool = True,
) -> ModelSizes:
    """The sizes of a model for the plan.

    Args:
        shape: The model's.
        weights: All that is loaded, rotary tables included.
        options: The driver's.
        hf_config: The model's `config.json`.
        itemsize: Bytes of an activation.
        kv_itemsize: Bytes of a number in the KV pool.
        state_bytes: Recurrent state of a request, in one rank.
        layer_weights: Of `weights`, those of the layers.
        adapted_mlps: As in :func:`adapter_bytes`.
        table_copies: As in :func:`adapter_bytes`.
        splits_inputs: As in :func:`adapter_bytes`.
    """
    targets = options.lora_target_modules
    adapters = adapter_bytes(shape, targets, itemsize, adapted_mlps, table_copies, splits_inputs)
    token = token_bytes(shape, kv_itemsize)
    if options.spec_eagle_path is not None:
        # It runs on one rank.
        head = read_draft_head(options.spec_eagle_path)
        of_head = head.token_bytes(itemsize, kv_itemsize)
        token = token._replace(size=token.size + of_head)
        slots = scratch_pages(options.spec_eagle_num_drafts, options.page_size) * options.page_size
        weights = (*weights, Part(head.weight_bytes + slots * of_head, REPLICATED))
    return ModelSizes(
        weights=tuple(weights),
        token_bytes=token,
        row_numbers=row_numbers(shape),
        itemsize=itemsize,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        heads=shape.heads,
        head_dim=shape.head_dim,
        chosen_experts=shape.chosen_experts,
        state_bytes=state_bytes,
        adapter_bytes=adapters if options.enable_lora else 0,
        image_bytes=image_bytes(hf_config, itemsize),
        layer_weights=tuple(layer_weights),
    )


def memory_settings(
    options: DriverOptions,
    device: Device,
    ranks: int,
    *,
    context_length: int,
    page_size: int,
    backends: tuple[str | None, str | None],
    deterministic: bool,
) -> MemorySettings:
    """The settings of a plan from a driver's options.

    Args:
        options: The driver's.
        device: A rank's.
        ranks: Devices that share the model.
        context_length: Positions of a context.
        page_size: Tokens of a page.
        backends: The attention backends of prefills and of decodes.
        deterministic: Whether sums do not depend on the batch.
    """
    own = options.paged_decode is not False
    workspace = DETERMINISTIC_BYTES if deterministic else FLASHINFER_BYTES
    kind = "cpu" if device.is_host else "cuda"
    return MemorySettings(
        context_length=context_length,
        page_size=page_size,
        requests=options.max_forward_requests,
        chunk_tokens=chunk_tokens(kind, device.total, options.chunked_prefill_size),
        slots=MAX_SLOTS,
        ranks=ranks,
        fraction=options.mem_fraction_static,
        captures=not options.disable_cuda_graph and (own or backends[1] in GRAPH_BACKENDS),
        prompts=own,
        graph_sizes=options.graph_sizes,
        triton_tables="triton" in backends and not own,
        workspace_bytes=workspace if "flashinfer" in backends else 0,
        partial_splits=PARTIAL_SPLITS if deterministic and own and kind == "cuda" else 0,
        swap_bytes=(options.cpu_mem_budget_in_gb << 30) // ranks,
        adapter_slots=options.max_loras_per_batch if options.enable_lora else 0,
        adapter_rank=options.max_lora_rank,
        fused_adapters=(
            options.enable_lora and options.lora_backend == FUSED_LORA and own and ranks == 1
        ),
        draft_passes=options.spec_eagle_num_drafts if options.spec_eagle_path is not None else 0,
        image_tokens=options.max_image_tokens,
        offload_bytes=0 if device.is_host else options.cpu_offload_gb << 30,
    )


def token_bytes(shape: Shape, itemsize: int) -> Part:
    """Keys and values of a token in all layers, as SGLang's `DefaultPoolConfigurator` counts."""
    if shape.latent:
        return Part(shape.kv_layers * shape.latent * itemsize, REPLICATED)
    width = shape.head_dim + shape.v_head_dim
    return Part(shape.kv_layers * shape.kv_heads * width * itemsize, shape.kv_heads)


def row_numbers(shape: Shape) -> tuple[Part, ...]:
    """Activations per token of attention or MLP, whichever is more; experts with their copies."""
    attention = 2 * shape.heads * shape.head_dim
    attention += shape.kv_heads * (shape.head_dim + shape.v_head_dim)
    # Gate, up and their product.
    dense, expert = 3 * shape.inner, 3 * shape.expert_inner
    divided = max(attention, dense, shape.chosen_experts * expert)
    copies = shape.chosen_experts + (RECURRENT_COPIES if shape.recurrent else 0)
    return (Part(divided, SHARDED), Part(copies * shape.hidden_size, REPLICATED))


def rotary_part(shape: Shape, context: int, itemsize: int, *, on_host: bool) -> Part:
    """SGLang's rotary tables, one per kind of layer, in float32 on a GPU."""
    rows = max(shape.positions, context) + ROTARY_ROOM
    numbers = shape.rotary_tables * rows * shape.rotary_dim
    return Part(numbers * (itemsize if on_host else _FLOAT32_BYTES), REPLICATED)


def adapter_bytes(
    shape: Shape,
    named: Sequence[str],
    itemsize: int,
    adapted_mlps: int | None = None,
    table_copies: int = 2,
    splits_inputs: bool = True,
) -> int:
    """Bytes of a LoRA slot of rank 1: lora_A and lora_B of each target layer.

    Args:
        shape: The model's.
        named: The option `lora_target_modules`.
        itemsize: Bytes of an activation.
        adapted_mlps: Layers whose MLP takes adapters. Experts take none; None: as in SGLang, where
            other layers of a model with experts take none either.
        table_copies: How often the library keeps lora_A and lora_B of embeddings and of the LM head
            where both are named: SGLang twice; 0 where it adapts neither.
        splits_inputs: Whether each part of a fused projection has a lora_A; else they share one.
    """
    if adapted_mlps is None:
        adapted_mlps = 0 if shape.chosen_experts else shape.layers
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    groups = (next((x for x in _FUSED_PROJECTIONS if name in x), (name,)) for name in named)
    targets = {part for group in groups for part in group}
    everything = "all" in targets
    sharing = () if splits_inputs else ("k_proj", "v_proj", "up_proj")

    def sizes(names: Sequence[str], outputs: Sequence[int]) -> int:
        pairs = zip(names, outputs, strict=True)
        return sum(
            x + (0 if name in sharing else shape.hidden_size)
            for name, x in pairs
            if everything or name in targets
        )

    numbers = shape.layers * sizes(_ATTENTION_PROJECTIONS, (queries, keys, keys, queries))
    numbers += adapted_mlps * sizes(_MLP_PROJECTIONS, (shape.inner,) * 3)
    # Other models' names, such as OPT's `fc1`: none of their layers is wider.
    others = targets - {*_ATTENTION_PROJECTIONS, *_MLP_PROJECTIONS, *_OTHER_TARGETS}
    widest = shape.hidden_size + max(shape.inner, queries + 2 * keys)
    numbers += shape.layers * len(others) * widest
    ends = sum(everything or name in targets for name in ("embed_tokens", "lm_head"))
    numbers += ends * min(ends, table_copies) * (shape.hidden_size + shape.vocabulary)
    return numbers * itemsize


def image_bytes(hf_config: Mapping[str, Any], itemsize: int) -> int:
    """Activations of a vision encoder for one token of an image, and its pixels."""
    vision = hf_config.get("vision_config")
    if not takes_images(hf_config) or not isinstance(vision, Mapping):
        return 0
    merge = int(vision.get("spatial_merge_size") or 2)
    width = int(vision.get("hidden_size") or 1152)
    inner = int(vision.get("intermediate_size") or 4 * width)
    pixels = 4 * 3 * 2 * int(vision.get("patch_size") or 16) ** 2
    return merge**2 * ((ENCODER_COPIES * width + 2 * inner) * itemsize + pixels)
