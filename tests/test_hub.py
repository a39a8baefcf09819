"""Models by their names on the Hugging Face hub, with its client and a local hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from pie_driver_sglang.checkpoint.hub_cache import needed_files
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.sglang_server import server_process
from support.models.tiny_models import POCKET
from support.servers.model_hub import COMMIT, GATED, MODEL, Hub, hub_of
from support.servers.pie_server import serving
from support.servers.sglang_server import Server, free_ports

NEEDED: Final = {each.name for each in POCKET.iterdir()} - {"README.md"}
#: In a process of its own: the client reads its variables once.
SCRIPT: Final = """\
import json, sys, threading
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.arguments import parse_arguments
try:
    found = parse_arguments({"device": "cpu", **json.loads(sys.argv[1])})
except ConfigError as error:
    sys.exit(f"{error} | {error.hint}")
assert not {"torch", "sglang"} & sys.modules.keys()
# The server forks its processes only while it has no other thread.
assert threading.active_count() == 1
assert found.runtime["model"] == str(found.model) == str(found.tokenizer)
print(found.model)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """The model, and files that it does not need: other formats, other folders, texts."""
    surplus = tmp_path / "surplus"
    surplus.write_bytes(b"surplus")
    files = {each.name: each for each in POCKET.iterdir()}
    others = ("pytorch_model.bin", "model.pt", "original/model.safetensors", "picture.png")
    with hub_of({**files, **dict.fromkeys(others, surplus)}) as hub:
        yield hub


def variables(home: Path, url: str) -> dict[str, str]:
    return {"HF_ENDPOINT": url, "HF_HOME": str(home)}


