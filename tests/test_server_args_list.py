"""The generated list of server arguments is that of the installed SGLang."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "generate_server_args.py"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_server_args", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_list_is_fresh(tool: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rendered = tool.render()
    assert rendered == tool.TARGET.read_text(encoding="utf-8")
