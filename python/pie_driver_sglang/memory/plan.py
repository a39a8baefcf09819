"""The memory plan of a model that is not loaded yet: arithmetic on sizes in bytes.

`mem_fraction_static` is the fraction of the free memory for weights, adapters, recurrent state and
KV. SGLang measures the first three and gives KV the rest, so an error in their planned sizes moves
no limit. The remaining memory holds activations, graphs, tables and a reserve for unknown sizes,
for which the largest safe fraction leaves room.
"""

from __future__ import annotations

from typing import Final

from pie_driver_sglang.memory.batch_sizes import row_pages
from pie_driver_sglang.memory.graphs import (
    DRAFTING_KINDS,
    LORA_KINDS,
    GraphKind,
    GraphSpec,
    graph_specs,
)
from pie_driver_sglang.memory.plan_types import (
    REPLICATED,
    Device,
    Loaded,
    MemorySettings,
    ModelSizes,
    Plan,
)
from pie_driver_sglang.memory.units import GIB, MIB

# Sizes that do not follow from shapes. "Measured" refers to benches/notebook/gpu.md; the reserve
# covers the errors of estimates.
GRAPH_LAYER_BYTES: Final = 256 << 10
"""Graph nodes of one layer in one captured graph. Measured: 0.41 GiB for 41 graphs of 28 layers
(Qwen3-0.6B shape), less the logits and activations, whose sizes follow from shapes."""
LORA_GRAPH_LAYER_BYTES: Final = 384 << 10
"""The same for a graph that applies adapters, with SGLang's layers. Measured: 0.117 GiB for 12
graphs of 28 layers."""
LORA_PARTS: Final = 3
"""Parts of the QKV projection."""
LORA_SPLIT_ROWS, LORA_SPLIT_INPUTS = 256, 1024
"""Rows up to which `kernels/gemm/lora.py` splits K, and inputs of a split."""
HIDDEN_COPIES: Final = 5
"""Hidden states of a row that exist at once: residual, normalized input, a layer's output, one in
a collective operation, and the previous pass's, not sampled yet. An estimate."""
LOGIT_BYTES: Final = 10
"""Bytes per logit: its 16-bit, gathered and float32 copies, as in `engine/backend_executor.py`."""
DISTRIBUTION_BYTES: Final = 40
"""Additional bytes per logit of a sorted distribution; see `sampling.groups.most_probable`."""
PAGE_STAGING_BYTES: Final = 64 << 20
"""Staging area for swapped pages: `STAGING_BYTES` in `engine/page_pools.py`."""
INPUT_BYTES: Final = 48
"""SGLang's eager input buffers, per token of the pool: six int64 values."""
ATTENTION_MASK_WORDS: Final = 1 << 20
"""Words of attention masks that a pass of any size may have; see `rust/planner/src/limits.rs`."""
PAGE_ID_BYTES: Final = 16
"""Bytes per page of SGLang's free list and of its copy."""
RECORDED_TOKEN_BYTES: Final = 4
"""Per token of the pool: the token itself, for penalties; `TokenHistory` in `sampling`."""
COUNTED_SLOTS: Final = 64
"""Slots whose tokens a GPU counts at once: `ROWS_AT_ONCE` of `token_history.py`."""
COUNT_BYTES: Final = 4
FLOAT32_BYTES: Final = 4
KV_SPLITS: Final = 8
"""KV splits per row in SGLang's triton backend."""
LIBRARY_BYTES: Final = GIB
"""Library workspaces and kernels, loaded at first use. An estimate."""
COLLECTIVE_BYTES: Final = 2 * GIB
"""Buffers of NCCL and SGLang's collective operations, per rank of several. Measured: 2.0 GiB in
the first of two ranks."""
FRAGMENTED_SHARE: Final = 1 / 64
"""Share of a GPU's free memory lost to fragmentation. An estimate."""
HOST_RESERVE_SHARE: Final = 1 / 16
"""Share of the free host memory that is left to everything else."""

CPU_POOL_TOKENS: Final = 65_536
"""KV tokens of a model on a CPU, unless two contexts need more."""
CPU_POOL_SHARE: Final = 0.1
"""Share of the free host memory for KV; more only if one context needs it."""


def plan_memory(device: Device, model: ModelSizes, settings: MemorySettings) -> Plan:
    """Plan a device's free memory; `Plan.fits` tells whether it is enough."""
    plan = _plan_with_fraction(device, model, settings)
    if not settings.kept_pages:
        return plan
    kept = _with_tokens(plan, settings, settings.kept_pages * settings.page_size)
    return kept if kept.reserve >= 0 else plan


