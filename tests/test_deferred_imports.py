"""`torch.compile` in imports: its compiler is imported when it is used, and only then."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

LIMIT_S = 180.0
SCRIPT = """
import json, sys
import torch
from pie_driver_sglang.backends.deferred_imports import deferred_compiler
with deferred_compiler():
    @torch.compile(backend="eager")
    def add(x):
        return x + 1
    constant = torch._dynamo.assume_constant_result(lambda: 1)
before = "torch._dynamo" in sys.modules
result = add(torch.zeros(1)).item()
after = "torch._dynamo" in sys.modules
with_mark = bool(getattr(constant, "_dynamo_marked_constant", False))
print(json.dumps([before, result, after, with_mark]))
"""
CLASS = """
import torch
from pie_driver_sglang.backends.deferred_imports import deferred_compiler
with deferred_compiler():
    @torch.compiler.disable
    class Marked:
        pass
assert isinstance(Marked(), Marked)
"""


MARKS = """
import os, sys
import torch
from pie_driver_sglang.backends.deferred_imports import deferred_compiler
calls = []
with deferred_compiler():
    @torch.compiler.assume_constant_result
    def constant():
        return 2
    @torch.compiler.allow_in_graph
    def whole(x):
        # Dynamo does not trace it.
        os.getpid()
        return x * 2
    @torch.compiler.disable
    def disabled(x):
        calls.append(torch.compiler.is_compiling())
        return x + 1
    @torch.compile(backend="eager", fullgraph=True)
    def inner(x):
        return x - 1
assert "torch._dynamo" not in sys.modules
ones = torch.ones(2)
assert torch.equal(disabled(ones), ones + 1)
# Not one of the deferred ones: nothing else tells when the marks are needed.
outer = torch.compile(lambda x: whole(inner(x)) + constant(), backend="eager", fullgraph=True)
assert torch.equal(outer(3 * ones), 6 * ones)
breaks = torch.compile(lambda x: disabled(x) * 2, backend="eager")
assert torch.equal(breaks(ones), 4 * ones)
assert torch.equal(inner(ones), ones - 1)
assert calls == [False, False], calls
try:
    torch.compile(lambda x: disabled(x) * 2, backend="eager", fullgraph=True)(ones)
except torch._dynamo.exc.Unsupported:
    pass
else:
    raise AssertionError("it is compiled in spite of its mark")
assert constant._dynamo_marked_constant
"""


def run(script: str, **environment: str) -> str:
    kept = {name: text for name, text in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.engine
@pytest.mark.parametrize("disabled", ["0", "1"])
def test_the_compiler_is_imported_by_the_first_call_unless_it_is_disabled(disabled: str) -> None:
    used = disabled == "0"
    assert json.loads(run(SCRIPT, TORCH_COMPILE_DISABLE=disabled)) == [False, 1.0, used, used]


@pytest.mark.engine
def test_a_class_without_compilation_stays_a_class() -> None:
    run(CLASS)


@pytest.mark.engine
def test_marks_of_imports_hold_for_all_that_is_compiled_later() -> None:
    """As without the deferral: `torch.compile` is called by others than the marked functions."""
    run(MARKS, TORCH_COMPILE_DISABLE="0")
