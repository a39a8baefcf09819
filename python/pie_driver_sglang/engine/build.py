"""From a loaded model to a planner and an executor that fit each other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from pie_driver_sglang._core import Planner
from pie_driver_sglang.config.arch import arch_name
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.options import FUSED_LORA, DriverOptions
from pie_driver_sglang.engine import memory_saver, process_groups
from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
from pie_driver_sglang.engine.backend import BackendInfo, ModelBackend
from pie_driver_sglang.engine.backend_executor import BackendExecutor
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.engine.control_commands import KV_CACHE_TAG, WEIGHTS_TAG
from pie_driver_sglang.engine.cuda_graphs import CudaGraphRunner, CudaPromptRunner
from pie_driver_sglang.engine.custom_processors import CustomProcessors
from pie_driver_sglang.engine.eager_steps import CpuGraphRunner
from pie_driver_sglang.engine.executor import ModelInfo
from pie_driver_sglang.engine.graph_runner import GraphRunner
from pie_driver_sglang.engine.invariance_check import check_batch_invariance
from pie_driver_sglang.engine.layers.batch_invariant import BatchInvariantGemm, supports_weight
from pie_driver_sglang.engine.layers.batch_invariant_cpu import CpuBatchInvariantGemm
from pie_driver_sglang.engine.layers.dense import DenseLayers
from pie_driver_sglang.engine.layers.gemm_search import tune_layers
from pie_driver_sglang.engine.layers.selection import (
    FusedLayers,
    fuse_layers,
    load_gemm_table,
    read_supported_layers,
)
from pie_driver_sglang.engine.layers.small_batch import MoeLayers
from pie_driver_sglang.engine.layers.weights import UnsupportedLayer, require
from pie_driver_sglang.engine.lora.adapters import Adapters
from pie_driver_sglang.engine.model_drafts import ModelDrafter
from pie_driver_sglang.engine.page_pools import PagePools, host_pages, page_buffers
from pie_driver_sglang.engine.sleep import DeviceMemory, FixedMemory, HostMemory, TaggedTensors
from pie_driver_sglang.engine.state_pool import StatePool
from pie_driver_sglang.engine.weight_control import WeightControl
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.kernels.compile_times import timing_compilations
from pie_driver_sglang.memory.batch_sizes import (
    DRAFTED_ROWS,
    MAX_SLOTS,
    chunk_tokens,
    decode_batch_sizes,
)
from pie_driver_sglang.memory.graphs import graph_specs, prompt_specs
from pie_driver_sglang.memory.plan_types import Plan
from pie_driver_sglang.memory.refusal import run_failure
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.observability.active import Active

logger = logging.getLogger(__name__)

BATCH_INVARIANT = "pie, batch-invariant"
"""The attention of all passes with `enable_deterministic_inference`, as the log names it."""
NEEDS_GPU = "the fused layers need a GPU"
"""Why layers that could be fused are not."""
DRAFT_CONTEXT_BYTES = 2**30
"""Host memory for the text of contexts; the one that was not used for longest is forgotten."""


def build_executor(
    backend: ModelBackend, block_table: BlockTable, plan: Plan, config: DriverConfig
) -> tuple[Planner, BackendExecutor]:
    """Makes what runs a loaded model: pools, adapters, fused layers, graphs.

    Args:
        backend: The loaded model.
        block_table: The one that its attention reads.
        plan: Of the memory, as made before the model was loaded.
        config: The driver's.

    Raises:
        StartError: The model cannot be served here.
    """
    found, options = backend.info, config.driver.options
    chunk = chunk_tokens(backend.device.type, plan.device.total, options.chunked_prefill_size)
    buffers = page_buffers(backend.kv_pages())
    budget = (options.cpu_mem_budget_in_gb << 30) // backend.rank.size
    pools = PagePools(buffers, host_pages(budget, buffers))
    states = None if backend.states is None else StatePool(backend.states)
    adapters = _adapters(backend, options)
    info = ModelInfo(
        total_pages=found.total_pages,
        page_size=found.page_size,
        vocab_size=found.vocab_size,
        context_length=found.context_length,
        arch_name=arch_name(config.model.hf_config),
        dtype=str(found.dtype).removeprefix("torch."),
        attention_backend=found.attention_backend,
        host_pages=pools.host_pages,
        adapter_slots=adapters.slots if adapters else 0,
        state_slots=states.slots if states else 0,
        state_bytes=states.slot_bytes if states else 0,
        embedding_size=found.embedding_size,
        embedding_normalized=found.embedding_normalized,
        embed_size=found.embed_size,
    )
    planner = _planner(found, info, block_table, chunk, config)
    executor = BackendExecutor(backend, block_table, plan, planner, info, pools, adapters, states)
    executor.drafter = _drafter(backend, block_table, options)
    executor.processors = CustomProcessors(enabled=options.enable_custom_logit_processor)
    active = Active()
    invariant = isinstance(backend.decode_attention, BatchInvariantAttention)
    attention = BATCH_INVARIANT if invariant else info.attention_backend
    active.choose("attention", attention, found.paged_decode_refusal)
    with start_spans.span("fused layers"):
        executor.fused = _fuse(backend, options, active)
    if adapters is not None and backend.folded is not None:
        adapters.fold(backend.folded)
    if adapters and options.lora_backend == FUSED_LORA and not _applies_adapters(executor.fused):
        logger.warning("`lora_backend` is pie, but %s's layers apply adapters", backend.info.name)
    if options.tune_gemms and not options.disable_cuda_graph:
        with start_spans.span("GEMM configs"):
            _tune(executor.fused, options)
    if invariant:
        # Afterwards, because fused layers are made of the library's own linear layers only.
        _replace_gemms(backend)
        if backend.device.type == "cpu":
            # There its operations outside of attention and GEMMs are the library's.
            check_batch_invariance(backend, block_table)
    with start_spans.span("graphs"), timing_compilations(start_spans.add):
        if found.embedding_size:
            executor.prompts = _prompts(executor, chunk, options, active)
        else:
            executor.steps = _steps(executor, chunk, options, adapters, active)
    executor.weights = _weights(backend, config)
    active.choose("drafts", options.drafts)
    executor.active = active.as_dict()
    if backend.rank.size > 1 and backend.device.type == "cpu":
        process_groups.refuse_connections()
    return planner, executor


def _weights(backend: ModelBackend, config: DriverConfig) -> WeightControl | None:
    """Updates and releases the weights, where the library allows it."""
    weights, folded = backend.weights, backend.folded
    if weights is None:
        return None

    def parameters() -> list[torch.Tensor]:
        kept = [] if folded is None else list(folded.tensors())
        return [tensor for _, tensor in weights.named_tensors()] + kept

    def cache() -> list[torch.Tensor]:
        return backend.kv_pages() + ([] if backend.states is None else backend.states.parts)

    memory = _device_memory(backend, config, {WEIGHTS_TAG: parameters, KV_CACHE_TAG: cache})
    folder = config.model.snapshot_dir
    return WeightControl(weights, folder, folded, memory, backend.rank.number)


def _device_memory(
    backend: ModelBackend, config: DriverConfig, tensors: TaggedTensors
) -> DeviceMemory:
    """How the memory of tensors is released and taken again."""
    if memory_saver.saves_memory(backend.device.type, config.driver.options):
        saver = memory_saver.TorchMemorySaver(backend.device)
        return memory_saver.CudaMemory(tensors, saver)
    return HostMemory(tensors) if backend.device.type == "cpu" else FixedMemory(tensors)


def _replace_gemms(backend: ModelBackend) -> None:
    """Has the library's layers multiply so that rows do not depend on each other."""
    if backend.device.type == "cpu":
        gemm = CpuBatchInvariantGemm()
        backend.replace_gemms(gemm, gemm.supports)
    else:
        table = load_gemm_table(backend.device)
        on_gpu = BatchInvariantGemm(backend.info.dtype, backend.device, table)
        backend.replace_gemms(on_gpu, supports_weight)


