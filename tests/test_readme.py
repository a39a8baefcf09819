"""README.md: its configuration, its programs and its length."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

import pie_driver_sglang
from pie_driver_sglang.cli.pie_config import driver_tables
from pie_driver_sglang.config.file import parse_config
from pie_driver_sglang.config.options import OPTIONS
from tiny_models import REPOSITORY

TEXT: Final = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_readme_has_at_most_120_lines() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_the_configuration_is_accepted() -> None:
    """With the embedded model in place of the one that would be downloaded."""
    [example] = blocks("toml")
    table: dict[str, Any] = tomllib.loads(example)
    table["model"][0]["hf_repo"] = str(REPOSITORY / "models" / "pocket")
    [driver] = driver_tables(table)
    config = parse_config(driver.table)
    assert config.driver.device == ("cuda:0",)
    assert config.driver.options.page_size == 16


def test_its_options_have_the_defaults_that_it_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", TEXT, re.MULTILINE)
    assert len(rows) >= 5
    for name, default in rows:
        option = OPTIONS[name]
        # As docs/options.md has it.
        assert default == (option.about.default.strip("`") or str(option.default).lower()), name


def test_its_programs_use_what_is_public() -> None:
    [program] = blocks("python")
    compile(program, "README.md", "exec")
    [names] = re.findall(r"^from pie_driver_sglang import (.+)$", program, re.MULTILINE)
    assert set(names.split(", ")) <= set(pie_driver_sglang.__all__)


def test_the_books_of_the_cache_are_kept_as_it_says() -> None:
    """What of its program needs no model."""
    [program] = blocks("python")
    imports, _, books = program.split("\n\n")
    exec(compile(f"{imports}\n{books}", "README.md", "exec"), {})


def test_the_first_screen_says_what_the_figures_are() -> None:
    first = "\n".join(TEXT.splitlines()[:30])
    assert "Weights are\nrandom" in first or "Weights are random" in first
    assert "docs/benchmarks.md" in first
    assert "drop-in replacement" in first
