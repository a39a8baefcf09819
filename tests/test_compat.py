"""The compat layer: which names of SGLang it uses, and which faults it corrects.

A probe that fails says that SGLang corrected its part: remove the correction that the probe names.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pie_driver_sglang.config.sglang_versions import SUPPORTED
from support import REPOSITORY, versions
from support.models import architectures
from support.process import drivers, scripts
from support.tools import load_tool

PACKAGE: Final = REPOSITORY / "python" / "pie_driver_sglang"
COMPAT: Final = tuple(
    PACKAGE / folder / "compat" for folder in ("backends/sglang", "frontends/sglang_server")
)
"""Of the driver, and of the server."""
VLLM_COMPAT: Final = PACKAGE / "backends" / "vllm" / "compat"
FILES: Final = sorted(PACKAGE.rglob("*.py"))
PRIVATE_ELSEWHERE: Final = {
    # Of torch and the standard library, not of SGLang.
    "backends/deferred_imports.py": {"_torchdynamo_disable"},
    "backends/load_trace.py": {"_schema", "_cdata"},
    # Of `multiprocessing.shared_memory`, which has no other way to reserve room.
    "shared_names.py": {"_fd"},
    "kernels/gemm/fp8_rows.py": {"_scaled_mm"},
    # What Triton compiles C by.
    "compilation/compile_pool.py": {"_build"},
}
"""Private attributes of others, by file."""
OF_NAMED_TUPLES: Final = {"_asdict", "_fields", "_make", "_replace"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file's tree, which no test changes."""
    return ast.parse(path.read_text())


def trees(*, inside: bool) -> Iterator[tuple[Path, ast.Module]]:
    """The files of SGLang's compat modules, or all others but vLLM's."""
    for path in FILES:
        if path.is_relative_to(VLLM_COMPAT):
            continue
        if any(path.is_relative_to(compat) for compat in COMPAT) == inside:
            yield path.relative_to(PACKAGE), parsed(path)


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_one_folder_imports_sglang() -> None:
    importers = {
        path.parent
        for path in FILES
        if any(name.partition(".")[0] in ("sglang", "sgl_kernel") for name in imported(path))
    }
    versions = [f"v{version.sglang.replace('.', '')}" for version in SUPPORTED]
    assert importers == {*COMPAT, *(folder / name for folder in COMPAT for name in versions)}


def test_selection_alone_imports_what_is_of_one_version() -> None:
    """And the prefix cache of the plug-in, which other versions do not take."""
    importers = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(".compat.v0" in name for name in imported(path))
    }
    assert importers == {
        "backends/sglang/compat/selection.py",
        "frontends/sglang_server/compat/selection.py",
        "frontends/sglang_server/compat/v0517/scheduler.py",
        "sglang_plugins/radix_cache.py",
        "sglang_plugins/tree_core.py",
    }


def test_one_folder_names_modules_of_sglang() -> None:
    """A name in a string is an import, too, if something imports it later."""
    for path, tree in trees(inside=False):
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named = [x for x in texts if isinstance(x, str) and x.startswith(("sglang.", "sgl_kernel"))]
        assert not named, path


def test_private_attributes_of_sglang_are_touched_in_one_folder() -> None:
    """Of `self`, `os` and named tuples they are allowed anywhere; all others must be listed."""
    for path, tree in trees(inside=False):
        touched = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.endswith("__")
            and ast.unparse(node.value) not in ("self", "cls", "super()", "os")
        }
        allowed = PRIVATE_ELSEWHERE.get(str(path), set()) | OF_NAMED_TUPLES
        assert touched <= allowed, path


def test_one_folder_patches() -> None:
    """Others patch torch and Python for a time, not SGLang."""
    patching = {str(path) for path, tree in trees(inside=False) if "unittest" in ast.unparse(tree)}
    assert patching == {
        "backends/deferred_imports.py",
        "backends/load_trace.py",
        "compilation/compile_pool.py",
        "compilation/dry_run.py",
        "compilation/launch_recorder.py",
        "engine/process_groups.py",
        "fork_server/cuda_properties.py",
    }


def test_every_compat_module_is_used() -> None:
    used: set[str] = set()
    for _, tree in trees(inside=False):
        used |= uses(tree)
    inside = list(trees(inside=True))
    for path, tree in inside:
        offered = {name for node in tree.body for name in defined(node)}
        others = [uses(other) for _, other in inside if other is not tree]
        own = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        unused = offered - used - own - set().union(*others)
        assert not unused, path
        passed_on = {
            node.value
            for line in tree.body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__"
            for node in ast.walk(line.value)
            if isinstance(node, ast.Constant)
        }
        assert not passed_on - used - set().union(*others), path


