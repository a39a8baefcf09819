"""README.md and docs/start: every command and snippet is run or parsed.

Each block belongs to one kind below; one that belongs to none is a failure. Run here are the
requests, the programs and the plan, on a model of this repository. Command lines of our command
are parsed here, and what they start is run by the tests of each command. Only parsed are those that
need what no test has: Docker and Git (`.github/workflows/ci.yml` builds the image, runs its demo,
and installs from Git), a cluster, a GPU, and Pie.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

import pie_driver_sglang
from pie_driver_sglang.cli import main
from pie_driver_sglang.observability.active import Active
from support import REPOSITORY
from support.models.tiny_models import POCKET
from support.servers.pie_server import running
from support.servers.sglang_server import Server

PAGES: Final = (
    "README.md",
    *sorted(f"docs/start/{p.name}" for p in (REPOSITORY / "docs/start").glob("*.md")),
)
MODEL: Final = "Qwen/Qwen3-8B"
URL: Final = "http://127.0.0.1:30000"
VALUES: Final = {"N": "1", "X": "0.5", "NAME": "x", "MODEL": MODEL, "HOST:PORT": "h:1", "…": ""}
"""What stands for a value in a table."""
BEGINNINGS: Final = r"pie-sglang \w|make \w|docker \w|uv \w|python -m |SGLANG_PLUGINS="
"""Of code in prose that is a command."""
PIE: Final = (
    r"config init|driver sglang (?:set venv \S+|show|doctor)|model download \S+"
    r"|run [\w-]+ -- .+|serve"
)
"""Commands of Pie, which is not installed here."""
PIE_INSTALLER: Final = "https://pie-project.org/install.sh"


class Block(NamedTuple):
    """A block of code.

    Attributes:
        page: Where it is.
        language: The word after the fence; empty for an indented block.
        text: Without the fence or the indentation.
    """

    page: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = (REPOSITORY / page).read_text()
        fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
        yield from (Block(page, *found.groups()) for found in fence.finditer(text))
        for found in re.finditer(r"(?:\A|\n\n)((?:    .*\n)+)", fence.sub("", text)):
            yield Block(page, "", re.sub(r"^    ", "", found[1], flags=re.MULTILINE))


def lines(block: Block) -> Iterator[list[str]]:
    """The commands of a block of them, each as its words, without comments."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


BLOCKS: Final = list(blocks())
SHELL: Final = [block for block in BLOCKS if block.language in ("", "sh")]
COMMANDS: Final = [
    (block.page, words)
    for block in SHELL
    if not block.text.startswith("pie-sglang: ")
    for words in lines(block)
]


def inline() -> Iterator[tuple[str, list[str]]]:
    """Commands in prose and tables, and the flags of tables, as command lines."""
    for page in PAGES:
        columns: list[str] = []
        for line in (REPOSITORY / page).read_text().splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else []
            columns = [] if not cells else columns or cells
            for number, text in enumerate(cells or [line]):
                flags = columns and columns[number] in ("here", "flag", "flags", "command", "goal")
                for code in re.findall(r"`([^`]+)`", text):
                    is_flag = bool(flags) and code.startswith("--")
                    if not is_flag and not re.match(BEGINNINGS, code):
                        continue
                    words = [each for word in shlex.split(code) for each in _with_value(word)]
                    if is_flag:
                        model = [] if "--model-path" in words else [MODEL]
                        words = ["pie-sglang", "serve", *model, *words]
                    yield page, words


def _with_value(word: str) -> Iterator[str]:
    name, equals, value = word.partition("=")
    word = f"{name}={VALUES.get(value, value)}" if equals else VALUES.get(word, word)
    if word:
        yield word


INLINE: Final = list(inline())


def name_of(words: Sequence[str]) -> str:
    return Path(words[0]).name


def served(words: Sequence[str]) -> list[str] | None:
    """The words after `pie-sglang serve`, or those of SGLang's own command; None for others."""
    if name_of(words) == "pie-sglang" and words[1] == "serve":
        return list(words[2:])
    if words[0].startswith("SGLANG_PLUGINS="):
        words = words[1:]
    if words[:3] == ["python", "-m", "sglang.launch_server"]:
        return list(words[3:])
    if words[:2] == ["docker", "run"]:
        rest = list(words[words.index("pie-driver-sglang") + 1 :])
        return rest[1:] if rest[:1] == ["serve"] else None
    return None