def _with_tokens(plan: Plan, settings: MemorySettings, tokens: int) -> Plan:
    """The plan with another pool size, independent of the fraction."""
    pages = (tokens - plan.tokens) // settings.page_size
    plan = plan._replace(tokens=tokens, tables=plan.tables + pages * _page_overhead(settings))
    temporary = plan.activations + plan.graphs + plan.tables
    return plan._replace(
        reserve=plan.device.free - used(plan), fraction=1 - temporary / plan.device.free
    )


def _plan_with_fraction(device: Device, model: ModelSizes, settings: MemorySettings) -> Plan:
    ranks = settings.ranks
    offloaded = _offloaded(model, settings)
    weights = sum(part.per_rank(ranks) for part in model.weights) - offloaded
    copied = sum(part.size for part in model.weights if part.most == REPLICATED)
    adapters = settings.adapter_slots * settings.adapter_rank * model.adapter_bytes
    # One slot of state is for padding.
    state = (settings.requests + 1) * model.state_bytes
    token_bytes = model.token_bytes.per_rank(ranks)
    fraction = settings.fraction
    if fraction is None:
        fraction = _safe_fraction(device, model, settings, weights + adapters + state)
    room = int(fraction * device.free) - weights - adapters - state
    tokens = min(max(0, room) // token_bytes, _most_tokens(device, settings, token_bytes))
    tokens = tokens // settings.page_size * settings.page_size
    plan = Plan(
        device=device,
        fraction=fraction,
        weights=weights,
        copied=copied if ranks > 1 else 0,
        adapters=adapters,
        state=state,
        activations=_activations(model, settings),
        graphs=_graphs(device, model, settings),
        tables=_tables(device, model, settings)
        + tokens * _page_overhead(settings) // settings.page_size,
        reserve=0,
        tokens=tokens,
        token_bytes=token_bytes,
        page_size=settings.page_size,
        offloaded=offloaded,
    )
    return plan._replace(reserve=device.free - used(plan))


def used(plan: Plan) -> int:
    """Bytes of everything but the reserve."""
    permanent = plan.weights + plan.adapters + plan.state + plan.kv
    return permanent + plan.activations + plan.graphs + plan.tables


def safe_reserve(device: Device, model: ModelSizes, settings: MemorySettings) -> int:
    """The reserve of the largest safe fraction."""
    if device.is_host:
        return int(device.free * HOST_RESERVE_SHARE)
    reserve = LIBRARY_BYTES + int(device.free * FRAGMENTED_SHARE)
    # The estimated sizes again, and the distributions that few batches request.
    reserve += _activations(model, settings) + _graphs(device, model, settings)
    reserve += settings.slots * model.vocabulary * DISTRIBUTION_BYTES
    # SGLang allocates a block table before the driver's replaces it.
    reserve += _block_table(settings)
    if not settings.triton_tables:
        # A model that `pie` cannot decode falls back to triton.
        reserve += _triton_tables(model, settings)
    return reserve + (COLLECTIVE_BYTES if settings.ranks > 1 else 0)


def table(plan: Plan) -> str:
    """The plan as a table for the log."""
    device = plan.device
    notes = [f"of which every rank has {size_text(plan.copied)}"] if plan.copied else []
    if plan.offloaded:
        notes.append(f"{size_text(plan.offloaded)} more in host memory")
    pages = f"{plan.tokens // plan.page_size:,} pages of {plan.page_size}"
    kv = f"{plan.tokens:,} tokens of {plan.token_bytes:,} bytes in {pages}"
    rows = [
        ("total", device.total, f"{size_text(device.free)} of it free"),
        ("weights", plan.weights, ", ".join(notes)),
        ("adapters", plan.adapters, ""),
        ("state", plan.state, ""),
        ("activations", plan.activations, ""),
        ("graphs", plan.graphs, ""),
        ("tables", plan.tables, ""),
        ("reserve", plan.reserve, ""),
        ("KV", plan.kv, kv),
    ]
    optional = ("adapters", "state", "graphs")
    lines = [
        f"memory planned for {device.name}, with `mem_fraction_static = {shown(plan.fraction)}`"
    ]
    for name, size, note in rows:
        if size or name not in optional:
            lines.append(f"  {name:<12}{size_text(size):>12}  {note}".rstrip())
    return "\n".join(lines)


def comparison(plan: Plan, loaded: Loaded) -> str:
    """A line that compares a loaded model with its plan."""
    names = ("weights", "adapters", "state", "graphs")
    pairs = [(name, getattr(loaded, name), getattr(plan, name)) for name in names]
    pairs.append(("KV", loaded.kv, plan.kv))
    pairs = [pair for pair in pairs if any(pair[1:])]
    if loaded.free is not None:
        pairs.append(("free", loaded.free, plan.reserve + plan.activations))
    parts = [f"{name} {size_text(real)} ({size_text(planned)})" for name, real, planned in pairs]
    tokens = f"{loaded.tokens:,} tokens ({plan.tokens:,})"
    return f"memory as it is (as planned): {', '.join(parts)}, {tokens}"


def shown(fraction: float) -> float:
    """A fraction rounded down to thousandths."""
    return int(fraction * 1000 + 1e-6) / 1000


def size_text(size: int) -> str:
    """Bytes in GiB or MiB."""
    if abs(size) >= GIB:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / MIB:,.1f} MiB"


