"""Models from a Python package index: pinned, converted once, complete or absent.

The index is a folder with a small wheel, so nothing is downloaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pie_driver_sglang.checkpoint import gguf, packaged
from pie_driver_sglang.checkpoint.packaged import (
    MODELS,
    PackagedFile,
    PackagedModel,
    UnavailableError,
    packaged_folder,
)
from pie_driver_sglang.cli.main import main
from pie_driver_sglang.frontends.common.model_location import model_folder

VERSION: Final = "1.0"
#: Fetches the model that a file describes, and prints its folder.
SCRIPT: Final = """\
import json, sys
from pie_driver_sglang.checkpoint.packaged import PackagedFile, PackagedModel, packaged_folder
found = json.load(open(sys.argv[1]))
parts = [PackagedFile(*part) for part in found.pop("parts")]
print(packaged_folder("tiny", PackagedModel(parts=parts, **found)))
"""


def write_wheel(folder: Path, package: str, content: bytes) -> str:
    """Writes a wheel with one file and returns its SHA-256."""
    name = package.replace("-", "_")
    path = folder / f"{name}-{VERSION}-py3-none-any.whl"
    information = f"{name}-{VERSION}.dist-info"
    files = {
        f"{name}/model.gguf": content,
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {VERSION}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/LICENSE": "the licence",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in [*files.items(), (f"{information}/RECORD", record)]:
            wheel.writestr(file, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_of(*parts: tuple[str, str], **changed: Any) -> PackagedModel:
    files = [
        PackagedFile(name, VERSION, digest, f"{name.replace('-', '_')}/model.gguf")
        for name, digest in parts
    ]
    fields: dict[str, Any] = {"title": "Tiny", "license": "MIT", "download_mib": 1, "disk_mib": 1}
    return PackagedModel(parts=files, **{**fields, **changed})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, and a cache in another."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Conversions copy the file. What they were given."""
    seen: list[bytes] = []
    run = packaged._run

    def convert(model: PackagedModel, verb: str, command: Any, *others: Any) -> None:
        if verb != "convert":
            run(model, verb, command, *others)
            return
        source, target = command[3:5]
        seen.append(source.read_bytes())
        shutil.copyfile(source, target / "model.safetensors")

    monkeypatch.setattr(packaged, "_run", convert)
    return seen


def left(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "pie-sglang" / "models").iterdir()}


