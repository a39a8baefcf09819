"""Validates the table `[driver.options]`: the driver's options, and SGLang settings passed through.

`options.py` defines the driver's options. Every other key must be a field of SGLang's `ServerArgs`
that the driver does not set itself; the list of those is generated (`server_args.py`), so nothing
here imports SGLang.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from pie_driver_sglang.config.no_effect import NO_EFFECT, TRITON_ATTENTION, no_effect_lines
from pie_driver_sglang.config.options import OPTIONS, PAGED_DECODE, DriverOptions, Option
from pie_driver_sglang.config.server_arg import ServerArg
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.config.weight_formats import check_weight_format
from pie_driver_sglang.errors import ConfigError, Unsupported, nearest, quoted

logger = logging.getLogger(__name__)

#: The options that name attention backends: for everything, for prefills, for decodes.
_BACKENDS: Final = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)

#: Keys that name the interpreter: the runtime uses and removes them.
LAUNCHER_KEYS: Final = frozenset({"venv", "python"})

#: Capacity options of the runtime's other drivers; this driver computes its capacity.
CAPACITY_NAMES: Final = frozenset(
    {
        "cpu_pages",
        "linear_attn_max_slots",
        "max_batch_size",
        "max_batch_tokens",
        "max_forward_requests",
        "max_forward_tokens",
        "max_num_batched_tokens",
        "max_num_kv_pages",
        "max_num_seqs",
        "max_running_requests",
        "max_total_tokens",
        "total_pages",
    }
)

#: Keys of `[model.driver]`, for a hint if they are among the options.
SECTION_KEYS: Final = frozenset(
    {"activation_dtype", "ipc_profile", "master_port", "spin_budget_us", "tensor_parallel_size"}
)

#: Names of other engines and older SGLang versions for an option.
_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cuda_graph_bs": "cuda_graph_bs_decode",
        "enforce_eager": "disable_cuda_graph",
        "gpu_memory_utilization": "mem_fraction_static",
        "max_model_len": "context_length",
    }
)

#: Why the user may not set a field, and a hint, by its generated owner.
OWNERS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "adapters": (
            "the runtime loads adapters, and this driver manages them",
            "set `enable_lora = true` and remove the key",
        ),
        "capacity": (
            "the driver computes its capacity from the memory and reports it to the runtime",
            "set `mem_fraction_static` for more or fewer KV pages, "
            "`cuda_graph_max_bs` for the requests per batch",
        ),
        "custom": ("it needs a Python object", "remove the key"),
        "device": (
            "the device comes from the runtime's configuration",
            "set `device` under [model.driver] and remove the key",
        ),
        "disaggregation": ("the runtime places prefill and decode itself", "remove the key"),
        "dtype": (
            "the activation type comes from the runtime's configuration",
            "set `activation_dtype` under [model.driver] and remove the key",
        ),
        "graphs": (
            "the driver captures its CUDA graphs itself",
            "set `cuda_graph_max_bs` or `cuda_graph_bs_decode` instead",
        ),
        "graphs_off": ("the driver decides this for all graphs", "set `disable_cuda_graph`"),
        "media": ("images come from the runtime, ready for the model", "remove the key"),
        "observability": (
            "the driver has its own log, metrics and traces",
            "remove the key; set `metrics_port`, `metrics_file`, `log_level`, `log_format` or "
            "`trace_file`",
        ),
        "offload": (
            "weights are offloaded by `cpu_offload_gb` only",
            "set it instead, or use a quantized checkpoint",
        ),
        "parallel": (
            "the driver shards a model over its devices itself",
            "list `device`, set `tensor_parallel_size` under [model.driver] and remove the key",
        ),
        "pool": ("the driver plans its KV pages itself", "set `page_size` or remove the key"),
        "prefix_cache": ("the runtime shares prefixes itself", "remove the key"),
        "sampling": ("each request sets its own sampling", "remove the key"),
        "schedule": ("the runtime schedules requests", "remove the key"),
        "seed": (
            "the seed comes from the runtime's configuration",
            "set `random_seed` under [model.driver] and remove the key",
        ),
        "server": ("the runtime serves clients, not SGLang's server", "remove the key"),
        "snapshot": (
            "the weights come from the snapshot that the runtime resolved",
            "set `hf_repo` under [model] and remove the key",
        ),
        "speculative": ("the driver does not use SGLang's speculation", "remove the key"),
        "tokenizer": ("the runtime tokenizes, not the driver", "remove the key"),
        "tokens": (
            "the driver serves models with causal attention, token by token",
            "remove the key",
        ),
    }
)


class TomlType(NamedTuple):
    """The TOML type of an option."""

    annotation: Any
    text: str
    """Its name in messages."""


#: By the type names of `server_args.py`.
TYPES: Final[Mapping[str, TomlType]] = MappingProxyType(
    {
        "bool": TomlType(bool, "true or false"),
        "float": TomlType(float, "a number"),
        "int": TomlType(int, "an integer"),
        "list[float]": TomlType(list[float], "an array of numbers"),
        "list[int]": TomlType(list[int], "an array of integers"),
        "list[str]": TomlType(list[str], "an array of strings"),
        "list[table]": TomlType(list[dict[str, Any]], "an array of tables"),
        "str": TomlType(str, "a string"),
        "table": TomlType(dict[str, Any], "a table"),
    }
)


def default_attention_backend(device: str) -> str:
    """Return SGLang's attention backend for `cpu` or `cuda:N` when the user names none."""
    return "torch_native" if device == "cpu" else "triton"


