"""Preflight, workflows, packaging, image and examples."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pie_driver_sglang
from pie_driver_sglang.cli import main
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.config.sglang_versions import SUPPORTED, SglangVersion
from pie_driver_sglang.frontends.gateway import smg
from pie_driver_sglang.interpreter import NEWEST, OLDEST, refusal
from pie_driver_sglang.observability import spans
from support import REPOSITORY
from support.tools import load_tool

WORKFLOWS: Final = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
PYPROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CARGO: Final = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())
TOOLS: Final = ("sh", "env", "cut", "awk", "df")
"""What the preflight itself needs."""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with all that is needed."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    program_of(folder, "cargo", "echo cargo 1.95.0 '(f2d3ce0bd 2026-03-21)'")
    program_of(folder, "cc", "exit 0")
    program_of(folder, "python3.12", 'case "$2" in *version*) echo 3.12 ;; esac')
    return folder


def program_of(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def preflight(tools: Path, *arguments: str) -> list[str]:
    """The problems that are named."""
    command = [str(REPOSITORY / "tools" / "preflight"), *arguments]
    found = subprocess.run(
        command, env={"PATH": str(tools)}, capture_output=True, text=True, timeout=30
    )
    lines = found.stderr.splitlines()
    assert found.stdout == ""
    assert found.returncode == (1 if lines else 0), found.stderr
    assert all(line.startswith("preflight: ") for line in lines), found.stderr
    return [line.removeprefix("preflight: ") for line in lines]


class TestPreflight:
    def test_nothing_is_missing(self, tools: Path) -> None:
        assert preflight(tools, "python3.12", ".", "0") == []

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("cargo", ("no Rust", "1.91", "rustup.rs")),
            ("cc", ("no C linker", "apt-get install gcc")),
            ("python3.12", ("PYTHON=python3.12 cannot be run", "3.11 or 3.12")),
        ],
    )
    def test_what_is_missing_is_named_with_a_remedy(
        self, tools: Path, name: str, words: tuple[str, ...]
    ) -> None:
        (tools / name).unlink()
        (line,) = preflight(tools, "python3.12", ".", "0")
        assert all(word in line for word in words), line

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("cargo", "echo cargo 1.90.0", ("Rust is 1.90.0", "1.91", "rustup update")),
            ("python3.12", "echo 3.13", ("is Python 3.13", "3.11 and 3.12")),
            ("python3.12", "exit 1", ("cannot be run",)),
            (
                "python3.12",
                'case "$2" in *version*) echo 3.12 ;; *) exit 1 ;; esac',
                ("no module venv", "python3.12-venv"),
            ),
        ],
    )
    def test_what_does_not_fit_is_named(
        self, tools: Path, name: str, text: str, words: tuple[str, ...]
    ) -> None:
        program_of(tools, name, text)
        (line,) = preflight(tools, "python3.12", ".", "0")
        assert all(word in line for word in words), line

    def test_a_full_disk(self, tools: Path) -> None:
        program_of_df = 'echo head; echo "/dev/a 100000000 1 7340032 1% /"'
        (tools / "df").unlink()
        program_of(tools, "df", program_of_df)
        assert preflight(tools, "python3.12", "/somewhere", "7") == []
        (line,) = preflight(tools, "python3.12", "/somewhere", "8")
        assert line.startswith("/somewhere has 7 GiB of free disk space, and 8 are needed")

    def test_everything_at_once(self, tools: Path) -> None:
        for name in ("cargo", "cc", "python3.12"):
            (tools / name).unlink()
        assert len(preflight(tools, "", ".", "0")) == 3

    def test_versions_are_those_of_the_packages(self) -> None:
        text = (REPOSITORY / "tools" / "preflight").read_text()
        minor = CARGO["workspace"]["package"]["rust-version"].partition(".")[2]
        assert f'"$minor" -lt {minor}' in text
        assert "3.11 | 3.12)" in text
        assert PYPROJECT["project"]["requires-python"] == ">=3.11,<3.13"
        assert (OLDEST, NEWEST) == ((3, 11), (3, 12))

    def test_make_checks_before_it_fetches(self, tools: Path, tmp_path: Path) -> None:
        """In an empty copy of the repository, on a machine without Rust."""
        copy = tmp_path / "copy"
        (copy / "tools").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "tools/preflight"):
            shutil.copy(REPOSITORY / name, copy / name)
        (tools / "cargo").unlink()
        for name in ("find", "git", "test", "rm", "make"):
            found = shutil.which(name)
            if found:
                (tools / name).symlink_to(found)
        command = ["make", ".venv/.dependencies", "PYTHON=python3.12", "GIB=0"]
        path = {"PATH": str(tools)}
        found_by = subprocess.run(
            command, cwd=copy, env=path, capture_output=True, text=True, timeout=60
        )
        assert found_by.returncode != 0
        assert "preflight: no Rust" in found_by.stderr
        assert not (copy / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [((3, 10), True), ((3, 11), False), ((3, 12), False), ((3, 13), True), ((3, 14), True)],
)
def test_other_pythons_are_refused_in_one_line(version: tuple[int, int], is_refused: bool) -> None:
    message = refusal(version, "/usr/bin/python")
    assert bool(message) == is_refused
    if is_refused:
        assert message.count("\n") == 1
        assert f"Python {version[0]}.{version[1]} " in message


def test_the_command_refuses_another_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    assert main.main(["--help"]) == 1
    assert capsys.readouterr().err.startswith("pie_driver_sglang: Python 3.13 ")


def workflow(name: str) -> dict[Any, Any]:
    text = (REPOSITORY / ".github" / "workflows" / name).read_text()
    found: dict[Any, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_whole(path: Path) -> None:
    found = workflow(path.name)
    # YAML's `on` is a boolean.
    assert found[True]
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        if "uses" in job:
            assert (REPOSITORY / job["uses"]).is_file()
            continue
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w.-]+@[\w./]+", step["uses"]), step
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", makefile(), re.MULTILINE), target


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (None, None),
        ("runs-on:", "run-on:"),
        ("- run: make counts", "- rum: make counts"),
        ("run: make counts", "run: echo ${{ github.event.pull_request.title }}"),
    ],
)
def test_a_fault_in_a_workflow_is_found(
    right: str | None, wrong: str | None, tmp_path: Path
) -> None:
    """What `make workflows` runs, over a copy."""
    shutil.copytree(REPOSITORY / ".github", tmp_path / ".github")
    (tmp_path / "Makefile").write_text(
        makefile().replace("$(BIN)", str(Path(sys.executable).parent))
    )
    path = tmp_path / ".github" / "workflows" / "ci.yml"
    text = path.read_text()
    if right is not None and wrong is not None:
        assert right in text
        path.write_text(text.replace(right, wrong))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".dependencies").touch()
    command = ["make", "--old-file", ".venv/.dependencies", "workflows", "PYTHON=python3"]
    # The variables of a `make test` would reach this make as well.
    given = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    given.pop("SGLANG", None)
    found = subprocess.run(
        command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode == 0) == (right is None), found.stdout + found.stderr


def makefile() -> str:
    return (REPOSITORY / "Makefile").read_text()


def test_wheels_are_for_both_processors_and_the_glibc_of_torch() -> None:
    job = workflow("wheel.yml")["jobs"]["build"]
    assert {row["target"] for row in job["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    (build,) = (step for step in job["steps"] if "maturin" in step.get("uses", ""))
    assert build["with"]["manylinux"] == "2_28"
    assert CARGO["profile"]["release"]["strip"] is True


def test_ci_runs_what_has_to_hold_before_a_change() -> None:
    wanted = set(
        re.findall(r"^make (\w+)$", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    )
    run = " ".join(
        step.get("run", "")
        for job in workflow("ci.yml")["jobs"].values()
        for step in job.get("steps", [])
    )
    assert wanted
    assert wanted <= set(re.findall(r"\bmake (\w+)", run))
    oldest = workflow("ci.yml")["jobs"]["minimum-rust"]["steps"][1]["uses"].partition("@")[2]
    assert oldest == CARGO["workspace"]["package"]["rust-version"]


def test_ci_installs_from_git_and_from_sources() -> None:
    """What the install page and the release page promise to those who have Rust."""
    [step] = workflow("ci.yml")["jobs"]["source"]["steps"][-1:]
    name = PYPROJECT["project"]["name"]
    for promise, checked in (
        (f'"{name} @ git+https://', f'"{name} @ git+file://$PWD"'),
        ("sources (`.tar.gz`)", "dist/*.tar.gz"),
    ):
        pages = ("docs/install.md", "docs/release.md")
        assert any(promise in (REPOSITORY / page).read_text() for page in pages)
        assert checked in step["run"]
    assert 'pip install --no-deps --force-reinstall "$source"' in step["run"]


def test_ci_runs_with_every_supported_version() -> None:
    """Every test, by its constraints, and the list of what is reached in its wheel."""
    jobs, versions = workflow("ci.yml")["jobs"], [version.sglang for version in SUPPORTED]
    tested = jobs["test"]["strategy"]["matrix"]["include"]
    assert [row["sglang"] for row in tested] == versions
    assert {row["python"] for row in tested} == {"3.11", "3.12"}
    for row in tested:
        assert f"sglang=={row['sglang']}\n" in (REPOSITORY / row["constraints"]).read_text()
    assert jobs["compat"]["strategy"]["matrix"]["sglang"] == versions
    assert "tools/check_compat.py" in jobs["compat"]["steps"][-1]["run"]


def test_a_wheel_needs_maturin_alone(tmp_path: Path) -> None:
    """What `make wheel` would run in a clone without an environment."""
    for name in ("Makefile", "pyproject.toml", "Cargo.toml", "Cargo.lock", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name in ("rust", "python"):
        (tmp_path / name).mkdir()
    command = ["make", "--dry-run", "wheel", "PYTHON=python3"]
    plan = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "target/builder/bin/maturin build --release" in plan
    assert ".venv" not in plan.replace("target/builder", "")
    (installed,) = re.findall(r"pip install .*", plan)
    assert installed.endswith("'maturin>=1.16,<2'")


def test_urls_are_those_of_one_repository() -> None:
    """The release checks that it is the one that publishes, and all links of the page need it."""
    urls = dict(PYPROJECT["project"]["urls"])
    source = urls.pop("Source")
    assert all(url.startswith(f"{source}/") for name, url in urls.items() if name != "Homepage")
    text = (REPOSITORY / ".github" / "workflows" / "release.yml").read_text()
    (check,) = re.findall(r"test \"\$\((.*)\)\" \\\n +(= .*)", text)
    assert check[1] == '= "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"'
    server, owner, name = source.rsplit("/", 2)
    for repository, status in ((f"{owner}/{name}", 0), (f"{owner}/fork", 1)):
        variables = {"GITHUB_SERVER_URL": server, "GITHUB_REPOSITORY": repository}
        command = ["bash", "-c", f'test "$({check[0]})" {check[1]}']
        found = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **variables}, timeout=60)
        assert found.returncode == status


def test_the_page_of_the_package_has_no_relative_links() -> None:
    for name in ("wheel.yml", "release.yml"):
        text = (REPOSITORY / ".github" / "workflows" / name).read_text()
        assert 'tools/absolute_links.py README.md "$GITHUB_SHA"' in text, name
    command = [sys.executable, "tools/absolute_links.py", "README.md", "v1"]
    page = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", page.stdout)
    assert links
    assert all("".join(link).startswith(("https://", "#")) for link in links)


def test_versions_agree() -> None:
    """In the files that `tools/set_version.py` knows, and the newest release of the changelog."""
    version = PYPROJECT["project"]["version"]
    assert version == CARGO["workspace"]["package"]["version"] == pie_driver_sglang.__version__
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    heading = r"^## (\S+) \((?:unreleased|\d{4}-\d{2}-\d{2})\)$"
    newest, *_ = re.findall(heading, changes, re.MULTILINE)
    assert newest == version
    tool = load_tool("set_version")
    for name, pattern in tool.VERSIONS.items():
        text = (REPOSITORY / name).read_text()
        assert tool.replace(text, pattern, version) == text, name
    locks = [(REPOSITORY / name).read_text() for name in tool.LOCKS]
    names = tool.local_packages(locks[0])
    assert "pie-py" in names
    assert all(tool.replace_locked(lock, names, version) == lock for lock in locks)
    changed = tool.replace_locked(locks[1], names, "7.7.7")
    assert {tool.local_packages(changed)[name] for name in ("pie-ring", "pie-planner")} == {"7.7.7"}


@pytest.mark.parametrize(
    ("tag", "heading", "status"),
    [
        ("v{version}", "## {version} (2026-12-01)", 0),
        ("v9.9.9", "## 9.9.9 (2026-12-01)", 1),
        ("v{version}", "## {version} (unreleased)", 1),
    ],
)
def test_a_release_is_checked_and_has_its_notes(
    tag: str, heading: str, status: int, tmp_path: Path
) -> None:
    """The shell of the release workflow, on a copy of the files that it reads."""
    version, source = PYPROJECT["project"]["version"], PYPROJECT["project"]["urls"]["Source"]
    for name in ("pyproject.toml", "Cargo.toml", "CHANGELOG.md", "tools/absolute_links.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    text, count = re.subn(
        rf"^## {re.escape(version)} \(.*\)$",
        heading.format(version=version),
        changes.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    changes.write_text(text)
    jobs = workflow("release.yml")["jobs"]
    server, owner, name = source.rsplit("/", 2)
    variables = {
        "GITHUB_REF_NAME": tag.format(version=version),
        "GITHUB_SERVER_URL": server,
        "GITHUB_REPOSITORY": f"{owner}/{name}",
    }

    def shell(job: str, step: str) -> int:
        [text] = [each["run"] for each in jobs[job]["steps"] if each.get("name") == step]
        # What is published is not part of the test.
        text = text.partition("gh release create")[0]
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=tmp_path,
            env={**os.environ, **variables},
            timeout=60,
        ).returncode

    assert bool(shell("check", "Compare")) == bool(status)
    if not status:
        assert shell("page", "Publish it") == 0
        notes = (tmp_path / "notes.md").read_text()
        assert "### Breaking" in notes
        assert "## 0.1.0" not in notes


def test_every_dependency_has_a_reason() -> None:
    """In the table of the install page, with its bounds."""
    page = (REPOSITORY / "docs" / "install.md").read_text()
    section = page.partition("\n## Dependencies\n")[2].partition("\n## ")[0]
    extras = PYPROJECT["project"]["optional-dependencies"]
    for text in [
        *PYPROJECT["project"]["dependencies"],
        *(each for e in extras.values() for each in e),
    ]:
        requirement = Requirement(text)
        rows = [line for line in section.splitlines() if line.startswith("|")]
        [row] = [row for row in rows if f"`{requirement.name}`" in row]
        lower = min(each.version for each in requirement.specifier if each.operator == ">=")
        assert lower in row or "a lower bound each" in row, requirement


def test_every_crate_has_a_reason() -> None:
    """A comment above its group; this workspace's own come first."""
    text = (REPOSITORY / "Cargo.toml").read_text()
    section = text.partition("\n[workspace.dependencies]\n")[2].partition("\n[")[0]
    groups = [group.splitlines() for group in re.split(r"^# ", section, flags=re.MULTILINE)[1:]]
    named = [line.partition(" ")[0] for _, *lines in groups for line in lines if line]
    assert sorted(named) == sorted(CARGO["workspace"]["dependencies"])
    assert all(
        name.startswith("pie-") == (group is groups[0])
        for group in groups
        for name in (line.partition(" ")[0] for line in group[1:] if line)
    )


