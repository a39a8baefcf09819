"""EngineArgs -> VllmConfig -> groups -> weights -> KV pages, without vLLM's scheduler or runner."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pie_driver_sglang.backends.vllm import load_check, measure, support
from pie_driver_sglang.backends.vllm.compat import model as compat
from pie_driver_sglang.backends.vllm.compat.passes import MetadataPlanner
from pie_driver_sglang.backends.vllm.compat.settings import resolve_settings
from pie_driver_sglang.backends.weight_sizes import measure_host
from pie_driver_sglang.config.arch import context_length
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.vllm_models import CHANGING_ARGS
from pie_driver_sglang.config.vllm_options import UTILIZATION
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.errors import DriverError, StartError, quoted
from pie_driver_sglang.memory.batch_sizes import chunk_tokens, row_pages
from pie_driver_sglang.memory.plan import table
from pie_driver_sglang.memory.plan_types import Plan
from pie_driver_sglang.memory.refusal import require_fit
from pie_driver_sglang.ranks.types import Rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


class BootedVllm(NamedTuple):
    """A loaded model of vLLM, with its KV pages."""

    config: VllmConfig
    model: Any
    planner: MetadataPlanner
    kv: list[torch.Tensor]
    """``[pages + 1, ...]`` of each layer with KV."""
    block_table: BlockTable
    plan: Plan
    """Of the memory, as made before the model was loaded."""
    weight_bytes: int
    """Of parameters and buffers, as they were loaded."""


def boot_vllm(config: DriverConfig, rank: Rank) -> BootedVllm:
    """Loads the model and allocates its KV pages.

    Raises:
        StartError: The memory or the model does not allow it.
    """
    options = config.driver.options
    with _named_failures(config), process_groups.joined(rank, "cpu"):
        resolved = resolve_settings(_engine_args(config))
        support.check_vllm_config(resolved)
        plan = _plan_host(config, resolved)
        pages = plan.tokens // plan.page_size + 1
        resolved.cache_config.num_gpu_blocks = pages
        compat.make_groups(resolved, rank.number, rank.size)
        plain = resolved.model_config.quantization is None
        loaded: list[int] = []
        layers: list[compat.KvLayer] = []

        def load(model: Any, load_weights: Callable[[], None]) -> None:
            layers.extend(compat.kv_layers(resolved))
            support.check_kv_layers(layers, options.page_size)
            load_check.load_completely(model, load_weights, checked=plain)
            loaded.append(load_check.parameter_bytes(model))

        model = compat.load_model(resolved, load)
        kv = [compat.allocate_kv(layer, pages, resolved.model_config.dtype) for layer in layers]
        planner = MetadataPlanner(resolved, layers, compat.share_kv(resolved))
        row = row_pages(resolved.model_config.max_model_len, options.page_size)
        block_table = BlockTable(options.max_forward_requests, row, options.page_size, "cpu")
    return BootedVllm(resolved, model, planner, kv, block_table, plan, sum(loaded))


def _plan_host(config: DriverConfig, resolved: VllmConfig) -> Plan:
    """Plans the memory, and logs the plan."""
    share = float(config.driver.options.server_args[UTILIZATION])
    whole, sizes = measure_host(), measure.vllm_sizes(config, resolved)

    def fit(part: float) -> Plan:
        device = whole._replace(free=int(part * whole.free))
        return require_fit(device, sizes, measure.vllm_settings(config, resolved, device))

    try:
        plan = fit(share)
    except StartError as error:
        for larger in (tenths / 10 for tenths in range(int(share * 10) + 1, 11)):
            with contextlib.suppress(StartError):
                fit(larger)
                error.hint = f"set `{UTILIZATION} = {larger}` in the options"
                break
        raise
    _, _, rows = table(plan).partition("\n")
    logger.info("memory planned for cpu, from %s of the free memory:\n%s", f"{share:.0%}", rows)
    return plan._replace(user_share=share)


def _engine_args(config: DriverConfig) -> dict[str, Any]:
    """The fields of `EngineArgs`: the user's, and those that the driver sets."""
    options = config.driver.options
    context = options.context_length
    if context is None and CHANGING_ARGS.isdisjoint(options.server_args):
        context = context_length(config.model.hf_config)
    chunk = chunk_tokens("cpu", 0, options.chunked_prefill_size)
    owned: dict[str, Any] = {
        "model": str(config.model.snapshot_dir),
        "dtype": config.driver.activation_dtype,
        "seed": config.driver.random_seed & 0x7FFF_FFFF,
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
    return {"use_tqdm_on_load": False, **options.server_args, **owned}


@contextlib.contextmanager
def _named_failures(config: DriverConfig) -> Iterator[None]:
    """Turns what vLLM and torch raise into one line with the remedy."""
    try:
        yield
    except DriverError:
        raise
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