def test_a_model_is_fetched_and_converted_once(
    index: Path, copied: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(("tiny-a", write_wheel(index, "tiny-a", b"weights")))
    folder = packaged_folder("tiny", model)
    assert {path.name for path in folder.iterdir()} == {
        "LICENSE",
        "model.safetensors",
        "source.json",
    }
    source = json.loads((folder / "source.json").read_text())
    assert source["packages"][0]["sha256"] == model.parts[0].sha256
    first = capsys.readouterr().err.splitlines()
    assert first == [
        "pie-sglang: downloading Tiny (MIT): 1 MiB, package tiny-a 1.0",
        "pie-sglang: converting Tiny to safetensors, once",
    ]
    shutil.rmtree(index)
    assert packaged_folder("tiny", model) == folder
    assert copied == [b"weights"]
    assert capsys.readouterr().err == ""
    assert left(tmp_path) == {folder.name, f"{folder.name}.lock"}


def test_parts_are_joined_in_their_order(index: Path, copied: list[bytes]) -> None:
    packages = [(name, write_wheel(index, name, name.encode())) for name in ("tiny-b", "tiny-a")]
    packaged_folder("tiny", model_of(*packages))
    assert copied == [b"tiny-btiny-a"]


def test_a_damaged_folder_is_made_again(index: Path, copied: list[bytes]) -> None:
    model = model_of(("tiny-a", write_wheel(index, "tiny-a", b"weights")))
    folder = packaged_folder("tiny", model)
    for damage in ("", "we"):
        (folder / "model.safetensors").write_text(damage)
        assert packaged_folder("tiny", model) == folder
        assert (folder / "model.safetensors").read_bytes() == b"weights"
    (folder / "source.json").unlink()
    assert packaged_folder("tiny", model) == folder
    assert len(copied) == 4


def test_another_file_than_the_pinned_one_is_refused(
    index: Path, copied: list[bytes], tmp_path: Path
) -> None:
    write_wheel(index, "tiny-a", b"others")
    with pytest.raises(UnavailableError, match="damaged, or another file: its SHA-256") as raised:
        packaged_folder("tiny", model_of(("tiny-a", "0" * 64)))
    assert raised.value.hint.startswith("run it again")
    assert copied == []
    assert left(tmp_path) == {"tiny-1.0-1.lock"}


def test_without_the_package_the_error_names_the_remedy(index: Path, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"^cannot download Tiny: ERROR: ") as raised:
        packaged_folder("tiny", model_of(("tiny-a", "0" * 64)))
    assert "\n" not in str(raised.value)
    assert "PIP_FIND_LINKS" in raised.value.hint
    assert "tiny-a 1.0" in raised.value.hint
    assert left(tmp_path) == {"tiny-1.0-1.lock"}


def test_a_file_that_cannot_be_converted(index: Path, tmp_path: Path) -> None:
    model = model_of(("tiny-a", write_wheel(index, "tiny-a", b"no GGUF")))
    with pytest.raises(UnavailableError, match=r"^cannot convert Tiny: .*Error") as raised:
        packaged_folder("tiny", model)
    assert "\n" not in str(raised.value)
    assert left(tmp_path) == {"tiny-1.0-1.lock"}


def test_a_full_disk(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(("tiny-a", write_wheel(index, "tiny-a", b"weights")), disk_mib=2**40)
    with pytest.raises(UnavailableError, match="takes 1099511627776 MiB of disk space") as raised:
        packaged_folder("tiny", model)
    assert "XDG_CACHE_HOME" in raised.value.hint

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packaged, "_join", full)
    model = model_of(("tiny-a", model.parts[0].sha256))
    with pytest.raises(UnavailableError, match="No space left on device") as raised:
        packaged_folder("tiny", model)
    assert raised.value.hint.startswith("free 1 MiB there")
    text = "OSError: [Errno 28] No space left on device"
    assert "disk became full" in str(packaged._explained(model, "convert", text, 1))
    assert left(tmp_path) == {"tiny-1.0-1.lock"}


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UnavailableError, match="cannot write the model cache") as raised:
        packaged_folder("tiny", model_of(("tiny-a", "0" * 64)))
    assert "XDG_CACHE_HOME" in raised.value.hint


