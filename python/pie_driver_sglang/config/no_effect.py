"""Settings that have no effect here: the driver does what they ask for, or lacks what they tune.

They are accepted, and one line in the log says why each has no effect: a command line that tunes
SGLang's scheduler or its kernels keeps ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_COMPILED: Final = "the driver captures its kernels in CUDA graphs, and compiles nothing with torch"
_PREFILL_GRAPHS: Final = "the driver chooses the sizes of its prefill graphs itself"
_ONE_POOL: Final = "all layers have one pool of KV pages"
_DELAYER: Final = "it tunes `enable_prefill_delayer`, which our scheduler does not have"
_ALL_REDUCE: Final = "the driver selects its all-reduce kernels itself"
#: The reason why a setting has no effect, by its name.
NO_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cuda_graph_backend_prefill": "the driver captures its prefill graphs itself; "
        "`disable_cuda_graph` turns all graphs off",
        "cuda_graph_bs_prefill": _PREFILL_GRAPHS,
        "cuda_graph_max_bs_prefill": _PREFILL_GRAPHS,
        "cuda_graph_max_seq_len_prefill": _PREFILL_GRAPHS,
        "cuda_graph_prefill_max_context": _PREFILL_GRAPHS,
        "cuda_graph_tc_compiler": _COMPILED,
        "delete_ckpt_after_loading": "the checkpoint is kept, because a restarted driver loads it "
        "again",
        "disable_hybrid_swa_memory": _ONE_POOL,
        "disable_outlines_disk_cache": "llguidance compiles grammars, and has no cache on disk",
        "disable_overlap_schedule": "the scheduler always overlaps steps, and sampled tokens do "
        "not depend on it",
        "enable_cudagraph_gc": "garbage is not collected during graph capture",
        "enable_flashinfer_allreduce_fusion": _ALL_REDUCE,
        "enable_metrics_for_all_schedulers": "every replica reports metrics",
        "enable_mixed_chunk": "prefill chunks and decodes always share steps",
        "enable_p2p_check": "the driver checks at the start whether its GPUs can map each other's "
        "memory",
        "enable_request_time_stats_logging": "`--enable-trace` and `--export-metrics-to-file` have "
        "the times of each request",
        "enable_torch_compile": _COMPILED,
        "enable_torch_compile_debug_mode": _COMPILED,
        "enable_weights_cpu_backup": "weights that are released always wait in host memory",
        "enforce_disable_flashinfer_allreduce_fusion": _ALL_REDUCE,
        "load_snapshot_publish_interval": "the load is published twice a second, and at once when "
        "the first request comes or the last one ends",
        "nccl_port": "the ranks of a driver meet at an anonymous file, and open no port",
        "num_continuous_decode_steps": "the scheduler decides after every step",
        "prefill_delayer_forward_passes_buckets": _DELAYER,
        "prefill_delayer_max_delay_ms": _DELAYER,
        "prefill_delayer_max_delay_passes": _DELAYER,
        "prefill_delayer_queue_min_ratio": _DELAYER,
        "prefill_delayer_token_usage_low_watermark": _DELAYER,
        "prefill_delayer_wait_seconds_buckets": _DELAYER,
        "sampling_backend": "the driver has its own sampling kernels",
        "scheduler_recv_interval": "a thread of its own receives requests while steps run",
        "show_time_cost": "it prints the times of marks in SGLang's code, and 0.5.17 sets none; "
        "`/start_profile` and `trace_file` have the times of steps",
        "sleep_on_idle": "scheduler and driver always sleep after a millisecond without work",
        "strip_thinking_cache": "the prefix cache keeps the tokens of a model's thinking, and "
        "evicts what was not used for longest",
        "swa_full_tokens_ratio": _ONE_POOL,
        "torch_compile_max_bs": _COMPILED,
    }
)


#: The same of vLLM's settings.
VLLM_NO_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "disable_custom_all_reduce": "ranks of the vLLM driver reduce by NCCL, or by gloo on CPUs",
        "enable_flashinfer_autotune": "the vLLM driver runs no kernels of FlashInfer",
        "override_attention_dtype": "attention is computed in the dtype of the activations",
    }
)
#: And of those, what concerns GPUs.
VLLM_NO_EFFECT_ON_CPU: Final[Mapping[str, str]] = MappingProxyType(
    {"enable_bf16x3_router_gemm": "it concerns GPUs, and the device is a CPU"}
)

#: Settings of SGLang's Triton attention kernels.
TRITON_ATTENTION: Final = (
    "triton_attention_num_kv_splits",
    "triton_attention_reduce_in_fp32",
    "triton_attention_split_tile_size",
)


def no_effect_lines(given: Mapping[str, Any], reasons: Mapping[str, str] = NO_EFFECT) -> list[str]:
    """A line for each given setting that has no effect, in the order of their names."""
    return [f"`{name}` has no effect: {reasons[name]}" for name in sorted(reasons.keys() & given)]