def files() -> Iterator[tuple[str, list[str]]]:
    """The commands of the files for containers."""
    manifest = "examples/kubernetes/server.yaml"
    for each in yaml.safe_load_all((REPOSITORY / manifest).read_text()):
        if each["kind"] == "Deployment":
            [container] = each["spec"]["template"]["spec"]["containers"]
            yield manifest, ["pie-sglang", *container["args"]]
    for compose in ("examples/replicas/compose.yaml", "examples/gpu/compose.yaml"):
        service = yaml.safe_load((REPOSITORY / compose).read_text())["services"]["server"]
        # The file of a secret is not here; `test_deploy.py` gives one.
        command = re.sub(r"--api-key-file \S+", "", service["command"])
        yield compose, ["pie-sglang", *shlex.split(command)]


@pytest.mark.engine
def test_the_servers_flags_are_those_of_its_parser() -> None:
    named = [*COMMANDS, *INLINE, *files()]
    found = [(page, words) for page, words in named if served(words) is not None]
    assert len(found) > 40
    given = [served(words) for _, words in found]
    # The help has no arguments.
    requested = json.dumps(
        [[w for w in words if w != "--help"] for words in given if words is not None]
    )
    out = subprocess.run(
        [sys.executable, "tests/support/sglang_scripts/parse_serve_flags.py"],
        input=requested,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(Path(pie_driver_sglang.__file__).parents[1])},
        timeout=300,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    faults = json.loads(out.stdout.splitlines()[-1])
    # A table may name a flag without its value.
    wrong = [
        (page, words, fault)
        for (page, words), fault in zip(found, faults, strict=True)
        if fault and not (fault.endswith(": expected one argument") and words[-1].startswith("--"))
    ]
    assert wrong == [], "\n".join(map(str, wrong))


class _ParsedError(Exception):
    """The arguments of a command were read."""