def test_sglang_needs_all_dependencies_but_one() -> None:
    """As the install page says: what a plugin adds to an environment with SGLang."""
    needed: set[str] = set()
    left = ["sglang"]
    while left:
        name = canonicalize_name(left.pop())
        if name in needed:
            continue
        needed.add(name)
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        requirements = map(Requirement, texts)
        left += [
            r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})
        ]
    added = {canonicalize_name(Requirement(r).name) for r in PYPROJECT["project"]["dependencies"]}
    [name] = added - needed
    for page in ("docs/install.md", "docs/start/parts.md"):
        assert re.search(rf"SGLang .*`{name}`|`{name}`.* SGLang", (REPOSITORY / page).read_text())


@pytest.mark.parametrize("version", SUPPORTED, ids=lambda version: version.sglang)
def test_constraints_name_what_a_version_pins(version: SglangVersion) -> None:
    """The oldest version is the one that `make` and the image install."""
    name = "constraints.txt" if version == SUPPORTED[0] else f"constraints-{version.sglang}.txt"
    lines = (REPOSITORY / name).read_text().splitlines()
    assert f"--constraints {name} " in lines[0]
    pinned: Mapping[str, str] = dict(line.split("==") for line in lines[1:])
    assert pinned.items() >= {**version.pins, "sglang-kernel": version.kernels}.items()
    for dependency in map(Requirement, PYPROJECT["project"]["dependencies"]):
        assert dependency.specifier.contains(pinned[dependency.name]), dependency
    assert f"SGLANG ?= {SUPPORTED[0].sglang}\n" in makefile()


