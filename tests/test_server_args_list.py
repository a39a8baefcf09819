"""The generated list of server arguments is that of the installed SGLang."""

from __future__ import annotations

import importlib.util
import warnings
from types import ModuleType

import pytest

from support.tools import load_tool

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("generate_server_args")


def test_the_list_is_fresh(tool: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rendered = tool.render()
    assert rendered == tool.TARGET.read_text(encoding="utf-8")
