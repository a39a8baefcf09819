"""README.md, SECURITY.md and docs/start: their configuration, programs and figures."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from typing import Any, Final

import pie_driver_sglang
from pie_driver_sglang.cli.pie_config import driver_tables
from pie_driver_sglang.config.config_file import parse_config
from pie_driver_sglang.config.options import OPTIONS
from support import REPOSITORY
from support.hostile import hostile_requests

TEXT: Final = (REPOSITORY / "README.md").read_text()
PIE: Final = (REPOSITORY / "docs/start/pie.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_configuration_for_pie_is_accepted() -> None:
    """With the embedded model in place of the one that would be downloaded."""
    [example] = blocks(PIE, "toml")
    table: dict[str, Any] = tomllib.loads(example)
    table["model"][0]["hf_repo"] = str(REPOSITORY / "models" / "pocket")
    [driver] = driver_tables(table)
    config = parse_config(driver.table)
    assert config.driver.device == ("cuda:0",)
    assert config.driver.options.page_size == 16


def test_documented_defaults_are_those_of_the_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PIE, re.MULTILINE)
    assert len(rows) >= 5
    for name, default in rows:
        option = OPTIONS[name]
        # As docs/options.md has it.
        assert default == (option.about.default.strip("`") or str(option.default).lower()), name


def test_its_programs_use_what_is_public() -> None:
    [program] = blocks(TEXT, "python")
    compile(program, "README.md", "exec")
    [names] = re.findall(r"^from pie_driver_sglang import (.+)$", program, re.MULTILINE)
    assert set(names.split(", ")) <= set(pie_driver_sglang.__all__)


def test_the_examples_of_index_and_drafter_run() -> None:
    """The parts of its program that need no model."""
    [program] = blocks(TEXT, "python")
    imports, _, *parts = program.split("\n\n")
    exec(compile("\n".join([imports, *parts]), "README.md", "exec"), {})


def test_the_security_page_counts_the_hostile_requests() -> None:
    page = (REPOSITORY / "SECURITY.md").read_text()
    rows = [row for kind in hostile_requests.ROWS.values() for row in kind]
    engine, gateway = (
        sum(k in row.at for row in rows)
        for k in (hostile_requests.ENGINE, hostile_requests.GATEWAY)
    )
    assert all(hostile_requests.SGLANG in row.at for row in rows)
    assert f"a table of {len(rows)} " in page
    assert f"`Engine` {engine}, the gateway the {gateway} " in page


def test_the_table_has_the_figures_of_its_record() -> None:
    [name] = re.findall(r"<!-- (benches/results/[\w.-]+\.json) -->", TEXT)
    record = json.loads((REPOSITORY / name).read_text())

    def median(load: str, side: str, figure: str) -> float:
        rows = [row for row in record["rows"] if (row.get("load"), row.get("side")) == (load, side)]
        return statistics.median(row[figure] for row in rows)

    table = TEXT.partition(name)[2].partition("\n\n")[0]
    for start, load, figure in (
        ("one stream", "1", "median_itl_ms"),
        ("64 streams", "64", "output_throughput"),
        ("256 streams", "256", "output_throughput"),
        ("burst of 408 requests", "all", "output_throughput"),
        ("shared prefixes", "prefix", "output_throughput"),
    ):
        [row] = re.findall(rf"^\| {start}.*$", table, re.MULTILINE)
        theirs, ours = (median(load, side, figure) for side in ("sglang", "ours"))
        ratio = theirs / ours if figure.endswith("_ms") else ours / theirs
        shown = f"{theirs:.1f} ms | {ours:.1f} ms" if figure.endswith("_ms") else ""
        shown = shown or f"{int(theirs + 0.5):,} | {int(ours + 0.5):,}"
        assert row.endswith(f"| {shown} | {ratio:.2f}x |"), (row, shown, ratio)
    assert record["date"][:10] in TEXT
    assert record["device"].split()[3] in table.splitlines()[1]
