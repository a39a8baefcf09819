"""What names in sources of Python stand for, without importing them; for `check_compat.py`."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ASSEMBLED: Final = {
    "sglang.srt.runtime_context._ConfigBag": "sglang.srt.arg_groups.fields",
    "sglang.srt.server_args.ServerArgs": "sglang.srt.arg_groups.fields",
}
"""Classes whose fields are collected from classes of a package, in versions that have it."""
COMPLETE: Final = (
    "ABC",
    "Enum",
    "Generic",
    "IntEnum",
    "NamedTuple",
    "Protocol",
    "StrEnum",
    "Struct",
)
"""Bases whose classes say themselves what they have."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Thing(NamedTuple):
    """What a name stands for: where it is defined, and how."""

    module: str
    node: ast.AST
    """A module, class, function or assignment."""
    is_made: bool = False
    """Whether it is an object of the class, not the class itself."""

    @property
    def name(self) -> str:
        """As a reader of the list knows it."""
        return getattr(self.node, "name", self.module.rpartition(".")[2])


class Sources:
    """The sources of packages by the names of their modules."""

    def __init__(self, roots: dict[str, Path]) -> None:
        """Takes packages from folders, and others from where Python finds them."""
        self._roots = roots
        self.module = cache(self._module)
        self.names = cache(self._names)
        self.members = cache(self._members)

    def _module(self, name: str) -> ast.Module | None:
        top, *parts = name.split(".")
        if top not in self._roots:
            spec = importlib.util.find_spec(top)
            folders = spec.submodule_search_locations if spec else None
            self._roots[top] = Path(next(iter(folders))) if folders else Path("/nowhere")
        folder = self._roots[top].joinpath(*parts)
        for path in (folder / "__init__.py", folder.with_suffix(".py")):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
        return ast.Module([], []) if folder.is_dir() else None

    def _names(self, module: str) -> dict[str, ast.AST]:
        """What a module defines or imports; imports from everything are under ``*module``."""
        tree = self.module(module)
        found: dict[str, ast.AST] = {}
        for node in _statements(tree.body if tree else []):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.setdefault(node.name, node)
                case ast.Import() | ast.ImportFrom():
                    for alias in node.names:
                        key = alias.asname or alias.name.partition(".")[0]
                        if alias.name == "*":
                            key = f"*{_source(node, module, self.is_package(module))}"
                        found.setdefault(key, node)
                case ast.Assign():
                    # A class that something else is made of later on is still what can be read.
                    for target in node.targets:
                        names = (x.id for x in ast.walk(target) if isinstance(x, ast.Name))
                        found = dict.fromkeys(names, node) | found
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.setdefault(name, node)
        return found

    def is_package(self, module: str) -> bool:
        """Whether a module is a folder."""
        top, *parts = module.split(".")
        return self.module(module) is not None and self._roots[top].joinpath(*parts).is_dir()

    def find(self, module: str, name: str) -> Thing | None:
        """What a name of a module stands for; None if there is none."""
        node = self.names(module).get(name)
        if isinstance(node, ast.ImportFrom):
            source = _source(node, module, self.is_package(module))
            original = next(x.name for x in node.names if (x.asname or x.name) == name)
            if (source, original) == (module, name):
                return Thing(f"{module}.{name}", self.module(f"{module}.{name}") or node)
            # What cannot be followed, such as compiled code, is there.
            return self.find(source, original) or Thing(source, node)
        if node is not None:
            return Thing(module, node)
        if (inner := self.module(f"{module}.{name}")) is not None:
            return Thing(f"{module}.{name}", inner)
        for key in self.names(module):
            if key.startswith("*") and (found := self.find(key[1:], name)):
                return found
        hook = self.names(module).get("__getattr__")
        return Thing(module, hook) if hook else None

    def evaluate(self, module: str, node: ast.AST | None) -> Thing | None:
        """What an expression at the top of a module stands for, as far as it is one of names."""
        match node:
            case ast.Name(id=name):
                return self.find(module, name)
            case ast.Attribute(value=value, attr=name):
                owner = self.evaluate(module, value)
                if owner and isinstance(owner.node, ast.Module):
                    return self.find(owner.module, name)
                imported = owner and isinstance(owner.node, ast.Import)
                return self.find(ast.unparse(value), name) if imported else None
            case ast.Constant(value=str(text)):
                return self.evaluate(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr()):
                return self.evaluate(module, left)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return self.evaluate(module, inner)
        return None

    def _members(self, thing: Thing) -> tuple[dict[str, tuple[str, ast.AST | None]], bool]:
        """The attributes of a class with their annotations, and whether these are all."""
        assert isinstance(thing.node, ast.ClassDef)
        found: dict[str, tuple[str, ast.AST | None]] = {}
        is_whole = True
        for base in reversed(thing.node.bases):
            if isinstance(base, ast.Subscript):
                base = base.value
            parent = self.evaluate(thing.module, base)
            if parent and isinstance(parent.node, ast.ClassDef):
                inherited, whole = self.members(parent._replace(is_made=False))
                found |= inherited
                is_whole = is_whole and whole
            elif isinstance(base, ast.Name) and hasattr(builtins, base.id):
                found |= dict.fromkeys(dir(getattr(builtins, base.id)), ("", None))
            elif ast.unparse(base).rpartition(".")[2] not in COMPLETE:
                is_whole = False
        for name, annotation in own_members(thing.node):
            if annotation is not None or name not in found:
                found[name] = (thing.module, annotation)
        collected = self._collected(thing)
        found |= collected | found
        found |= dict.fromkeys(("__init__", "__name__", "__new__", "__class__"), ("", None))
        # A module of torch has what it is given, and says so; all else with such a hook is open.
        hook, _ = found.get("__getattr__", ("torch", None))
        return found, is_whole and (hook.startswith("torch") or bool(collected))

    def _collected(self, thing: Thing) -> dict[str, tuple[str, ast.AST | None]]:
        """The fields of a class that are declared in a package of its own."""
        package = ASSEMBLED.get(f"{thing.module}.{thing.name}", "")
        tree = self.module(package) if package else None
        found: dict[str, tuple[str, ast.AST | None]] = {}
        if tree is None or not self.is_package(package):
            return found
        top, *parts = package.split(".")
        for path in sorted(self._roots[top].joinpath(*parts).glob("*.py")):
            module = f"{package}.{path.stem}"
            inner = self.module(module)
            for node in inner.body if inner else ():
                if isinstance(node, ast.ClassDef):
                    found |= {name: (module, None) for name, _ in own_members(node)}
        return found

    def attribute(self, owner: Thing, name: str) -> Thing | bool | None:
        """What an attribute is; True if it is there and unknown, None if it is missing."""
        if isinstance(owner.node, ast.Module):
            return name.startswith("__") or self.find(owner.module, name)
        if not isinstance(owner.node, ast.ClassDef) or owner.module.startswith("torch"):
            return True
        members, is_whole = self.members(owner._replace(is_made=False))
        if name not in members:
            return None if is_whole else True
        module, annotation = members[name]
        if isinstance(annotation, Function):
            return Thing(module, annotation, owner.is_made)
        found = self.evaluate(module, annotation) if annotation else None
        return found._replace(is_made=True) if found else True

    def signature(self, called: Thing) -> Signature | None:
        """The arguments of a class or a function; None if they cannot be known."""
        node = called.node
        if isinstance(node, Function):
            is_static = any(ast.unparse(x) == "staticmethod" for x in node.decorator_list)
            is_class = any(ast.unparse(x) == "classmethod" for x in node.decorator_list)
            is_method = called.is_made or is_class
            return _signature(node, skip=is_method and not is_static)
        if not isinstance(node, ast.ClassDef) or called.is_made:
            return None
        if any("dataclass" in ast.unparse(x) for x in node.decorator_list):
            return self._fields(called)
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                return _signature(inner, skip=True)
        parents = [self.evaluate(called.module, base) for base in node.bases]
        known = (x for x in parents if x and isinstance(x.node, ast.ClassDef))
        return next(filter(None, map(self.signature, known)), None)

    def _fields(self, owner: Thing) -> Signature:
        """The arguments of a dataclass; those of its bases are taken to have defaults."""
        assert isinstance(owner.node, ast.ClassDef)
        own = [x for x in owner.node.body if isinstance(x, ast.AnnAssign)]
        names = [x.target.id for x in own if isinstance(x.target, ast.Name)]
        needed = [x.target.id for x in own if isinstance(x.target, ast.Name) and x.value is None]
        inherited, _ = self.members(owner)
        return Signature([*names, *inherited], set(needed), is_open=False)