def valid_names() -> tuple[str, ...]:
    """Return every name that `[driver.options]` accepts, sorted."""
    passed = {name for name, field in SERVER_ARGS.items() if field.owner is None}
    return tuple(sorted(passed | OPTIONS.keys()))


def parse_option(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE` with a TOML value; any other text is a string.

    Raises:
        ConfigError: There is no key.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"option {quoted(text)} is not KEY=VALUE", "e.g. `--option page_size=32`")
    try:
        table = msgspec.toml.decode(f"value = {value}")
    except msgspec.DecodeError:
        return key.strip(), value.strip()
    return key.strip(), table["value"]


def parse_options(table: Mapping[str, Any], device: str) -> DriverOptions:
    """Check the table `[driver.options]`.

    Args:
        table: The table as TOML gives it.
        device: `cpu` or `cuda:N`; some defaults and limits depend on it.

    Raises:
        ConfigError: A key is unknown or may not be set, or a value is wrong or unsupported.
    """
    paged_decode: bool | None
    table = without_graphs_of_size_0(table)
    backends, paged_decode = _without_paged(_with_both_backends(table), device)
    if device != "cpu" and table.keys().isdisjoint(_BACKENDS):
        paged_decode = None
    own: dict[str, Any] = {"paged_decode": paged_decode}
    passed: dict[str, Any] = {}
    for name, value in backends.items():
        if name in OPTIONS:
            own[name] = _check_option(OPTIONS[name], value)
        elif name not in LAUNCHER_KEYS:
            passed[name] = _check_passed(name, value)
    passed = without_no_effect(passed, NO_EFFECT)
    own.setdefault("attention_backend", default_attention_backend(device))
    own.setdefault("lora_backend", "torch_native" if device == "cpu" else "triton")
    options = DriverOptions(**own, server_args=passed)
    _check_drafts(options)
    _check_device(options, device)
    _check_adapters(options, device)
    _check_graph_sizes(options)
    check_weight_format(passed, device)
    _warn_of_other_kernels(options)
    if not options.disable_radix_cache:
        logger.warning(
            "option `disable_radix_cache` is false, which has no effect: "
            "the runtime shares prefixes itself"
        )
    return options


def without_no_effect(passed: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    """The settings that have an effect here; the log says why the others have none."""
    for line in no_effect_lines(passed, reasons):
        logger.warning("option %s", line)
    return {name: value for name, value in passed.items() if name not in reasons}


def without_graphs_of_size_0(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with `cuda_graph_max_bs = 0` written as `disable_cuda_graph`, as in SGLang."""
    size = table.get("cuda_graph_max_bs")
    if size != 0 or isinstance(size, bool):
        return dict(table)
    rest = {name: value for name, value in table.items() if name != "cuda_graph_max_bs"}
    return {**rest, "disable_cuda_graph": True}


def _check_graph_sizes(options: DriverOptions) -> None:
    """Reject decode graphs that no batch fits."""
    about = OPTIONS["cuda_graph_max_bs"].about
    least, most = about.limits if about.limits is not None else (1, 1)
    most = options.cuda_graph_max_bs or most
    for size in options.graph_sizes:
        if not least <= size <= most:
            raise ConfigError(
                f"option `cuda_graph_bs_decode` has the size {size}, outside {least} to {most}",
                "remove it, or set `cuda_graph_max_bs` to the largest size, at most 4096",
            )


def _warn_of_other_kernels(options: DriverOptions) -> None:
    """Warn of settings of SGLang's Triton attention where other kernels attend."""
    backend = options.server_args.get("decode_attention_backend", options.attention_backend)
    if backend == "triton" and options.paged_decode is False:
        return
    for name in TRITON_ATTENTION:
        if name in options.server_args:
            logger.warning(
                "option `%s` has no effect where other kernels than SGLang's Triton attention "
                'decode: set `attention_backend = "triton"` for those',
                name,
            )


def _with_both_backends(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with `attention_backend = "prefill,decode"` written as two keys."""
    value = table.get("attention_backend")
    if not isinstance(value, str) or "," not in value:
        return dict(table)
    prefill, _, decode = (word.strip() for word in value.partition(","))
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        if name in table:
            raise ConfigError(
                f"option `attention_backend` is {quoted(value)}, which names the backends of "
                f"prefill and decode, and `{name}` names one again",
                f"remove `{name}`",
            )
    return {
        **table,
        "attention_backend": decode,
        "prefill_attention_backend": prefill,
        "decode_attention_backend": decode,
    }


def _without_paged(table: dict[str, Any], device: str) -> tuple[dict[str, Any], bool]:
    """The table with SGLang's backends only, and whether `pie` decodes."""
    both, prefill, decode = (table.get(name) for name in _BACKENDS)
    if PAGED_DECODE not in (both, prefill, decode):
        return table, False
    if device == "cpu":
        raise ConfigError(
            f"the attention backend {quoted(PAGED_DECODE)} does not run on the CPU",
            "set `attention_backend` to `torch_native` or remove it, or use a device `cuda:0`",
        )
    if prefill == PAGED_DECODE or decode not in (PAGED_DECODE, None):
        raise ConfigError(
            f"the attention backend {quoted(PAGED_DECODE)} decodes only, and is named for prefill",
            f'set `attention_backend = "triton,{PAGED_DECODE}"`',
        )
    rest = {key: table[key] for key in table if key not in _BACKENDS or table[key] != PAGED_DECODE}
    if both == PAGED_DECODE and prefill is not None:
        rest["attention_backend"] = prefill
    return rest, True


def _check_option(option: Option, value: Any) -> Any:
    name = option.name
    checked = convert_own(option, value)
    if name == "chunked_prefill_size" and checked == 0:
        raise ConfigError(
            "option `chunked_prefill_size` is 0, which leaves no token for a step",
            "set it to at least 1, to -1 for the default, or remove it",
        )
    if option.type == "str":
        own = ServerArg("str", choices=option.about.choices)
        _check_text(name, checked, own if own.choices else SERVER_ARGS.get(name, own))
    return checked


def _check_passed(name: str, value: Any) -> Any:
    field = SERVER_ARGS.get(name)
    if name in CAPACITY_NAMES:
        raise _owned(name, "capacity")
    if field is None:
        settings = "SGLang's settings for the model and its kernels, by their ServerArgs names"
        raise unknown_option(name, OPTIONS, valid_names(), _OTHER_NAMES, settings)
    if field.owner is not None:
        raise _owned(name, field.owner)
    checked = convert_option(name, value, field.type)
    if isinstance(checked, str):
        _check_text(name, checked, field)
    return checked


def convert_own(option: Option, value: Any) -> Any:
    """Return the value of an option of the driver, of its type and within its limits."""
    name, limits = option.name, option.about.limits
    checked = convert_option(name, value, option.type)
    if limits is not None and not limits[0] <= checked <= limits[1]:
        low, high = limits
        raise ConfigError(
            f"option `{name}` is {quoted(checked)}, outside {low} to {high}",
            f"set `{name}` to a value from {low} to {high}, or remove it",
        )
    return checked


def convert_option(name: str, value: Any, described: str) -> Any:
    """Return the value as one of the described types (`int`, `str | table`, ...)."""
    for alternative in described.split(" | "):
        try:
            return msgspec.convert(value, TYPES[alternative].annotation)
        except (ValueError, OverflowError):  # msgspec's own errors are ValueErrors.
            continue
    expected = " or ".join(TYPES[alternative].text for alternative in described.split(" | "))
    raise ConfigError(
        f"option `{name}` is {quoted(value)}, expected {expected}",
        f"write {expected} for `{name}`, or remove it",
    )


def choices_hint(name: str, value: str, choices: Sequence[str]) -> str | None:
    """Return a hint for a value that is not among the choices of an option, None if it is.

    Raises:
        ConfigError: The value is empty.
    """
    if not value or "\0" in value:
        raise ConfigError(
            f"option `{name}` is {quoted(value)}, which names nothing",
            f"set `{name}` or remove it",
        )
    if not choices or value in choices:
        return None
    return f"{nearest(value, choices)} choose one of {', '.join(choices)}".strip()


def _check_text(name: str, value: str, field: ServerArg) -> None:
    """Reject an empty string, and a value that is not among the choices."""
    hint = choices_hint(name, value, field.choices)
    if hint is None:
        return
    if field.open_choices and (name not in _BACKENDS or loads_plugins()):
        logger.warning("option `%s` is %s, unknown to SGLang itself: %s", name, quoted(value), hint)
        return
    if field.open_choices:
        hint += "; for a backend of a plugin, name the plugin in SGLANG_PLUGINS"
    unknown = "which SGLang does not know" if name in SERVER_ARGS else "which is none of its values"
    raise ConfigError(f"option `{name}` is {quoted(value)}, {unknown}", hint)


def loads_plugins() -> bool:
    """Whether SGLang loads plugins, which may add backends and model classes."""
    return any(os.environ.get(name) for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"))


def _owned(name: str, owner: str) -> Unsupported:
    reason, remedy = OWNERS[owner]
    return Unsupported(f"option `{name}` cannot be set: {reason}", remedy)


def unknown_option(
    name: str, own: Iterable[str], passed: Iterable[str], renamed: Mapping[str, str], settings: str
) -> ConfigError:
    """Return the error of a name that is neither an option nor a setting that is passed through."""
    hint = nearest(name.replace("-", "_").lower(), {*own, *passed})
    if name in renamed:
        hint = f"this driver calls it `{renamed[name]}`"
    elif name in SECTION_KEYS:
        hint = f"`{name}` belongs under [model.driver], not under its options"
    return ConfigError(
        f"unknown option {quoted(name)} in [model.driver.options]",
        hint or f"valid options of the driver: {', '.join(sorted(own))}; and {settings}",
    )


def _check_drafts(options: DriverOptions) -> None:
    _check_head(options)
    shortest, longest = options.spec_ngram_min_n, options.spec_ngram_max_n
    longest = min(longest or options.spec_ngram_max_depth, options.spec_ngram_max_depth)
    if shortest > longest:
        raise ConfigError(
            f"option `spec_ngram_min_n` is {shortest}, but no match is longer than {longest}",
            "lower it, or raise `spec_ngram_max_n` and `spec_ngram_max_depth`",
        )
    factor = options.spec_suffix_max_spec_factor
    if options.spec_suffix_enabled and factor * longest < 1:
        raise ConfigError(
            f"option `spec_suffix_max_spec_factor` is {factor}, by which no match of at most "
            f"{longest} tokens has a draft",
            f"set it to at least {math.ceil(100 / longest) / 100}, or remove it",
        )


def _check_head(options: DriverOptions) -> None:
    folder = options.spec_eagle_path
    if folder is None:
        return
    if not (Path(folder).is_absolute() and Path(folder).is_dir()):
        raise ConfigError(
            f"option `spec_eagle_path` is {quoted(folder)}, which is not the absolute path of a "
            "folder",
            "name the folder of an EAGLE head, or remove the key",
        )
    for name in ("spec_ngram_enabled", "spec_suffix_enabled"):
        if getattr(options, name):
            raise ConfigError(
                f"options `spec_eagle_path` and `{name}` are both set, and one of them drafts",
                "remove one of them",
            )
    if options.disable_cuda_graph:
        raise ConfigError(
            "option `disable_cuda_graph` is true, and an EAGLE head drafts in the graph of a step",
            "remove `disable_cuda_graph` or `spec_eagle_path`",
        )


def check_lora_root(options: DriverOptions) -> None:
    """Reject a folder of adapters that is none."""
    root = options.lora_root
    if root is not None and not (Path(root).is_absolute() and Path(root).is_dir()):
        raise ConfigError(
            f"option `lora_root` is {quoted(root)}, which is not the absolute path of a folder",
            "name a folder that exists, or remove the key",
        )


def _check_adapters(options: DriverOptions, device: str) -> None:
    known = SERVER_ARGS["lora_target_modules"].choices
    targets = options.lora_target_modules
    unknown = [target for target in targets if target not in known]
    if unknown or not targets or ("all" in targets and len(targets) > 1):
        raise ConfigError(
            f"option `lora_target_modules` is {quoted(list(targets))}",
            f'write ["all"], or some of {", ".join(known)}',
        )
    check_lora_root(options)
    if options.max_loaded_loras < options.max_loras_per_batch:
        raise ConfigError(
            f"option `max_loaded_loras` is {options.max_loaded_loras}, less than "
            f"`max_loras_per_batch`, which is {options.max_loras_per_batch}",
            f"set `max_loaded_loras` to at least {options.max_loras_per_batch}",
        )
    if (options.lora_backend == "torch_native") != (device == "cpu"):
        fitting = "torch_native" if device == "cpu" else "triton`, `csgmv` or `pie"
        raise Unsupported(
            f"option `lora_backend` is {quoted(options.lora_backend)}, not for {device}",
            f"set `lora_backend` to `{fitting}`, or remove it",
        )


def _check_device(options: DriverOptions, device: str) -> None:
    """Reject known GPU backends on the CPU; a plugin's backend may run there."""
    if options.nvtx and device == "cpu":
        raise ConfigError(
            "option `nvtx` is true, and there is no CUDA device to profile",
            "set `nvtx = false` or remove it, or use a device `cuda:0`",
        )
    known = SERVER_ARGS["attention_backend"].choices
    for name in _BACKENDS:
        backend = options.server_args.get(name, options.attention_backend)
        if device == "cpu" and backend in known and backend != "torch_native":
            raise Unsupported(
                f"option `{name}` is {quoted(backend)}, which does not run on the CPU",
                f"set `{name}` to `torch_native` or remove it, or use a device `cuda:0`",
            )