def _safe_fraction(
    device: Device, model: ModelSizes, settings: MemorySettings, permanent: int
) -> float:
    """The largest fraction that leaves enough for the rest; 0 if nothing is left for KV."""
    room = device.free - permanent - safe_reserve(device, model, settings)
    room -= _activations(model, settings) + _graphs(device, model, settings)
    room -= _tables(device, model, settings)
    # Some tables grow with the pool.
    page_bytes = settings.page_size * model.token_bytes.per_rank(settings.ranks)
    kv = max(0, room) * page_bytes // (page_bytes + _page_overhead(settings))
    return (permanent + kv) / device.free if kv else 0.0


def _most_tokens(device: Device, settings: MemorySettings, token_bytes: int) -> int:
    """Maximum KV tokens: all that fit a GPU; fewer on the CPU, which shares its memory."""
    most = device.free // token_bytes
    if device.is_host:
        share = int(device.free * CPU_POOL_SHARE) // token_bytes
        wanted = max(2 * settings.context_tokens, CPU_POOL_TOKENS)
        most = min(wanted, max(share, settings.context_tokens))
    if settings.max_pages:
        most = min(most, max(settings.max_pages * settings.page_size, settings.context_tokens))
    return most


def _activations(model: ModelSizes, settings: MemorySettings) -> int:
    """Bytes of the largest pass, of the logits of a full slot group, and of a batch's images."""
    pass_bytes = settings.chunk_tokens * _row_bytes(model, settings)
    logit_bytes = settings.slots * model.vocabulary * LOGIT_BYTES
    images = settings.image_tokens * model.image_bytes
    return pass_bytes + logit_bytes + images + _fetched(model, settings)


def _offloaded(model: ModelSizes, settings: MemorySettings) -> int:
    """Bytes of a rank's weights that stay in host memory."""
    layers = sum(part.per_rank(settings.ranks) for part in model.layer_weights)
    return min(settings.offload_bytes, layers)


