"""What the driver corrects in SGLang is still wrong there, and SGLang is imported in one folder.

A probe that fails says that SGLang mended its part: remove the correction that the probe names.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import architectures
import drivers
import scripts
import tiny_models

PACKAGE: Final = tiny_models.REPOSITORY / "python" / "pie_driver_sglang"


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_one_folder_imports_sglang() -> None:
    importers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.partition(".")[0] == "sglang" for name in imported(path))
    }
    assert importers == {"srt"}


def test_kernels_import_torch_and_triton_alone() -> None:
    allowed = {"__future__", "typing", "dataclasses", "collections", "torch", "triton"}
    for path in (PACKAGE / "kernels").glob("*.py"):
        for name in imported(path):
            own = name.startswith("pie_driver_sglang.kernels")
            assert own or name.partition(".")[0] in allowed, f"{path.name} imports {name}"


def uncorrected(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    """What SGLang makes of a small model of an architecture, with some of its options changed."""
    architecture = architectures.ARCHITECTURES[name]
    changed = architecture._replace(options={**architecture.options, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.ARCHITECTURES, "probe", changed)
        snapshot = architectures.build("probe", folder)
    config = drivers.write_config(folder, snapshot)
    found: dict[str, Any] = json.loads(
        scripts.run("tests/seam_probes.py", str(config)).splitlines()[-1]
    )
    return found


def test_exaone_4_does_not_look_for_rope_parameters() -> None:
    """`srt/support.py: correct_rope`. No attention backend of a CPU takes the model itself."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = Path(root, "srt", "models", "exaone4.py").read_text()
    assert 'getattr(config, "rope_theta"' in source
    assert "rope_parameters" not in source


@pytest.mark.engine
class TestProbes:
    def test_the_windows_of_cohere_2_count_a_rows_own_token(self, tmp_path: Path) -> None:
        """`srt/support.py: correct_windows`."""
        found = uncorrected("Cohere 2", tmp_path)
        assert architectures.WINDOW in found["windows"]

    def test_experts_are_padded_on_a_cpu(self, tmp_path: Path) -> None:
        """`srt/boot.py: _unpadded`. And a CPU is not taken for one: `boot._load_model`."""
        found = uncorrected("Mixtral", tmp_path, intermediate_size=80)
        assert found["intermediate_size"] != 80
        assert found["cpu_known"] == [False, False]
