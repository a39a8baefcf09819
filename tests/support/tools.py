"""Loads the scripts of `tools` as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from unittest import mock

from support import REPOSITORY


def load_tool(name: str) -> ModuleType:
    """The module of `tools/NAME.py`."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # They import each other, as they do where they are run.
    with mock.patch.object(sys, "path", [str(REPOSITORY / "tools"), *sys.path]):
        spec.loader.exec_module(module)
    return module
