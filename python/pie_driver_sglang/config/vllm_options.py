"""Validates `[driver.options]` of the vLLM driver: its own options, and vLLM's passed through.

Names, defaults and meaning are those of Pie's vLLM driver; options that have nothing to do with the
library are those of `options.py`. Every other key must be a field of vLLM's `EngineArgs` that the
driver does not set itself (`engine_args.py`, generated). Nothing here imports vLLM.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from pie_driver_sglang.config.engine_args import ENGINE_ARGS
from pie_driver_sglang.config.no_effect import VLLM_NO_EFFECT, VLLM_NO_EFFECT_ON_CPU
from pie_driver_sglang.config.option_checks import (
    LAUNCHER_KEYS,
    OWNERS,
    check_lora_root,
    choices_hint,
    convert_option,
    convert_own,
    unknown_option,
    without_no_effect,
)
from pie_driver_sglang.config.options import (
    OPTIONS,
    PAGED_DECODE,
    About,
    DriverOptions,
    Group,
    Option,
)
from pie_driver_sglang.errors import ConfigError, Unsupported, quoted

#: The attention of vLLM on a CPU, and the only one that runs there.
CPU_ATTENTION: Final = "CPU_ATTN"

#: vLLM's FlashAttention 3, and its Triton kernel.
FLASH_ATTENTION: Final = "FLASH_ATTN"
VLLM_TRITON: Final = "TRITON_ATTN"

#: The attention backends by kind of device, the default first.
_BACKENDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"cpu": (CPU_ATTENTION,), "cuda": (PAGED_DECODE, FLASH_ATTENTION, VLLM_TRITON)}
)

#: A remedy for users of Pie's configuration, of servers and of the engine.
ON_SGLANG: Final = (
    'run the model on SGLang (`type = "sglang"` for Pie, `pie-sglang serve`, `Engine` without '
    "`engine`)"
)

#: The share of the free memory that the driver takes.
UTILIZATION: Final = "gpu_memory_utilization"

#: What pages of vLLM's attention have: a multiple of so many tokens.
BLOCK_MULTIPLE: Final = 16

#: The largest ranks that vLLM makes slots for.
LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)

#: Adapters in host memory, unless more fit a pass.
_LOADED_LORAS: Final = 32

#: The values that the driver serves of those that a field of vLLM has.
_SERVED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"model_impl": ("auto", "vllm")})

#: The driver's names of options that vLLM calls otherwise.
VLLM_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attention_backend": "attention_backend",
        "chunked_prefill_size": "max_num_batched_tokens",
        "context_length": "max_model_len",
        "cuda_graph_max_bs": "max_num_seqs",
        "disable_cuda_graph": "enforce_eager",
        "kv_cache_dtype": "kv_cache_dtype",
        "max_loaded_loras": "max_cpu_loras",
        "mem_fraction_static": UTILIZATION,
        "page_size": "block_size",
    }
)

#: Options that are the same with every library.
_COMMON: Final = (
    "cpu_mem_budget_in_gb",
    "enable_lora",
    "fuse_layers",
    "lora_root",
    "spec_ngram_enabled",
    "spec_ngram_num_drafts",
    "trace_file",
    "trace_max_mib",
    "log_format",
    "log_level",
    "log_interval_s",
    "metrics_port",
    "metrics_file",
    "active_file",
)


def _option(name: str, kind: str, default: Any, group: Group, text: str, **about: Any) -> Option:
    return Option(name, kind, default, About(group, text, **about))


#: The options by name.
VLLM_OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        option.name: option
        for option in (
            _option("max_model_len", "int", None, Group.MODEL,
                    "Most positions of one context.", limits=(1, 2**31 - 1)),
            _option(UTILIZATION, "float", 0.9, Group.MEMORY,
                    "Share of the free memory for weights, KV pages and activations.",
                    limits=(0.01, 1.0)),
            _option("block_size", "int", 16, Group.MEMORY,
                    "Tokens of one KV page, a multiple of 16.", limits=(16, 1024)),
            _option("kv_cache_dtype", "str", "auto", Group.MEMORY,
                    "Element type of the KV pages: that of the activations.",
                    choices=("auto",)),
            _option("attention_backend", "str", None, Group.SPEED,
                    "Attention backend. `pie` decodes by the driver's own kernel, and prefills by "
                    "FlashAttention 3, or by vLLM's Triton kernel where that cannot.",
                    choices=tuple(name for names in _BACKENDS.values() for name in names)),
            _option("enforce_eager", "bool", False, Group.SPEED,
                    "Run every batch through Python, without the graph path."),
            _option("max_num_seqs", "int", None, Group.SPEED,
                    "Most requests of one batch.", limits=(1, 4096)),
            _option("max_num_batched_tokens", "int", None, Group.SPEED,
                    "Most tokens of one forward pass; longer prompts are split.",
                    limits=(1, 2**31 - 1)),
            _option("max_lora_rank", "int", 16, Group.ADAPTERS,
                    "Largest rank of an adapter; vLLM's kernels take 1, 8, 16, 32, 64, 128, 256, "
                    "320 and 512."),
            _option("max_loras", "int", 1, Group.ADAPTERS,
                    "Different adapters of one forward pass, besides requests without one. "
                    "Batches with more are split.", limits=(1, 4095)),
            _option("max_cpu_loras", "int", None, Group.ADAPTERS,
                    "Adapters in the host memory of each rank, at least `max_loras`; by default "
                    "32, or one more than `max_loras`. Others are read from their files again "
                    "when a request uses them.", limits=(1, 2**20)),
            _option("lora_target_modules", "list[str]", None, Group.ADAPTERS,
                    'Layers that adapters may change, by their checkpoint names, e.g. `["q_proj", '
                    '"v_proj"]`; by default all that vLLM can adapt.'),
            _option("spec_ngram_min_n", "int", 2, Group.DRAFTS,
                    "Shortest match that drafts, in tokens.", limits=(1, 255)),
            _option("spec_ngram_max_n", "int", 4, Group.DRAFTS,
                    "Longest match that drafts, in tokens.", limits=(1, 255)),
            _option("trust_remote_code", "bool", False, Group.MODEL,
                    "Allow the model's folder to bring Python code of its own."),
            *(OPTIONS[name] for name in _COMMON),
        )
    }
)  # fmt: skip


#: Owners whose reason and hint are the same with both libraries.
_COMMON_OWNERS: Final = (
    "device",
    "disaggregation",
    "dtype",
    "parallel",
    "prefix_cache",
    "sampling",
    "schedule",
    "seed",
    "snapshot",
    "tokenizer",
    "tokens",
)

#: Why the user may not set a field of `EngineArgs`, and a hint, by its generated owner.
VLLM_OWNERS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        **{owner: OWNERS[owner] for owner in _COMMON_OWNERS},
        "adapters": (
            "the driver keeps adapters and their slots itself",
            "remove the key; set `enable_lora`, `max_loras`, `max_lora_rank`, `max_cpu_loras` or "
            "`lora_target_modules`",
        ),
        "attention": ("the driver plans attention itself", "set `attention_backend`"),
        "capacity": (
            "the driver computes its capacity from the memory and reports it to the runtime",
            f"set `{UTILIZATION}` for more or fewer KV pages, `max_num_seqs` for the requests of "
            "a batch",
        ),
        "graphs": ("the driver decides what is captured or compiled", "set `enforce_eager`"),
        "media": ("the vLLM driver serves no images, audio or video", "remove the key"),
        "observability": (
            "the driver has a log, metrics and traces of its own",
            "remove the key; set `metrics_port`, `metrics_file`, `log_level` or `trace_file`",
        ),
        "offload": (
            "the driver plans its memory with all weights on the device",
            "remove the key, and use a smaller or a quantized checkpoint",
        ),
        "pool": ("the driver lays out the KV pages itself", "set `block_size` or remove the key"),
        "server": ("the runtime serves clients, not vLLM's server", "remove the key"),
        "speculative": (
            "the driver drafts by n-grams only",
            "set `spec_ngram_enabled` and remove the key",
        ),
        "state": ("the vLLM driver serves no models with recurrent state yet", "remove the key"),
    }
)


def parse_vllm_options(table: Mapping[str, Any], device: str) -> DriverOptions:
    """Check the table `[driver.options]` of the vLLM driver.

    Args:
        table: The table as TOML gives it.
        device: `cpu` or `cuda:N`.

    Raises:
        ConfigError: A key is unknown or may not be set, or a value is wrong or unsupported.
    """
    own = {name: option.default for name, option in VLLM_OPTIONS.items()}
    passed: dict[str, Any] = {}
    for name, value in table.items():
        if name in VLLM_OPTIONS:
            own[name] = _check_own(VLLM_OPTIONS[name], value)
        elif name not in LAUNCHER_KEYS:
            passed[name] = _check_engine_arg(name, value)
    kind = device.partition(":")[0]
    _choose_backend(own, kind)
    idle = {**VLLM_NO_EFFECT, **(VLLM_NO_EFFECT_ON_CPU if kind == "cpu" else {})}
    passed = without_no_effect(passed, idle)
    _check_matches(own)
    if own["block_size"] % BLOCK_MULTIPLE:
        raise ConfigError(
            f"option `block_size` is {own['block_size']}, which is no multiple of "
            f"{BLOCK_MULTIPLE}, as vLLM's attention wants",
            "set `block_size = 16` or remove it",
        )
    # Drafts come from a context's own text.
    fields: dict[str, Any] = {
        "spec_ngram_max_depth": own["spec_ngram_max_n"],
        "spec_ngram_capacity": 0,
    }
    # None: where the model allows it.
    fields["paged_decode"] = None if own["attention_backend"] == PAGED_DECODE else False
    fields |= _adapter_fields(own)
    # Models with images are refused.
    fields["max_image_tokens"] = 0
    passed[UTILIZATION] = own.pop(UTILIZATION)
    renamed = {vllm: name for name, vllm in VLLM_NAMES.items()}
    fields |= {renamed.get(name, name): value for name, value in own.items()}
    options = DriverOptions(**fields, server_args=passed)
    check_lora_root(options)
    return options


def _adapter_fields(own: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of adapters, and names them as the core does."""
    rank, targets = own["max_lora_rank"], own.pop("lora_target_modules")
    if rank not in LORA_RANKS:
        larger = next((size for size in LORA_RANKS if size > rank), LORA_RANKS[-1])
        raise ConfigError(
            f"option `max_lora_rank` is {rank}, and vLLM's LoRA kernels take "
            f"{', '.join(map(str, LORA_RANKS))}",
            f"set `max_lora_rank = {larger}`",
        )
    targets = ("all",) if targets is None else tuple(targets)
    if not targets or not all(targets) or ("all" in targets and len(targets) > 1):
        raise ConfigError(
            f"option `lora_target_modules` is {quoted(list(targets))}",
            'name layers, e.g. `["q_proj", "v_proj"]`, or remove it for all of them',
        )
    most, loaded = own.pop("max_loras"), own.pop("max_cpu_loras")
    if loaded is not None and loaded < most:
        raise ConfigError(
            f"option `max_cpu_loras` is {loaded}, less than `max_loras`, which is {most}",
            f"set `max_cpu_loras` to at least {most}",
        )
    # The core counts the base model, too. Without it a pass has one adapter more, all of which must
    # be in host memory.
    return {
        "lora_target_modules": targets,
        "max_loras_per_batch": most + 1,
        "max_loaded_loras": max(loaded or _LOADED_LORAS, most + 1),
    }


