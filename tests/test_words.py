"""Links of documents resolve, and the names in them exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from support import REPOSITORY
from support.tools import load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("check_words")


def test_the_repository_has_no_fault(tool: ModuleType) -> None:
    assert [str(fault) for fault in tool.check(REPOSITORY)] == []


def test_enough_is_checked(tool: ModuleType) -> None:
    documents = {str(path.relative_to(REPOSITORY)) for path in tool.documents(REPOSITORY)}
    assert {"README.md", "ARCHITECTURE.md", "docs/options.md", "rust/ring/README.md"} <= documents
    sources = {str(path.relative_to(REPOSITORY)) for path in tool.sources(REPOSITORY)}
    assert {"python/pie_driver_sglang/engine/executor.py", "rust/wire/src/lib.rs"} <= sources
    assert len(sources) > 200
    links = list(tool.links((REPOSITORY / "README.md").read_text()))
    assert len(links) > 20


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("See [a page](docs/missing.md).", "docs/missing.md does not exist"),
        ("See [a heading](docs/memory.md#missing).", "no such heading"),
        ("See [a heading](#missing).", "no such heading"),
        ('<img src="missing.svg">', "missing.svg does not exist"),
        ("See [it](/etc/passwd).", "is not relative"),
        ("See [it](../../../../../../etc/passwd).", "does not exist|outside of the repository"),
        ("Set `page_sise = 32`.", "there is no option page_sise"),
        ("```toml\n[model.driver.options]\npage_sise = 32\n```", "there is no option page_sise"),
        ("Run `pie-sglang doktor`.", "there is no command pie-sglang doktor"),
        ("    pie-sglang plan --modell x", "there is no flag --modell"),
        ("Run `python -m pie_driver_sglang doktor`.", "there is no command"),
        ("Run `make tset`.", "there is no target tset"),
        ("Set `PIE_DRIVER_LGO=debug`.", "there is no variable PIE_DRIVER_LGO"),
        ("Look at `docs/missing.md`.", "docs/missing.md does not exist"),
    ],
)
def test_a_planted_fault_in_a_document_is_found(tool: ModuleType, text: str, fault: str) -> None:
    faults = [str(each) for each in tool.check_document(REPOSITORY, "README.md", text)]
    assert any(re.search(fault, each) for each in faults), faults


@pytest.mark.parametrize(
    "text",
    [
        "[a heading](docs/memory.md#when-it-does-not-fit) and [a page](https://example.com/x#y).",
        "Set `page_size = 32` or `kv_cache_dtype`; run `pie-sglang plan --model x` or `make test`.",
        "`" + "`, `".join(["name"] * 60) + "`.",
    ],
)
def test_what_is_right_passes(tool: ModuleType, text: str) -> None:
    assert list(tool.check_document(REPOSITORY, "README.md", text)) == []


def test_a_section_that_the_protocol_lacks_is_found(tool: ModuleType) -> None:
    sections = tool.sections_of((REPOSITORY / "docs" / "pie-protocol.md").read_text())
    assert {"4.2", "5.5", "6", "6.13", "8.3"} <= sections
    assert list(tool.check_sections("a.rs", "/// A rule (§5.5, §8.3).", sections)) == []
    [fault] = tool.check_sections("a.rs", "/// A rule (§5.5, §5.99).", sections)
    assert "§5.99" in fault.text


def test_a_metric_that_does_not_exist_is_found(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tool.known_names(REPOSITORY)
    metrics = frozenset({"pie_driver_steps", "pie_driver_tokens", "pie_driver_step_seconds"})
    monkeypatch.setattr(tool, "known_names", lambda root: names._replace(metrics=metrics))
    text = "`pie_driver_steps_total`, `pie_driver_step_seconds_bucket{le}` and `pie_driver_stepps`."
    faults = [each.text for each in tool.check_document(REPOSITORY, "README.md", text)]
    assert faults == ["there is no metric pie_driver_stepps"]


def test_metrics_are_those_of_the_driver(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a module of metrics there is nothing to check."""
    module = ModuleType("pie_driver_sglang.observability.driver_metrics")
    module.METRICS = (SimpleNamespace(name="x:steps_total"),)  # type: ignore[attr-defined]
    module.READY = "x:ready"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pie_driver_sglang.observability", ModuleType("observe"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert tool._metrics() == {"x:steps_total", "x:ready"}


def test_the_script_exits_with_1_for_a_fault(tmp_path: Path) -> None:
    """On a copy of the documents, which it takes for a repository."""
    for name in ("docs", "python", "Makefile"):
        source, target = REPOSITORY / name, tmp_path / name
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copy(source, target)
    (tmp_path / "README.md").write_text("See [a page](docs/missing.md).\n")
    command = [sys.executable, str(REPOSITORY / "tools" / "check_words.py"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "README.md:1: docs/missing.md does not exist" in run.stdout


class TestAbsoluteLinks:
    def test_every_relative_link_of_the_readme_becomes_absolute(self, tool: ModuleType) -> None:
        text = (REPOSITORY / "README.md").read_text()
        made = load_tool("absolute_links").absolute(text, "README.md", "https://host/me/it", "v1")
        before = [target for _, target in tool.links(text)]
        after = [target for _, target in tool.links(made)]
        assert len(before) == len(after) > 20
        for old, new in zip(before, after, strict=True):
            if old.startswith("http"):
                assert new == old
                continue
            match = re.fullmatch(r"https://host/me/it/(raw|blob)/v1/(.+)", new)
            assert match is not None, old
            assert (match[1] == "raw") == old.endswith(".svg")
            assert (REPOSITORY / match[2].partition("#")[0]).exists()

    def test_folders_and_code(self) -> None:
        absolute = load_tool("absolute_links").absolute
        assert absolute("[a](../x.md#y) `[b](c.md)`", "docs/d.md", "https://h", "v1") == (
            "[a](https://h/blob/v1/x.md#y) `[b](c.md)`"
        )