def _adapters(backend: ModelBackend, options: DriverOptions) -> Adapters | None:
    if backend.lora is None:
        return None
    adapters = Adapters(backend.lora, options.max_loaded_loras, options.lora_root)
    slots, rank = adapters.slots, options.max_lora_rank
    logger.info("adapters: %d slots of rank %d, %s", slots, rank, backend.lora.kernels)
    return adapters


def _planner(
    found: BackendInfo, info: ModelInfo, block_table: BlockTable, chunk: int, config: DriverConfig
) -> Planner:
    """A planner for these sizes, with a drafter where the options want one."""
    if found.mask_refusal is not None:
        logger.info("attention masks that are not causal are refused: %s", found.mask_refusal)
    if found.vision is None and found.is_multimodal:
        logger.info("the model is served without its media: the driver has no way for them")
    planner = Planner(
        page_size=info.page_size,
        total_pages=info.total_pages,
        vocab_size=info.vocab_size,
        max_positions=info.context_length,
        row_pages=block_table.row_pages,
        max_requests=block_table.requests,
        chunk_tokens=chunk,
        max_slots=MAX_SLOTS,
        random_seed=config.driver.random_seed % 2**64,
        states=info.state_slots,
        masks=found.mask_refusal is None,
        adapter_slots=info.adapter_slots,
        vision=found.vision,
        embedding_size=found.embedding_size,
        embed_size=found.embed_size,
    )
    if config.driver.options.drafts != "off":
        _draft(planner, info, config.driver.options)
    return planner


