"""What a model will take of a device, before it is loaded: arithmetic on sizes in bytes.

`mem_fraction_static` is the share of the free memory for what stays: weights, adapters, recurrent
state and KV. SGLang measures the former and gives KV what is left of that share, so that an error
in their sizes moves no limit. The rest of the memory is for what comes and goes: activations,
graphs, tables, and a reserve for what the plan does not know. The largest safe share leaves room
for exactly these.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pie_driver_sglang.memory.limits import (
    bound_ladder,
    grouped_ladder,
    ladder,
    long_ladder,
    row_pages,
)

GIB: Final = 2**30
EVERYWHERE: Final = 1
"""As `Part.most`: every rank has the whole."""
ANY_RANKS: Final = 2**20
"""As `Part.most`: ranks divide it, however many they are."""

# What is not known from shapes. "Measured" is a figure of benches/gpu/RESULTS.md; all others are
# guesses, and the reserve is there for their errors.
GRAPH_LAYER_BYTES: Final = 256 << 10
"""Nodes of one layer in one captured graph. From 0.41 GiB measured for 41 graphs of 28 layers
(Qwen3-0.6B shape), of which logits and activations are known by their shapes."""
BOUND_GRAPH_LAYER_BYTES: Final = 384 << 10
"""The same of a graph that applies adapters, whose layers run as SGLang has them. From 0.117 GiB
measured for 12 graphs of 28 layers."""
HIDDEN_COPIES: Final = 5
"""Hidden states of a row at once: the residual, the normed one, a layer's result, one in a
collective operation, and what the last pass left to be sampled. A guess."""
LOGIT_BYTES: Final = 10
"""Bytes of a logit: in two bytes, gathered, and in four; as `srt/sglang_engine.py` computes it."""
DISTRIBUTION_BYTES: Final = 40
"""A logit besides, where a distribution is sorted; by what `sampling.most_probable` does."""
PAGE_STAGING_BYTES: Final = 64 << 20
"""The area through which pages are swapped; `pool.STAGING_BYTES`."""
INPUT_BYTES: Final = 48
"""SGLang's eager input buffers for each token that the pool has: six int64 numbers."""
ATTENTION_MASK_WORDS: Final = 1 << 20
"""Words of attention masks that a pass of any size may have; as in `rust/batch/src/limits.rs`."""
PAGE_ID_BYTES: Final = 16
"""A page in SGLang's list of free ones, and in a copy of that list."""
KV_SPLITS: Final = 8
"""Parts in which SGLang's triton backend computes a row."""
LIBRARY_BYTES: Final = GIB
"""Workspaces of libraries, and kernels, loaded when they are first used. A guess."""
COLLECTIVE_BYTES: Final = 2 * GIB
"""Buffers of NCCL and of SGLang's collective operations, in each of several ranks. From 2.0 GiB
measured in the first of two."""
FRAGMENTED_SHARE: Final = 1 / 64
"""Of a GPU's free memory, lost between allocations. A guess."""
HOST_RESERVE_SHARE: Final = 1 / 16
"""Of the free host memory, for everything else that happens there."""

CPU_POOL_TOKENS: Final = 65_536
"""KV tokens of a model on a CPU, or two contexts if these are more."""
CPU_POOL_SHARE: Final = 0.1
"""Of the free host memory, for KV; more only where one context needs it."""