@pytest.fixture
def slow_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Has each download wait for a byte of a pipe. The pipe's descriptor."""
    modules = tmp_path / "modules"
    modules.mkdir()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # pip imports it, and the other processes do not.
    (modules / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if 'pip' in sys.orig_argv[1:3]:\n    os.read(os.open({str(pipe)!r}, os.O_RDONLY), 1)\n"
    )
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    descriptor = os.open(pipe, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def fetching(tmp_path: Path, model: PackagedModel) -> subprocess.Popen[str]:
    description = tmp_path / "model.json"
    description.write_text(json.dumps(model._asdict()))
    command = [sys.executable, "-c", SCRIPT, str(description)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_a_second_process_waits_and_a_killed_one_leaves_nothing(
    index: Path, slow_pip: int, tmp_path: Path
) -> None:
    model = model_of(("tiny-a", write_wheel(index, "tiny-a", b"no GGUF")))
    with fetching(tmp_path, model) as first:
        assert first.stderr is not None
        assert "downloading" in first.stderr.readline()
        with fetching(tmp_path, model) as second:
            assert second.stderr is not None
            assert second.stderr.readline() == (
                "pie-sglang: waiting for another process that fetches Tiny\n"
            )
            assert len(left(tmp_path)) == 2
            first.kill()
            # Its download continues, and holds the lock as long.
            os.write(slow_pip, b"x")
            assert "downloading" in second.stderr.readline()
            os.write(slow_pip, b"x")
            assert "converting" in second.stderr.readline()
            second.communicate()
    assert left(tmp_path) == {"tiny-1.0-1.lock"}


def test_ctrl_c_leaves_nothing(index: Path, slow_pip: int, tmp_path: Path) -> None:
    model = model_of(("tiny-a", write_wheel(index, "tiny-a", b"no GGUF")))
    with fetching(tmp_path, model) as process:
        assert process.stderr is not None
        assert "downloading" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        os.write(slow_pip, b"x")
        process.communicate()
    assert left(tmp_path) == {"tiny-1.0-1.lock"}


def test_without_pip_and_uv(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "has_pip", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UnavailableError, match="neither pip nor uv") as raised:
        packaged_folder("tiny", model_of(("tiny-a", "0" * 64)))
    assert "ensurepip" in raised.value.hint


def test_uv_downloads_where_there_is_no_pip(
    index: Path, copied: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).exists():
        pytest.skip("there is no uv")
    monkeypatch.setattr(packaged, "has_pip", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda _: uv)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(index))
    digest = write_wheel(index, "tiny-a", b"weights")
    with pytest.raises(UnavailableError, match="its SHA-256 is not the pinned one"):
        packaged_folder("tiny", model_of(("tiny-a", "0" * 64)))
    packaged_folder("tiny", model_of(("tiny-a", digest)))
    assert copied == [b"weights"]


def test_a_name_stands_for_the_folder(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pie_driver_sglang.frontends.sglang_server.server_process import with_packaged_model

    [made] = [f"smollm2-{MODELS['smollm2'].parts[0].version}-1"]
    folder = tmp_path / "cache" / "pie-sglang" / "models" / made
    folder.mkdir(parents=True)
    (folder / "source.json").write_text('{"files": {}}')
    assert model_folder({"model_path": "smollm2"}, with_weights=True) == folder
    begin = ["--model-path", str(folder)]
    named = ["--served-model-name", "smollm2"]
    for words in (["--model-path", "smollm2"], ["--model=smollm2"], ["--model", "smollm2"]):
        assert with_packaged_model(words) == [*begin, *named]
    words = ["--served-model-name", "chat", "--model-path", "smollm2", "--port", "1"]
    assert with_packaged_model(words) == [*begin, *words[:2], *words[4:]]
    assert with_packaged_model(["--model-path", "other"]) == ["--model-path", "other"]
    # A folder of that name comes first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert with_packaged_model(["--model", "smollm2"]) == ["--model", "smollm2"]
    assert model_folder({"model_path": "smollm2"}, with_weights=True) == Path("smollm2")


@pytest.mark.parametrize("command", ["shell", "bench"])
@pytest.mark.parametrize(
    "words",
    [["--model", "smollm2", "--device", "cpu"], ["smollm2", "--device", "cpu"]],
    ids=["flag", "positional"],
)
def test_a_command_shows_the_error(
    index: Path, capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    assert main([command, *words]) == 1
    error = capsys.readouterr().err
    assert "\npie-sglang: cannot download SmolLM2-135M-Instruct: ERROR: " in error
    assert "\nhint: " in error


def test_byte_pairs_merge_by_their_scores() -> None:
    """A table as Gemma's: special tokens, runs of spaces, bytes, and pieces with scores."""
    pytest.importorskip("tokenizers")
    table = [("<unk>", 0, 3), ("<bos>", 0, 3), ("  ", 0, 4)]
    table += [(f"<0x{byte:02X}>", 0, 6) for byte in range(256)]
    # "ab" merges before "bc", and "bc" is never there for "abc".
    pieces = {"a": 0, "b": 0, "c": 0, "▁": 0, "ab": -1, "bc": -2, "▁ab": -3, "abc": -4}
    table += [(piece, score, 1) for piece, score in pieces.items()]
    tokens, scores, types = zip(*table, strict=True)
    names = ("unknown_token_id", "bos_token_id", "add_bos_token")
    metadata = {
        f"tokenizer.ggml.{name}": value for name, value in zip(names, (0, 1, True), strict=True)
    }
    tokenizer = gguf.sentencepiece_tokenizer(tokens, scores, types, metadata)
    found = tokenizer.encode("abc bc ab  \n")
    assert found.tokens == ["<bos>", "abc", "▁", "bc", "▁ab", "  ", "<0x0A>"]
    assert tokenizer.decode(found.ids) == "abc bc ab  \n"