def test_licences_of_all_crates_are_allowed() -> None:
    allowed = set(tomllib.loads((REPOSITORY / "deny.toml").read_text())["licenses"]["allow"])
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    for package in json.loads(found.stdout)["packages"]:
        # `A AND B` needs both, `A OR B` and the old `A/B` need one.
        text = package["license"].replace("(", "").replace(")", "")
        for both in text.split(" AND "):
            choices = {choice.strip() for choice in re.split(r" OR |/", both)}
            assert choices & allowed, (package["name"], package["license"])


def test_the_image_copies_what_is_there() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    for names in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((REPOSITORY / name).exists() for name in names.split()), names
    assert "--compile-bytecode" in text
    # Both servers are in it.
    assert ".whl)[demo,gateway]" in text
    assert "/.venv*" in (REPOSITORY / ".dockerignore").read_text().splitlines()


def test_the_example_of_a_configuration_is_accepted() -> None:
    command = [sys.executable, "-m", "pie_driver_sglang", "check", "examples/pie.toml"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_example_of_replicas_names_what_is_there() -> None:
    folder = REPOSITORY / "examples" / "replicas"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            assert (folder / volume.split(":")[0]).exists(), volume
    command, *words = services["server"]["command"].split()
    assert command == "serve"
    given = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
    assert {"dp_size", "enable_metrics"} <= set(given) <= SERVER_ARGS.keys()
    [job] = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:30000"]}]


def test_install_hints_have_the_pins_of_the_project() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert list(spans.REQUIREMENTS) == extras["trace"]
    assert extras["gateway"] == [smg.REQUIREMENT]
