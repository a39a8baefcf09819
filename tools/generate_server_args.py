"""Write which settings of the installed SGLang a user may pass through.

It also lists SGLang's flags, and the architectures that it has classes for. The list of the oldest
supported version is whole, `pie_driver_sglang/config/server_args_v0517.py`; one of a later version
says what differs from the version before. `config/server_args.py` chooses by the installed version.

Run it with an interpreter of each supported version, from the oldest to the newest, after a change
of the versions or of the rules below::

    export PYTHONPATH=python                        # the definitions in these sources
    python tools/generate_server_args.py            # rewrite the list
    python tools/generate_server_args.py --check    # fail if the checked-in list is stale

The rules are the only place that decides who sets a field. A field is decided by the first of: an
option of its name in `config/options.py`, its name in `BY_NAME`, a prefix in `BY_PREFIX`, SGLang's
own namespace for it in `BY_NAMESPACE`. `None` means that the user may set it; a word names the
owner, and `config/option_checks.py` holds the sentence that the user reads for each owner.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from generated_file import literal, render_setting, write_or_check

from pie_driver_sglang.config.options import OPTIONS
from pie_driver_sglang.config.server_arg import Flag, ServerArgList
from pie_driver_sglang.config.server_args import LISTS
from pie_driver_sglang.config.sglang_versions import adapter_version

CONFIG: Final = Path(__file__).parent.parent / "python" / "pie_driver_sglang" / "config"
VERSION: Final = adapter_version().sglang
"""The version whose list this is; an interpreter without SGLang only reads it."""
TARGET: Final = CONFIG / f"server_args_v{VERSION.replace('.', '')}.py"


def _owner(owner: str | None, *names: str) -> dict[str, str | None]:
    return dict.fromkeys(names, owner)


BY_NAME: Final[Mapping[str, str | None]] = {
    **_owner("dtype", "dtype"),
    **_owner("seed", "random_seed"),
    **_owner("capacity", "max_running_requests", "max_total_tokens", "max_mamba_cache_size"),
    **_owner("graphs", "cuda_graph_config", "cuda_graph_max_bs_decode"),
    **_owner("graphs", "cuda_graph_backend_decode", "cuda_graph_backend_prefill"),
    **_owner("graphs", "debug_cuda_graph", "disable_cuda_graph_padding"),
    **_owner("graphs", "enable_profile_cuda_graph"),
    **_owner("graphs", "enable_amd_monokernel", "enable_nvidia_megakernel"),
    **_owner("graphs_off", "disable_decode_cuda_graph", "disable_prefill_cuda_graph"),
    **_owner("snapshot", "model_path", "revision", "download_dir", "delete_ckpt_after_loading"),
    **_owner("snapshot", "engine_info_bootstrap_port", "modelexpress_config"),
    **_owner("snapshot", "startup_weight_load_mode"),
    **_owner("server", "checkpoint_engine_wait_weights_before_ready"),
    **_owner("speculative", "decrypted_draft_config_file", "enable_linear_replayssm_spec"),
    **_owner("speculative", "enable_multi_layer_eagle", "linear_attn_verify_backend"),
    **_owner("sampling", "grammar_backend", "sampling_backend", "enable_watermark"),
    **_owner("prefix_cache", "mamba_radix_cache_strategy", "uses_mamba_radix_cache"),
    **_owner("prefix_cache", "mamba_max_states_per_path", "mamba_track_interval"),
    **_owner("prefix_cache", "enable_int8_mamba_checkpoint", "int8_mamba_ckpt_size"),
    **_owner("prefix_cache", "enable_decoder_swa_bounded_replay"),
    **_owner("prefix_cache", "enable_encoder_swa_bounded_replay"),
    **_owner("pool", "swa_full_tokens_ratio", "disable_hybrid_swa_memory"),
    **_owner("pool", "prefill_only_disable_kv_cache", "enable_page_major_kv_layout"),
    **_owner("pool", "enable_unified_memory", "mamba_full_memory_ratio"),
    **_owner("pool", "c128_page_size", "qsa_indexer_dtype", "swa_prefix_tails"),
    **_owner("custom", "custom_sigquit_handler", "stat_loggers"),
    **_owner(None, "lora_eviction_policy", "max_lora_chunk_size"),
    # Allowed although the rest of their namespace is not: they act inside the model.
    **_owner(None, "disable_chunked_prefix_cache", "enable_fp32_lm_head", "enable_tf32_matmul"),
    **_owner(None, "debug_tensor_dump_input_file", "debug_tensor_dump_layers"),
    **_owner(None, "debug_tensor_dump_output_folder", "forward_hooks"),
    **_owner(None, "enable_layerwise_nvtx_marker"),
    **_owner(None, "disable_flashinfer_cutlass_moe_fp4_allgather", "disable_shared_experts_fusion"),
    **_owner(None, "enable_fused_moe_sum_all_reduce", "enforce_shared_experts_fusion"),
    **_owner(None, "disable_custom_all_reduce"),
    **_owner(None, "flashinfer_mxfp4_moe_precision", "moe_runner_backend"),
}

BY_PREFIX: Final[Mapping[str, str | None]] = {
    "decoupled_spec_": "speculative",
    "kt_": None,
    "remote_instance_": "snapshot",
    "tokenizer_": "tokenizer",
    "watermark_": "sampling",
    "detokenizer_": "tokenizer",
    "weight_cache_": "snapshot",
}

BY_NAMESPACE: Final[Mapping[str, str | None]] = {
    "device": "device",
    "disagg": "disaggregation",
    "exec.comm": "parallel",
    "exec.deterministic": None,
    "exec.dllm": "tokens",
    "exec.features": "server",
    "exec.graph": None,
    "exec.kernel": None,
    "exec.mamba": None,
    "exec.moe": "parallel",
    "exec.offload": "offload",
    "exec.overlap": "schedule",
    "lora": "adapters",
    "memory": "prefix_cache",
    "mm": "media",
    "model": None,
    "observability": "observability",
    "parallel": "parallel",
    "schedule": "schedule",
    "serving": "server",
    "spec": "speculative",
}

#: SGLang's lists of choices that plugins may extend (its `add_*_choices` functions): a value
#: outside such a list is not an error by itself.
OPEN_CHOICES: Final = (
    "ATTENTION_BACKEND_CHOICES",
    "FP4_GEMM_RUNNER_BACKEND_CHOICES",
    "FP8_GEMM_RUNNER_BACKEND_CHOICES",
    "LINEAR_ATTN_KERNEL_BACKEND_CHOICES",
    "LOAD_FORMAT_CHOICES",
    "MOE_RUNNER_BACKEND_CHOICES",
    "QUANTIZATION_CHOICES",
    "RL_ON_POLICY_TARGET_CHOICES",
)

HEADER: Final = '''\
"""What {which} of SGLang's `ServerArgs`, its flags and its architectures.