def _draft(planner: Planner, info: ModelInfo, options: DriverOptions) -> None:
    """Gives the planner a drafter."""
    by_suffixes = options.spec_suffix_enabled
    sizes = decode_batch_sizes(options.max_forward_requests, options.graph_sizes)
    remedy = f"set `spec_{'suffix' if by_suffixes else 'ngram'}_enabled = false`"
    if options.spec_eagle_path is not None:
        remedy = "remove `spec_eagle_path`"
    if info.embedding_size:
        raise StartError(
            f"{info.arch_name} returns embeddings, and drafts are of text",
            remedy,
        )
    if info.state_slots:
        raise StartError(
            f"{info.arch_name} keeps recurrent state, from which rejected drafts cannot be taken "
            "back",
            remedy,
        )
    if options.spec_eagle_path is not None:
        planner.draft_by_model(
            num_drafts=options.spec_eagle_num_drafts,
            host_pages=info.host_pages,
            graph_sizes=sizes,
            model_sizes=[rows for rows in sizes if rows <= DRAFTED_ROWS],
        )
        return
    planner.draft(
        num_drafts=options.spec_suffix_num_drafts if by_suffixes else options.spec_ngram_num_drafts,
        max_depth=options.spec_ngram_max_depth,
        min_n=options.spec_ngram_min_n,
        max_n=options.spec_ngram_max_n,
        capacity=options.spec_ngram_capacity,
        context_bytes=DRAFT_CONTEXT_BYTES,
        host_pages=info.host_pages,
        graph_sizes=sizes,
        suffix=(options.spec_suffix_max_spec_factor, options.spec_suffix_min_token_prob)
        if by_suffixes
        else None,
    )


def _drafter(
    backend: ModelBackend, block_table: BlockTable, options: DriverOptions
) -> ModelDrafter | None:
    """What drafts in the graphs of steps."""
    model = backend.draft_model
    if model is None:
        return None
    return ModelDrafter(backend, model, block_table, options.spec_eagle_num_drafts)


