"""Implements `SettingsCompat`: `ServerArgs` keeps what was passed in.

Resolved values are declarations of the record until it is published. Publishing copies them into
namespaces, which are what SGLang reads, and which alone can be changed from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.runtime_context import SpawnRanks, get_context
from sglang.srt.runtime_context import publish as sglang_publish
from sglang.srt.server_args import ServerArgs

_SOURCE: Final = "pie_driver_sglang"
"""Who changes a setting, for SGLang's log."""


def resolve(args: ServerArgs) -> None:
    """By declarations; the fields stay as they are."""
    args.resolve_once()


def check_lora(args: ServerArgs) -> None:
    """Before they are published: it declares, too."""
    check_lora_server_args(args)


def publish(args: ServerArgs, rank: int, gpu_id: int, replica: int | None = None) -> None:
    """Publishes the settings with the rank; a second call would drop what was changed."""
    ranks = SpawnRanks(world_rank=rank, dp_rank=replica, gpu_id=gpu_id)
    sglang_publish(args, role="scheduler", ranks=ranks)


def change(args: ServerArgs, fields: Mapping[str, Any]) -> None:
    """Changes the namespaces, which must be those of these settings."""
    context = get_context()
    if context.server_args is not args:
        raise RuntimeError(f"settings are not published, so {sorted(fields)} cannot be changed")
    context.override(_SOURCE, **fields)


class _Values:
    """Reads the published namespaces, or before that what resolution has declared."""

    def __init__(self, args: ServerArgs) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask before there is a record.
        if name.startswith("__") or name == "_args":
            raise AttributeError(name)
        context = get_context()
        if _is_published(self._args) and name in type(self._args).__struct_fields__:
            return context.config_leaf(name)
        return getattr(resolving_view(self._args), name)


def _is_published(args: ServerArgs) -> bool:
    try:
        return get_context().server_args is args
    except ValueError:
        # Nothing is.
        return False


def values(args: ServerArgs) -> ServerArgs:
    """A view: a plain attribute of the record still answers, with the raw value."""
    view: Any = _Values(args)
    return view


def attention_backends(args: ServerArgs) -> tuple[str, str]:
    """The backends of prefills and of decodes."""
    prefill, decode = attention_backends_of(values(args))
    return prefill, decode


def initialize_kernels(args: ServerArgs) -> None:
    """Each choice is made by the published namespaces."""
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_fp4_gemm_config()
    initialize_bf16_gemm_config()
