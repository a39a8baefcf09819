"""SGLang's `ServerArgs` as keyword arguments of the engine: parsed, passed on, or rejected."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from pie_driver_sglang import _core
from pie_driver_sglang.checkpoint.gguf_cache import LOAD_FORMAT
from pie_driver_sglang.checkpoint.pooling import read_pooling
from pie_driver_sglang.config.arch import auto_dtype, image_token_bytes
from pie_driver_sglang.config.config_file import SGLANG_RULES, ConfigRules
from pie_driver_sglang.config.driver_config import ACTIVATION_DTYPES
from pie_driver_sglang.config.hf_config import hidden_size, load_hf_config
from pie_driver_sglang.config.model_features import returns_embeddings
from pie_driver_sglang.config.no_effect import NO_EFFECT, no_effect_lines
from pie_driver_sglang.config.option_checks import parse_options, valid_names
from pie_driver_sglang.config.reasoning_parsers import reasoning_end
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.config.sglang_versions import is_0517
from pie_driver_sglang.config.vllm_models import VLLM_RULES
from pie_driver_sglang.config.weight_formats import check_stored_format
from pie_driver_sglang.errors import ConfigError, Unsupported, invalid_value, quoted
from pie_driver_sglang.frontends.common.argument_names import (
    BOTH,
    OWN,
    READ,
    SCHEDULER,
    UNSERVED_BY_ENGINE,
    UNSERVED_REASONS,
    unknown_argument,
)
from pie_driver_sglang.frontends.common.driver_options import DRAFTERS, common_options
from pie_driver_sglang.frontends.common.eagle_arguments import with_head_folder
from pie_driver_sglang.frontends.common.lora_adapters import (
    AdapterPath,
    largest_rank,
    parse_paths,
)
from pie_driver_sglang.frontends.common.model_location import (
    load_format_of,
    model_folder,
    tokenizer_folder,
)
from pie_driver_sglang.frontends.common.scheduler_values import (
    check_scheduler,
    preemption,
    require_integer,
)
from pie_driver_sglang.frontends.common.vllm_arguments import (
    LIBRARY_FOLDER,
    vllm_names,
    vllm_options,
    vllm_served,
)
from pie_driver_sglang.memory.batch_sizes import CHUNK_TOKENS, LARGE_CHUNK_TOKENS
from pie_driver_sglang.memory.gpus import check_gpus, has_gpu, prefers_cpu

logger = logging.getLogger(__name__)

_OTHER_DEVICES: Final = ("hpu", "musa", "npu", "xpu")
"""Devices of SGLang that the driver does not support."""
_OTHER_GRAMMAR_BACKENDS: Final = ("outlines", "xgrammar")
"""Grammar backends of SGLang, for which llguidance serves the same grammars."""
DECODE_LOG_INTERVAL: Final = 40
"""SGLang's default of `decode_log_interval`."""
_HIDDEN_STATES_MODES: Final = ("last", "full")
"""SGLang's values of `return_hidden_states_mode`."""
_EMBEDS: Final = "max_input_embeds_bytes"
_EMBEDS_BYTES: Final = 2 << 20
"""With contexts of 256k tokens the region still fits the 64 MiB of `/dev/shm` in a container. A
driver's own default is 0, as Pie sends none."""
_JSON_EXAMPLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "json_model_override_args": '{"rope_theta": 1000000}',
        "model_loader_extra_config": '{"enable_multithread_load": true}',
        "preferred_sampling_params": '{"temperature": 0.7}',
    }
)
"""Arguments that are JSON objects, with an example."""
_DTYPE_ALIASES: Final[Mapping[str, str]] = MappingProxyType({"half": "float16", "float": "float32"})


class EngineArguments(NamedTuple):
    """The parsed arguments of an engine.

    Attributes:
        model: The snapshot's folder.
        tokenizer: The folder of the tokenizer; None for an engine without text.
        runtime: The keyword arguments of `_core.Runtime` that do not depend on the tokenizer.
        sampling: Default sampling parameters.
        speculates: Whether requests ask for drafts.
        context_length: As set by the user; None for the model's.
        adapters: LoRA adapters to load at the start.
        max_adapters: How many may be loaded; 0 if adapters are disabled.
        reasoning_parser: SGLang's name of the model's reasoning parser.
        hidden_size: Dimension of a hidden state; 0 if requests cannot have them returned.
        image_bytes: Maximum bytes of the images of a step, as in the driver; 0 for text models.
        media_bytes: Maximum bytes of images and `input_embeds` together, which share one budget.
        engine: The library of the drivers, `sglang` or `vllm`.
        returns_embeddings: Whether the model returns embeddings, and no text.
        decode_log_interval: Steps from one `Decode batch` line of the log to the next.
    """

    model: Path
    tokenizer: Path | None
    runtime: dict[str, Any]
    sampling: Mapping[str, Any]
    speculates: bool
    context_length: int | None
    adapters: tuple[AdapterPath, ...] = ()
    max_adapters: int = 0
    reasoning_parser: str | None = None
    returns_embeddings: bool = False
    decode_log_interval: int = DECODE_LOG_INTERVAL
    hidden_size: int = 0
    image_bytes: int = 0
    media_bytes: int = 0
    engine: str = "sglang"

    def check_devices(self) -> None:
        """Raise StartError if a GPU of a rank does not exist, before anything is loaded."""
        check_gpus(self.runtime["devices"])


