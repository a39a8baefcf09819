"""Which of SGLang's flags the frontend or our runtime supports, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.config.flag_names import flag_of
from pie_driver_sglang.config.no_effect import NO_EFFECT
from pie_driver_sglang.config.option_checks import valid_names
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_FLAGS
from pie_driver_sglang.errors import ConfigError, nearest
from pie_driver_sglang.frontends.common.argument_names import (
    READ,
    SCHEDULER,
    UNSERVED_NAMES,
    other_engines_flag,
)

OWN_FLAGS: Final = """\
  --scheduler NAME     pie, sglang, or auto (default): ours, or SGLang's if a flag or the model
                       requires it, which is logged
  --engine NAME        what runs the model: sglang (default) or vllm (docs/vllm.md)
  --option KEY=VALUE   an option of the driver (docs/options.md) or an argument of the engine
                       (docs/engine.md); may be given several times
"""
#: The names of these, and `--front`.
OWN_NAMES: Final = ("--scheduler", "--engine", "--option", "--front")
FLAG_LIST: Final = "`pie-sglang serve --help` lists all flags"

#: The timeout of a step.
WATCHDOG: Final = "watchdog_timeout"
#: How SGLang's processor passes pixels, with the value that our scheduler supports.
TRANSPORT: Final = ("mm_feature_transport", "cpu")
#: The flag and its value with which requests with a grammar are rejected.
GRAMMARS_OFF: Final = ("grammar_backend", "none")
#: Owners whose flags SGLang's frontend supports by itself.
_FRONT_OWNERS: Final = frozenset({"server", "tokenizer", "observability"})
#: Flags of other owners that do not concern the scheduler.
_FRONT: Final = frozenset(
    {
        "abort_on_priority_when_disabled",
        "allowed_media_domains",
        "default_priority_value",
        "disable_fast_image_processor",
        "gc_threshold",
        "image_processor_backend",
        "limit_mm_data_per_request",
        "load_balance_method",
        "media_url_max_file_size_mb",
        "mm_io_worker_num",
        "mm_preprocess_cache_size_mb",
        "mm_process_config",
        "mm_processor_worker_num",
        # Of the tokenizer manager and the detokenizer; our steps have `--watchdog-timeout`.
        "soft_watchdog_timeout",
        "trust_mm_content_hashes",
        WATCHDOG,
    }
)
_SERVER: Final = "it starts a server of its own, without our limits and keys"
#: Flags that are refused with either scheduler, with the reason and what to do.
REFUSED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "enable_http2": (
            "its server has no limits on connections",
            "remove the flag, and put a proxy that speaks HTTP/2 in front",
        ),
        "encoder_only": (_SERVER, "start it by `python -m sglang.launch_server`"),
        "grpc_mode": (_SERVER, "set `--front gateway`, which serves gRPC, or remove the flag"),
        "smg_grpc_mode": (_SERVER, "set `--front gateway`, which serves gRPC, or remove the flag"),
        "use_ray": (_SERVER, "remove the flag; `--tp-size` and `--dp-size` need no Ray"),
    }
)
#: Flags of SGLang that have another name here.
RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {"cuda_graph_max_bs_decode": "cuda_graph_max_bs"}
)


_OUTPUTS: Final = "the driver does not return them"
_OTHER_FRONT: Final = "it takes another frontend"
_WATERMARKS: Final = "tokens are sampled without a watermark"
_ADAPTERS: Final = "the driver has its own loading and layers of adapters"
#: Flags that our scheduler does not support, and the reason.
_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **UNSERVED_NAMES,
        **{name: reason for name, (reason, _) in REFUSED.items()},
        "aux_hidden_state_capture": _OUTPUTS,
        "checkpoint_engine_wait_weights_before_ready": "it is ready once the weights are loaded",
        "constrained_json_max_whitespace_cnt": "`--constrained-json-whitespace-pattern` bounds "
        "whitespace here, as in `[ ]{0,4}`",
        "enable_draft_weights_cpu_backup": "there is no draft model",
        "enable_forward_pass_metrics": "the driver's passes are not published",
        "enable_mfu_metrics": "floating-point operations are not counted",
        "enable_mis": "scoring of several items in one prompt is not served",
        "enable_return_aux_hidden_states": _OUTPUTS,
        "enable_return_indexer_topk": _OUTPUTS,
        "enable_return_routed_experts": _OUTPUTS,
        "enable_strict_thinking": "the reasoning of a model is not constrained",
        "enable_watermark": _WATERMARKS,
        "forward_pass_metrics_ipc_name": "the driver's passes are not published",
        "forward_pass_metrics_worker_id": "the driver's passes are not published",
        "grpc_port": _OTHER_FRONT,
        "grpc_response_timeout_secs": _OTHER_FRONT,
        "grpc_worker_threads": _OTHER_FRONT,
        "kv_canary": "it checks SGLang's own KV pool",
        "kv_canary_real_data": "it checks SGLang's own KV pool",
        "kv_canary_sweep_interval": "it checks SGLang's own KV pool",
        "kv_events_config": "events of the prefix index are not published yet",
        "language_model_only": "the vision encoder of a model is always loaded",
        "load_publish_endpoint": "the load is published by `/v1/loads` and the metrics only",
        "lora_eviction_policy": "the least recently used adapter is evicted",
        "mm_feature_transport": "pixels are passed through host memory",
        "msprobe_dump_config": "it hooks into SGLang's own runner",
        "return_aux_hidden_state_layer_ids": _OUTPUTS,
        "sampling_mask_max_tokens": _OUTPUTS,
        "sidecar": _OTHER_FRONT,
        "sidecar_args": _OTHER_FRONT,
        "smg_http_sidecar_port": _OTHER_FRONT,
        "watermark_config": _WATERMARKS,
    }
)
_REASONS_OF_OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adapters": _ADAPTERS,
        "custom": "it needs a Python object in another process",
        "capacity": "the driver computes its capacity from the memory",
        "device": "`--device` and `--base-gpu-id` select the device",
        "disaggregation": "prefill and decode run in one driver",
        "graphs_off": "`--disable-cuda-graph` turns off all of its graphs",
        "graphs": "the driver captures its CUDA graphs itself",
        "media": "the driver runs the vision encoder itself",
        "offload": "weights are offloaded by `--cpu-offload-gb` only",
        "parallel": "a model is sharded by `--tp-size` only",
        "pool": "the driver plans its KV pages itself",
        "prefix_cache": "the runtime has its own prefix index",
        "sampling": "each request sets its own sampling",
        "schedule": "it is a setting of SGLang's scheduler",
        "snapshot": "the weights come from the folder of the model",
        "speculative": "the driver drafts by n-grams, suffixes or a chain of an EAGLE head",
        "tokens": "the driver serves models with causal attention, token by token",
    }
)


def served_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of our runtime among the flags that the user set (``ServerArgs`` fields)."""
    known = {*SCHEDULER, *READ, *valid_names()} - NO_EFFECT.keys() - _REASONS.keys()
    named = {RENAMED.get(name, name): value for name, value in given.items()}
    if (name := GRAMMARS_OFF[0], named.get(name)) == GRAMMARS_OFF:
        # The frontend rejects requests with a grammar.
        del named[name]
    return {name: value for name, value in named.items() if name in known}