class Signature(NamedTuple):
    """The arguments of something that is called."""

    names: list[str]
    needed: set[str]
    is_open: bool
    """Whether it takes any others."""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, also within conditions."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for inner in getattr(node, part, ()):
                    yield from _statements(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    )


def _source(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that names are imported from."""
    if isinstance(node, ast.Import):
        return node.names[0].name
    parts = module.split(".") if is_package else module.split(".")[:-1]
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def own_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST | None]]:
    """What a class defines itself, with the annotation, or a method itself."""
    for inner in _statements(node.body):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                is_property = any("property" in ast.unparse(x) for x in inner.decorator_list)
                yield name, inner.returns if is_property else inner
                yield from _assigned(inner)
            case ast.ClassDef(name=name):
                yield name, None
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                yield name, annotation
            case ast.Assign(targets=targets):
                yield from ((x.id, None) for x in targets if isinstance(x, ast.Name))


def _assigned(method: Function) -> Iterator[tuple[str, ast.AST | None]]:
    """The attributes that a method gives its object."""
    arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
    if not arguments:
        return
    own, annotated = arguments[0].arg, {x.arg: x.annotation for x in arguments}
    for node in ast.walk(method):
        match node:
            case ast.AnnAssign(
                target=ast.Attribute(value=ast.Name(id=name), attr=attribute), annotation=annotation
            ) if name == own:
                yield attribute, annotation
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id=name), attr=attribute)],
                value=ast.Name(id=value),
            ) if name == own:
                yield attribute, annotated.get(value)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()) if (
                name == own
            ):
                yield attribute, None
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr=registers),
                args=[ast.Constant(value=str(attribute)), *_],
            ) if name == own and registers.startswith("register_"):
                yield attribute, None


def _signature(node: Function, *, skip: bool) -> Signature:
    """Of a function, or of a method without its object."""
    parameters = [*node.args.posonlyargs, *node.args.args]
    given = parameters[: len(parameters) - len(node.args.defaults)]
    needed = {x.arg for x in given[skip:]}
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    needed |= {x.arg for x, default in named if default is None}
    is_open = bool(node.args.vararg or node.args.kwarg)
    names = [x.arg for x in parameters[skip:]] + [x.arg for x in node.args.kwonlyargs]
    return Signature(names, needed, is_open)