def defined(node: ast.stmt) -> Iterator[str]:
    """The public names of a compat module: functions, classes, and the properties of these."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
        yield node.name
    if isinstance(node, ast.ClassDef):
        properties = (x for x in node.body if isinstance(x, ast.FunctionDef) and x.decorator_list)
        yield from (x.name for x in properties)


def uses(tree: ast.Module) -> set[str]:
    """The names that a file imports, and those of attributes."""
    nodes = list(ast.walk(tree))
    names = {x.attr for x in nodes if isinstance(x, ast.Attribute)}
    return names | {
        x.name for node in nodes if isinstance(node, ast.ImportFrom) for x in node.names
    }


def test_the_installed_sglang_has_all_that_is_reached() -> None:
    missing = load_tool("check_compat").find_missing()
    assert not missing, "\n".join(missing)


def test_kernels_import_torch_and_triton_alone() -> None:
    usual = {"__future__", "typing", "dataclasses", "collections", "enum", "numpy", "torch"}
    usual |= {"contextlib", "time"}
    # Those in CUDA C++ are not Triton's.
    for folder, more in (("kernels", {"triton"}), ("kernels/cuda", {"cuda", "importlib", "re"})):
        paths = list((PACKAGE / folder).glob("*.py"))
        assert paths
        for path in paths:
            for name in imported(path):
                own = name.startswith("pie_driver_sglang.kernels")
                known = name.partition(".")[0] in usual | more
                assert own or known, f"{path.name} imports {name}"


def uncorrected(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """What SGLang makes of a small model of an architecture, with some of its options changed."""
    architecture = architectures.ARCHITECTURES[name]
    changed = architecture._replace(options={**architecture.options, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.ARCHITECTURES, "probe", changed)
        snapshot = architectures.build("probe", folder)
    config = drivers.write_config(folder, snapshot)
    found: dict[str, Any] = json.loads(
        scripts.run("tests/support/sglang_scripts/compat_probes.py", str(config)).splitlines()[-1]
    )
    return found


def sglang_source(*path: str) -> str:
    """The text of a file of the installed SGLang."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    return Path(root, "srt", *path).read_text()


def test_exaone_4_does_not_look_for_rope_parameters() -> None:
    """`compat/corrections.py: correct_rope`. No backend of a CPU takes the model itself."""
    source = sglang_source("models", "exaone4.py")
    assert 'getattr(config, "rope_theta"' in source
    assert "rope_parameters" not in source


def test_the_final_norm_of_granite_4_adds_a_residual_again() -> None:
    """`compat/v0517/layers.py`. What its layers return has it in it already, in that version."""
    source = sglang_source("models", "granitemoehybrid.py")
    adds_twice = versions.IS_OLDEST
    scaled = "hidden_states = residual + hidden_states * self.residual_multiplier"
    assert (scaled in source) == adds_twice
    assert ("hidden_states, _ = self.norm(hidden_states, residual)" in source) == adds_twice


def test_the_norms_of_qwen3_next_are_made_on_the_default_device() -> None:
    """`compat/model.py: device_module_of`."""
    assert "device=torch.get_device_module().current_device()" in sglang_source(
        "models", "qwen3_next.py"
    )


def test_the_parameters_of_xielu_are_in_bfloat16() -> None:
    """`compat/corrections.py: correct_layers`."""
    assert "dtype: torch.dtype = torch.bfloat16" in sglang_source("layers", "activation.py")
    assert "XIELU()" in sglang_source("models", "apertus.py")


def test_gemma_has_the_exact_gelu() -> None:
    """`compat/corrections.py: correct_layers`."""
    assert 'self.act_fn = GeluAndMul("none")' in sglang_source("models", "gemma.py")


@pytest.mark.engine
class TestProbes:
    def test_the_windows_of_cohere_2_count_the_query_token(self, tmp_path: Path) -> None:
        """`backends/sglang/compat/corrections.py: correct_windows`."""
        found = uncorrected("Cohere 2", tmp_path)
        assert architectures.WINDOW in found["windows"]

    @pytest.mark.skipif(versions.IS_OLDEST, reason="backends take the table from the runner")
    def test_backends_read_the_block_table_of_the_driver(self, tmp_path: Path) -> None:
        """`compat/v0523/passes.py: read_block_table`. On a CPU nothing reads it."""
        assert uncorrected("Qwen3", tmp_path)["reads_block_table"]

    def test_experts_are_padded_on_a_cpu(self, tmp_path: Path) -> None:
        """`compat/model.py: unpadded`. And a CPU is not taken for one: `take_cpu_for_one`."""
        found = uncorrected("Mixtral", tmp_path, intermediate_size=80)
        assert found["intermediate_size"] != 80
        assert found["cpu_known"] == [False, False]