class Part(NamedTuple):
    """Bytes, or numbers, that ranks divide among themselves."""

    size: int
    most: int
    """Ranks that have different parts; more than these have copies."""

    def of_rank(self, ranks: int) -> int:
        """What each of `ranks` has."""
        return -(-self.size // min(self.most, ranks))


class Device(NamedTuple):
    """Where a rank goes."""

    name: str
    """`cpu` or `cuda:N`."""
    total: int
    """Bytes."""
    free: int
    """Bytes that this rank may use: what other processes have stays theirs."""

    @property
    def is_host(self) -> bool:
        """Whether it is the host's memory."""
        return self.name == "cpu"


class Model(NamedTuple):
    """Sizes of a model over all ranks."""

    weights: tuple[Part, ...]
    token_bytes: Part
    """Keys and values of a token in all layers."""
    row_numbers: tuple[Part, ...]
    """What the widest layer holds at once for a token, beside hidden states: numbers."""
    itemsize: int
    """Bytes of an activation."""
    hidden_size: int
    layers: int
    vocabulary: int
    heads: int
    """Query heads; ranks divide them evenly."""
    head_dim: int
    state_bytes: int = 0
    """Recurrent state of a request, in one rank."""
    adapter_bytes: int = 0
    """A slot of adapters of rank 1."""
    image_bytes: int = 0
    """What the vision encoder holds for a token of an image."""


class Settings(NamedTuple):
    """What the configuration decides."""

    context_length: int
    page_size: int
    requests: int
    """Rows of the block table, and of the largest graph."""
    chunk_tokens: int
    """Tokens of the largest pass."""
    slots: int
    """Rows of logits at once."""
    ranks: int = 1
    fraction: float | None = None
    """`mem_fraction_static`; None for the largest that is safe."""
    captures: bool = True
    """Whether graphs are captured."""
    prompts: bool = True
    """Whether some of the graphs are for prompts."""
    triton_tables: bool = False
    """Whether SGLang's triton backend decodes, with lists of all tokens of all rows."""
    workspace_bytes: int = 0
    """What attention backends take for themselves."""
    swap_bytes: int = 0
    """Host memory of this rank for swapped pages."""
    adapter_slots: int = 0
    adapter_rank: int = 0
    image_tokens: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens of one context in whole pages."""
        return -(-self.context_length // self.page_size) * self.page_size


class Plan(NamedTuple):
    """A rank's memory row by row, in bytes. The rows add up to what is free."""

    device: Device
    fraction: float
    """Of what is free, for weights, adapters, state and KV."""
    weights: int
    copied: int
    """Of the weights: what every rank has the whole of; 0 for a single rank."""
    adapters: int
    state: int
    activations: int
    graphs: int
    tables: int
    """Block table, staging areas and input buffers."""
    reserve: int
    """All the rest; less than 0 where there is too little."""
    tokens: int
    """Of the KV pool, in whole pages."""
    token_bytes: int
    page_size: int

    @property
    def kv(self) -> int:
        """Bytes of the KV pool."""
        return self.tokens * self.token_bytes

    def fits(self, settings: Settings) -> bool:
        """Whether the model can start: with one context, and with what comes and goes."""
        return self.tokens >= settings.context_tokens and self.reserve >= 0


class Loaded(NamedTuple):
    """What a loaded model was found to take, in bytes."""

    weights: int
    adapters: int
    state: int
    graphs: int
    tokens: int
    """Of the KV pool."""
    kv: int
    free: int | None
    """What is left for passes; None where it was not measured."""


def plan_memory(device: Device, model: Model, settings: Settings) -> Plan:
    """Divides what is free on a device. See :meth:`Plan.fits` for whether that is enough."""
    ranks = settings.ranks
    weights = sum(part.of_rank(ranks) for part in model.weights)
    copied = sum(part.size for part in model.weights if part.most == EVERYWHERE)
    adapters = settings.adapter_slots * settings.adapter_rank * model.adapter_bytes
    # One slot of state is for padding.
    state = (settings.requests + 1) * model.state_bytes
    token_bytes = model.token_bytes.of_rank(ranks)
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
        + tokens * _side_bytes(settings) // settings.page_size,
        reserve=0,
        tokens=tokens,
        token_bytes=token_bytes,
        page_size=settings.page_size,
    )
    return plan._replace(reserve=device.free - used(plan))


def used(plan: Plan) -> int:
    """Bytes of all rows but the reserve."""
    stays = plan.weights + plan.adapters + plan.state + plan.kv
    return stays + plan.activations + plan.graphs + plan.tables


def wanted_reserve(device: Device, model: Model, settings: Settings) -> int:
    """What the largest safe fraction leaves beside everything that the plan knows."""
    if device.is_host:
        return int(device.free * HOST_RESERVE_SHARE)
    reserve = LIBRARY_BYTES + int(device.free * FRAGMENTED_SHARE)
    # As much again of what is partly guessed, and what only few batches need.
    reserve += _activations(model, settings) + _graphs(device, model, settings)
    reserve += settings.slots * model.vocabulary * DISTRIBUTION_BYTES
    # SGLang makes a block table of its own, which ours replaces.
    reserve += _block_table(settings)
    if not settings.triton_tables:
        # A model that the driver's own backend cannot decode falls back on triton.
        reserve += _triton_tables(model, settings)
    return reserve + (COLLECTIVE_BYTES if settings.ranks > 1 else 0)


def table(plan: Plan) -> str:
    """The plan for people: a row for each part."""
    device = plan.device
    copied = f"of which every rank has {size_text(plan.copied)}" if plan.copied else ""
    pages = f"{plan.tokens // plan.page_size:,} pages of {plan.page_size}"
    kv = f"{plan.tokens:,} tokens of {plan.token_bytes:,} bytes in {pages}"
    rows = [
        ("total", device.total, f"{size_text(device.free)} of it free"),
        ("weights", plan.weights, copied),
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
    """A loaded model beside its plan, in one line."""
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
    """A fraction for people, in thousandths and never more than it is."""
    return int(fraction * 1000 + 1e-6) / 1000


def size_text(size: int) -> str:
    """Bytes for people."""
    if abs(size) >= GIB:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.1f} MiB"


