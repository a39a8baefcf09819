"""ServerArgs -> ModelConfig -> ModelRunner, without SGLang's scheduler or HTTP server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from pie_driver_sglang.backends.sglang import load_check, lora, measure, support
from pie_driver_sglang.backends.sglang.attention import paged
from pie_driver_sglang.backends.sglang.compat import corrections, texts
from pie_driver_sglang.backends.sglang.compat.jit_builds import report_builds
from pie_driver_sglang.backends.sglang.compat.model import (
    ModelConfig,
    ModelRunner,
    attach_head,
    device_module_of,
    load_model_config,
    make_runner,
    resolved,
    take_cpu_for_one,
    unpadded,
)
from pie_driver_sglang.backends.sglang.compat.pools import replace_block_table
from pie_driver_sglang.backends.sglang.compat.ranks import TpRank, making_groups, rank_of
from pie_driver_sglang.backends.sglang.compat.settings import (
    Resolved,
    ServerArgs,
    change_settings,
    load_plugins,
    make_settings,
    prepare_layers,
    publish_settings,
)
from pie_driver_sglang.backends.sglang.draft_head import EagleHead
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.model_features import returns_embeddings
from pie_driver_sglang.config.options import PAGED_DECODE, DriverOptions
from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.engine import memory_saver, process_groups
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.engine.layers.batch_invariant import MAX_INVARIANT_RANKS
from pie_driver_sglang.errors import DriverError, StartError, quoted
from pie_driver_sglang.memory.batch_sizes import row_pages
from pie_driver_sglang.memory.plan import table
from pie_driver_sglang.memory.plan_types import Plan
from pie_driver_sglang.memory.refusal import (
    find_warning,
    out_of_memory,
    pool_too_small,
    require_fit,
)
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.ranks.types import Rank

logger = logging.getLogger(__name__)

_HOST_FRACTION = 0.99
"""What SGLang gets on a CPU, where it limits the pool by `max_total_tokens`."""
DETERMINISTIC = "enable_deterministic_inference"
_NO_CUSTOM_ALL_REDUCE = "disable_custom_all_reduce"
_UNPLANNED_FRACTION = 0.5
"""What SGLang gets until the plan is made."""


class Booted(NamedTuple):
    """A loaded model and the sizes that the planner needs."""

    runner: ModelRunner
    block_table: BlockTable
    plan: Plan
    """Of the memory, as made before the model was loaded."""
    attention: str | None
    """Why the backend `pie` does not decode; None where it does."""
    head: EagleHead | None = None
    """What drafts for the model; None for nothing."""


def boot(config: DriverConfig, rank: Rank) -> Booted:
    """Loads a rank's part of the model and allocates its KV pool.

    Raises:
        StartError: The device, the memory or the model's architecture does not allow it.
    """
    options = config.driver.options
    load_plugins()
    device_type, _, index = config.driver.device[rank.number].partition(":")
    gpu_id = int(index or 0)
    if device_type == "cuda":
        # Captured graphs and everything else in one order; the default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream(gpu_id))  # type: ignore[no-untyped-call]
        report_builds(start_spans.add)
    with _translated_failures(config, rank):
        groups = process_groups.joined(rank, device_type)
        with groups, making_groups(rank.size, device_type):
            runner, plan = _load_model(config, _server_args(config, device_type), gpu_id, rank)
            head = _load_head(runner, options)
        with within(plan), start_spans.span("KV pool and attention"):
            block_table = _allocate(runner, plan, options.max_forward_requests)
            if head is not None:
                head.allocate(runner, block_table)
            if not runner.is_generation:
                support.follow_pooling_files(runner, config.model, block_table)
            refusal = _install_attention(runner, block_table, options)
            runner.init_attention_backends()
            paged.replace_prefill_attention(runner)
            corrections.correct_decode_windows(runner)
            runner.init_cuda_graphs(capture_decode_cuda_graph=False)
    if head is not None and device_type == "cuda" and refusal is not None:
        raise StartError(
            f"an EAGLE head drafts by the attention backend `{PAGED_DECODE}`, and it is {refusal}",
            hint="remove `spec_eagle_path`",
        )
    return Booted(runner, block_table, plan, refusal, head)


def _load_head(runner: ModelRunner, options: DriverOptions) -> EagleHead | None:
    """Loads what drafts for a loaded model, where the options name it."""
    if options.spec_eagle_path is None:
        return None
    head = EagleHead(runner, options)
    attach_head(runner, head.module)
    return head


def _install_attention(
    runner: ModelRunner, block_table: BlockTable, options: DriverOptions
) -> str | None:
    """Chooses the attention of decodes; returns why the backend `pie` is not it."""
    if runner.device == "cpu" and options.server_args.get(DETERMINISTIC):
        support.check_deterministic_on_cpu(runner)
        paged.install(runner, block_table, deterministic_on_cpu=True)
        return None
    refusal = support.paged_decode_refusal(runner, options.paged_decode)
    if refusal is None:
        chosen = options.paged_decode is None and support.prefills_by_fa3(runner)
        paged.install(runner, block_table, "fa3" if chosen else None)
        if rank_of(runner).size > 1 and resolved(runner).enable_deterministic_inference:
            logger.warning(
                "deterministic inference on several GPUs is not proved: one answer of 64 differed "
                "once (docs/determinism.md)"
            )
    elif resolved(runner).enable_deterministic_inference:
        logger.warning(
            "SGLang's deterministic mode: decode and prefill round differently, so an answer may "
            "change if its request is retracted or the driver restarts"
        )
    return refusal


def _allocate(runner: ModelRunner, plan: Plan, requests: int) -> BlockTable:
    """Makes the KV pool and the block table."""
    page_size, context = resolved(runner).page_size, runner.model_config.context_len
    tokens = _make_pool(runner)
    least = -(-context // page_size) * page_size
    if tokens < least:
        raise pool_too_small(plan, tokens, least, measure.weight_bytes(runner))
    support.check_pool(runner)
    block_table = BlockTable(requests, row_pages(context, page_size), page_size, runner.device)
    replace_block_table(runner, block_table)
    return block_table


def _make_pool(runner: ModelRunner) -> int:
    """Tokens of the KV pool that SGLang makes; 0 where it says that there is no memory for one."""
    try:
        runner.alloc_memory_pool()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        if not texts.has_no_pool(error):
            raise
        logger.debug("SGLang has no memory for KV", exc_info=True)
        return 0
    return int(runner.max_total_num_tokens)


def _load_model(
    config: DriverConfig, args: ServerArgs, gpu_id: int, rank: Rank
) -> tuple[ModelRunner, Plan]:
    """Plans the memory, then loads the weights."""
    tp_rank = TpRank(rank.number, rank.size)
    publish_settings(args, tp_rank, gpu_id)
    _keep_custom_all_reduce(args, config.driver.options, rank)
    model_config = load_model_config(args)
    corrections.correct_rope(model_config)
    support.check_config(model_config, Resolved(args).attention_backend)
    support.choose_vision_backend(args, model_config, gpu_id)
    if Resolved(args).device == "cpu":
        take_cpu_for_one()
    if not model_config.is_generation:
        # Before the weights are loaded.
        support.read_pooling_files(config.model.snapshot_dir)
    plan = _plan(config, model_config, args, gpu_id, rank)
    prepare_layers(args)
    start_spans.rest("configuration")
    watched = load_check.watched(config.model.snapshot_dir)
    on_device = device_module_of(Resolved(args).device)
    with start_spans.span("weights"), unpadded(), on_device, watched:
        runner = make_runner(model_config, args, gpu_id, tp_rank, lora.fitting)
    support.check_model(runner)
    corrections.correct_layers(runner)
    window = support.sliding_window(model_config.hf_text_config)
    if window is not None:
        corrections.correct_windows(runner, window)
    return runner, plan


def _keep_custom_all_reduce(args: ServerArgs, options: DriverOptions, rank: Rank) -> None:
    """Keeps SGLang's own all-reduce in its deterministic mode, where two ranks add up.

    SGLang leaves all sums to NCCL then, which is slower in decodes. Which layers run is not known
    yet; a sum of two has the same bits by either.
    """
    deterministic = Resolved(args).enable_deterministic_inference
    asked_off = options.server_args.get(_NO_CUSTOM_ALL_REDUCE)
    invariant = 1 < rank.size <= MAX_INVARIANT_RANKS
    if deterministic and invariant and not asked_off:
        change_settings(args, **{_NO_CUSTOM_ALL_REDUCE: False})


def _plan(
    config: DriverConfig, model_config: ModelConfig, args: ServerArgs, gpu_id: int, rank: Rank
) -> Plan:
    """Plans the memory, logs the plan, and hands it to SGLang, which sizes its pool by it."""
    device = measure.measure(config.driver.device[rank.number], gpu_id, rank.size)
    # Ranks have pools and passes of one size.
    device = device._replace(
        total=min(process_groups.gathered(device.total)),
        free=min(process_groups.gathered(device.free)),
    )
    sizes = measure.sizes_of(config, model_config, args)
    settings = measure.settings_of(config, model_config, args, device)
    plan = require_fit(device, sizes, settings)
    logger.info("%s", table(plan))
    warning = find_warning(plan, sizes, settings)
    if warning is not None:
        logger.warning("%s", warning)
    share, limit = plan.fraction, None
    if settings.kept_pages or settings.max_pages or config.driver.options.spec_eagle_path:
        # SGLang's own count does not know the layer of an EAGLE head.
        limit = plan.tokens
    if device.is_host:
        # What is free there changes all the time: the plan decides, not what SGLang measures.
        share, limit = _HOST_FRACTION, plan.tokens
    change_settings(args, mem_fraction_static=share, max_total_tokens=limit)
    return plan


def _server_args(config: DriverConfig, device_type: str) -> ServerArgs:
    options = config.driver.options
    owned: dict[str, Any] = {
        "model_path": str(config.model.snapshot_dir),
        "device": device_type,
        "dtype": config.driver.activation_dtype,
        "attention_backend": options.attention_backend,
        "page_size": options.page_size,
        "random_seed": config.driver.random_seed & 0x7FFF_FFFF,
        "max_running_requests": options.max_forward_requests,
        "mem_fraction_static": _UNPLANNED_FRACTION,
        "kv_cache_dtype": options.kv_cache_dtype,
        "trust_remote_code": options.trust_remote_code,
        "context_length": options.context_length,
        "cpu_offload_gb": options.cpu_offload_gb,
        "chunked_prefill_size": options.chunked_prefill_size,
        "tp_size": config.driver.tensor_parallel_size,
        # It would use NVLink's multicast.
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        # The planner knows one pool of slots; one more for windowed layers needs a second mapping.
        "disable_hybrid_swa_memory": True,
        "log_level": "warning",
        "is_embedding": returns_embeddings(
            config.model.hf_config, is_embedding=options.is_embedding
        ),
    }
    passed = dict(options.server_args)
    if device_type == "cpu":
        # SGLang has no such mode there; the driver's own does not need its settings.
        passed.pop(DETERMINISTIC, None)
    if memory_saver.saves_memory(device_type, options):
        memory_saver.choose_hook_mode()
        # Weights are those of before after a wake, whether or not they are updated then.
        owned |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return make_settings({**passed, **owned, **lora.server_args(options)})


@contextlib.contextmanager
def within(plan: Plan) -> Iterator[None]:
    """Within it memory is only taken as planned; a GPU that has less names the smaller share."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(plan, _first_line(error)) from error


