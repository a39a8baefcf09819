"""From a configuration to a planner and an engine that fit each other."""

from __future__ import annotations

import logging

from pie_driver_sglang._core import Planner
from pie_driver_sglang.backends.sglang import support
from pie_driver_sglang.backends.sglang.boot import Booted, boot, within
from pie_driver_sglang.backends.sglang.compat.layers import UnknownLayer, expect
from pie_driver_sglang.backends.sglang.compat.lora import manager_of
from pie_driver_sglang.backends.sglang.compat.model import ModelRunner, resolved
from pie_driver_sglang.backends.sglang.compat.pools import paged
from pie_driver_sglang.backends.sglang.measure import chosen_experts
from pie_driver_sglang.config.arch import arch_name
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.config.types import DriverConfig
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.backend_executor import BackendExecutor
from pie_driver_sglang.engine.cuda_graphs import CudaSteps
from pie_driver_sglang.engine.eager_steps import CpuSteps
from pie_driver_sglang.engine.executor import ModelInfo
from pie_driver_sglang.engine.graph_runner import GraphRunner
from pie_driver_sglang.engine.layers.selection import (
    FusedLayers,
    fuse_layers,
    known_layers,
)
from pie_driver_sglang.engine.lora.adapters import Adapters
from pie_driver_sglang.engine.page_pools import PagePools, host_pages, page_buffers
from pie_driver_sglang.engine.state_pool import StatePool
from pie_driver_sglang.engine.vision import find_vision
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory.graphs import GraphSpec, graph_specs
from pie_driver_sglang.memory.limits import MAX_SLOTS, chunk_tokens, decode_batch_sizes
from pie_driver_sglang.memory.refusal import not_run
from pie_driver_sglang.observability.active import SGLANG, Active
from pie_driver_sglang.ranks.types import ALONE, Rank

logger = logging.getLogger(__name__)

NEEDS_GPU = "the fused layers need a GPU"
"""Why layers that could be fused are not."""
DRAFT_CONTEXT_BYTES = 2**30
"""Host memory for what contexts have said; the one that was not used for longest is forgotten."""


def load_engine(config: DriverConfig, rank: Rank = ALONE) -> tuple[Planner, BackendExecutor]:
    """Loads a rank's part of the model and plans for its sizes.

    Raises:
        StartError: The model cannot be loaded or served here.
    """
    booted = boot(config, rank)
    with within(booted.plan):
        return _load_engine(config, rank, booted)


