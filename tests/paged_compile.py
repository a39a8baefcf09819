"""Compiles what decode attention launches for a GPU (compute capability 9.0) on a machine without.

The interpreter runs the kernels as Python, which takes what Triton's compiler refuses.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pie_driver_sglang.sglang.masked_torch import Rule
from pie_driver_sglang.sglang.paged_triton import Cut, Rows, attend, share, tuning

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
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        specialized = not kernel.params[number].do_not_specialize
        aligned = isinstance(value, int) and specialized and value % 16 == 0
        if isinstance(value, torch.Tensor) or aligned:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=options)


def launches(
    dim: int,
    group: int,
    pool: torch.dtype,
    queries: torch.dtype,
    page: int,
    rule: Rule,
    window: int,
) -> list[Any]:
    """Everything that one layer launches, compiled."""
    compiled = []

    def record(kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        compiled.append(compile_launch(kernel, *args, **options))

    lengths = torch.tensor([100, 7, 3])
    rows = Rows(torch.zeros(4, 512, dtype=torch.int32), torch.arange(3), lengths)
    storage = torch.zeros(64, 8, dim).to(pool)
    q = torch.zeros(3, 8 * group, dim, dtype=queries)
    with mock.patch.object(JITFunction, "run", record):
        shares = share(rows, Cut(tuning(dim, group, pool.itemsize), 8, window), 132)
        attend(q, storage, storage, torch.empty_like(q), rows, shares, rule, page)
    return compiled


CASES: list[tuple[int, int, torch.dtype, torch.dtype, int, Rule, int]] = [
    (128, 2, torch.bfloat16, torch.bfloat16, 16, Rule(0.1), -1),
    (128, 5, torch.bfloat16, torch.bfloat16, 1, Rule(0.1), 100),
    (64, 71, torch.float16, torch.float16, 64, Rule(0.1, cap=3.0), -1),
    (80, 5, torch.float8_e4m3fn, torch.bfloat16, 16, Rule(0.1, sinks=torch.zeros(40)), -1),
    (256, 1, torch.float8_e5m2, torch.bfloat16, 24, Rule(0.1), 0),
    (128, 5, torch.float32, torch.float32, 16, Rule(0.1), -1),
]


if __name__ == "__main__":
    for case in CASES:
        names = []
        for kernel in launches(*case):
            names.append(kernel.name)
            if kernel.name == "_attend":
                loop = kernel.asm["ttgir"].partition("scf.while")[2].partition("scf.for")[2]
                assert "async_copy_global_to_local" in loop, "KV is not loaded ahead"
                # Two programs have room on a multiprocessor of an H100 or H200.
                assert 2 * (kernel.metadata.shared + 1024) <= 228 * 1024, kernel.metadata.shared
                print(f"{kernel.metadata.shared} bytes of shared memory: {case[:5]}")
        assert names == ["_share", "_attend", "_merge"]
    print(f"{len(CASES)} layers compiled")
