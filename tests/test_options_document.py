"""`docs/options.md` is generated from the options."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from pie_driver_sglang.config.options import OPTIONS
from support import REPOSITORY


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_options", REPOSITORY / "tools" / "generate_options.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_is_fresh(tool: ModuleType) -> None:
    assert tool.render() == tool.TARGET.read_text(encoding="utf-8"), "run `make docs`"


def test_every_option_has_a_row(tool: ModuleType) -> None:
    text = tool.render().partition("\n## Ranks\n")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    documented = {row.split("`")[1]: row for row in rows}
    assert documented.keys() == OPTIONS.keys()
    for name, option in OPTIONS.items():
        assert option.about.text in documented[name]
        # A bar would end a cell.
        assert documented[name].count("|") == 7
