"""The memory plan: its rows, defaults and formulas."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.kernels.sampling.token_history import TokenHistory
from pie_driver_sglang.memory.batch_sizes import (
    LONGEST_GRAPH,
    LONGEST_SPARSE_GRAPH,
    chunk_tokens,
    decode_batch_sizes,
    extended_batch_sizes,
    prefill_batch_sizes,
    row_pages,
)
from pie_driver_sglang.memory.graphs import GraphKind, graph_specs
from pie_driver_sglang.memory.plan import (
    CPU_POOL_TOKENS,
    GRAPH_LAYER_BYTES,
    attention_mask_bytes,
    comparison,
    plan_memory,
    planned_graphs,
    safe_reserve,
    table,
    used,
)
from pie_driver_sglang.memory.plan_types import (
    REPLICATED,
    SHARDED,
    Device,
    Loaded,
    MemorySettings,
    ModelSizes,
    Part,
)
from pie_driver_sglang.memory.refusal import (
    find_remedy,
    require_fit,
)
from pie_driver_sglang.memory.sizes import memory_settings
from pie_driver_sglang.memory.units import GIB
from support.models.memory_sizes import H200, PAGE, QWEN, USUAL


def test_weights_in_host_memory_are_not_the_devices() -> None:
    """KV gets what they leave, less the copy of a layer that passes and graphs need."""
    layers = 28 * 30_000_000
    model = QWEN._replace(layer_weights=(Part(layers, SHARDED),))
    before = plan_memory(H200, model, USUAL)
    for gib, offloaded in ((0, 0), (1, layers), (64, layers)):
        plan = plan_memory(H200, model, USUAL._replace(offload_bytes=gib * GIB))
        assert plan.offloaded == offloaded
        assert plan.weights == before.weights - offloaded
        copy = layers // 28 if offloaded else 0
        assert plan.activations == before.activations + copy
        assert plan.graphs == before.graphs + copy
        assert (plan.tokens > before.tokens) == bool(offloaded)
        text = f"{layers / 2**20:,.1f} MiB more in host memory"
        assert (text in table(plan)) == bool(offloaded)
    # Of each rank, and never more than its layers.
    half = plan_memory(H200, model, USUAL._replace(ranks=2, offload_bytes=64 * GIB))
    assert half.offloaded == layers // 2


def test_a_model_fits_with_its_layers_in_host_memory() -> None:
    weights = 60 * GIB
    large = QWEN._replace(
        weights=(Part(weights, SHARDED),), layer_weights=(Part(56 * GIB, SHARDED),)
    )
    device = Device("cuda:0", 48 * GIB, 47 * GIB)
    settings = USUAL._replace(requests=16, chunk_tokens=2048)
    with pytest.raises(StartError):
        require_fit(device, large, settings)
    plan = require_fit(device, large, settings._replace(offload_bytes=48 * GIB))
    assert plan.weights == 12 * GIB


def test_a_driver_that_replaces_another_keeps_its_pages() -> None:
    """Where less memory is free, the reserve is what shrinks; where more is, nothing grows."""
    before = plan_memory(H200, QWEN, USUAL)
    kept = USUAL._replace(kept_pages=before.tokens // PAGE)
    for free in (H200.free - GIB, H200.free, H200.free + GIB):
        device = H200._replace(free=free)
        plan = plan_memory(device, QWEN, kept)
        assert (plan.tokens, plan.kv) == (before.tokens, before.kv)
        assert plan.fits(kept)
        assert used(plan) + plan.reserve == free
        # SGLang gets a share that the pool fits into.
        stays = plan.weights + plan.adapters + plan.state + plan.kv
        assert stays <= plan.fraction * free <= free - plan.activations - plan.graphs
    # Too little for them: as many as fit.
    device = H200._replace(free=H200.free // 2)
    assert plan_memory(device, QWEN, kept) == plan_memory(device, QWEN, USUAL)


def test_a_limited_pool_leaves_the_rest_of_the_memory_free() -> None:
    """`max_total_tokens`; one context fits always."""
    whole = plan_memory(H200, QWEN, USUAL)
    for pages, tokens in ((20_000, 20_000 * PAGE), (1, USUAL.context_tokens)):
        limited = plan_memory(H200, QWEN, USUAL._replace(max_pages=pages))
        assert limited.tokens == tokens
        assert limited.reserve >= whole.reserve + (whole.kv - limited.kv)
    # A higher limit than without it takes no more memory, also where the host shares its own.
    for device in (H200, Device("cpu", 64 * GIB, 64 * GIB)):
        high = plan_memory(device, QWEN, USUAL._replace(max_pages=2**31))
        assert high.tokens == plan_memory(device, QWEN, USUAL).tokens


FIELDS = {
    "mem_fraction_static": "fraction",
    "context_length": "context_length",
    "max_loras_per_batch": "adapter_slots",
    "chunked_prefill_size": "chunk_tokens",
    "cuda_graph_max_bs": "requests",
    "tensor_parallel_size": "ranks",
}
"""What a key of the configuration changes."""

parts = st.builds(Part, st.integers(0, 8 * GIB), st.sampled_from([1, 2, 8, SHARDED]))
models = st.builds(
    ModelSizes,
    weights=st.lists(parts, max_size=3).map(tuple),
    token_bytes=st.builds(Part, st.integers(64, 2**22), st.sampled_from([1, 4, 8])),
    row_numbers=st.builds(Part, st.integers(0, 200_000), st.just(SHARDED)).map(lambda p: (p,)),
    itemsize=st.sampled_from([2, 4]),
    hidden_size=st.integers(64, 16_384),
    layers=st.integers(1, 120),
    vocabulary=st.integers(256, 262_144),
    heads=st.sampled_from([1, 8, 32, 64]),
    head_dim=st.sampled_from([64, 128, 256]),
    state_bytes=st.sampled_from([0, 0, 2**20]),
    adapter_bytes=st.integers(0, 2**23),
    image_bytes=st.integers(0, 2**20),
    layer_weights=st.just(()),
).map(lambda model: model._replace(layer_weights=model.weights[:1]))
settings_ = st.builds(
    MemorySettings,
    context_length=st.integers(1, 262_144),
    page_size=st.sampled_from([1, 16, 64]),
    requests=st.integers(1, 1024),
    chunk_tokens=st.sampled_from([256, 2048, 8192, 65_536]),
    slots=st.just(512),
    ranks=st.sampled_from([1, 2, 4]),
    fraction=st.none(),
    workspace_bytes=st.sampled_from([0, 2**29]),
    captures=st.booleans(),
    graph_sizes=st.sampled_from([(), (), (1, 8, 64)]),
    triton_tables=st.booleans(),
    prompts=st.booleans(),
    offload_bytes=st.sampled_from([0, 0, GIB, 2**40]),
    swap_bytes=st.sampled_from([0, GIB]),
    partial_splits=st.sampled_from([0, 16]),
    adapter_slots=st.sampled_from([0, 0, 8, 64]),
    adapter_rank=st.sampled_from([16, 64]),
    draft_passes=st.sampled_from([0, 0, 1, 5]),
    image_tokens=st.sampled_from([0, 1024]),
    max_pages=st.sampled_from([0, 0, 1, 1000]),
    kept_pages=st.just(0),
)
names = st.sampled_from(["cpu", "cuda:0"])
sizes = st.integers(1, 200 * GIB)
fractions = st.integers(10, 990).map(lambda thousandths: thousandths / 1000)


@st.composite
def devices(draw: st.DrawFn, least: int = 1) -> Device:
    free = draw(st.integers(least, 200 * GIB))
    return Device(draw(names), free + draw(st.integers(0, 8 * GIB)), free)


@given(devices(), models, settings_, st.none() | fractions)
def test_the_rows_add_up_to_what_is_free(
    device: Device, model: ModelSizes, settings: MemorySettings, fraction: float | None
) -> None:
    plan = plan_memory(device, model, settings._replace(fraction=fraction))
    assert used(plan) + plan.reserve == device.free
    assert plan.tokens >= 0
    assert plan.tokens % plan.page_size == 0
    if fraction is not None:
        assert plan.fraction == fraction


@given(devices(least=48 * GIB), models, settings_)
def test_the_default_leaves_its_reserve_and_no_more(
    device: Device, model: ModelSizes, settings: MemorySettings
) -> None:
    plan = plan_memory(device, model, settings)
    assume(plan.tokens)
    wanted = safe_reserve(device, model, settings)
    assert plan.reserve >= wanted
    if not device.is_host and not settings.max_pages:
        # Two more pages would be too much: one is lost by rounding.
        page = plan.page_size * (plan.token_bytes + 48) + 16
        assert plan.reserve - 2 * page < wanted + 16


@given(devices(), models, settings_, st.integers(0, 64 * GIB))
def test_more_memory_never_means_less_kv(
    device: Device, model: ModelSizes, settings: MemorySettings, more: int
) -> None:
    larger = device._replace(total=device.total + more, free=device.free + more)
    few, many = (plan_memory(each, model, settings) for each in (device, larger))
    assert many.tokens + settings.page_size >= few.tokens


@given(sizes, models, settings_, fractions)
def test_a_given_fraction_is_used_to_the_last_page(
    free: int, model: ModelSizes, settings: MemorySettings, fraction: float
) -> None:
    device = Device("cuda:0", free, free)
    plan = plan_memory(device, model, settings._replace(fraction=fraction, max_pages=0))
    stays = plan.weights + plan.adapters + plan.state + plan.kv
    share = int(fraction * free)
    assert stays <= share or not plan.tokens
    assert stays + plan.page_size * plan.token_bytes > share


@given(st.integers(48 * GIB, 200 * GIB), models, settings_, st.none() | fractions)
def test_sglang_comes_to_the_same_pool(
    free: int, model: ModelSizes, settings: MemorySettings, fraction: float | None
) -> None:
    settings = settings._replace(fraction=fraction)
    plan = plan_memory(Device("cuda:0", free, free), model, settings)
    assume(plan.tokens)
    # SGLang 0.5.17: KVCacheConfigurator._profile_available_bytes, in GiB, then its configurator.
    left = (free - plan.weights - plan.adapters) / 2**30
    rest = left - free / 2**30 * (1 - plan.fraction) - plan.state / 2**30
    tokens = int(rest * 2**30) // plan.token_bytes // plan.page_size * plan.page_size
    if settings.max_pages:
        # Its `max_total_tokens`.
        tokens = min(tokens, plan.tokens)
    assert abs(tokens - plan.tokens) <= plan.page_size


@given(devices(), models, settings_, st.none() | fractions)
def test_a_named_key_with_its_value_fits(
    device: Device, model: ModelSizes, settings: MemorySettings, fraction: float | None
) -> None:
    settings = settings._replace(fraction=fraction)
    if plan_memory(device, model, settings).fits(settings):
        assert require_fit(device, model, settings).fits(settings)
        return
    with pytest.raises(StartError) as caught:
        require_fit(device, model, settings)
    found = re.search(r"`(\w+) = ([\d.]+)`", str(caught.value.hint))
    if found is None:
        assert find_remedy(device, model, settings) is None
        return
    value = float(found[2]) if found[1] == "mem_fraction_static" else int(found[2])
    changed = settings._replace(**{FIELDS[found[1]]: value})
    assert require_fit(device, model, changed).fits(changed)


@given(models, settings_)
def test_a_model_that_needs_nothing_but_memory_is_refused_only_for_that(
    model: ModelSizes, settings: MemorySettings
) -> None:
    device = Device("cuda:0", 2**60, 2**60)
    assert require_fit(device, model, settings).tokens >= settings.context_tokens


@given(parts, st.integers(1, 64))
def test_ranks_have_the_whole_together(part: Part, ranks: int) -> None:
    assert part.per_rank(ranks) * min(ranks, part.most) >= part.size
    assert part.per_rank(ranks) <= part.size
    assert Part(part.size, REPLICATED).per_rank(ranks) == part.size


def test_others_on_the_device_keep_theirs() -> None:
    alone = plan_memory(H200, QWEN, USUAL)
    beside = plan_memory(H200._replace(free=40 * GIB), QWEN, USUAL)
    assert used(beside) + beside.reserve == 40 * GIB
    assert beside.tokens < alone.tokens / 3


def test_a_host_gives_kv_a_tenth_or_one_context() -> None:
    host = Device("cpu", 32 * GIB, 20 * GIB)
    tiny = QWEN._replace(token_bytes=Part(1024, 8))
    assert plan_memory(host, tiny, USUAL).tokens == 2 * 40_960
    short = USUAL._replace(context_length=512)
    assert plan_memory(host, tiny, short).tokens == CPU_POOL_TOKENS
    # A tenth is 2 GiB.
    wide = QWEN._replace(token_bytes=Part(2**20, 8))
    assert plan_memory(host, wide, short).tokens == 2048
    # More than a tenth, but not more than there is.
    assert plan_memory(host, wide, USUAL._replace(context_length=8192)).tokens == 8192


def test_the_graphs_of_the_measured_shape() -> None:
    # benches/notebook/gpu.md: 41 plain graphs of up to 2,304 rows of this shape took 0.41 GiB, and
    # 0.33 later. Those for shared prefixes and extended ones were not among them.
    settings = USUAL._replace(chunk_tokens=16_384, prompts=True)
    specs = graph_specs(256, 16_384, groups=True, prompts=True, sparse=False, adapters=False)
    rows = {kind: [spec.rows for spec in specs if spec.kind is kind] for kind in GraphKind}
    assert len(rows[GraphKind.PLAIN]) == 41
    assert rows[GraphKind.GROUPED] == [16, 32, 64, 128, 192, 256]
    assert rows[GraphKind.EXTENDED] == extended_batch_sizes(256)
    assert not rows[GraphKind.LORA]
    planned = plan_memory(H200, QWEN, settings).graphs
    others = len(specs) - len(rows[GraphKind.PLAIN])
    unmeasured = others * QWEN.layers * GRAPH_LAYER_BYTES + 256 * QWEN.vocabulary * 4
    assert (planned - unmeasured) / GIB == pytest.approx(0.414, rel=0.05)
    # And 28 of up to 256 rows 0.30 GiB with triton, as SGLang has the layers: not less is planned.
    assert len(decode_batch_sizes(256)) == 28
    settings = USUAL._replace(triton_tables=True, prompts=False)
    unmeasured -= len(rows[GraphKind.GROUPED]) * QWEN.layers * GRAPH_LAYER_BYTES
    assert 0.30 < (plan_memory(H200, QWEN, settings).graphs - unmeasured) / GIB < 0.40


@pytest.mark.parametrize("lora", [None, "triton", "pie"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", [None, "pie", "triton"])
def test_all_graphs_that_are_captured_are_planned(
    backend: str | None, ranks: int, lora: str | None
) -> None:
    """Whether the backend `pie` decodes a model is unknown until it is loaded."""
    given_options = {} if backend is None else {"attention_backend": backend}
    if lora is not None:
        given_options |= {"enable_lora": True, "lora_backend": lora}
    options = parse_options(given_options, "cuda")
    settings = memory_settings(
        options, H200, ranks, context_length=40_960, page_size=PAGE,
        backends=("triton", backend or "triton"), deterministic=False,
    )  # fmt: skip
    planned = planned_graphs(QWEN, settings)
    for pie in {None: (False, True), "pie": (True,), "triton": (False,)}[backend]:
        captured = graph_specs(
            options.max_forward_requests, settings.chunk_tokens, groups=pie,
            prompts=pie, sparse=False, adapters=lora is not None,
            fused_adapters=lora == "pie" and pie and ranks == 1,
        )  # fmt: skip
        assert set(captured) <= set(planned)
    fused = {GraphKind.ADAPTERS, GraphKind.EXTENDED_ADAPTERS}
    assert fused.isdisjoint(spec.kind for spec in planned) == (
        lora != "pie" or backend == "triton" or ranks > 1
    )


@pytest.mark.parametrize("chosen", [(), (1, 64), (3, 24, 100, 1000)])
@pytest.mark.parametrize("requests", [1, 64, 256, 5000])
def test_decodes_with_adapters_have_the_rows_of_plain_graphs(
    requests: int, chosen: tuple[int, ...]
) -> None:
    """They are staged there, also where the user chose the batch sizes."""
    specs = graph_specs(
        requests, 8192, groups=True, prompts=True, sparse=False, adapters=True, chosen=chosen
    )
    rows = {kind: [spec.rows for spec in specs if spec.kind is kind] for kind in GraphKind}
    assert set(rows[GraphKind.LORA]) <= set(rows[GraphKind.PLAIN])
    assert rows[GraphKind.LORA] == sorted(set(rows[GraphKind.LORA]))
    assert rows[GraphKind.LORA][-1] == requests
    if not chosen:
        assert rows[GraphKind.LORA] == extended_batch_sizes(requests)


def test_graphs_of_fused_layers_with_adapters_are_planned() -> None:
    """Decodes as for other LoRA graphs, and prompts; their shrunk inputs have room in the pool."""
    settings = USUAL._replace(
        adapter_slots=9, adapter_rank=16, fused_adapters=True, prompts=True, chunk_tokens=2048
    )
    specs = planned_graphs(QWEN, settings)
    rows = {kind: [spec.rows for spec in specs if spec.kind is kind] for kind in GraphKind}
    assert rows[GraphKind.ADAPTERS] == [*extended_batch_sizes(256), 384, 512, 768, 1024, 1536, 2048]
    assert rows[GraphKind.EXTENDED_ADAPTERS] == rows[GraphKind.LORA] == extended_batch_sizes(256)
    small, large = (
        plan_memory(H200, QWEN, settings._replace(adapter_rank=rank)).graphs for rank in (16, 128)
    )
    # Three parts of QKV; 256 rows of the down projection have three split-K sums.
    assert large - small >= (128 - 16) * (2048 * 3 * 2 + 256 * 3 * 4)
    planned = planned_graphs(QWEN, settings._replace(fused_adapters=False))
    assert not any(spec.kind is GraphKind.ADAPTERS for spec in planned)


@pytest.mark.parametrize("requests", [256, 4096])
def test_extended_graphs_are_planned(requests: int) -> None:
    """Their nodes, the float32 copy of all logits, the tokens of KV and the counts of tokens."""
    settings = USUAL._replace(requests=requests)
    nodes = len(extended_batch_sizes(requests)) * QWEN.layers * GRAPH_LAYER_BYTES
    copies = requests * QWEN.vocabulary * 4
    plan = plan_memory(H200, QWEN, settings)
    plain = sum(decode_batch_sizes(requests)) * QWEN.hidden_size * QWEN.itemsize
    assert plan.graphs > nodes + copies + plain
    # By the kernels' own sizes.
    history = TokenHistory(torch.zeros(1, 1, dtype=torch.int32), plan.tokens, QWEN.vocabulary)
    assert plan.tables > history.tokens.nbytes + history.counts().nbytes
    more = plan_memory(H200, QWEN._replace(vocabulary=2 * QWEN.vocabulary), settings)
    assert more.graphs - plan.graphs == requests * QWEN.vocabulary * (QWEN.itemsize + 4)
    host = Device("cpu", 32 * GIB, 20 * GIB)
    assert plan_memory(host, QWEN, settings).graphs == 0


@pytest.mark.parametrize("most", [1, 200, 256, 2303, 2304, 4096])
@pytest.mark.parametrize("chunk", [16, 257, 300, 2048, 3000, 8192])
@pytest.mark.parametrize("sparse", [False, True])
def test_prefill_graph_sizes_continue_those_of_decode(most: int, chunk: int, sparse: bool) -> None:
    rows = prefill_batch_sizes(most, chunk, sparse=sparse)
    longest = min(LONGEST_SPARSE_GRAPH if sparse else LONGEST_GRAPH, chunk)
    assert rows == sorted(set(rows))
    assert all(most < count <= longest for count in rows)
    assert (rows[-1:] == [longest]) == (longest > most)
    # At most a quarter of the rows in use are padding, but in small steps.
    assert all(count <= max(32, 1.25 * less) for less, count in itertools.pairwise([most, *rows]))


def test_graphs_of_a_mixture_take_longer_passes() -> None:
    rows = prefill_batch_sizes(256, 8192, sparse=True)
    assert rows[: rows.index(LONGEST_GRAPH) + 1] == prefill_batch_sizes(256, 8192, sparse=False)
    assert {b - a for a, b in itertools.pairwise(rows) if b > LONGEST_GRAPH} == {256}
    mixture = QWEN._replace(chosen_experts=8)
    more = plan_memory(H200, mixture, USUAL).graphs - plan_memory(H200, QWEN, USUAL).graphs
    assert more > 7 * QWEN.layers * GRAPH_LAYER_BYTES


def test_what_decodes_with_adapters_add_to_the_graphs() -> None:
    # Measured with this shape: 0.34 GiB without, 0.46 with them.
    settings = USUAL._replace(adapter_slots=8, adapter_rank=16)
    more = plan_memory(H200, QWEN, settings).graphs - plan_memory(H200, QWEN, USUAL).graphs
    assert more / 2**20 == pytest.approx(120, rel=0.1)


def test_every_graph_keeps_the_hidden_states_of_its_decodes() -> None:
    most = USUAL._replace(requests=4096)
    wide = QWEN._replace(hidden_size=QWEN.hidden_size + 1000)
    rows = [plan_memory(H200, model, most).graphs for model in (QWEN, wide)]
    assert rows[1] - rows[0] > sum(decode_batch_sizes(4096)) * 1000 * QWEN.itemsize


@given(
    chunk=st.integers(1, 20_000),
    context=st.integers(1, 1 << 21),
    page=st.sampled_from([1, 16, 64, 1000]),
)
def test_passes_are_split_where_their_masks_exceed_the_plan(
    chunk: int, context: int, page: int
) -> None:
    rows = row_pages(context, page)
    assume(256 * rows < 1 << 31)
    settings = USUAL._replace(chunk_tokens=chunk, context_length=context, page_size=page)
    planner = _core.Planner(
        page_size=page,
        total_pages=1,
        vocab_size=1,
        max_positions=1,
        row_pages=rows,
        max_requests=1,
        chunk_tokens=chunk,
        max_slots=1,
        random_seed=0,
    )
    assert planner.attention_mask_bytes == attention_mask_bytes(settings)
    plain = plan_memory(H200, QWEN, settings._replace(chunk_tokens=1))
    assert plain.tables >= attention_mask_bytes(settings._replace(chunk_tokens=1))


TABLE = """\
memory planned for cuda:0, with `mem_fraction_static = 0.93`
  total         140.00 GiB  139.00 GiB of it free
  weights         1.13 GiB
  activations    965.9 MiB
  graphs         703.1 MiB
  tables         170.5 MiB
  reserve         7.83 GiB
  KV            128.24 GiB  1,200,624 tokens of 114,688 bytes in 75,039 pages of 16"""


def test_the_table() -> None:
    assert table(plan_memory(H200, QWEN, USUAL)) == TABLE


def test_the_table_of_a_rank_names_what_every_rank_has() -> None:
    settings = USUAL._replace(ranks=2, adapter_slots=8, adapter_rank=64)
    text = table(plan_memory(H200, QWEN._replace(adapter_bytes=2**20), settings))
    assert "weights        588.6 MiB  of which every rank has 20.1 MiB" in text
    assert "adapters       512.0 MiB" in text


def test_the_comparison() -> None:
    plan = plan_memory(H200, QWEN, USUAL)
    loaded = Loaded(GIB, 0, 0, graphs=2**28, tokens=plan.tokens - 16, kv=plan.kv, free=5 * GIB)
    assert comparison(plan, loaded) == (
        "memory as it is (as planned): weights 1.00 GiB (1.13 GiB), graphs 256.0 MiB (703.1 MiB), "
        "KV 128.24 GiB (128.24 GiB), free 5.00 GiB (8.78 GiB), 1,200,608 tokens (1,200,624)"
    )


def test_a_host_keeps_the_pages_that_it_swaps() -> None:
    host = Device("cpu", 8 * GIB, 6 * GIB)
    plain, swapping = (
        plan_memory(host, QWEN, USUAL._replace(swap_bytes=size)) for size in (0, 2 * GIB)
    )
    assert swapping.tables - plain.tables > 2 * GIB
    gpu = plan_memory(H200, QWEN, USUAL._replace(swap_bytes=2 * GIB))
    assert gpu.tables < GIB


def test_recurrent_models_have_no_graphs() -> None:
    assert plan_memory(H200, QWEN._replace(state_bytes=2**20), USUAL).graphs == 0
    assert plan_memory(H200, QWEN, USUAL._replace(captures=False)).graphs == 0


def test_passes_are_longer_on_large_gpus() -> None:
    assert chunk_tokens("cuda", 80 * GIB, None) == 8192
    assert chunk_tokens("cuda", 140 * GIB, None) == 16_384
    assert chunk_tokens("cuda", 140 * GIB, -1) == 16_384
    assert chunk_tokens("cuda", 140 * GIB, 512) == 512
    assert chunk_tokens("cpu", 900 * GIB, None) == 2048