def check_arguments(
    home: Path, url: str, model: str = MODEL, offline: str = "0", **arguments: object
) -> subprocess.CompletedProcess[str]:
    """Has the engine's arguments checked, with a cache of its own."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"model_path": model, **arguments})],
        env={**os.environ, **variables(home, url), "HF_HUB_OFFLINE": offline},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_a_model_needs_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    first = check_arguments(tmp_path, hub.url)
    assert first.returncode == 0, first.stderr
    assert hub.fetched == NEEDED
    folder = Path(first.stdout.strip())
    assert {each.name for each in folder.iterdir()} == NEEDED
    assert (folder / "model.safetensors").read_bytes() == (
        POCKET / "model.safetensors"
    ).read_bytes()
    # The weights come after everything else, in a download of their own.
    lines = [line for line in first.stderr.splitlines() if "downloading" in line]
    assert len(lines) == 2
    assert lines[1] == f"pie-sglang: downloading {MODEL}: {len(NEEDED)} files, 0.01 GiB"
    hub.fetched.clear()
    second = check_arguments(tmp_path, hub.url)
    assert second.stdout == first.stdout
    assert not hub.fetched
    assert "downloading" not in second.stderr
    assert check_arguments(tmp_path, "http://127.0.0.1:9", offline="1").stdout == first.stdout


def test_flags_are_refused_before_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    found = check_arguments(tmp_path, hub.url, dtype="int3")
    assert "`dtype` is 'int3'" in found.stderr
    assert "model.safetensors" not in hub.fetched


def test_an_interrupted_download_is_resumed(hub: Hub, tmp_path: Path) -> None:
    folder = Path(check_arguments(tmp_path, hub.url).stdout.strip())
    (folder / "model.safetensors").unlink()
    found = check_arguments(tmp_path, hub.url)
    assert (Path(found.stdout.strip()) / "model.safetensors").is_file(), found.stderr


def test_a_model_that_moved_on_is_of_one_commit(hub: Hub, tmp_path: Path) -> None:
    """Its configuration was cached before: what the driver gets is all of the later commit."""
    before = check_arguments(tmp_path, hub.url, load_format="dummy")
    assert Path(before.stdout.strip()).name == COMMIT, before.stderr
    hub.commit = "d" * 40
    found = check_arguments(tmp_path, hub.url)
    assert Path(found.stdout.strip()).name == hub.commit, found.stderr
    # What is checked is the later one's configuration, too.
    config = json.loads((POCKET / "config.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**config, "architectures": ["NewForCausalLM"]}))
    hub.files["config.json"], hub.commit = other, "e" * 40
    again = check_arguments(tmp_path, hub.url, revision="v1", download_dir=str(tmp_path / "place"))
    assert "has no NewForCausalLM" in again.stderr


def test_a_revision_and_a_folder_for_downloads(hub: Hub, tmp_path: Path) -> None:
    place = tmp_path / "place"
    found = check_arguments(tmp_path / "home", hub.url, revision="v1", download_dir=str(place))
    folder = Path(found.stdout.strip())
    assert folder.is_relative_to(place), found.stderr
    assert folder.name == COMMIT
    assert "has no revision 'v9'" in check_arguments(tmp_path, hub.url, revision="v9").stderr


def test_errors_name_a_remedy(hub: Hub, tmp_path: Path) -> None:
    gated = check_arguments(tmp_path, hub.url, GATED)
    assert "'house/gated' is gated" in gated.stderr
    assert "`hf auth login`, or set `HF_TOKEN`" in gated.stderr
    unknown = check_arguments(tmp_path, hub.url, "house/other").stderr
    assert f"is neither a folder nor a repository at {hub.url} that you may read" in unknown
    offline = check_arguments(tmp_path, hub.url, offline="1").stderr
    assert "is not completely in the Hugging Face cache, and `HF_HUB_OFFLINE` is set" in offline
    [port] = free_ports(1)
    away = check_arguments(tmp_path, f"http://127.0.0.1:{port}").stderr
    assert f"cannot be downloaded from http://127.0.0.1:{port}: " in away
    assert "check the network" in away
    for text in (gated.stderr, unknown, offline, away):
        assert "Traceback" not in text


def test_a_plan_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    def plan(offline: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pie_driver_sglang", "plan", MODEL, "--device-gib", "8"],
            env={**os.environ, **variables(tmp_path, hub.url), "HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            timeout=120,
        )

    refused = plan("1")
    assert (refused.returncode, hub.fetched) == (1, set())
    assert "and `HF_HUB_OFFLINE` is set" in refused.stderr
    found = plan("0")
    assert found.returncode == 0, found.stderr
    assert "the shape in config.json: an estimate" in found.stdout
    assert "config.json" in hub.fetched
    assert not any(name.endswith((".safetensors", ".bin")) for name in hub.fetched)
    assert plan("1").stdout == found.stdout


def test_safetensors_come_before_other_formats() -> None:
    names = ["config.json", "a.safetensors", "a.bin", "a.gguf", "x/a.safetensors", "m.py"]
    assert list(needed_files(names, with_weights=True)) == ["config.json", "a.safetensors", "m.py"]
    assert list(needed_files(names, with_weights=False)) == ["config.json", "m.py"]
    assert list(needed_files(["a.bin", "a.json"], with_weights=True)) == ["a.bin", "a.json"]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("front", ["sglang", "gateway"])
def test_both_frontends_serve_a_model_by_its_name(
    front: str,
    hub: Hub,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Sockets are in it, whose names may not be long.
    folder = tmp_path_factory.mktemp("door")
    for name, value in variables(tmp_path_factory.mktemp("home"), hub.url).items():
        monkeypatch.setenv(name, value)
    [port] = free_ports(1)
    words = ["--front", front, "--model-path", MODEL, "--device", "cpu", "--port", str(port)]
    with serving(folder, *words, end_s=90):
        server = Server(f"http://127.0.0.1:{port}", folder / "log")
        body = {"model": MODEL, "prompt": "def f(x):", "max_tokens": 4}
        assert json.loads(server.fetch("/v1/completions", body))["usage"]["completion_tokens"] == 4
    assert hub.fetched == NEEDED


def test_modelscope_is_asked_by_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read before a name is looked up on the Hugging Face hub."""
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = {"model_path": "house/pocket", "device": "cpu"}
    with pytest.raises(ConfigError, match="is not in the ModelScope cache") as refusal:
        parse_arguments(given)
    assert "`modelscope download --model house/pocket`" in refusal.value.hint
    folder = tmp_path / "cache" / "models" / "house" / "pocket"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(POCKET)
    plan = parse_arguments(given)
    assert plan.model == plan.tokenizer == folder
    assert server_process.pinned_revision(plan, given) == []
    other = tmp_path / "other" / "house" / "second"
    other.parent.mkdir(parents=True)
    other.symlink_to(POCKET)
    named = {**given, "model_path": "house/second", "download_dir": str(tmp_path / "other")}
    assert parse_arguments(named).model == other
    # A folder is a folder, whatever the variable says.
    assert parse_arguments({**given, "model_path": str(POCKET)}).model == POCKET
