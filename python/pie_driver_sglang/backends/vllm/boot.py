"""EngineArgs -> VllmConfig -> groups -> weights -> KV pages, without vLLM's scheduler or runner."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pie_driver_sglang.backends.vllm import load_check, measure, support
from pie_driver_sglang.backends.vllm.attention import (
    PagedAttention,
    PagedLayer,
    PassAttention,
    prompts_by_fa3,
)
from pie_driver_sglang.backends.vllm.compat import attention as kernels
from pie_driver_sglang.backends.vllm.compat import model as compat
from pie_driver_sglang.backends.vllm.compat.passes import MetadataPlanner
from pie_driver_sglang.backends.vllm.compat.settings import resolve_settings
from pie_driver_sglang.config.arch import context_length
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.options import PAGED_DECODE, DriverOptions
from pie_driver_sglang.config.vllm_models import CHANGING_ARGS
from pie_driver_sglang.config.vllm_options import (
    CPU_ATTENTION,
    FLASH_ATTENTION,
    UTILIZATION,
    vllm_hint,
)
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.attention.paged import PagedDecode
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.errors import DriverError, StartError, quoted
from pie_driver_sglang.memory.batch_sizes import chunk_tokens, row_pages
from pie_driver_sglang.memory.plan import table
from pie_driver_sglang.memory.plan_types import Plan
from pie_driver_sglang.memory.refusal import out_of_memory, require_fit
from pie_driver_sglang.ranks.types import Rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pie_driver_sglang.backends.vllm.lora import VllmLora

logger = logging.getLogger(__name__)


class BootedVllm(NamedTuple):
    """A loaded model of vLLM, with its KV pages."""

    config: VllmConfig
    model: Any
    device: torch.device
    attention: PassAttention
    attention_name: str
    """Of the backends of prefills and decodes, as the log has them."""
    kv: list[torch.Tensor]
    """``[pages + 1, ...]`` of each layer with KV; on a GPU keys, then values."""
    block_table: BlockTable
    plan: Plan
    """Of the memory, as made before the model was loaded."""
    weight_bytes: int
    """Of parameters and buffers, as they were loaded."""
    lora: VllmLora | None
    """Adapters; None where they are off."""


def boot_vllm(config: DriverConfig, rank: Rank) -> BootedVllm:
    """Loads a rank's part of the model and allocates its KV pages; all ranks do so at once.

    Raises:
        StartError: The memory or the model does not allow it.
    """
    options, device = config.driver.options, torch.device(config.driver.device[rank.number])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Captured graphs and everything else in one order; the default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    kernels.register_paged()
    with _named_failures(config), process_groups.joined(rank, device.type):
        resolved = resolve_settings(_engine_args(config, device))
        support.check_vllm_config(resolved, device)
        if options.enable_lora:
            support.check_lora_dtype(resolved.model_config.dtype, device)
        resolved.parallel_config.rank = rank.number
        plan = _plan(config, resolved, device)
        pages = plan.tokens // plan.page_size + 1
        resolved.cache_config.num_gpu_blocks = pages
        compat.make_groups(resolved, rank.number, rank.size, device)
        model, layers, weight_bytes = _load(resolved, options)
        with _within(plan):
            lora = _make_lora(resolved, model, options, device) if options.enable_lora else None
        row = row_pages(resolved.model_config.max_model_len, options.page_size)
        block_table = BlockTable(options.max_forward_requests, row, options.page_size, device)
        if options.attention_backend == CPU_ATTENTION:
            dtype = resolved.model_config.dtype
            kv = [compat.allocate_kv(layer, pages, dtype) for layer in layers]
            planner = MetadataPlanner(resolved, layers, compat.share_kv(resolved), block_table)
            booted: tuple[PassAttention, str, list[torch.Tensor]] = (planner, CPU_ATTENTION, kv)
        else:
            with _within(plan):
                booted = _paged_attention(resolved, layers, pages, block_table, options)
    return BootedVllm(resolved, model, device, *booted, block_table, plan, weight_bytes, lora)


def _load(resolved: VllmConfig, options: DriverOptions) -> tuple[Any, list[compat.KvLayer], int]:
    """The model, its layers with KV, and the bytes of its parameters as they were loaded."""
    plain = resolved.model_config.quantization is None
    loaded: list[int] = []
    layers: list[compat.KvLayer] = []

    def load(model: Any, load_weights: Callable[[], None]) -> None:
        layers.extend(compat.kv_layers(resolved))
        support.check_kv_layers(layers, options.page_size)
        if options.enable_lora:
            from pie_driver_sglang.backends.vllm.lora import choose_layers

            choose_layers(model, options)
        load_check.load_completely(model, load_weights, checked=plain)
        loaded.append(load_check.parameter_bytes(model))

    return compat.load_model(resolved, load), layers, sum(loaded)


def _make_lora(
    resolved: VllmConfig, model: Any, options: DriverOptions, device: torch.device
) -> VllmLora:
    """Has layers of the model take adapters."""
    from pie_driver_sglang.backends.vllm.lora import VllmLora, wrap_layers

    return VllmLora(wrap_layers(resolved, model, options, device), device)


def _paged_attention(
    resolved: VllmConfig,
    layers: Sequence[compat.KvLayer],
    pages: int,
    block_table: BlockTable,
    options: DriverOptions,
) -> tuple[PassAttention, str, list[torch.Tensor]]:
    """Allocates the KV on a GPU, and chooses the kernels that attend to it; names them."""
    device, dtype = block_table.slots.device, resolved.model_config.dtype
    stored = {x.name: compat.allocate_pages(x, pages, dtype, device) for x in layers}
    shared, modules = compat.shared_kv(resolved), compat.attention_modules(resolved)
    found = {}
    for number, name in enumerate([*stored, *shared]):
        key_pages, value_pages = stored[shared.get(name, name)]
        own = kernels.read_paged_layer(
            number, modules[name], key_pages.flatten(0, 1), value_pages.flatten(0, 1)
        )
        found[name] = PagedLayer(
            own, key_pages, value_pages, kernels.sinks_of(modules[name]), name in shared
        )
    name = support.prefill_backend(
        [layer.attention for layer in found.values()],
        options.attention_backend,
        kernels.flash_attention_version(),
    )
    by_fa3 = name == FLASH_ATTENTION
    decode = None
    if options.attention_backend == PAGED_DECODE:
        own_layers = [layer.attention for layer in found.values()]
        plain = all(x.window == -1 and not x.logit_cap for x in own_layers)
        properties: Any = torch.cuda.get_device_properties(device)
        decode = PagedDecode(
            block_table,
            own_layers,
            properties.multi_processor_count,
            prompts_by_fa3 if by_fa3 and plain else None,
        )
        name = f"{name},{PAGED_DECODE}"
    prefill = kernels.attend_by_fa3 if by_fa3 else kernels.attend_by_triton
    attention = PagedAttention(found, block_table, prefill, decode)
    return attention, name, [part for pair in stored.values() for part in pair]


def _plan(config: DriverConfig, resolved: VllmConfig, device: torch.device) -> Plan:
    """Plans the memory, and logs the plan."""
    share = float(config.driver.options.server_args[UTILIZATION])
    whole, sizes = (
        measure.measure_device(device, config),
        measure.vllm_sizes(config, resolved, device),
    )
    # Ranks have pools and passes of one size.
    whole = whole._replace(
        total=min(process_groups.gathered(whole.total)),
        free=min(process_groups.gathered(whole.free)),
    )

    def fit(part: float) -> Plan:
        free = whole._replace(free=int(part * whole.free))
        return require_fit(free, sizes, measure.vllm_settings(config, resolved, free))

    try:
        plan = fit(share)
    except StartError as error:
        for larger in (tenths / 10 for tenths in range(int(share * 10) + 1, 11)):
            with contextlib.suppress(StartError):
                fit(larger)
                error.hint = f"set `{UTILIZATION} = {larger}` in the options"
                break
        else:
            error.hint = vllm_hint(error.hint)
        raise
    _, _, rows = table(plan).partition("\n")
    part = f"{share:.0%}"
    logger.info("memory planned for %s, from %s of the free memory:\n%s", device, part, rows)
    return plan._replace(user_share=share)


@contextlib.contextmanager
def _within(plan: Plan) -> Iterator[None]:
    """Within it memory is only taken as planned; a GPU that has less names the smaller share."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(plan, _reason_line(error)) from error