def _fuse(backend: ModelBackend, options: DriverOptions, active: Active) -> FusedLayers | None:
    """The fused layers of a model, where there are kernels for it."""
    try:
        require(options.fuse_layers, "`fuse_layers` is false")
        invariant = isinstance(backend.decode_attention, BatchInvariantAttention)
        if backend.group.world_size > 1 and not invariant:
            own_all_reduce = not options.server_args.get("disable_custom_all_reduce")
            require(own_all_reduce, "`disable_custom_all_reduce` is set")
        if backend.device.type != "cuda":
            read_supported_layers(backend)
            raise UnsupportedLayer(NEEDS_GPU)
        fused = fuse_layers(backend, applies_adapters=options.lora_backend == FUSED_LORA)
    except UnsupportedLayer as reason:
        active.choose("layers", backend.info.name, f"not fused: {reason}")
        return None
    active.choose("layers", "fused")
    return fused


def _applies_adapters(fused: FusedLayers | None) -> bool:
    """Whether fused layers apply LoRA adapters."""
    return isinstance(fused, DenseLayers) and fused.applies_adapters


def _tune(fused: FusedLayers | None, options: DriverOptions) -> None:
    """Searches GEMM configs that were never searched on such a GPU."""
    small_batch = fused.small_batch if isinstance(fused, DenseLayers | MoeLayers) else None
    if small_batch is None:
        return
    sizes = decode_batch_sizes(options.max_forward_requests, options.graph_sizes)
    if line := tune_layers(small_batch, sizes):
        logger.info(line)


def _steps(
    executor: BackendExecutor,
    chunk: int,
    options: DriverOptions,
    adapters: Adapters | None,
    active: Active,
) -> GraphRunner | None:
    """What runs short batches without Python, unless the user or the model rules it out."""
    backend = executor.backend
    refusal = _graph_refusal(executor, options)
    active.choose("steps", "eager" if refusal else "graph path", refusal)
    if refusal is not None:
        return None
    slots, on_cuda = options.max_forward_requests, backend.device.type == "cuda"
    attention = backend.decode_attention
    specs = graph_specs(
        slots,
        chunk,
        groups=on_cuda and attention is not None and attention.shares_prefixes,
        prompts=backend.info.graphs_take_prompts,
        sparse=backend.info.is_sparse,
        adapters=adapters is not None,
        fused_adapters=_applies_adapters(executor.fused),
        draft_model=executor.drafter is not None,
        chosen=options.graph_sizes,
    )
    with _failing_by_the_plan(executor):
        if on_cuda:
            return CudaGraphRunner(executor, specs, slots, adapters)
        return CpuGraphRunner(executor, specs, slots)


def _prompts(
    executor: BackendExecutor, chunk: int, options: DriverOptions, active: Active
) -> GraphRunner | None:
    """What runs short passes of an embedding model, which has no decodes, as graphs."""
    backend = executor.backend
    refusal = _graph_refusal(executor, options)
    if refusal is None and not backend.info.graphs_take_prompts:
        refusal = "prompts are captured with the driver's own decode attention only"
    if refusal is None and backend.pooling is None:
        refusal = "the model's class does not separate the layers before its pooler"
    active.choose("steps", "eager" if refusal else "prompt graphs", refusal)
    if refusal is not None:
        return None
    specs = prompt_specs(chunk, sparse=backend.info.is_sparse)
    with _failing_by_the_plan(executor):
        if backend.device.type == "cuda":
            return CudaPromptRunner(executor, specs)
        return CpuGraphRunner(executor, specs, slots=1)


def _graph_refusal(executor: BackendExecutor, options: DriverOptions) -> str | None:
    """Why nothing can be captured."""
    if options.disable_cuda_graph:
        return "`disable_cuda_graph` is set"
    if executor.model_info.state_slots:
        return "the model keeps recurrent state"
    return executor.backend.info.graph_refusal


@contextlib.contextmanager
def _failing_by_the_plan(executor: BackendExecutor) -> Iterator[None]:
    """Explains a failed capture, which may lack memory, by the memory plan."""
    try:
        yield
    except Exception as error:
        logger.debug("a step failed", exc_info=True)
        raise run_failure(executor.plan, executor.plan.device.name, error) from error