Generated by `tools/generate_server_args.py` from SGLang {version}. Do not edit.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from pie_driver_sglang.config.server_arg import Flag, ServerArg, ServerArgList

# fmt: off
CHANGES: Final = ServerArgList(
    version="{version}",
    fields=MappingProxyType({{
{fields}    }}),
    architectures=frozenset({{
{architectures}    }}),
    gone=frozenset({gone}),
    flags=MappingProxyType({{
{flags}    }}),
)
'''


class FieldInfo(typing.NamedTuple):
    """What the generator reads off one dataclass field."""

    name: str
    annotation: Any
    namespace: str
    choices: tuple[str, ...]
    open_choices: bool
    default: Any


def read_parser() -> argparse.ArgumentParser:
    """SGLang's parser of its command line."""
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def read_flags(parser: argparse.ArgumentParser) -> dict[str, Flag]:
    """The flags of SGLang's parser, by their names."""
    return {
        name: _read_flag(name, action)
        for action in parser._actions
        for name in action.option_strings
    }


def _read_flag(name: str, action: argparse.Action) -> Flag:
    nargs = "" if action.nargs is None else str(action.nargs)
    if nargs != "0":
        return Flag(action.dest, nargs)
    if isinstance(action, argparse.BooleanOptionalAction):
        return Flag(action.dest, nargs, not name.startswith("--no-"))
    # A deprecated flag without effect sets nothing.
    return Flag(action.dest, nargs, action.const)


def read_fields() -> list[FieldInfo]:
    """Import SGLang (about ten seconds) and read the fields of `ServerArgs`."""
    module = importlib.import_module("sglang.srt.server_args")
    namespaces = importlib.import_module("sglang.srt.arg_groups.arg_utils").namespace_of(
        module.ServerArgs
    )
    open_lists = [getattr(module, name) for name in OPEN_CHOICES]
    hints = typing.get_type_hints(module.ServerArgs, include_extras=True)
    parser = read_parser()
    return [
        _read_field(name, hint, namespaces.get(name, ""), open_lists, parser.get_default(name))
        for name, hint in hints.items()
        # What SGLang notes of its own resolution is no setting.
        if not name.startswith("_")
    ]


def _read_field(
    name: str, hint: Any, namespace: str, open_lists: list[list[str]], default: Any
) -> FieldInfo:
    raw_choices = None
    for extra in getattr(hint, "__metadata__", ()):
        if type(extra).__name__ == "Arg":
            raw_choices = extra.choices
    annotation = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    words = raw_choices if raw_choices is not None else _literal_words(annotation)
    if any(not isinstance(word, str | None) for word in words):
        words = ()
    is_open = any(_extends(raw_choices, known) for known in open_lists)
    words = tuple(sorted(filter(None, words)))
    # Of a deprecated name of the flag.
    default = None if default == argparse.SUPPRESS else default
    return FieldInfo(name, annotation, namespace, words, is_open, default)


def _extends(choices: Any, known: list[str]) -> bool:
    return choices is known or (isinstance(choices, list) and set(known) <= set(choices))


def _literal_words(annotation: Any) -> Iterable[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return [word for part in typing.get_args(annotation) for word in _literal_words(part)]


def describe_type(annotation: Any) -> str:
    """Name what TOML may hold for a Python annotation; `any` if TOML has no such value."""
    names = {name for part in _alternatives(annotation) if (name := _describe_one(part))}
    return " | ".join(sorted(names)) or "any"


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _describe_one(annotation: Any) -> str | None:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (bool, int, float, str):
        return str(annotation.__name__)
    if origin is typing.Literal:
        kinds = {type(value).__name__ for value in arguments if value is not None}
        return kinds.pop() if len(kinds) == 1 else None
    if dict in (annotation, origin) and type not in arguments:
        return "table"
    if origin in (list, set):
        item = _describe_one(arguments[0])
        return f"list[{item}]" if item else None
    return None


def decide_owner(field: FieldInfo) -> str | None:
    """Apply the rules above to one field.

    Raises:
        LookupError: The field's namespace is new: add it to `BY_NAMESPACE`.
    """
    if field.name in OPTIONS:
        return "key"
    if field.name in BY_NAME:
        return BY_NAME[field.name]
    for prefix, owner in BY_PREFIX.items():
        if field.name.startswith(prefix):
            return owner
    if field.namespace not in BY_NAMESPACE:
        raise LookupError(f"no rule for `{field.name}` in SGLang's namespace `{field.namespace}`")
    return BY_NAMESPACE[field.namespace]


def render() -> str:
    """Return the text of the generated module.

    Raises:
        LookupError: A rule is missing, or names a field that no version of SGLang has.
    """
    before = _version_before()
    fields = {field.name: field for field in sorted(read_fields())}
    stale = BY_NAME.keys() - fields.keys() - {name for x in LISTS.values() for name in x.fields}
    if stale:
        raise LookupError(f"rules for fields that no version has: {sorted(stale)}")
    rows = {name: _render_field(field) for name, field in fields.items()}
    known = {
        name: render_setting(
            name,
            arg.type,
            arg.owner,
            arg.choices,
            open_choices=arg.open_choices,
            default=arg.default,
        )
        for name, arg in before.fields.items()
    }
    classes, flags = read_architectures(), read_flags(read_parser())
    gone = {*before.fields} - fields.keys() | before.architectures - classes
    gone |= before.flags.keys() - flags.keys()
    return HEADER.format(
        which=f"differs from SGLang {before.version}" if before.version else "is there",
        version=VERSION,
        fields="".join(row for name, row in rows.items() if known.get(name) != row),
        architectures=_names(classes - before.architectures),
        gone=f"{{\n{_names(gone)}    }}" if gone else "",
        flags="".join(
            _render_flag(name, flag)
            for name, flag in sorted(flags.items())
            if before.flags.get(name) != flag
        ),
    )


def _version_before() -> ServerArgList:
    """The list that this one changes."""
    older = [*LISTS.values()][: [*LISTS].index(VERSION)]
    return older[-1] if older else ServerArgList("", {}, frozenset())


def _names(names: Iterable[str]) -> str:
    return "".join(f'        "{name}",\n' for name in sorted(names))


def read_architectures() -> set[str]:
    """The classes that SGLang's model files enter into its registry, without importing them."""
    package = importlib.import_module("sglang").__path__[0]
    names: set[str] = set()
    for path in Path(package, "srt", "models").glob("*.py"):
        for statement in ast.parse(path.read_bytes()).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if any(isinstance(name, ast.Name) and name.id == "EntryClass" for name in targets):
                names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names - {"EntryClass"}


def _render_field(field: FieldInfo) -> str:
    owner, described = decide_owner(field), describe_type(field.annotation)
    if owner is None and described == "any":
        raise LookupError(f"`{field.name}` has no TOML type: give it an owner")
    return render_setting(
        field.name,
        described,
        owner,
        field.choices,
        open_choices=field.open_choices,
        default=field.default,
    )


def _render_flag(name: str, flag: Flag) -> str:
    defaults = Flag._field_defaults.values()
    while len(flag) > 1 and flag[-1] == [None, *defaults][len(flag) - 1]:
        flag = flag[:-1]  # type: ignore[assignment]
    line = f'        "{name}": Flag({", ".join(map(literal, flag))}),\n'
    return (
        line
        if len(line) <= 101
        else line.replace("Flag(", "Flag(\n            ")[:-3] + ("\n        ),\n")
    )


def main() -> int:
    """Write the list, or compare it with `--check`. Returns the exit status."""
    return write_or_check(__doc__, TARGET, render, Path(__file__).name)


if __name__ == "__main__":
    raise SystemExit(main())
