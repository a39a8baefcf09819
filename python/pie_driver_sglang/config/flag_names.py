"""Command lines: the flags of SGLang's server by all names, and how many values each takes.

SGLang's parser is not imported, which takes seconds; `tests/test_serve_flags.py` compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError

#: Fields of flags that have another name than their field, of any supported version.
SGLANG_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attention_context_parallel_size": "attn_cp_size",
        "attention_data_parallel_size": "attn_dp_size",
        "context_bucket": "cuda_graph_prefill_max_context",
        "cuda_graph_bs": "cuda_graph_bs_decode",
        "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
        "data_parallel_size": "dp_size",
        "decode_context_parallel_size": "dcp_size",
        "elastic_ep_join_mode": "ep_join_mode",
        "elastic_ep_join_rank_offset": "ep_join_rank_offset",
        "enable_hicache": "enable_hierarchical_cache",
        "ep": "ep_size",
        "expert_parallel_size": "ep_size",
        "fp4_gemm_backend": "fp4_gemm_runner_backend",
        "fp8_gemm_backend": "fp8_gemm_runner_backend",
        "grpc_http_sidecar_port": "smg_http_sidecar_port",
        "hierarchical_sparse_attention_extra_config": "hisparse_config",
        "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
        "model": "model_path",
        "moe_data_parallel_size": "moe_dp_size",
        "nccl_init_addr": "dist_init_addr",
        "nsa_decode_backend": "dsa_decode_backend",
        "nsa_prefill_backend": "dsa_prefill_backend",
        "nsa_prefill_cp_mode": "dsa_prefill_cp_mode",
        "piecewise_cuda_graph_compiler": "cuda_graph_tc_compiler",
        "piecewise_cuda_graph_max_tokens": "cuda_graph_max_bs_prefill",
        "piecewise_cuda_graph_tokens": "cuda_graph_bs_prefill",
        "pipeline_parallel_size": "pp_size",
        "speculative_dflash_draft_window_size": "speculative_draft_window_size",
        "speculative_draft_model": "speculative_draft_model_path",
        "tensor_parallel_size": "tp_size",
    }
)
#: Flags without a value whose field has another name or type, or that have no field any more.
_SWITCHES: Final = frozenset(
    {
        "collect_tokens_histogram",
        "disable_piecewise_cuda_graph",
        "enable_breakable_cuda_graph",
        "enable_gdn_replayssm_spec",
        "enable_nsa_prefill_context_parallel",
        "enforce_piecewise_cuda_graph",
        "no_dcp_replicate_q_proj",
        "no_dllm_fdfo",
        "no_enable_decoder_swa_bounded_replay",
        "no_enable_dsa_fused_indexer",
        "no_enable_fused_qk_norm_rope",
        "no_enable_tf32_matmul",
        "no_enable_tp_lm_head_all_to_all",
        "no_experts_shared_outer_loras",
        "no_lora_strict_loading",
        "no_mm_enable_dp_encoder",
        "no_ple_offload_embedding",
        "no_speculative_enable_w4a4_mxfp4_megamoe",
        "prefill_round_robin_balance",
        "stream_output",
    }
)
#: Flags of one value whose field is a list, a table or a switch, or that have none.
_ONE_VALUE: Final = frozenset(
    {
        "config",
        "decoupled_spec_connect_endpoints",
        "forward_hooks",
        "monokernel_backend",
        "remote_instance_weight_loader_send_weights_group_ports",
        "sidecar_args",
    }
)
_NAMES: Final = frozenset({*SERVER_ARGS, *SGLANG_ALIASES, *_SWITCHES, *_ONE_VALUE})
SGLANG_FLAGS: Final = frozenset(f"--{name.replace('_', '-')}" for name in _NAMES)


def starting_with(flag: str) -> list[str]:
    """The flags of SGLang that a flag stands for: itself, or those that it abbreviates."""
    if flag in SGLANG_FLAGS:
        return [flag]
    return sorted(each for each in SGLANG_FLAGS if each.startswith(flag)) if len(flag) > 2 else []


def field_of(flag: str) -> str:
    """The field that a flag sets, also if the flag is abbreviated; empty for an unknown flag."""
    found = starting_with(flag)
    fields = {
        SGLANG_ALIASES.get(name, name) for name in (each[2:].replace("-", "_") for each in found)
    }
    return fields.pop() if len(fields) == 1 else ""


def most_values(flag: str) -> int:
    """The most values that may follow a flag of SGLang; any number for an unknown flag."""
    name = field_of(flag)
    if name in _SWITCHES:
        return 0
    if name in _ONE_VALUE:
        return 1
    field = SERVER_ARGS.get(name)
    if field is None or field.type.startswith("list"):
        return sys.maxsize
    return int(field.type != "bool")


def pop_flags(
    arguments: Sequence[str], takes_value: Callable[[str], bool | None]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Take flags out of a command line.

    Args:
        arguments: The command line.
        takes_value: Whether a flag takes a value; None for one that is not taken out.

    Returns:
        The flags with their values, which are empty for those without, and the other arguments.

    Raises:
        ConfigError: A value is missing, or there is one for a flag without.
    """
    found: list[tuple[str, str]] = []
    rest, queue = [], list(arguments)
    while queue:
        flag, equals, value = (argument := queue.pop(0)).partition("=")
        takes = takes_value(flag) if flag.startswith("--") else None
        if takes is None:
            rest.append(argument)
        elif not takes:
            if equals:
                raise ConfigError(f"`{flag}` takes no value", f"write `{flag}` alone")
            found.append((flag, ""))
        elif equals or queue:
            found.append((flag, value if equals else queue.pop(0)))
        else:
            raise ConfigError(f"`{flag}` has no value", "see `pie-sglang serve --help`")
    return found, rest
