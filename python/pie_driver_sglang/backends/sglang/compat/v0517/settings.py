"""Implements `SettingsCompat`: fields of `ServerArgs` are resolved when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.runtime_context import publish as sglang_publish
from sglang.srt.server_args import ServerArgs

_SOURCE: Final = "pie_driver_sglang"
"""Who changes a setting, for SGLang's log."""
_ROLE: Final = "scheduler"


def resolve(args: ServerArgs) -> None:
    """Nothing: they are resolved when they are made."""


def check_lora(args: ServerArgs) -> None:
    """By a method."""
    args.check_lora_server_args()


def publish(args: ServerArgs, rank: int, gpu_id: int, replica: int | None = None) -> None:
    """Publishes the settings; the rank is an argument of `ModelRunner`."""
    sglang_publish(args, role=_ROLE)


def change(args: ServerArgs, fields: Mapping[str, Any]) -> None:
    """Changes fields, and publishes them again: the namespaces are copies."""
    args.override(_SOURCE, **fields)
    sglang_publish(args, role=_ROLE)


def values(args: ServerArgs) -> ServerArgs:
    """The settings themselves."""
    return args


def attention_backends(args: ServerArgs) -> tuple[str, str]:
    """The backends of prefills and of decodes."""
    prefill, decode = args.get_attention_backends()
    return prefill, decode


def initialize_kernels(args: ServerArgs) -> None:
    """Each choice is made by the fields of the settings."""
    initialize_moe_config(args)
    initialize_fp8_gemm_config(args)
    initialize_fp4_gemm_config(args)
    initialize_bf16_gemm_config(args)