@pytest.mark.parametrize(("page", "words"), [*COMMANDS, *INLINE])
def test_every_command_is_known(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if served(words) is not None:
        return  # By the test above.
    kind = name_of(words)
    check = CHECKS.get(kind)
    assert check is not None, f"{page}: no kind of command for {shlex.join(words)}"
    check(words, monkeypatch)


def check_ours(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Its parser reads it; a command alone is a name."""
    assert words[1] in {*main.COMMANDS, "--help"}, words
    if words[2:] in ([], ["--help"]):
        return
    read = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *given: Any) -> None:
        read(parser, *given)
        raise _ParsedError

    patch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(_ParsedError):
        main.main(words[1:])


def check_make(words: list[str], _: pytest.MonkeyPatch) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE), words


def check_docker(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """An image is built of this repository's file, whose entry point is our command."""
    if words[1] == "compose":
        assert words[2] == "--file"
        assert (REPOSITORY / words[3]).is_file()
        return
    if words[1] == "run":
        check_ours(["pie-sglang", *words[words.index("pie-driver-sglang") + 1 :]], patch)
        return
    if words[1] in ("tag", "push"):
        # As the manifest names it.
        assert words[-1] == "REGISTRY/pie-driver-sglang"
        return
    assert words == ["docker", "build", "--tag", "pie-driver-sglang", "."]
    assert 'ENTRYPOINT ["pie-sglang"]' in (REPOSITORY / "Dockerfile").read_text()


def check_uv(words: list[str], _: pytest.MonkeyPatch) -> None:
    if "&&" in words:
        cut = words.index("&&")
        check_uv(words[:cut], _)
        return check_uv(words[cut + 1 :], _)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    command = words[1:2] if words[1] == "venv" else words[1:3]
    known = subprocess.run([uv, *command, "--help"], capture_output=True, text=True, check=True)
    flags = {word for word in words if word.startswith("--")}
    assert flags <= set(re.findall(r"--[\w-]+", known.stdout)), words
    return None


def check_kubectl(words: list[str], _: pytest.MonkeyPatch) -> None:
    manifest = REPOSITORY / "examples/kubernetes/server.yaml"
    if words[1] == "create":
        assert words[2:4] == ["secret", "generic"]
        key = words[4].removeprefix("--from-literal=").partition("=")[0]
        assert f"{{name: {words[5]}, key: {key}}}" in manifest.read_text()
        return
    assert words == ["kubectl", "apply", "--filename", str(manifest.relative_to(REPOSITORY))]


def check_git(words: list[str], _: pytest.MonkeyPatch) -> None:
    """The repository that the package names."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    source = project["urls"]["Source"]
    assert words == ["git", "clone", source, "&&", "cd", source.rpartition("/")[2]]


def check_shell(words: list[str], _: pytest.MonkeyPatch) -> None:
    subprocess.run(["bash", "-n", "-c", shlex.join(words)], check=True)


def check_pie(words: list[str], _: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(PIE, " ".join(words[1:])), words


def check_curl(words: list[str], _: pytest.MonkeyPatch) -> None:
    """It is run by a test below, except the one that installs Pie."""
    if PIE_INSTALLER in words:
        assert words[-3:] == ["|", "PIE_VERSION=0.4.0", "bash"]
        return
    assert words in CURLS


CHECKS: Final = {
    "pie-sglang": check_ours,
    "make": check_make,
    "docker": check_docker,
    "uv": check_uv,
    "git": check_git,
    "export": check_shell,
    "kubectl": check_kubectl,
    "hf": check_shell,
    "pie": check_pie,
    "curl": check_curl,
}
CURLS: Final = [
    words for _, words in COMMANDS if name_of(words) == "curl" and PIE_INSTALLER not in words
]
PROGRAMS: Final = [block for block in BLOCKS if block.language == "python"]
OUTPUTS: Final = [block for block in BLOCKS if block.language == "text"]
QWEN3_8B: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The configuration of `MODEL`, as far as a plan reads it."""


@pytest.fixture(scope="module")
def server(forked_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("start")
    flags = ["--scheduler", "pie", "--served-model-name", MODEL, "--enable-metrics"]
    with running(folder, *flags, python=forked_python) as (found, _):
        yield found


@pytest.mark.engine
@pytest.mark.parametrize("words", CURLS)
def test_requests_by_curl(server: Server, words: list[str]) -> None:
    at_ours = [word.replace(URL, server.url) for word in words]
    assert at_ours != words
    done = subprocess.run(
        [*at_ours, "--silent", "--fail"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.engine
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.page)
def test_programs(block: Block, server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    """With the server and the embedded model in place of what they name."""
    text = block.text.replace(URL, server.url)
    if "Engine(" in text:
        text = text.replace('"Qwen/Qwen3-0.6B"', repr(str(POCKET)))
        text = text.replace("model_path=", "device='cpu', model_path=")
    elif "openai" in text:
        pytest.importorskip("openai")
    with contextlib.suppress(SystemExit):
        exec(compile(text, block.page, "exec"), {"__name__": "__main__"})
    assert capfd.readouterr().out


def test_the_plugins_are_entry_points() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["sglang.srt.plugins"]
    named = re.findall(
        r"SGLANG_PLUGINS=(\S+)", "".join((REPOSITORY / p).read_text() for p in PAGES)
    )
    assert named
    assert all(set(each.split(",")) <= plugins.keys() for each in named)


def test_every_block_has_a_kind() -> None:
    """Others than commands and programs are checked by the tests that are named here."""
    elsewhere = {"toml": "test_readme.py"}
    for block in BLOCKS:
        if block.language == "text":
            assert [block] == OUTPUTS, block
        elif block.language in elsewhere:
            test = Path(__file__).with_name(elsewhere[block.language])
            assert Path(block.page).name in test.read_text(), block
        else:
            assert block in SHELL or block in PROGRAMS, block


def test_the_plan_that_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of the command before it, for the configuration of the model that it names."""
    [block] = OUTPUTS
    [words] = [words for page, words in COMMANDS if page == block.page and words[1] == "plan"]
    assert words[2] == MODEL
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    index = {"metadata": {"total_size": 16_381_470_720}, "weight_map": {"a": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main.main(["plan", str(tmp_path), *words[3:]]) == 0
    assert capsys.readouterr().out == block.text


@pytest.mark.engine
def test_the_server_says_when_it_is_ready(server: Server) -> None:
    [line] = {
        code
        for page in PAGES
        for code in re.findall(r"printed `([^`]+)`", (REPOSITORY / page).read_text())
    }
    assert line in server.log.read_text()


@pytest.mark.engine
def test_the_line_of_what_is_active_has_its_parts(server: Server) -> None:
    shown = [block.text for block in BLOCKS if block.text.startswith("pie-sglang: ")]
    assert shown
    parts = list(json.loads(server.fetch("/server_info"))["active"])
    for text in shown:
        assert re.findall(r"(?:: |; )(\w+): ", text) == [p for p in parts if p != "reasons"]
    assert Active().as_dict() == {"reasons": {}}
