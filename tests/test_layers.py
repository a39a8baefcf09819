"""Package layering: imports in one direction, and one meaning for each public name."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from support import REPOSITORY

ROOT: Final = REPOSITORY / "python" / "pie_driver_sglang"
PACKAGE: Final = ROOT.name
#: What the source files of a package end with.
SOURCES: Final = {".py", ".cu", ".cuh"}
#: Modules for one version of SGLang.
OF_A_VERSION: Final = re.compile(r"[._]v\d{4}\b")
#: Public names that several modules may define, and why.
SHARED_NAMES: Final = {
    "LIBRARY": "each backend is one",
    "NAME": "each plugin of SGLang has a name",
    "T": "a type variable",
    "logger": "a logger for each module",
    "main": "a program's entry point",
    "register": "a plugin's entry point",
    "run": "what a program does after its arguments are read",
}

#: What a layer may import besides Python's own library, itself and `errors`.
LAYERS: Final[Mapping[str, frozenset[str]]] = {
    "config": frozenset({"msgspec"}),
    "memory": frozenset({"config", "psutil"}),
    "checkpoint": frozenset({"console", "memory", "numpy"}),
    "observability": frozenset({"_core", "config", "opentelemetry", "prometheus_client"}),
    "engine": frozenset(
        {
            "_core",
            "checkpoint",
            "config",
            "kernels",
            "memory",
            "dill",
            "msgspec",
            "numpy",
            "observability",
            "ranks",
            "safetensors",
            "torch",
            "torch_memory_saver",
            "tqdm",
        }
    ),
    "frontends.common": frozenset(
        {
            "_core",
            "checkpoint",
            "memory",
            "pie_driver_sglang",
            "config",
            "interpreter",
            "msgspec",
            "shared_names",
        }
    ),
    "frontends.batches": frozenset(),
    "frontends.gateway": frozenset(
        {
            "_core",
            "config",
            "console",
            "fork_server",
            "observability",
            "prometheus_client",
            "server_guard",
            "shared_names",
            "smg",
        }
    ),
    "compilation": frozenset({"_core", "cuda", "engine", "kernels", "memory", "torch", "triton"}),
    "kernels": frozenset({"_core", "cuda", "numpy", "torch", "triton"}),
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The package's modules by their names; no test changes them."""
    return {
        ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    }


def public_names(tree: ast.Module) -> Iterator[str]:
    for statement in tree.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield from [statement.name] * (not statement.name.startswith("_"))
        elif isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield target.id


def imports(tree: ast.AST, *, lazy: bool) -> Iterator[str]:
    """The absolute names that a module imports; with `lazy` those of functions, too.

    What is imported for type checkers only is left out.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in trees() else node.module
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, lazy=lazy)


def test_no_two_modules_define_one_name() -> None:
    modules = defaultdict(list)
    for module, tree in trees().items():
        if OF_A_VERSION.search(module):
            # It implements a protocol, as the module of another version does.
            continue
        for name in set(public_names(tree)):
            modules[name].append(module)
    shared = {name: modules for name, modules in modules.items() if len(modules) > 1}
    assert shared.keys() - SHARED_NAMES.keys() == set(), shared
    assert SHARED_NAMES.keys() <= shared.keys(), "allowed, but not needed"


def test_no_imports_in_a_circle() -> None:
    edges = {
        module: {name for name in imports(tree, lazy=False) if name in trees()} - {module}
        for module, tree in trees().items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " imports ".join((*path, module))
        if module not in done:
            for other in sorted(edges[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_it_may(layer: str) -> None:
    found = set()
    for module, tree in trees().items():
        if module.startswith(f"{PACKAGE}.{layer}"):
            found |= set(imports(tree, lazy=True))
    parts = (name.split(".") for name in found)
    top = {part[1] if part[0] == PACKAGE and len(part) > 1 else part[0] for part in parts}
    assert top - sys.stdlib_module_names - {layer.partition(".")[0], "errors"} <= LAYERS[layer]


def test_sglang_is_imported_in_its_layers_alone() -> None:
    for module, tree in trees().items():
        names = {name.partition(".")[0] for name in imports(tree, lazy=True)}
        layers = (
            f"{PACKAGE}.backends.sglang.",
            f"{PACKAGE}.frontends.sglang_server.compat.",
        )
        assert "sglang" not in names or module.startswith(layers), module


def test_vllm_is_imported_in_its_layer_alone() -> None:
    for module, tree in trees().items():
        names = {name.partition(".")[0] for name in imports(tree, lazy=True)}
        assert "vllm" not in names or module.startswith(f"{PACKAGE}.backends.vllm.compat."), module


def test_the_core_knows_no_library_and_neither_backend_the_other() -> None:
    """What a driver on vLLM imports holds nothing of SGLang's backend, nor the other way round."""
    backends = [f"{PACKAGE}.backends.{name}" for name in ("sglang", "vllm")]
    for layer in ("driver", "engine", "memory", "checkpoint", "observability", "config"):
        for module, tree in trees().items():
            if module.startswith(f"{PACKAGE}.{layer}."):
                found = [n for n in imports(tree, lazy=True) if n.startswith(tuple(backends))]
                assert not found, module
    for own, other in (backends, reversed(backends)):
        for module, tree in trees().items():
            if module.startswith(own):
                assert not [n for n in imports(tree, lazy=True) if n.startswith(other)], module


def test_every_package_has_a_docstring() -> None:
    for path in Path(ROOT).rglob("__init__.py"):
        name = ".".join((PACKAGE, *path.parent.relative_to(ROOT).parts))
        text = ast.get_docstring(trees()[name]) or ""
        assert len(text.splitlines()) >= 3, f"{name}: a line, then a paragraph"


def test_every_package_names_its_modules() -> None:
    for path in Path(ROOT).rglob("__init__.py"):
        name = ".".join((PACKAGE, *path.parent.relative_to(ROOT).parts))
        text = ast.get_docstring(trees()[name]) or ""
        named = set(re.findall(r"`+(\w+)(?:\.\w+)?`+", text))
        modules = {
            file.stem
            for file in path.parent.iterdir()
            if file.suffix in SOURCES or (file / "__init__.py").is_file()
        }
        modules = {module for module in modules if not module.startswith("_")}
        assert modules <= named, f"{name} does not say what {sorted(modules - named)} are for"


@pytest.mark.parametrize(
    "root", sorted(REPOSITORY.glob("rust/*/src/lib.rs")), ids=lambda p: p.parts[-3]
)
def test_every_crate_names_its_modules(root: Path) -> None:
    """Except for its errors and its tests; a crate of three modules or fewer needs no list."""
    text = root.read_text(encoding="utf-8")
    product = re.sub(r"#\[cfg\(test\)\]\nmod \w+;", "", text)
    modules = set(re.findall(r"^(?:pub )?mod (\w+);", product, re.MULTILINE)) - {"error"}
    header = text.partition("\nmod ")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^//! \|.*", header, re.MULTILINE))))
    assert len(modules) <= 3 or modules <= named, sorted(modules - named)
