"""Lists what the adapter reaches in SGLang and a version of SGLang does not have.

    .venv/bin/python tools/check_compat.py            # the installed version
    .venv/bin/python tools/check_compat.py FOLDER     # the folder `sglang` of an unpacked wheel

Sources are read and nothing of SGLang is imported, so the list is complete: imports, attributes of
what is known to be of one of SGLang's classes, arguments of calls, those that a method of ours
lacks in the place of SGLang's (an override, or one that is assigned), the order of parameters that
are passed by position (`POSITIONAL`), and names in strings. Known is the class of what is imported,
annotated, made by a call or a field of such an object. A value that means something else in another
version is not found; docs/sglang-upgrade.md has these.

A folder such as `v0517` is of one version, and so is a file that imports from it: they are read for
that version alone, and for later ones that have no folder.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from pie_driver_sglang.config.sglang_versions import version_for

ROOT: Final = Path(__file__).parent.parent / "python"
USERS: Final = (
    "pie_driver_sglang/backends/sglang",
    "pie_driver_sglang/frontends/sglang_server",
    "pie_driver_sglang/sglang_plugins",
)
COMPAT: Final = (
    "pie_driver_sglang.backends.sglang.compat",
    "pie_driver_sglang.frontends.sglang_server.compat",
)
ASSEMBLED: Final = {"sglang.srt.server_args.ServerArgs": "sglang.srt.arg_groups.fields"}
"""Classes whose fields are collected from classes of a package, in versions that have it."""
POSITIONAL: Final = "POSITIONAL"
"""The name of a table of functions and their parameters, in order."""


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
            elif ast.unparse(base).rpartition(".")[2] not in ("ABC", "Enum", "Generic", "Protocol"):
                is_whole = False
        for name, annotation in _own_members(thing.node):
            if annotation is not None or name not in found:
                found[name] = (thing.module, annotation)
        found |= self._collected(thing) | found
        found |= dict.fromkeys(("__init__", "__name__", "__new__", "__class__"), ("", None))
        # A module of torch has what it is given, and says so; all else with such a hook is open.
        hook, _ = found.get("__getattr__", ("torch", None))
        return found, is_whole and hook.startswith("torch")

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
                    found |= {name: (module, None) for name, _ in _own_members(node)}
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


def _own_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST | None]]:
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


class Uses(ast.NodeVisitor):
    """What a file of the adapter uses of SGLang and does not find."""

    def __init__(self, sources: Sources, module: str) -> None:
        """Reads a file's imports."""
        self.missing: list[tuple[int, str]] = []
        self._sources = sources
        self._module = module
        self._known: dict[str, Thing] = {}
        self._texts: dict[str, str] = {}
        self._classes: list[ast.ClassDef] = []
        self._tree = sources.module(module) or ast.Module([], [])
        self._functions: dict[str, Function] = {}
        nodes = list(ast.walk(self._tree))
        methods = {id(x) for node in nodes if isinstance(node, ast.ClassDef) for x in node.body}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                self._import(node)
            elif isinstance(node, Function) and id(node) not in methods:
                self._functions[node.name] = node

    def run(self) -> list[tuple[int, str]]:
        """Lines, and what is missing."""
        self.visit(self._tree)
        return sorted(set(self.missing))

    def _import(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if not source.startswith(("sglang", *COMPAT)):
            return
        if source.startswith("sglang") and self._sources.module(source) is None:
            self.missing.append((node.lineno, f"no module {source}"))
            return
        for alias in node.names:
            found = self._sources.find(source, alias.name)
            if found is None and source.startswith("sglang"):
                self.missing.append((node.lineno, f"no {alias.name} in {source}"))
            elif found is not None and found.module.startswith("sglang"):
                self._known[alias.asname or alias.name] = found

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Knows its arguments within."""
        before = dict(self._known)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            self._learn(argument.arg, self._annotated(argument.annotation))
        self.generic_visit(node)
        self._known = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Knows within what its objects keep."""
        before = dict(self._known)
        for name, annotation in _own_members(node):
            if (kept := self._annotated(annotation)) is not None:
                self._learn(f"self.{name}", kept)
        self._classes.append(node)
        self.generic_visit(node)
        self._classes.pop()
        for base in filter(None, map(self._annotated, node.bases)):
            for method in node.body:
                if isinstance(method, Function):
                    original = self._sources.attribute(base, method.name)
                    self._check_replacement(method, original, bound=False)
        self._known = before
        # It is made as the class of SGLang that it is derived from.
        bases = (self._type(base) for base in node.bases)
        if "__init__" not in dict(_own_members(node)):
            self._learn(node.name, next(filter(None, bases), None))

    def visit_Assign(self, node: ast.Assign) -> None:
        """Knows what a name stands for from here on."""
        self.generic_visit(node)
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=patched, attr=name)], value=ast.Name(id=function)
            ):
                self._replace(self._type(patched), name, function)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            self._learn(name, self._type(node.value))
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                self._texts[name] = node.value.value
                self._check_text(node.lineno, node.value.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Knows what a name is said to be."""
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._learn(node.target.id, self._annotated(node.annotation))
            if node.target.id == POSITIONAL and isinstance(node.value, ast.Dict):
                self._check_positions(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Looks for a name of SGLang that is put together."""
        match node.values:
            case [ast.FormattedValue(value=ast.Name(id=name)), ast.Constant(value=str(rest))]:
                self._check_text(node.lineno, self._texts.get(name, "") + rest)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Looks for an attribute."""
        self.generic_visit(node)
        owner = self._type(node.value)
        if owner is not None and self._sources.attribute(owner, node.attr) is None:
            self.missing.append((node.lineno, f"no {owner.name}.{node.attr}"))

    def visit_Call(self, node: ast.Call) -> None:
        """Compares arguments, and looks for an attribute that is patched."""
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(attr="object"), args=[patched, ast.Constant(value=str(name)), *_]
            ):
                owner = self._type(patched)
                if owner is not None and self._sources.attribute(owner, name) is None:
                    self.missing.append((node.lineno, f"no {owner.name}.{name}"))
                for function in (x.id for x in node.args[2:] if isinstance(x, ast.Name)):
                    self._replace(owner, name, function)
        called = self._type(node.func)
        signature = self._sources.signature(called) if called else None
        if called is not None and signature is not None:
            for problem in _compare(node, signature):
                self.missing.append((node.lineno, f"{called.name}() {problem}"))

    def _replace(self, owner: Thing | None, name: str, function: str) -> None:
        """Compares a function of this file with what it replaces of an object, class or module."""
        if owner is not None and function in self._functions:
            original = self._sources.attribute(owner, name)
            self._check_replacement(self._functions[function], original, bound=owner.is_made)

    def _check_replacement(
        self, own: Function, original: Thing | bool | None, *, bound: bool
    ) -> None:
        """Compares a function of ours with the one of SGLang that it takes the place of.

        Args:
            own: Ours.
            original: SGLang's.
            bound: Whether ours is without the object.
        """
        if isinstance(original, Thing) and isinstance(original.node, Function):
            for name in _lacking(own.args, original.node.args, skip=bound):
                problem = f"{own.name}() takes no {name}, as {original.node.name}() does"
                self.missing.append((own.lineno, problem))

    def _check_text(self, line: int, text: str) -> None:
        """A name of SGLang in a string, which its hooks take."""
        if not text.startswith("sglang.") or not all(x.isidentifier() for x in text.split(".")):
            return
        found: Thing | bool | None = Thing("sglang", ast.Module([], []))
        for part in text.split(".")[1:]:
            if isinstance(found, Thing):
                found = self._sources.attribute(found, part)
        if found is None:
            self.missing.append((line, f"no {text}"))

    def _check_positions(self, table: ast.Dict) -> None:
        """Functions of SGLang whose parameters are known by their positions."""
        for key, value in zip(table.keys, table.values, strict=True):
            name, expected = ast.literal_eval(key or table), list(ast.literal_eval(value))
            module, _, function = name.rpartition(".")
            found = self._sources.find(module, function)
            signature = self._sources.signature(found) if found else None
            if found is None:
                self.missing.append((value.lineno, f"no {function} in {module}"))
            if signature is not None and signature.names != expected:
                given = ", ".join(signature.names)
                self.missing.append((value.lineno, f"{function}() takes ({given}) in this order"))

    def _learn(self, name: str, thing: Thing | None) -> None:
        if thing is None:
            self._known.pop(name, None)
        else:
            self._known[name] = thing

    def _annotated(self, annotation: ast.AST | None) -> Thing | None:
        """What an annotation says of its name."""
        if isinstance(annotation, ast.BinOp):
            annotation = annotation.left
        known = self._known.get(annotation.id) if isinstance(annotation, ast.Name) else None
        return known._replace(is_made=True) if known else None

    def _type(self, node: ast.AST) -> Thing | None:
        """What an expression stands for, if that is SGLang's."""
        match node:
            case ast.Name(id=name):
                return self._known.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if (
                f"self.{name}" in self._known
            ):
                return self._known[f"self.{name}"]
            case ast.Attribute(value=value, attr=name):
                owner = self._type(value)
                found = self._sources.attribute(owner, name) if owner else None
                return found if isinstance(found, Thing) else None
            case ast.Call(func=ast.Name(id="super")) if self._classes:
                bases = (self._annotated(base) for base in self._classes[-1].bases)
                return next(filter(None, bases), None)
            case ast.Call(func=func):
                called = self._type(func)
                if called is None:
                    return None
                if isinstance(called.node, ast.ClassDef) and not called.is_made:
                    return called._replace(is_made=True)
                if isinstance(called.node, ast.FunctionDef):
                    found = self._sources.evaluate(called.module, called.node.returns)
                    return found._replace(is_made=True) if found else None
        return None


def _compare(call: ast.Call, signature: Signature) -> Iterator[str]:
    """What is wrong with the arguments of a call."""
    spread = any(isinstance(x, ast.Starred) for x in call.args)
    spread = spread or any(x.arg is None for x in call.keywords)
    given = [x.arg for x in call.keywords if x.arg is not None]
    if not signature.is_open:
        yield from (f"takes no {name}" for name in given if name not in signature.names)
        if len(call.args) > len(signature.names):
            yield f"takes {len(signature.names)} arguments"
    if not spread:
        filled = {*given, *signature.names[: len(call.args)]}
        yield from (f"wants {name}" for name in sorted(signature.needed - filled))


def _lacking(own: ast.arguments, original: ast.arguments, *, skip: bool) -> Iterator[str]:
    """Arguments of a function that another one has no place for, by position or by name."""
    places = [*own.posonlyargs, *own.args]
    names = {x.arg for x in [*places, *own.kwonlyargs]}
    positional = [*original.posonlyargs, *original.args][skip:]
    wanted = [] if own.vararg else positional[len(places) :]
    for argument in [*wanted, *original.kwonlyargs]:
        if argument.arg not in names and not own.kwarg:
            yield argument.arg


def find_missing(sglang: Path | None = None, root: Path = ROOT) -> list[str]:
    """What the adapter uses and a version of SGLang lacks, a line each.

    Args:
        sglang: The folder of its package; by default the installed one.
        root: The folder with the driver's package.
    """
    roots = {"pie_driver_sglang": root / "pie_driver_sglang"}
    sources = Sources({**roots, "sglang": sglang} if sglang else roots)
    found = []
    others = _other_version(sources)
    for path in sorted(path for folder in USERS for path in (root / folder).rglob("*.py")):
        where = path.relative_to(root)
        if others.search(str(where)) or others.search(_imports(path)):
            continue
        module = ".".join(where.with_suffix("").parts).removesuffix(".__init__")
        found += [f"{where}:{line}: {what}" for line, what in Uses(sources, module).run()]
    return found


def _other_version(sources: Sources) -> re.Pattern[str]:
    """What names a folder that the version which is read does not use."""
    tree = sources.module("sglang._version") or ast.Module([], [])
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    version = next((x for x in texts if isinstance(x, str) and re.match(r"\d+\.\d+\.", x)), "")
    own = version_for(version).sglang.replace(".", "")
    return re.compile(rf"\bv(?!{own}\b)0\d+\b" if version else r"(?!)")


def _imports(path: Path) -> str:
    """The modules that a file imports when it is imported itself."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return " ".join(x.module or "" for x in nodes if isinstance(x, ast.ImportFrom))


if __name__ == "__main__":
    missing = find_missing(Path(sys.argv[1]) if sys.argv[1:] else None)
    print("\n".join(missing))
    sys.exit(bool(missing))
