"""The check of SGLang's version before it is imported."""

from __future__ import annotations

import logging
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from pie_driver_sglang import errors
from pie_driver_sglang.backends.sglang.version import OVERRIDE, check_versions, pins
from pie_driver_sglang.config.server_args import SGLANG_VERSION
from pie_driver_sglang.config.sglang_versions import ADAPTED, SUPPORTED, version_for
from pie_driver_sglang.errors import StartError
from support import REPOSITORY


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that the check finds; a name that is removed is not installed."""
    versions = pins()

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_the_pins_are_those_of_the_project() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    exact = dict(line.split("==") for line in declared if "==" in line)
    assert pins() == exact
    assert exact["sglang"] == SGLANG_VERSION


def test_an_installed_version_gets_modules_of_its_own_or_of_one_before() -> None:
    found = {x: version_for(x).sglang for x in ("0.5.9", "0.5.17", "0.5.21", "0.5.23", "0.6.1")}
    assert found == {
        "0.5.9": "0.5.17",
        "0.5.17": "0.5.17",
        "0.5.21": "0.5.17",
        "0.5.23": "0.5.23",
        "0.6.1": "0.5.23",
    }
    assert set(SUPPORTED) <= set(ADAPTED)


def test_this_environment_passes() -> None:
    check_versions({})


def test_a_build_of_the_pinned_version_passes(installed: dict[str, str]) -> None:
    installed["torch"] += "+cu130"
    check_versions({})


@pytest.mark.parametrize("override", [None, "0", "yes"])
def test_another_version_is_refused(installed: dict[str, str], override: str | None) -> None:
    installed["sglang"] = "0.5.23"
    with pytest.raises(StartError) as refusal:
        check_versions({} if override is None else {OVERRIDE: override})
    assert f"sglang is 0.5.23 in {sys.prefix}, supported: {SGLANG_VERSION}" in refusal.value.message
    assert ("has no effect" in refusal.value.message) == (override is not None)
    assert f"pip install sglang=={SGLANG_VERSION}" in refusal.value.hint
    assert f"{OVERRIDE}=1" in refusal.value.hint


def test_the_override_warns(installed: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    installed["sglang"] = "0.5.23"
    with caplog.at_level(logging.WARNING):
        check_versions({OVERRIDE: "1"})
    assert "sglang is 0.5.23" in caplog.text


def test_a_missing_package_is_refused_whatever_is_allowed(installed: dict[str, str]) -> None:
    del installed["sglang"]
    with pytest.raises(StartError, match="sglang cannot be found"):
        check_versions({OVERRIDE: "1"})


@pytest.mark.parametrize(("version", "fits"), [("0.5.23", False), (f"{SGLANG_VERSION}+own", True)])
def test_what_is_installed_is_seen_without_an_import(
    version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if fits:
        check_versions({})
        return
    with pytest.raises(StartError, match=r"sglang is 0\.5\.23"):
        check_versions({})


def test_dependencies_are_checked_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no metadata where they are not installed."""
    monkeypatch.setattr(sys, "path", [])
    names = "sglang, torch, flashinfer-python"
    with pytest.raises(StartError, match=f"{names} cannot be found in {sys.prefix}"):
        check_versions({})


@pytest.mark.parametrize("again", [False, True])
def test_an_install_hint_is_for_this_environment(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """By pip, or by uv where the environment has no pip, as those of `uv venv`."""
    flags = [] if not again else ["--force-reinstall"]
    words = shlex.split(errors.install_command("a>=1,<2", "b", again=again))
    assert words == [sys.executable, "-m", "pip", "install", *flags, "a>=1,<2", "b"]
    monkeypatch.setattr(errors, "has_pip", lambda: False)
    flags = [] if not again else ["--reinstall"]
    words = shlex.split(errors.install_command("a>=1,<2", "b", again=again))
    assert words == ["uv", "pip", "install", "--python", sys.executable, *flags, "a>=1,<2", "b"]
