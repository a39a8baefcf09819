"""Leaves `torch.compile` out of imports: its compiler is imported when it is first used.

Dynamo, Inductor and SymPy are 1,000 modules, a third of SGLang's import. Decorators of functions
that are never called import them, and so do two modules for one name each. What the decorators mark
is handed to Dynamo as soon as anything imports it, so that it compiles as if they had imported it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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
    dynamo = _Dynamo()
    finder = _Finder(stubs, dynamo)
    is_disabled = os.environ.get(_DISABLED) == "1"
    if is_disabled:
        # For good: where it is disabled, it still imports the compiler to leave functions alone.
        vars(torch)["compile"] = _compile_nothing
    compiles = _compile_nothing if is_disabled else _deferring(torch.compile)
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
            finder.remove_stubs()
            if vars(torch)["_dynamo"] is dynamo:
                del vars(torch)["_dynamo"]


def _compile_nothing(model: Any = None, **options: Any) -> Any:
    """As `torch.compile` where it is disabled."""
    return functools.partial(_compile_nothing, **options) if model is None else model


class _Dynamo:
    """Stands for `torch._dynamo`, of which decorators that mark functions are used in imports."""

    def __init__(self) -> None:
        self._marks: list[Callable[[ModuleType], object]] = []
        """What is done once Dynamo is imported, which is given."""
        self._dynamo: ModuleType | None = None
        """Dynamo, once it has run: its own imports mark functions, too."""

    def allow_in_graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As Dynamo's."""
        self._mark(lambda dynamo: dynamo.allow_in_graph(function))
        return function

    def assume_constant_result(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As Dynamo's."""
        self._mark(lambda dynamo: dynamo.assume_constant_result(function))
        return function

    def disable(self, function: Any = None, recursive: bool = True, **others: Any) -> Any:
        """As Dynamo's, to which classes are handed."""
        if function is None:
            return functools.partial(self.disable, recursive=recursive, **others)
        if isinstance(function, type) or self._dynamo is not None:
            dynamo = importlib.import_module(_DYNAMO)
            return dynamo.disable(function, recursive=recursive, **others)
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            return (disabled or [function])[0](*arguments, **keywords)

        def mark(dynamo: ModuleType) -> None:
            disabled.append(dynamo.disable(function, recursive=recursive, **others))
            # Dynamo compiles no frame of it, and breaks a graph that calls it.
            importlib.import_module(f"{_DYNAMO}.decorators").skip(call)

        self._mark(mark)
        return call

    def _mark(self, mark: Callable[[ModuleType], object]) -> None:
        if self._dynamo is None:
            self._marks.append(mark)
        else:
            mark(self._dynamo)

    def apply_marks(self, dynamo: ModuleType) -> None:
        """Hand to Dynamo, which has just been imported, what was marked."""
        self._dynamo = dynamo
        for mark in self._marks:
            mark(dynamo)
        self._marks.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_DYNAMO), name)


def _deferring(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile_later, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled: list[Any] = []

        @functools.wraps(model)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                # A part of what calls it, as where `torch.compile` is within `torch.compile`.
                return model(*arguments, **keywords)
            if not compiled:
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
    """Tells when Dynamo is imported. Before that it takes the stubs away."""

    def __init__(self, stubs: dict[str, _Deferred], dynamo: _Dynamo) -> None:
        self._stubs, self._dynamo = stubs, dynamo

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find Dynamo as the other finders do; it is told to `_Dynamo` when it has run."""
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        self.remove_stubs()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_mark(module: ModuleType) -> None:
                execute(module)
                self._dynamo.apply_marks(module)

            vars(spec.loader)["exec_module"] = execute_and_mark
        return spec

    def remove_stubs(self) -> None:
        """Remove those that are still there."""
        for name, stub in self._stubs.items():
            if sys.modules.get(name) is stub:
                del sys.modules[name]
