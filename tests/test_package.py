"""What importing the package loads, and its version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pie_driver_sglang import __version__

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    environment = {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout


def test_importing_the_package_loads_nothing() -> None:
    loaded = run_python(
        "import sys; before = set(sys.modules); import pie_driver_sglang as p; "
        "assert p.__file__.endswith('__init__.py'); "
        "print(*(set(sys.modules) - before))"
    ).split()
    assert {name.partition(".")[0] for name in loaded} <= {
        "pie_driver_sglang", "importlib", "typing", "collections", "functools", "re", "types",
        "copyreg", "contextlib", "operator", "keyword", "reprlib", "enum", "warnings", "__future__",
        "_collections", "_functools", "_operator", "_sre", "_typing", "itertools",
    }  # fmt: skip


def test_checking_a_configuration_loads_no_library() -> None:
    code = (
        "import sys, pie_driver_sglang as p; p.load_config; p.Capabilities; "
        "import pie_driver_sglang.logs, pie_driver_sglang.config.arch; "
        "print(*[m for m in ('torch', 'sglang', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert run_python(code).split() == []


def test_lazy_names() -> None:
    import pie_driver_sglang as package

    for name in package.__all__:
        assert name in dir(package)
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert __version__ == workspace["package"]["version"] == project["version"]
