"""Lists what the adapter reaches in SGLang and a version of SGLang does not have.

    .venv/bin/python tools/check_compat.py            # the installed version
    .venv/bin/python tools/check_compat.py FOLDER     # the folder `sglang` of an unpacked wheel

Sources are read and nothing of SGLang is imported, so the list is complete: imports, attributes of
what is known to be of one of SGLang's classes, arguments of calls, those that a method of ours
lacks or has in another place than SGLang's (an override, or one that is assigned), the order of
parameters that are passed by position (`POSITIONAL`), and names in strings. A call must name all
arguments but the first: an order that has changed is then no error. Known is the class of what is
imported, annotated, made by a call or a field of such an object. A value that means something else
in another version is not found; docs/sglang-upgrade.md has these.

A folder such as `v0517` is of one version, and so is a file that imports from it: they are read for
that version alone, and for later ones that have no folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from python_sources import Function, Signature, Sources, Thing, own_members

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
POSITIONAL: Final = "POSITIONAL"
"""The name of a table of functions and their parameters, in order."""


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
        self._positional: set[str] = set()
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
        for name, annotation in own_members(node):
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
        if "__init__" not in dict(own_members(node)):
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
            problems = list(_compare(node, signature))
            if called.module.startswith("sglang") and called.name not in self._positional:
                problems += _unnamed(node)
            self.missing += [(node.lineno, f"{called.name}() {problem}") for problem in problems]

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
            for name in _moved(own.args, original.node.args, skip=bound):
                problem = f"{own.name}() takes {name} in another place than {original.node.name}()"
                self.missing.append((own.lineno, problem))

    def _check_text(self, line: int, text: str) -> None:
        """A name of SGLang in a string, which its hooks take."""
        if not text.startswith("sglang.") or not all(x.isidentifier() for x in text.split(".")):
            return
        if self._named(text) is None:
            self.missing.append((line, f"no {text}"))

    def _named(self, text: str) -> Thing | bool | None:
        """What a dotted name of SGLang stands for; True if it is there and unknown."""
        found: Thing | bool | None = Thing("sglang", ast.Module([], []))
        for part in text.split(".")[1:]:
            if isinstance(found, Thing):
                found = self._sources.attribute(found, part)
        return found

    def _check_positions(self, table: ast.Dict) -> None:
        """Functions of SGLang whose parameters are known by their positions."""
        for key, value in zip(table.keys, table.values, strict=True):
            name, expected = ast.literal_eval(key or table), list(ast.literal_eval(value))
            owner, _, function = name.rpartition(".")
            found = self._named(name)
            signature = self._sources.signature(found) if isinstance(found, Thing) else None
            self._positional.add(function)
            if found is None:
                self.missing.append((value.lineno, f"no {function} in {owner}"))
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


def _unnamed(call: ast.Call) -> Iterator[str]:
    """What is wrong with arguments whose order may change from version to version."""
    given = [x for x in call.args if not isinstance(x, ast.Starred)]
    given = [x for x in given if not (isinstance(x, ast.Name) and x.id == "self")]
    if len(given) > 1:
        yield f"is given {len(given)} arguments by position: name all but the first"


def _lacking(own: ast.arguments, original: ast.arguments, *, skip: bool) -> Iterator[str]:
    """Arguments of a function that another one has no place for, by position or by name."""
    places = [*own.posonlyargs, *own.args]
    names = {x.arg for x in [*places, *own.kwonlyargs]}
    positional = [*original.posonlyargs, *original.args][skip:]
    wanted = [] if own.vararg else positional[len(places) :]
    for argument in [*wanted, *original.kwonlyargs]:
        if argument.arg not in names and not own.kwarg:
            yield argument.arg


def _moved(own: ast.arguments, original: ast.arguments, *, skip: bool) -> Iterator[str]:
    """Arguments of both functions that callers pass in different places."""
    places = [x.arg for x in [*own.posonlyargs, *own.args]]
    wanted = [x.arg for x in [*original.posonlyargs, *original.args][skip:]]
    for place, name in enumerate(places):
        if name in wanted and wanted.index(name) != place:
            yield name


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
