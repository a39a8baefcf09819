"""Compiles launches of Triton kernels for compute capability 9.0 on a machine without a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

# It puts functions of its own in place of some of Triton's, which no kernel may call then.
import sglang.srt.utils.common  # noqa: F401
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from pie_driver_sglang.kernels.attention import (
    batch_invariant,
    paged_decode,
    single_decode,
    split_plan,
)
from pie_driver_sglang.kernels.comm import all_reduce_norm
from pie_driver_sglang.kernels.gemm import fp8_rows, linear, lora, norm_rope, small_m, tiled
from pie_driver_sglang.kernels.moe import experts, routing
from pie_driver_sglang.kernels.sampling import penalties, sampler, token_logprobs

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32",
    torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


def compile_launch(kernel: JITFunction[Any], *args: Any, **options: Any) -> Any:
    """Compiles a kernel for the arguments of a launch."""
    options = {key: value for key, value in options.items() if key not in ("grid", "warmup")}
    named = dict(zip(kernel.arg_names, args, strict=False)) | {
        key: options.pop(key) for key in list(options) if key in kernel.arg_names
    }
    constants = {
        param.name: named[param.name]
        for param in kernel.params
        if param.is_constexpr or named[param.name] is None
    }
    signature, attributes = {}, {}
    for number, (name, value) in enumerate(named.items()):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if isinstance(value, TensorDescriptor):
            block = list(value.block_shape)
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{block}>"
            continue
        if isinstance(value, tuple):
            signature[name] = tuple("*" + TYPES[each.dtype] for each in value)
            for index in range(len(value)):
                attributes[number, index] = [["tt.divisibility", 16]]
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        specialized = not kernel.params[number].do_not_specialize
        aligned = isinstance(value, int) and specialized and value % 16 == 0
        if isinstance(value, torch.Tensor) or aligned:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=options)


def recorded(launch: Callable[[], object]) -> list[Any]:
    """The kernels that are launched, compiled to be launched early."""
    compiled = []

    def record(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        compiled.append(compile_launch(kernel, *args, **options))

    early = {"PDL": True, "launch_pdl": True}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", record))
        modules = (split_plan, paged_decode, linear, lora, norm_rope, small_m, tiled, fp8_rows)
        modules += (
            batch_invariant,
            single_decode,
            experts,
            routing,
            all_reduce_norm,
            sampler,
            penalties,
            token_logprobs,
        )
        for module in modules:
            patches.enter_context(mock.patch.object(module, "pdl_options", lambda _: early))
        launch()
    return compiled


def check_order(kernel: Any, early: int | None = 0, *, leads: bool = False) -> None:
    """Before the previous kernel has ended nothing is touched, except by so many loads, or some."""
    before, wait, behind = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert wait, f"{kernel.name} does not wait"
    where = before if leads else behind
    assert "griddepcontrol.launch_dependents" in where, f"{kernel.name} holds up the next kernel"
    touches = re.findall(r"(?:ld|st|red|atom)(?:\.volatile)?\.global|cp\.async\.c[ag]", before)
    early = len(touches) if early is None else early
    assert touches == ["ld.global"] * early, f"{kernel.name}: {touches} before it may"
