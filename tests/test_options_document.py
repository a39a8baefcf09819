"""`docs/options.md` is generated from the options."""

from __future__ import annotations

from types import ModuleType

import pytest

from pie_driver_sglang.config.options import OPTIONS
from support.tools import load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("generate_options")


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
