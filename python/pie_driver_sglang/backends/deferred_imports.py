"""Leaves `torch.compile` out of imports: its compiler is imported when it is first used.

Dynamo, Inductor and SymPy are 1,000 modules, a third of SGLang's import. Decorators of functions
that are never called import them, and so do two modules for one name each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from types import FunctionType, ModuleType
from typing import Any, Final
from unittest import mock

_DYNAMO: Final = "torch._dynamo"
_DISABLED: Final = "TORCH_COMPILE_DISABLE"
_MARKS: Final = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators of `torch.compiler`."""
_DEFERRED: Final = (f"{_DYNAMO}.utils", f"{_DYNAMO}._trace_wrapped_higher_order_op")
"""Of what `torchvision.ops.roi_align` and `transformers.masking_utils` import a name."""


@contextlib.contextmanager
def deferred_compiler() -> Iterator[None]:
    """Within it, functions are decorated by `torch.compile` without importing the compiler."""
    if _DYNAMO in sys.modules:
        yield
        return
    import torch

    stubs = {name: _Deferred(name) for name in _DEFERRED}
    finder, dynamo = _Finder(stubs), _Dynamo()
    is_disabled = os.environ.get(_DISABLED) == "1"
    if is_disabled:
        # For good: where it is disabled, it still imports the compiler to leave functions alone.
        vars(torch)["compile"] = _compile_nothing
    compiles = _compile_nothing if is_disabled else _deferring(torch.compile, dynamo)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compiles))
        for name in _MARKS:
            stack.enter_context(mock.patch.object(torch.compiler, name, getattr(dynamo, name)))
        # `import torch._dynamo` replaces it.
        vars(torch)["_dynamo"] = dynamo
        sys.modules.update(stubs)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            finder.remove_stubs()
            if vars(torch)["_dynamo"] is dynamo:
                del vars(torch)["_dynamo"]


def _compile_nothing(model: Any = None, **options: Any) -> Any:
    """As `torch.compile` where it is disabled."""
    return functools.partial(_compile_nothing, **options) if model is None else model


class _Dynamo:
    """Stands for `torch._dynamo`, of which decorators that mark functions are used in imports."""

    def __init__(self) -> None:
        self._marked: list[tuple[str, Callable[..., Any]]] = []

    def allow_in_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Mark it before something is compiled."""
        self._marked.append(("allow_in_graph", function))
        return function

    def assume_constant_result(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Mark it before something is compiled."""
        self._marked.append(("assume_constant_result", function))
        return function

    def disable(self, function: Any = None, recursive: bool = True, **others: Any) -> Any:
        """As Dynamo's, to which classes are handed."""
        if function is None:
            return functools.partial(self.disable, recursive=recursive, **others)
        if isinstance(function, type):
            dynamo = importlib.import_module(_DYNAMO)
            return dynamo.disable(function, recursive=recursive, **others)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return function(*arguments, **keywords)

        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        return call

    def apply_marks(self) -> None:
        """Hand the marked functions to Dynamo."""
        marked, self._marked = self._marked, []
        for name, function in marked:
            getattr(importlib.import_module(_DYNAMO), name)(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_DYNAMO), name)


def _deferring(compile_now: Callable[..., Any], dynamo: _Dynamo) -> Callable[..., Any]:
    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled: list[Any] = []

        @functools.wraps(model)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not compiled:
                dynamo.apply_marks()
                compiled.append(compile_now(model, **options))
            return compiled[0](*arguments, **keywords)

        return call

    return compile_later


class _Deferred(ModuleType):
    """Stands for a module until one of its names is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            real = importlib.import_module(self.__name__)
            return getattr(real, name)(*arguments, **keywords)

        return call


class _Finder(MetaPathFinder):
    """Takes the stubs away before the package itself is imported."""

    def __init__(self, stubs: dict[str, _Deferred]) -> None:
        self._stubs = stubs

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Find nothing."""
        if name == _DYNAMO:
            self.remove_stubs()

    def remove_stubs(self) -> None:
        """Remove those that are still there."""
        for name, stub in self._stubs.items():
            if sys.modules.get(name) is stub:
                del sys.modules[name]