def _fetched(model: ModelSizes, settings: MemorySettings) -> int:
    """Bytes of the copy of a layer's weights that a pass makes of what is in host memory."""
    layers = sum(part.per_rank(settings.ranks) for part in model.layer_weights)
    return min(_offloaded(model, settings), -(-layers // max(1, model.layers)))


def _row_bytes(model: ModelSizes, settings: MemorySettings) -> int:
    widest = sum(part.per_rank(settings.ranks) for part in model.row_numbers)
    return (HIDDEN_COPIES * model.hidden_size + widest) * model.itemsize


def planned_graphs(model: ModelSizes, settings: MemorySettings) -> list[GraphSpec]:
    """All graphs that may be captured, whichever attention backend the loaded model gets."""
    return graph_specs(
        settings.requests,
        settings.chunk_tokens,
        groups=not settings.triton_tables,
        prompts=settings.prompts,
        sparse=model.chosen_experts > 0,
        adapters=settings.adapter_slots > 0,
        fused_adapters=settings.fused_adapters,
        draft_model=settings.draft_passes > 0,
        chosen=settings.graph_sizes,
    )


def _shrunk_bytes(model: ModelSizes, settings: MemorySettings, rows: int) -> int:
    """Bytes of shrunk inputs of LoRA in fused layers, and of the split-K sums of few rows."""
    rank = max(16, 1 << (settings.adapter_rank - 1).bit_length())
    widest = sum(part.per_rank(settings.ranks) for part in model.row_numbers)
    splits = -(-max(LORA_PARTS * model.hidden_size, widest) // LORA_SPLIT_INPUTS)
    sums = LORA_SPLIT_ROWS * splits * FLOAT32_BYTES
    return rank * (rows * LORA_PARTS * model.itemsize + sums)


def _graphs(device: Device, model: ModelSizes, settings: MemorySettings) -> int:
    """Bytes of all CUDA graphs: a pool for the largest, and nodes and hidden states of each.

    Models with recurrent state have none.
    """
    if device.is_host or not settings.captures or model.state_bytes:
        return 0
    specs = planned_graphs(model, settings)
    nodes = model.layers * sum(_layer_bytes(spec) for spec in specs)
    drafting = sum(spec.kind in DRAFTING_KINDS for spec in specs)
    nodes += settings.draft_passes * drafting * GRAPH_LAYER_BYTES
    kept = sum(spec.rows for spec in specs if spec.keeps_hidden(settings.requests))
    hidden = kept * model.hidden_size * model.itemsize
    # The activations of all graphs share the memory of the largest.
    pool = max(spec.rows for spec in specs) * _row_bytes(model, settings)
    pool += _fetched(model, settings)
    if settings.fused_adapters:
        bound = max(spec.rows for spec in specs if spec.kind is GraphKind.ADAPTERS)
        pool += _shrunk_bytes(model, settings, bound)
    # The logits, and the float32 copy of those that an extended step changes.
    logits = settings.requests * model.vocabulary * (model.itemsize + FLOAT32_BYTES)
    tables = _triton_tables(model, settings) if settings.triton_tables else 0
    partials = 0
    if settings.partial_splits:
        # Vectors of a head with their maxima and sums; rows with one split have none in use.
        results = settings.requests * settings.partial_splits + max(spec.rows for spec in specs)
        partials = results * model.heads * (model.head_dim + 2) * FLOAT32_BYTES
    return nodes + pool + hidden + logits + tables + partials


def _layer_bytes(spec: GraphSpec) -> int:
    return LORA_GRAPH_LAYER_BYTES if spec.kind in LORA_KINDS else GRAPH_LAYER_BYTES


def _triton_tables(model: ModelSizes, settings: MemorySettings) -> int:
    """Bytes of SGLang's triton backend: int64 KV indices, and float32 partial results."""
    lists = 8 * row_pages(settings.context_length, settings.page_size) * settings.page_size
    heads = -(-model.heads // settings.ranks)
    return settings.requests * (lists + heads * KV_SPLITS * (model.head_dim + 1) * 4)


def _block_table(settings: MemorySettings) -> int:
    """Bytes of the block table: an int32 slot per token and request, and a padding row."""
    tokens = row_pages(settings.context_length, settings.page_size) * settings.page_size
    return 4 * (settings.requests + 1) * tokens


def attention_mask_bytes(settings: MemorySettings) -> int:
    """Maximum bytes of a pass's attention masks: `Limits::attention_words` of `rust/planner`."""
    chunk = settings.chunk_tokens
    tokens = row_pages(settings.context_length, settings.page_size) * settings.page_size
    row = -(-tokens // 32)
    most = max(ATTENTION_MASK_WORDS, chunk * -(-chunk // 32), row)
    return 4 * min(chunk * row, most)


def _tables(device: Device, model: ModelSizes, settings: MemorySettings) -> int:
    """Bytes that do not depend on the pool; `rust/planner/src/block/layout.rs` has the staging."""
    rows = row_pages(settings.context_length, settings.page_size)
    staged = 16 * settings.requests * rows + 24 * settings.chunk_tokens
    masks = (settings.slots + settings.requests) * model.vocabulary // 8
    swapping = PAGE_STAGING_BYTES if settings.swap_bytes else 0
    # On the CPU, swapped pages are in the same memory.
    swapping += settings.swap_bytes if device.is_host else 0
    inputs = INPUT_BYTES * settings.chunk_tokens
    counts = 0 if device.is_host else COUNTED_SLOTS * model.vocabulary * COUNT_BYTES
    fixed = staged + masks + counts + swapping + inputs + attention_mask_bytes(settings)
    return _block_table(settings) + fixed + settings.workspace_bytes


def _page_overhead(settings: MemorySettings) -> int:
    """Bytes per page besides keys and values."""
    return (INPUT_BYTES + RECORDED_TOKEN_BYTES) * settings.page_size + PAGE_ID_BYTES
