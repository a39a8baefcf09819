"""The engine's arguments by name: supported ones by component, and why others are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError, nearest, quoted

#: Arguments that the native runtime accepts under SGLang's names.
SCHEDULER: Final = (
    "chunked_prefill_size",
    "constrained_json_disable_any_whitespace",
    "constrained_json_whitespace_pattern",
    "disable_radix_cache",
    "enable_priority_scheduling",
    "max_queued_requests",
    "max_running_requests",
    "priority_scheduling_preemption_threshold",
    "radix_eviction_policy",
    "schedule_conservativeness",
    "schedule_low_priority_values_first",
    "schedule_policy",
)
#: Arguments that `parse_arguments` reads.
READ: Final = (
    "base_gpu_id",
    "decode_log_interval",
    "device",
    "disable_priority_preemption",
    "download_dir",
    "dp_size",
    "dtype",
    "enable_return_hidden_states",
    "gpu_id_step",
    "grammar_backend",
    "log_level",
    "lora_paths",
    "max_prefill_tokens",
    "max_total_tokens",
    "model_path",
    "preferred_sampling_params",
    "random_seed",
    "reasoning_parser",
    "return_hidden_states_mode",
    "revision",
    "served_model_name",
    "skip_tokenizer_init",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "tokenizer_path",
    "tp_size",
)
#: Arguments that SGLang does not have.
OWN: Final = (
    "devices",
    "grammar_compile_timeout_s",
    "grammar_memory_mb",
    "grammar_timeout_s",
    "log_file",
    "max_grammar_bytes",
    "max_restarts",
    "max_step_ms",
    "max_token_gap_ms",
    "ready_timeout_s",
    "request_limits",
    "strict_json_schema",
)
#: Arguments of the scheduler that are options of the driver, too.
BOTH: Final = frozenset({"chunked_prefill_size"})
#: Names of vLLM, of SGLang's command line and of earlier versions for an argument of SGLang.
_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "block_size": "page_size",
        "data_parallel_size": "dp_size",
        "enable_prompt_tokens_details": "enable_cache_report",
        "enforce_eager": "disable_cuda_graph",
        "gpu_memory_utilization": "mem_fraction_static",
        "hf_overrides": "json_model_override_args",
        "limit_mm_per_prompt": "limit_mm_data_per_request",
        "lora_modules": "lora_paths",
        "max_cpu_loras": "max_loaded_loras",
        "max_loras": "max_loras_per_batch",
        "max_model_len": "context_length",
        "max_num_batched_tokens": "chunked_prefill_size",
        "max_num_seqs": "max_running_requests",
        "model": "model_path",
        "no_enable_prefix_caching": "disable_radix_cache",
        "override_generation_config": "preferred_sampling_params",
        "pipeline_parallel_size": "pp_size",
        "return_hidden_states": "enable_return_hidden_states",
        "root_path": "fastapi_root_path",
        "seed": "random_seed",
        "tensor_parallel_size": "tp_size",
        "tokenizer": "tokenizer_path",
        "uvicorn_log_level": "log_level_http",
    }
)
#: Hints for arguments of vLLM without a counterpart; names of ours are in braces.
_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "async_scheduling": "remove it; steps are scheduled while the one before runs",
        "compilation_config": "remove it; the driver captures its CUDA graphs itself",
        "disable_frontend_multiprocessing": "remove it",
        "disable_log_requests": "remove it; requests are logged with {log_requests} alone",
        "disable_log_stats": "set {decode_log_interval} to a large number for fewer lines",
        "distributed_executor_backend": "remove it; the ranks of a model are processes of one host",
        "enable_auto_tool_choice": "remove it; {tool_call_parser} enables tool calls by itself",
        "enable_chunked_prefill": "remove it; prefill is chunked, by {chunked_prefill_size} tokens",
        "enable_expert_parallel": "set {ep_size}, with which SGLang's scheduler serves",
        "enable_log_requests": "set {log_requests}",
        "enable_prefix_caching": "remove it; prefixes are cached without {disable_radix_cache}",
        "enable_sleep_mode": "set {enable_memory_saver} for a GPU; on the CPU "
        "`/release_memory_occupation` needs no flag",
        "generation_config": "set {sampling_defaults} to `openai` for vLLM's value `vllm`",
        "guided_decoding_backend": "remove it; llguidance compiles the grammars",
        "kv_transfer_config": "remove it; prefill and decode run in one driver",
        "max_log_len": "set {log_requests_level}",
        "max_logprobs": "remove it; `request_limits` has the limits of log-probabilities",
        "max_seq_len_to_capture": "remove it; graphs serve every length",
        "no_enable_log_requests": "remove it; requests are logged with {log_requests} alone",
        "num_scheduler_steps": "remove it; a step needs no work of the host that it waits for",
        "scheduling_policy": "set {enable_priority_scheduling}, and, as in vLLM, "
        "{schedule_low_priority_values_first}",
        "speculative_config": "set {speculative_algorithm} to NGRAM for n-gram drafts, or to "
        "SUFFIX for suffix decoding",
        "structured_outputs_config": "remove it; llguidance compiles the grammars",
        "swap_space": "set {cpu_mem_budget_in_gb}, the memory of the host for swapped KV pages",
    }
)


def other_engines_flag(flag: str) -> str:
    """A hint for a flag of another engine; empty for any other flag."""
    argument = flag.removeprefix("--").replace("-", "_")
    if name := _OTHER_NAMES.get(argument):
        return f"SGLang calls `{flag}` `{_flag(name)}`."
    return f"{_advice(argument, _flag)}." if argument in _ADVICE else ""


def _flag(name: str) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if name in SERVER_ARGS else f"--option {name}=VALUE"


def _advice(argument: str, shown: Callable[[str], str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: f"`{shown(found[1])}`", _ADVICE[argument])


#: Why an argument of SGLang is refused, where the reason of its owner would not fit.
UNSERVED_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enable_nccl_nvls": "the ranks of a driver do not use NVLink's multicast",
        "enable_prefill_delayer": "prefills are not delayed until more of them can share a step",
        "enable_symm_mem": "the ranks of a driver do not use NCCL's symmetric memory",
        "numa_node": "the driver is not bound to a NUMA node; start the command under "
        "`numactl --cpunodebind=N --membind=N` instead",
        "prefill_max_requests": "the prefills of a step are limited by their tokens; set "
        "`chunked_prefill_size` or `max_prefill_tokens`",
    }
)
#: The same for what the server serves and the engine does not.
UNSERVED_BY_ENGINE: Final[Mapping[str, str]] = MappingProxyType(
    {
        **UNSERVED_NAMES,
        "gc_threshold": "the engine is a part of this process; call `gc.set_threshold`",
        "soft_watchdog_timeout": "it watches SGLang's processes, and the engine has none",
        "watchdog_timeout": "a driver is restarted after a step of 60 s",
    }
)
#: Why an argument of SGLang is refused, by its owner.
UNSERVED_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adapters": "the driver manages adapters; set `lora_paths` and `max_loaded_loras`",
        "capacity": "the driver computes its capacity from the memory; set `mem_fraction_static`",
        "custom": "it needs a Python object in the driver's process",
        "device": "set `device`, `devices`, `base_gpu_id` or `tp_size`",
        "disaggregation": "prefill and decode run in one driver",
        "dtype": "set `dtype`",
        "graphs": "the driver captures its CUDA graphs itself; set `cuda_graph_max_bs` or "
        "`cuda_graph_bs_decode`",
        "graphs_off": "set `disable_cuda_graph`, for all graphs",
        "media": "the engine has no settings for media",
        "observability": "the engine exports no metrics; `get_server_info()` has its counters",
        "offload": "weights are offloaded by `cpu_offload_gb` only",
        "parallel": "a model is sharded by `tp_size` and replicated by `dp_size` only",
        "pool": "the driver plans its KV pages itself; set `page_size`",
        "prefix_cache": "the runtime has its own prefix index",
        "sampling": "each request sets its own sampling",
        "schedule": "it is a setting of SGLang's scheduler",
        "seed": "set `random_seed`",
        "server": "there is no HTTP server",
        "snapshot": "the weights come from `model_path`",
        "speculative": "the driver drafts by n-grams, suffixes or EAGLE heads: set "
        "`speculative_algorithm`",
        "tokenizer": "the tokenizer is read from tokenizer.json in threads of this process",
        "tokens": "the driver serves models with causal attention, token by token",
    }
)


def unknown_argument(name: str, known: set[str]) -> ConfigError:
    """The error for an argument that does not exist, with the nearest of `known` as its hint."""
    hint = nearest(name, known)
    if name in _OTHER_NAMES:
        hint = f"SGLang calls it `{_OTHER_NAMES[name]}`"
    elif name in _ADVICE:
        hint = _advice(name, str)
    return ConfigError(
        f"there is no argument {quoted(name)}", hint or "the names are those of SGLang's ServerArgs"
    )