class _Library(NamedTuple):
    """The inference library of the drivers, as its arguments are parsed."""

    package: str
    """What a driver runs by ``python -m``."""
    rules: ConfigRules
    served: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Checks the names of arguments, and returns those that have an effect, by our names."""
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    """The table `[driver.options]`."""


def parse_arguments(given: Mapping[str, Any]) -> EngineArguments:
    """Parse keyword arguments, and download the model if it is not local.

    Args:
        given: Arguments by name; None means the default.

    Raises:
        Unsupported: This package does not support a feature of SGLang.
        ConfigError: An argument is unknown or wrong, or the model does not exist.
    """
    values = {name: value for name, value in given.items() if value is not None}
    engine = engine_of(values)
    values.pop("engine", None)
    values = with_head_folder(_LIBRARIES[engine].served(values))
    _check_grammar_backend(values.get("grammar_backend", "llguidance"))
    _check_limits(values.get("request_limits", {}))
    _check_without_model(values, engine)
    # Weights last: wrong arguments are reported before the download.
    model = model_folder(values, with_weights=False)
    if load_format_of(values) == LOAD_FORMAT:
        # It is converted.
        values = {**values, "model_path": str(model), "load_format": "auto"}
    parsed = _parsed(values, model, engine)
    if values.get("load_format") == "dummy":
        return parsed
    complete = model_folder(values, with_weights=True)
    # The downloaded commit may be later than that of the cached configuration.
    return parsed if complete == model else _parsed(values, complete, engine)


def engine_of(values: Mapping[str, Any]) -> str:
    """The library of the drivers: SGLang, unless the argument `engine` names another.

    Raises:
        ConfigError: It names none.
    """
    engine = values.get("engine", "sglang")
    if not isinstance(engine, str) or engine not in _LIBRARIES:
        raise invalid_value("`engine`", engine, "one of " + ", ".join(_LIBRARIES))
    return engine


def known_arguments(engine: str) -> set[str]:
    """The names of all arguments of an engine, also of those that are refused with a reason."""
    if engine == "vllm":
        return vllm_names()
    return {*SCHEDULER, *READ, *OWN, *NO_EFFECT, *valid_names(), *SERVER_ARGS}


def _check_without_model(values: Mapping[str, Any], engine: str) -> None:
    """Check what needs no model, before one is downloaded or converted.

    Raises:
        Unsupported: This package does not support a feature of SGLang.
        ConfigError: An argument is wrong.
    """
    library = _LIBRARIES[engine]
    device = _devices(values)[0]
    options = library.options(values)
    if load_format_of(values) == LOAD_FORMAT:
        del options["load_format"]
    library.rules.parse_options(options, device)
    check_scheduler(values)
    returns_hidden_states(values)
    for name in _JSON_EXAMPLES:
        _json_object(values, name)
    parse_paths(values.get("lora_paths", ()))
    _reasoning_parser(values.get("reasoning_parser"))


def _parsed(values: Mapping[str, Any], model: Path, engine: str) -> EngineArguments:
    """Validate the arguments against the model's configuration."""
    library = _LIBRARIES[engine]
    devices = _devices(values)
    kind = devices[0]
    options = library.options(values)
    checked = library.rules.parse_options(options, kind)
    hf_config = library.rules.override(load_hf_config(model), checked)
    library.rules.check_model(hf_config, checked, values.get("tp_size", 1))
    if engine == "sglang":
        check_stored_format(hf_config, kind)
    embeds = returns_embeddings(hf_config, is_embedding=checked.is_embedding)
    if engine == "sglang" and not embeds and _EMBEDS not in options:
        # Models that return embeddings take tokens alone.
        options[_EMBEDS] = _EMBEDS_BYTES
        checked = replace(checked, max_input_embeds_bytes=_EMBEDS_BYTES)
    taken = {*SCHEDULER, *OWN} - {"devices"}
    runtime: dict[str, Any] = {name: values[name] for name in taken & values.keys()}
    runtime |= {
        "model": str(model),
        "python": sys.executable,
        "driver_package": library.package,
        "devices": devices,
        "replicas": values.get("dp_size", 1),
        "tensor_parallel_size": values.get("tp_size", 1),
        "dtype": _dtype(values.get("dtype", "auto"), hf_config, kind),
        "seed": values.get("random_seed", 42),
        "options": options,
    }
    chunk = runtime.pop("chunked_prefill_size", options.get("max_num_batched_tokens", -1))
    if chunk != -1:
        runtime["chunked_prefill_size"] = chunk
    elif not kind.startswith("cpu"):
        # The chunk of a large GPU; the driver of a smaller one splits the step.
        runtime["chunked_prefill_size"] = LARGE_CHUNK_TOKENS
    runtime |= preemption(values)
    if "max_prefill_tokens" in values:
        # Of all prefill chunks of one step, as in SGLang.
        most = runtime.get("chunked_prefill_size", CHUNK_TOKENS["cpu"])
        runtime["chunked_prefill_size"] = min(most, values["max_prefill_tokens"])
    if engine == "vllm":
        runtime["library_path"] = os.environ.get(LIBRARY_FOLDER) or None
    if embeds and _needs_whole_prompts(model):
        # The states of a cached prefix are gone.
        runtime["disable_radix_cache"] = True
    if not is_0517():
        # 0.5.17 looks at the length first.
        runtime["stop_before_length"] = True
    if returns_hidden_states(values):
        runtime["hidden_size"] = hidden_size(hf_config)
    if checked.enable_custom_logit_processor:
        runtime["enable_custom_logit_processor"] = True
    if "max_total_tokens" in values:
        runtime["max_total_pages"] = max(1, values["max_total_tokens"] // checked.page_size)
    image_bytes = checked.max_image_tokens * image_token_bytes(hf_config)
    return EngineArguments(
        model=model,
        tokenizer=None if values.get("skip_tokenizer_init") else tokenizer_folder(values, model),
        runtime=runtime,
        sampling=_json_object(values, "preferred_sampling_params"),
        speculates=checked.drafts != "off",
        context_length=checked.context_length,
        adapters=parse_paths(values.get("lora_paths", ())),
        # A driver on vLLM may keep one more than it is told to.
        max_adapters=values.get("max_cpu_loras") or checked.max_loaded_loras
        if checked.enable_lora
        else 0,
        reasoning_parser=_reasoning_parser(values.get("reasoning_parser")),
        returns_embeddings=embeds,
        decode_log_interval=values.get("decode_log_interval", DECODE_LOG_INTERVAL),
        hidden_size=runtime.get("hidden_size", 0),
        image_bytes=image_bytes,
        media_bytes=image_bytes or checked.max_input_embeds_bytes,
        engine=engine,
    )


def _needs_whole_prompts(model: Path) -> bool:
    """Whether an embedding is pooled from all states of a prompt."""
    try:
        return read_pooling(model).needs_all_states
    except (OSError, ValueError, AttributeError):
        # The driver refuses it, with the reason.
        return False


def returns_hidden_states(values: Mapping[str, Any]) -> bool:
    """Whether requests may have hidden states returned, by either of SGLang's two settings.

    Raises:
        ConfigError: One has a wrong value.
    """
    enabled = values.get("enable_return_hidden_states", False)
    if not isinstance(enabled, bool):
        raise invalid_value("`enable_return_hidden_states`", enabled, "True or False")
    mode = values.get("return_hidden_states_mode")
    if mode is not None and mode not in _HIDDEN_STATES_MODES:
        expected = "one of " + ", ".join(_HIDDEN_STATES_MODES)
        raise invalid_value("`return_hidden_states_mode`", mode, expected)
    return enabled or mode is not None


def _served(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that have no effect.

    Raises:
        ConfigError: One is unknown.
        Unsupported: One is not served.
    """
    known = {*SCHEDULER, *READ, *OWN, *NO_EFFECT, *valid_names()}
    for name, value in values.items():
        if name in known:
            continue
        field = SERVER_ARGS.get(name)
        if field is None:
            raise unknown_argument(name, {*known, *SERVER_ARGS})
        if field.owner is not None and field.owner != "key":
            why = UNSERVED_BY_ENGINE.get(name) or UNSERVED_REASONS.get(
                field.owner, "the driver decides it"
            )
            raise Unsupported(
                f"the argument `{name}` = {quoted(value)} is not served: {why}", f"remove `{name}`"
            )
    for line in no_effect_lines(values):
        logger.warning("the argument %s", line)
    return {name: value for name, value in values.items() if name not in NO_EFFECT}


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The table `[driver.options]`: the driver's options, and settings of SGLang."""
    taken = {*SCHEDULER, *READ, *OWN}
    options = {name: value for name, value in values.items() if name not in taken or name in BOTH}
    # As in SGLang, remote code is opt-in.
    options.setdefault("trust_remote_code", False)
    if values.get("lora_paths"):
        # As in SGLang, unless adapters are disabled explicitly.
        options.setdefault("enable_lora", True)
        # As in SGLang; smaller ranks keep the default, for adapters that are loaded later.
        largest = largest_rank(parse_paths(values["lora_paths"]))
        if largest > parse_options({}, "cpu").max_lora_rank:
            options.setdefault("max_lora_rank", largest)
    return options | common_options(values, tuple(DRAFTERS))


_LIBRARIES: Final[Mapping[str, _Library]] = MappingProxyType(
    {
        "sglang": _Library("pie_driver_sglang", SGLANG_RULES, _served, _options),
        "vllm": _Library("pie_driver_vllm", VLLM_RULES, vllm_served, vllm_options),
    }
)


def _devices(values: Mapping[str, Any]) -> list[str]:
    ranks, replicas = values.get("tp_size", 1), values.get("dp_size", 1)
    for name, count in (("tp_size", ranks), ("dp_size", replicas)):
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 64:
            raise ConfigError(f"`{name}` is {quoted(count)}", f"set `{name}` from 1 to 64")
    needed = ranks * replicas
    for name, least in (("base_gpu_id", 0), ("gpu_id_step", 1)):
        require_integer(values, name, least)
    listed = values.get("devices")
    if listed is None:
        device = values.get("device") or ("cpu" if prefers_cpu() or not has_gpu() else "cuda")
        listed = _numbered(device, needed, values)
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str | bytes)
    if not is_list or len(listed) != needed or not all(isinstance(one, str) for one in listed):
        raise ConfigError(
            f"`devices` is {quoted(listed)}, but `tp_size` times `dp_size` is {needed}",
            f"list {needed} devices, as `cuda:0`",
        )
    return list(listed)


def _numbered(device: str, needed: int, values: Mapping[str, Any]) -> list[str]:
    if device == "cpu":
        return ["cpu", *(f"cpu:{number}" for number in range(1, needed))]
    if device != "cuda":
        kind = Unsupported if device in _OTHER_DEVICES else ConfigError
        raise kind(
            f"`device` is {quoted(device)}, expected `cuda` or `cpu`",
            "name single GPUs by `devices` or `base_gpu_id`",
        )
    first, step = values.get("base_gpu_id", 0), values.get("gpu_id_step", 1)
    return [f"cuda:{first + step * number}" for number in range(needed)]


def _dtype(name: Any, hf_config: Mapping[str, Any], device: str) -> str:
    """The activation dtype, as SGLang resolves it on a GPU."""
    if isinstance(name, str):
        name = _DTYPE_ALIASES.get(name.lower(), name.lower())
    if name == "auto":
        # Half precision is emulated on most CPUs.
        return "float32" if device.startswith("cpu") else auto_dtype(hf_config)
    if name not in ACTIVATION_DTYPES:
        raise ConfigError(
            f"`dtype` is {quoted(name)}, expected auto or one of {', '.join(ACTIVATION_DTYPES)}",
            'set `dtype="auto"`, or remove it',
        )
    return str(name)


def _check_limits(limits: Any) -> None:
    try:
        _core.check_request_limits(limits)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"`request_limits` is {quoted(limits)}: {error}",
            'e.g. `request_limits={"stop_strings": 5000}`; docs/limits.md lists them',
        ) from None


def _check_grammar_backend(name: Any) -> None:
    if name in _OTHER_GRAMMAR_BACKENDS:
        logger.warning("`grammar_backend` is %s: llguidance compiles the grammars", quoted(name))
    elif name == "none":
        raise Unsupported(
            "`grammar_backend` is 'none': requests with a grammar are always served, by llguidance",
            "remove `grammar_backend`",
        )
    elif name != "llguidance":
        raise ConfigError(
            f"`grammar_backend` is {quoted(name)}",
            f"expected one of llguidance, {', '.join(_OTHER_GRAMMAR_BACKENDS)}",
        )


def _reasoning_parser(name: Any) -> str | None:
    """Validate the name; None for `auto`, which SGLang's server resolves."""
    if name in (None, "auto"):
        return None
    reasoning_end(str(name))
    return str(name)


def _json_object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    text = values.get(name)
    if text is None:
        return {}
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"`{name}` is {quoted(text)}, expected a JSON object",
            f"e.g. `{name}='{_JSON_EXAMPLES[name]}'`",
        )
    return found