def _safe_fraction(device: Device, model: Model, settings: Settings, stays: int) -> float:
    """The largest share that leaves what is needed; 0 where nothing is left for KV."""
    room = device.free - stays - wanted_reserve(device, model, settings)
    room -= _activations(model, settings) + _graphs(device, model, settings)
    room -= _tables(device, model, settings)
    # Some tables grow with the pool.
    page_bytes = settings.page_size * model.token_bytes.of_rank(settings.ranks)
    kv = max(0, room) * page_bytes // (page_bytes + _side_bytes(settings))
    return (stays + kv) / device.free if kv else 0.0


def _most_tokens(device: Device, settings: Settings, token_bytes: int) -> int:
    """KV tokens by the rules for a CPU: all that fit a GPU, but a host has other uses for them."""
    if not device.is_host:
        return device.free // token_bytes
    share = int(device.free * CPU_POOL_SHARE) // token_bytes
    wanted = max(2 * settings.context_tokens, CPU_POOL_TOKENS)
    return min(wanted, max(share, settings.context_tokens))


def _activations(model: Model, settings: Settings) -> int:
    """The largest pass, the logits of a full group of slots, and a batch's images."""
    pass_bytes = settings.chunk_tokens * _row_bytes(model, settings)
    logit_bytes = settings.slots * model.vocabulary * LOGIT_BYTES
    return pass_bytes + logit_bytes + settings.image_tokens * model.image_bytes


def _row_bytes(model: Model, settings: Settings) -> int:
    widest = sum(part.of_rank(settings.ranks) for part in model.row_numbers)
    return (HIDDEN_COPIES * model.hidden_size + widest) * model.itemsize


def _graphs(device: Device, model: Model, settings: Settings) -> int:
    """All graphs share one pool, which the largest needs; nodes, and hidden states, are their own.

    Models with recurrent state have none.
    """
    if device.is_host or not settings.captures or model.state_bytes:
        return 0
    rows = ladder(settings.requests)
    if not settings.triton_tables:
        rows = [*grouped_ladder(settings.requests), *rows]
    if settings.prompts:
        rows += long_ladder(settings.requests, settings.chunk_tokens)
    nodes = len(rows) * model.layers * GRAPH_LAYER_BYTES
    bound = bound_ladder(settings.requests) if settings.adapter_slots else []
    nodes += len(bound) * model.layers * BOUND_GRAPH_LAYER_BYTES
    # What decodes leave behind is every graph's own as well.
    kept = sum(ladder(settings.requests)) + sum(bound)
    logits = settings.requests * model.vocabulary * model.itemsize
    tables = _triton_tables(model, settings) if settings.triton_tables else 0
    hidden = kept * model.hidden_size * model.itemsize
    return nodes + rows[-1] * _row_bytes(model, settings) + hidden + logits + tables


def _triton_tables(model: Model, settings: Settings) -> int:
    """Of SGLang's triton backend: int64 lists of all tokens, and float32 parts of results."""
    lists = 8 * row_pages(settings.context_length, settings.page_size) * settings.page_size
    heads = -(-model.heads // settings.ranks)
    return settings.requests * (lists + heads * KV_SPLITS * (model.head_dim + 1) * 4)


def _block_table(settings: Settings) -> int:
    """A slot of every token of every request, int32; one row is for padding."""
    tokens = row_pages(settings.context_length, settings.page_size) * settings.page_size
    return 4 * (settings.requests + 1) * tokens


def attention_mask_bytes(settings: Settings) -> int:
    """Of a pass at most; see `Limits::attention_words` in `rust/batch/src/limits.rs`."""
    chunk = settings.chunk_tokens
    tokens = row_pages(settings.context_length, settings.page_size) * settings.page_size
    row = -(-tokens // 32)
    most = max(ATTENTION_MASK_WORDS, chunk * -(-chunk // 32), row)
    return 4 * min(chunk * row, most)


def _tables(device: Device, model: Model, settings: Settings) -> int:
    """What does not depend on the pool: see `rust/batch/src/layout.rs` for the staging block."""
    rows = row_pages(settings.context_length, settings.page_size)
    staged = 16 * settings.requests * rows + 24 * settings.chunk_tokens
    masks = (settings.slots + settings.requests) * model.vocabulary // 8
    swapping = PAGE_STAGING_BYTES if settings.swap_bytes else 0
    # Pages that a host swaps out stay in its memory.
    swapping += settings.swap_bytes if device.is_host else 0
    inputs = INPUT_BYTES * settings.chunk_tokens
    fixed = staged + masks + swapping + inputs + attention_mask_bytes(settings)
    return _block_table(settings) + fixed + settings.workspace_bytes


def _side_bytes(settings: Settings) -> int:
    """What a page of the pool takes beside its keys and values."""
    return INPUT_BYTES * settings.page_size + PAGE_ID_BYTES