@contextlib.contextmanager
def _translated_failures(config: DriverConfig, rank: Rank) -> Iterator[None]:
    """Turns what SGLang and torch raise into one line with the remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"{config.driver.device[rank.number]} has too little memory for the weights: "
            f"{_first_line(error)}",
            hint="free memory on the device, or choose a smaller or a quantized model",
        ) from error
    except DriverError:
        raise
    except Exception as error:
        logger.debug("SGLang failed", exc_info=True)
        text = _first_line(error)
        if texts.lacks_architecture(text):
            text = texts.without_list(text)
            hint = f"SGLang {adapter_version().sglang} has no such model; use one that it supports"
        elif texts.finds_other_processes(text):
            hint = "end what else uses these GPUs, or choose others: ranks take equal parts"
        elif texts.lacks_memory(text):
            hint = "free memory on the device, or choose a smaller or a quantized model"
        else:
            hint = f"check the model folder and what reaches SGLang: {_settings(config)}"
        raise StartError(
            f"SGLang cannot load {config.model.snapshot_dir}: {text}", hint=hint
        ) from error


def _settings(config: DriverConfig) -> str:
    """The settings that SGLang can disagree with, as the configuration has them."""
    options = config.driver.options
    named = {
        "device": ", ".join(config.driver.device),
        "tensor_parallel_size": config.driver.tensor_parallel_size,
        "activation_dtype": config.driver.activation_dtype,
        "attention_backend": options.attention_backend,
        "kv_cache_dtype": options.kv_cache_dtype,
        "page_size": options.page_size,
        **({"context_length": options.context_length} if options.context_length else {}),
        **options.server_args,
    }
    return ", ".join(f"`{name}` = {quoted(value)}" for name, value in named.items())


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