def vllm_hint(hint: str) -> str:
    """A hint of the core's memory plan, about slots for adapters as vLLM counts them."""
    slots = re.fullmatch(r"set `max_loras_per_batch = (\d+)` in the options", hint)
    if slots is None:
        return hint
    most = int(slots[1]) - 1
    if not most:
        return "remove `enable_lora`, or choose a smaller or a quantized model"
    return f"set `max_loras = {most}` in the options"


def _choose_backend(own: dict[str, Any], kind: str) -> None:
    """Sets the default attention backend of `cpu` or `cuda`, and rejects another device's."""
    choices = _BACKENDS[kind]
    name = own["attention_backend"]
    own["attention_backend"] = choices[0] if name is None else name
    if own["attention_backend"] not in choices:
        raise Unsupported(
            f"option `attention_backend` is {quoted(name)}, which does not run on `{kind}`",
            f"set it to one of {', '.join(choices)}, or remove it",
        )


def _check_own(option: Option, value: Any) -> Any:
    checked = convert_own(option, value)
    if isinstance(checked, str):
        _check_words(option.name, checked, option.about.choices)
    return checked


def _check_words(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Reject an empty string, and a value that is not among the choices."""
    hint = choices_hint(name, value, choices)
    if hint is None:
        return
    if name in ENGINE_ARGS and value in ENGINE_ARGS[name].choices:
        raise Unsupported(f"option `{name}` is {quoted(value)}, not served by this driver", hint)
    raise ConfigError(f"option `{name}` is {quoted(value)}, which is none of its values", hint)


def _check_engine_arg(name: str, value: Any) -> Any:
    field = ENGINE_ARGS.get(name)
    if field is None:
        passed = (key for key, field in ENGINE_ARGS.items() if field.owner is None)
        settings = "vLLM's settings for the model and its kernels, by their EngineArgs names"
        raise unknown_option(name, VLLM_OPTIONS, passed, VLLM_NAMES, settings)
    if field.owner is not None:
        reason, remedy = VLLM_OWNERS[field.owner]
        raise Unsupported(f"option `{name}` cannot be set: {reason}", remedy)
    if field.type == "table" and isinstance(value, str):
        # As vLLM's flags and Python arguments may have it.
        with contextlib.suppress(msgspec.DecodeError):
            value = msgspec.json.decode(value)
    checked = convert_option(name, value, field.type)
    if isinstance(checked, str):
        _check_words(name, checked, _SERVED.get(name, field.choices))
    return checked


def _check_matches(own: Mapping[str, Any]) -> None:
    shortest, longest = own["spec_ngram_min_n"], own["spec_ngram_max_n"]
    if shortest > longest:
        raise ConfigError(
            f"option `spec_ngram_min_n` is {shortest}, but no match is longer than {longest}",
            "lower it, or raise `spec_ngram_max_n`",
        )