def refuse_flags(given: Mapping[str, Any]) -> None:
    """Reject the flags that neither scheduler serves (``ServerArgs`` fields).

    Raises:
        ConfigError: With the reason.
    """
    rank, nodes = given.get("node_rank", 0), given.get("nnodes", 1)
    if not 0 <= rank < nodes:
        # SGLang's would wait for a first host that does not exist.
        raise ConfigError(
            f"`--node-rank` is {rank}, and `--nnodes` is {nodes}",
            "set `--nnodes` to the number of hosts, and number them from 0",
        )
    tokenizers, detokenizers = (
        given.get(name, 1) for name in ("tokenizer_worker_num", "detokenizer_worker_num")
    )
    if tokenizers == 1 < detokenizers and not given.get("skip_tokenizer_init"):
        # SGLang's router fails an assertion at the first output.
        raise ConfigError(
            f"`--detokenizer-worker-num` is {detokenizers}, and `--tokenizer-worker-num` is 1: "
            "the outputs of one tokenizer worker go to one detokenizer",
            f"set `--tokenizer-worker-num {detokenizers}`, too, or remove both",
        )
    for name in sorted(REFUSED.keys() & given.keys()):
        reason, hint = REFUSED[name]
        raise ConfigError(f"`{flag_of(name) or name}` is not served: {reason}", hint)


def unserved_flag(given: Mapping[str, Any]) -> str | None:
    """The first flag that our runtime does not support, with the reason; None without one."""
    served = {*SCHEDULER, *READ, *NO_EFFECT, *valid_names(), *RENAMED, *_FRONT} - _REASONS.keys()
    for name in sorted(given):
        if (name, given[name]) == TRANSPORT:
            continue
        reason = _REASONS.get(name)
        field = SERVER_ARGS.get(name)
        owner = field.owner if field is not None else None
        if reason is None and (name in served or owner in _FRONT_OWNERS or field is None):
            continue
        if reason is None:
            reason = _REASONS_OF_OWNERS.get(owner or "", "it is not supported")
        return f"{flag_of(name) or name}: {reason}"
    return None


def refuse_other_engines_flags(arguments: Sequence[str]) -> None:
    """Reject flags of vLLM, of which SGLang's parser reads some as abbreviations.

    Raises:
        ConfigError: With SGLang's names as the hint.
    """
    # What follows `--gateway-arg` is a flag of smg.
    pairs = zip(["", *arguments], arguments, strict=False)
    flags = [each.partition("=")[0] for before, each in pairs if before != "--gateway-arg"]
    found = [
        flag
        for flag in flags
        if flag.startswith("--") and flag not in SGLANG_FLAGS and other_engines_flag(flag)
    ]
    if found:
        raise unknown_flags(found, ())


def unknown_flags(names: Sequence[str], known: Iterable[str]) -> ConfigError:
    """The error for flags that do not exist, with the nearest of `known` as the hint."""
    listed = ", ".join(f"`{name}`" for name in names)
    known = list(known)
    hints = dict.fromkeys(other_engines_flag(name) or nearest(name, known) for name in names)
    return ConfigError(f"there is no flag {listed}", " ".join([*filter(None, hints), FLAG_LIST]))