def _load_engine(
    config: DriverConfig, rank: Rank, booted: Booted
) -> tuple[Planner, BackendExecutor]:
    runner, options = booted.runner, config.driver.options
    settings, model_config = resolved(runner), runner.model_config
    buffers = page_buffers(paged(runner.token_to_kv_pool))
    budget = (options.cpu_mem_budget_in_gb << 30) // rank.size
    pools = PagePools(buffers, host_pages(budget, buffers))
    states = StatePool.of(runner.req_to_token_pool)
    adapters = (
        Adapters(manager_of(runner), options.max_loaded_loras, options.lora_root)
        if options.enable_lora
        else None
    )
    if adapters is not None:
        slots, most = adapters.slots, options.max_lora_rank
        logger.info("adapters: %d slots of rank %d, %s", slots, most, settings.lora_backend)
    active = Active()
    info = ModelInfo(
        total_pages=runner.max_total_num_tokens // settings.page_size,
        page_size=settings.page_size,
        vocab_size=model_config.vocab_size,
        context_length=model_config.context_len,
        arch_name=arch_name(config.model.hf_config),
        dtype=str(model_config.dtype).removeprefix("torch."),
        attention_backend=",".join(dict.fromkeys(settings.attention_backends)),
        host_pages=pools.host_pages,
        adapter_slots=adapters.slots if adapters else 0,
        state_slots=states.slots if states else 0,
        state_bytes=states.slot_bytes if states else 0,
    )
    obstacle = support.mask_obstacle(runner)
    if obstacle is not None:
        logger.info("attention masks that are not causal are refused: %s", obstacle)
    vision = find_vision(runner)
    if vision is None and model_config.is_multimodal:
        logger.info("the model is served without its media: the driver has no way for them")
    total = booted.plan.device.total
    chunk = chunk_tokens(runner.device, total, options.chunked_prefill_size)
    planner = Planner(
        page_size=info.page_size,
        total_pages=info.total_pages,
        vocab_size=info.vocab_size,
        max_positions=info.context_length,
        row_pages=booted.row_pages,
        max_requests=booted.max_requests,
        chunk_tokens=chunk,
        max_slots=MAX_SLOTS,
        random_seed=config.driver.random_seed % 2**64,
        states=info.state_slots,
        masks=obstacle is None,
        adapter_slots=info.adapter_slots,
        vision=vision,
    )
    if options.spec_ngram_enabled:
        _draft(planner, info, options)
    active.choose("attention", info.attention_backend, booted.attention)
    engine = BackendExecutor(booted, planner, info, pools, adapters, states)
    engine.fused = _fuse(engine.runner, options, active)
    specs = graph_specs(
        options.max_forward_requests,
        chunk,
        groups=runner.device == "cuda" and support.reads_prefixes_once(runner),
        prompts=support.takes_prompts(runner),
        sparse=chosen_experts(model_config) > 0,
        adapters=adapters is not None,
    )
    engine.steps = _steps(engine, options, specs, adapters, active)
    active.choose("drafts", "ngram" if options.spec_ngram_enabled else "off")
    engine.active = active.as_dict()
    if rank.size > 1 and runner.device == "cpu":
        process_groups.refuse_connections()
    return planner, engine


def _fuse(runner: ModelRunner, options: DriverOptions, active: Active) -> FusedLayers | None:
    """The fused layers of a model, where there are kernels for it."""
    try:
        expect(options.fuse_layers, "`fuse_layers` is false")
        if runner.device != "cuda":
            known_layers(runner)
            raise UnknownLayer(NEEDS_GPU)
        found = fuse_layers(runner)
    except UnknownLayer as reason:
        active.choose("layers", SGLANG, f"not fused: {reason}")
        return None
    active.choose("layers", "fused")
    return found


def _draft(planner: Planner, info: ModelInfo, options: DriverOptions) -> None:
    """Gives the planner a drafter."""
    if info.state_slots:
        raise StartError(
            f"{info.arch_name} keeps recurrent state, from which rejected drafts cannot be taken "
            "back",
            "set `spec_ngram_enabled = false`",
        )
    planner.draft(
        num_drafts=options.spec_ngram_num_drafts,
        max_depth=options.spec_ngram_max_depth,
        min_n=options.spec_ngram_min_n,
        max_n=options.spec_ngram_max_n,
        capacity=options.spec_ngram_capacity,
        context_bytes=DRAFT_CONTEXT_BYTES,
        host_pages=info.host_pages,
        rungs=decode_batch_sizes(options.max_forward_requests),
    )


def _steps(
    engine: BackendExecutor,
    options: DriverOptions,
    specs: list[GraphSpec],
    adapters: Adapters | None,
    active: Active,
) -> GraphRunner | None:
    """What runs short batches without Python, unless the user or the model rules it out."""
    obstacle = support.graph_path_obstacle(engine.runner)
    if options.disable_cuda_graph:
        obstacle = "`disable_cuda_graph` is set"
    elif engine.model_info.state_slots:
        obstacle = "the model keeps recurrent state"
    active.choose("steps", "eager" if obstacle else "graph path", obstacle)
    if obstacle is not None:
        return None
    slots = options.max_forward_requests
    try:
        if engine.runner.device == "cpu":
            return CpuSteps(engine, specs, slots)
        return CudaSteps(engine, specs, slots, adapters)
    except Exception as error:
        logger.debug("a step failed", exc_info=True)
        raise not_run(engine.plan, engine.plan.device.name, error) from error
