"""The check of SGLang's version before it is imported."""

from __future__ import annotations

import logging
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pie_driver_sglang import errors
from pie_driver_sglang.backends.sglang import version as version_check
from pie_driver_sglang.backends.sglang.version import OVERRIDE, check_versions, pins
from pie_driver_sglang.config.server_args import LISTS, SGLANG_VERSION
from pie_driver_sglang.config.sglang_versions import (
    SUPPORTED,
    SglangVersion,
    adapter_version,
    version_for,
)
from pie_driver_sglang.errors import StartError
from support import REPOSITORY


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that the check finds; a name that is removed is not installed."""
    versions = pins()
    # Which version it is is found once in a process.
    monkeypatch.setattr(version_check, "adapter_version", adapter_version.__wrapped__)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_the_project_admits_the_supported_versions_and_no_others() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    admitted = {x.name: x.specifier for x in map(Requirement, project["dependencies"])}
    near = {f"0.5.{patch}{post}" for patch in range(12, 30) for post in ("", ".post1")} | {"0.6.0"}
    # A post-release of the oldest is admitted by pip, and refused at the start.
    found = {x for x in near if admitted["sglang"].contains(x)} - {"0.5.17.post1"}
    assert found == {version.sglang for version in SUPPORTED}
    for version in SUPPORTED:
        assert all(admitted[name].contains(pin) for name, pin in version.pins.items())
    assert SGLANG_VERSION == adapter_version().sglang == pins()["sglang"]


def test_an_installed_version_gets_modules_of_its_own_or_of_one_before() -> None:
    found = {x: version_for(x).sglang for x in ("0.5.9", "0.5.17", "0.5.21", "0.5.23", "0.6.1")}
    assert found == {
        "0.5.9": "0.5.17",
        "0.5.17": "0.5.17",
        "0.5.21": "0.5.17",
        "0.5.23": "0.5.23",
        "0.6.1": "0.5.23",
    }
    assert LISTS.keys() == {version.sglang for version in SUPPORTED}


def test_this_environment_passes() -> None:
    check_versions({})


def test_a_build_of_the_pinned_version_passes(installed: dict[str, str]) -> None:
    installed["torch"] += "+cu130"
    check_versions({})


@pytest.mark.parametrize("version", SUPPORTED, ids=lambda version: version.sglang)
def test_a_supported_version_needs_the_torch_that_it_pins(
    installed: dict[str, str], version: SglangVersion, caplog: pytest.LogCaptureFixture
) -> None:
    installed |= version.pins
    check_versions({})
    assert caplog.text == ""
    installed["torch"] = "2.12.0"
    with pytest.raises(StartError, match=rf"torch is 2\.12\.0 in .*, expected {version.torch}"):
        check_versions({})


@pytest.mark.parametrize(("other", "near"), [("0.5.21", "0.5.17"), ("0.5.24", "0.5.23")])
@pytest.mark.parametrize("override", [None, "0", "yes"])
def test_another_version_is_refused(
    installed: dict[str, str], other: str, near: str, override: str | None
) -> None:
    installed["sglang"] = other
    with pytest.raises(StartError) as refusal:
        check_versions({} if override is None else {OVERRIDE: override})
    assert f"sglang is {other} in {sys.prefix}, supported: 0.5.17, 0.5.23" in refusal.value.message
    assert ("has no effect" in refusal.value.message) == (override is not None)
    assert f"pip install sglang=={near}" in refusal.value.hint
    assert f"{OVERRIDE}=1" in refusal.value.hint


def test_the_override_warns(installed: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    installed["sglang"] = "0.5.24"
    with caplog.at_level(logging.WARNING):
        check_versions({OVERRIDE: "1"})
    assert "sglang is 0.5.24" in caplog.text


def test_a_missing_package_is_refused_whatever_is_allowed(installed: dict[str, str]) -> None:
    del installed["sglang"]
    with pytest.raises(StartError, match="sglang cannot be found"):
        check_versions({OVERRIDE: "1"})


@pytest.mark.parametrize(("version", "fits"), [("0.5.21", False), (f"{SGLANG_VERSION}+own", True)])
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
    with pytest.raises(StartError, match=r"sglang is 0\.5\.21"):
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


@pytest.mark.parametrize(
    ("version", "device", "warned"),
    [
        (SUPPORTED[0], "cuda:0", False),
        (SUPPORTED[-1], "cuda:0", True),
        (SUPPORTED[-1], "cpu", False),
    ],
)
def test_a_version_that_no_gpu_has_run_is_named(
    version: SglangVersion,
    device: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(version_check, "adapter_version", lambda: version)
    version_check.warn_untried(device)
    assert [version.sglang in text for text in caplog.messages] == [True] * warned