def _engine_args(config: DriverConfig, device: torch.device) -> dict[str, Any]:
    """The fields of `EngineArgs`: the user's, and those that the driver sets."""
    options = config.driver.options
    context = options.context_length
    if context is None and CHANGING_ARGS.isdisjoint(options.server_args):
        context = context_length(config.model.hf_config)
    memory = min(process_groups.gathered(measure.measure_device(device, config).total))
    chunk = chunk_tokens(device.type, memory, options.chunked_prefill_size)
    owned: dict[str, Any] = {
        "model": str(config.model.snapshot_dir),
        "dtype": config.driver.activation_dtype,
        "seed": config.driver.random_seed & 0x7FFF_FFFF,
        "tensor_parallel_size": config.driver.tensor_parallel_size,
        "trust_remote_code": options.trust_remote_code,
        "skip_tokenizer_init": True,
        # Not the classes of transformers, which vLLM falls back to.
        "model_impl": "vllm",
        "block_size": options.page_size,
        "max_model_len": context,
        # Bounds of buffers: the planner schedules.
        "max_num_seqs": options.max_forward_requests,
        "max_num_batched_tokens": max(chunk, options.max_forward_requests),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        # All layers have one block table.
        "disable_hybrid_kv_cache_manager": True,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    if options.attention_backend != CPU_ATTENTION:
        # The driver's kernels, under the name that vLLM has for such.
        owned["attention_backend"] = kernels.CUSTOM
    return {"use_tqdm_on_load": False, **options.server_args, **owned}


@contextlib.contextmanager
def _named_failures(config: DriverConfig) -> Iterator[None]:
    """Turns what vLLM and torch raise into one line with the remedy."""
    try:
        yield
    except DriverError:
        raise
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"the device has too little memory for the weights: {_reason_line(error)}",
            "free memory on the device, or choose a smaller or a quantized model",
        ) from error
    except Exception as error:
        logger.debug("vLLM failed", exc_info=True)
        options = config.driver.options
        named = {"activation_dtype": config.driver.activation_dtype, **options.server_args}
        settings = ", ".join(f"`{name}` = {quoted(value)}" for name, value in named.items())
        raise StartError(
            f"vLLM cannot load {config.model.snapshot_dir}: {_reason_line(error)}",
            f"check the model folder and what reaches vLLM: {settings}",
        ) from error


def _reason_line(error: BaseException) -> str:
    """What an exception says, in a line. Pydantic says it on the third, after counts and names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and "validation error" in lines[0]:
        lines = [line.removeprefix("Value error, ") for line in lines[1:]]
        lines = [line for line in lines if not line.isidentifier()] or lines
    return (lines or [type(error).__name__])[0].partition(" [type=")[0][:500]
