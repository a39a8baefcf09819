"""GGUF files as models: converted once, served as the model that they were made of."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest

from pie_driver_sglang import Engine
from pie_driver_sglang.checkpoint import gguf, gguf_cache
from pie_driver_sglang.checkpoint.gguf_cache import converted_folder, gguf_source
from pie_driver_sglang.checkpoint.packaged import MANIFEST, locked, write_manifest
from pie_driver_sglang.cli import main
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.common.model_location import model_folder
from pie_driver_sglang.frontends.sglang_server.server_process import (
    named_architectures,
    with_converted_model,
)
from support.models import tiny_gguf
from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.servers.pie_server import serving
from support.servers.sglang_server import Server, free_ports

TEXT: Final = "The capital of France is"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def source(cache: Path) -> Path:
    return tiny_gguf.write(cache / "pocket-q8.gguf", "Q8_0")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    return converted_folder(source)


@pytest.mark.engine
def test_the_engine_serves_a_file(source: Path, converted: Path, forked_python: str) -> None:
    reference = Reference(converted)
    with mock.patch.object(sys, "executable", forked_python):
        engine = Engine(model_path=str(source), load_format="gguf", device="cpu")
    with engine:
        found = engine.generate(TEXT, {"temperature": 0, "max_new_tokens": 12})
        assert engine.tokenizer is not None
        [prompt] = engine.tokenizer.encode([TEXT])
    tokens = found["output_ids"]
    assert reference.check([*prompt, *tokens[:-1]], tokens) > len(tokens) // 2
    # Eight bits are near the model that the file was made of.
    original, _ = Reference(POCKET).greedy(prompt, 4)
    assert tokens[:4] == original


@pytest.mark.engine
def test_the_tokenizer_is_that_of_the_model(converted: Path) -> None:
    from tokenizers import Tokenizer

    ours, theirs = (
        Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (converted, POCKET)
    )
    texts = (TEXT, "It's 1234,\n\n  isn't it?", "<|im_start|>user\nHi<|im_end|>")
    for text in (*texts, "<think>\nHm.</think> <tool_call>{}</tool_call>"):
        found = ours.encode(text).ids
        assert found == theirs.encode(text).ids
        assert ours.decode(found) == theirs.decode(found)
    assert (converted / "chat_template.jinja").read_text() == tiny_gguf.CHAT_TEMPLATE


@pytest.mark.engine
def test_a_file_is_converted_once(source: Path, converted: Path) -> None:
    failing = mock.patch.object(subprocess, "run", side_effect=AssertionError)
    with failing:
        assert converted_folder(source) == converted
        assert model_folder({"model_path": str(source)}, with_weights=True) == converted
        parsed = parse_arguments(
            {"model_path": str(source), "load_format": "gguf", "device": "cpu"}
        )
        assert parsed.model == converted
        assert parsed.runtime["options"]["load_format"] == "auto"
        # The server's clients see the file's name.
        words = ["--model-path", str(source), "--load-format", "gguf", "--port", "1"]
        assert with_converted_model(words) == [
            *("--model-path", str(converted)),
            *("--port", "1", "--served-model-name", "pocket-q8"),
        ]
    # Another file of the same name is another model.
    with failing, pytest.raises(AssertionError):
        converted_folder(tiny_gguf.write(source.with_name("pocket.gguf")).replace(source))


@pytest.mark.engine
def test_a_type_that_is_not_known_is_named(cache: Path) -> None:
    path = tiny_gguf.write(cache / "q8k.gguf", "Q8_K")
    with pytest.raises(ConfigError, match=r"token_embd\.weight is of type Q8_K") as refusal:
        converted_folder(path)
    assert len(str(refusal.value).splitlines()) == 1
    assert not list(gguf_cache.cache_folder().glob("*q8k*/"))


@pytest.mark.engine
def test_a_damaged_file_is_one_line(cache: Path) -> None:
    path = cache / "damaged.gguf"
    path.write_bytes(b"no GGUF at all")
    with pytest.raises(ConfigError, match="cannot convert") as refusal:
        converted_folder(path)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.engine
def test_a_full_disk_is_known_before_the_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"MiB in bfloat16, and .* has 1 MiB left"):
        gguf.convert(source, tmp_path / "model")


def test_a_killed_converter_is_not_its_last_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho a harmless warning >&2\nkill -9 $$\n")
    program.chmod(0o755)
    with (
        mock.patch.object(sys, "executable", str(program)),
        pytest.raises(ConfigError, match="killed by SIGKILL") as refusal,
    ):
        converted_folder(files(tmp_path / "one", "model.gguf") / "model.gguf")
    assert "warning" not in str(refusal.value)
    assert "memory" in str(refusal.value.hint)


@pytest.mark.parametrize("name", ["日本" * 39, "\udcff\udcfe", "a[b]*\n ö", "-dash", "x" * 250])
def test_a_file_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = files(tmp_path / "one", f"{name}.gguf") / f"{name}.gguf"
    with mock.patch.object(gguf_cache, "_convert") as convert:
        folder = converted_folder(path)
    convert.assert_called_once()
    assert folder.name.isascii()
    assert folder.name.isprintable()
    # The names of the temporary folder and the lock are longer.
    assert len(folder.name) < 200


def test_a_link_of_the_hub_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    link = files(tmp_path / "blobs", "0123abcd").with_name("q4.gguf")
    link.symlink_to(tmp_path / "blobs" / "0123abcd")
    with mock.patch.object(gguf_cache, "_convert") as convert:
        assert "q4" in converted_folder(link).name
    assert convert.call_args.args[0] == link


def test_sglangs_own_scheduler_reads_the_file(tmp_path: Path) -> None:
    path = files(tmp_path / "one", "model.gguf") / "model.gguf"
    for name in (path, path.parent):
        assert named_architectures(["--model-path", str(name)]) == ()


def test_the_hub_has_no_gguf_files_for_us() -> None:
    with pytest.raises(ConfigError, match="'owner/name' is neither a file nor a folder") as refusal:
        model_folder({"model_path": "owner/name", "load_format": "gguf"}, with_weights=False)
    assert "hf download owner/name" in str(refusal.value.hint)


def files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_which_file_a_path_names(tmp_path: Path) -> None:
    one = files(tmp_path / "one", "model.gguf", "README.md")
    assert gguf_source(one) == gguf_source(one / "model.gguf") == one / "model.gguf"
    snapshot = files(tmp_path / "snapshot", "config.json", "model.safetensors", "q4.GGUF")
    assert gguf_source(snapshot) is None
    assert gguf_source(snapshot, "gguf") == snapshot / "q4.GGUF"
    assert gguf_source(files(tmp_path / "empty")) is None
    whole = files(tmp_path / "whole", "m-00001-of-00001.gguf")
    assert gguf_source(whole) == whole / "m-00001-of-00001.gguf"


@pytest.mark.parametrize(
    ("names", "load_format", "words"),
    [
        (("a.gguf", "b.gguf"), "auto", "has 2 GGUF files: a.gguf, b.gguf"),
        (("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"), "auto", "is part 1 of 3"),
        (("config.json", "model.safetensors"), "gguf", "`load_format` is 'gguf'"),
    ],
)
def test_what_names_no_file(
    names: tuple[str, ...], load_format: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        gguf_source(files(tmp_path / "model", *names), load_format)


def test_gemmas_tokenizer_has_the_chat_template_of_the_file() -> None:
    """It is rebuilt here, without what transformers reads of the file."""
    tokenizer = SimpleNamespace()
    metadata = {"general.architecture": "gemma3", "tokenizer.chat_template": "{{ messages }}"}
    gguf.correct_tokenizer(tokenizer, metadata)
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_pre_tokenizer_that_is_not_read_is_named() -> None:
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}
    assert "'tekken', which is not read" in str(gguf.tokenizer_note(fields))
    assert gguf.tokenizer_note({**fields, "tokenizer.ggml.pre": "qwen2"}) is None
    assert gguf.tokenizer_note({**fields, "tokenizer.ggml.pre": "llama-bpe"}) is None
    assert gguf.tokenizer_note({**fields, "tokenizer.ggml.model": "llama"}) is None


@pytest.mark.engine
def test_llama_3s_pre_tokenizer_is_rebuilt(cache: Path) -> None:
    """As transformers makes it of Meta's file: its expression, whole words, a first token."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder = converted_folder(tiny_gguf.write(cache / "llama-3.gguf", pre="llama-bpe"))
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(POCKET / "tokenizer.json"))
    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    theirs.model.ignore_merges = True
    begin = json.loads((POCKET / "config.json").read_text())["bos_token_id"]
    text = theirs.id_to_token(begin)
    theirs.post_processor = processors.TemplateProcessing(f"{text} $A", None, [(text, begin)])
    texts = (
        TEXT,
        "In 20251129 it's 1234567,\n\n  ISN'T it?",
        "a\t\t b \r\n\n c  ",
        "naïve 日本語١٢٣٤",
    )
    for each in (*texts, " the internationalization of 12345"):
        found = ours.encode(each).ids
        assert found == theirs.encode(each).ids
        assert found[0] == begin
        assert ours.decode(found) == each
    split = ours.pre_tokenizer.pre_tokenize_str("1234567")
    assert [piece for piece, _ in split] == ["123", "456", "7"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_prefill_tokens": 0}, "max_prefill_tokens"),
        ({"page_size": "many"}, "page_size"),
        ({"tp_size": 0}, "tp_size"),
        ({"reasoning_parser": "no-such"}, "no-such"),
        ({"preferred_sampling_params": "{"}, "preferred_sampling_params"),
        ({"speculative_algorithm": "EAGLE"}, "EAGLE"),
    ],
)
def test_wrong_arguments_are_known_before_the_conversion(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = files(tmp_path / "one", "model.gguf") / "model.gguf"
    with (
        mock.patch.object(gguf_cache, "_convert", side_effect=AssertionError),
        pytest.raises(ConfigError, match=words),
    ):
        parse_arguments(
            {"model_path": str(model), "load_format": "gguf", "device": "cpu", **arguments}
        )


def test_notes_of_the_converter_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho a warning >&2\necho note: look at it >&2\n")
    program.chmod(0o755)
    with mock.patch.object(sys, "executable", str(program)):
        converted_folder(files(tmp_path / "one", "model.gguf") / "model.gguf")
    shown = capfd.readouterr().err
    assert "look at it" in shown
    assert "a warning" not in shown


class TestRemoval:
    """`pie-sglang models`."""

    def test_what_is_of_no_use_is_removed(
        self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            assert main.main(["models"]) == 0
            assert "no converted models" in capsys.readouterr().out
            copies = [shutil.copy(source, tmp_path / f"{name}.gguf") for name in "ab"]
            with mock.patch.object(gguf_cache, "_convert", side_effect=made):
                kept, gone = (converted_folder(Path(copy)) for copy in copies)
            Path(copies[1]).unlink()
            assert main.main(["models"]) == 0
            listed = capsys.readouterr().out
            assert str(gguf_cache.cache_folder()) in listed
            [line] = [line for line in listed.splitlines() if gone.name in line]
            assert "--prune" in line
            assert listed.count("--prune") == 1
            assert main.main(["models", "--prune"]) == 0
            assert (kept.is_dir(), gone.exists()) == (True, False)
            assert main.main(["models", "--remove", "nothing"]) == 1
            assert "no model 'nothing'" in capsys.readouterr().err
            assert main.main(["models", "--remove", kept.name]) == 0
            assert not kept.exists()

    @pytest.mark.parametrize("manifest", ["", "[]", '{"source": 5, "files": {}}', '{"files": []}'])
    def test_a_damaged_one_is_of_no_use(
        self, manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = gguf_cache.cache_folder() / "gguf-x-0"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text(manifest)
        assert main.main(["models"]) == 0
        assert main.main(["models", "--prune"]) == 0
        assert not folder.exists()

    def test_what_a_killed_conversion_leaves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        cache = gguf_cache.cache_folder()
        assert main.main(["models", "--prune"]) == 0
        left, working = cache / ".gguf-x-0.abc", cache / ".gguf-y.z-0.abc"
        half, other = cache / "gguf-z-0", cache / "another"
        for folder in (left, working, half, other):
            (folder / "model").mkdir(parents=True)
            (folder / "model" / "weights").write_bytes(bytes(1 << 20))
        with locked(cache / "gguf-y.z-0.lock", "it"):
            assert main.main(["models", "--prune"]) == 0
        assert "removed interrupted conversions: 2 MiB" in capsys.readouterr().out
        exist = [folder.exists() for folder in (left, working, half, other)]
        assert exist == [False, True, False, True]

    def test_one_that_cannot_be_removed_is_one_line(
        self,
        source: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with mock.patch.object(gguf_cache, "_convert", side_effect=made):
            folder = converted_folder(source)
        lock = folder.with_name(f"{folder.name}.lock")
        lock.unlink()
        lock.mkdir()
        assert main.main(["models", "--remove", folder.name]) == 1
        assert f"cannot remove '{folder}': Is a directory" in capsys.readouterr().err
        assert folder.is_dir()

    def test_one_that_is_being_converted_stays(self, source: Path, tmp_path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            with mock.patch.object(gguf_cache, "_convert", side_effect=made):
                folder = converted_folder(source)
            with locked(folder.with_name(f"{folder.name}.lock"), "it"):
                assert main.main(["models", "--remove", folder.name]) == 1
            assert folder.is_dir()


def made(source: Path, folder: Path, size: int, _: int) -> None:
    """Makes a folder as a conversion does."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_manifest(folder, {"title": source.name, "source": str(source), "bytes": size})


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_server_reads_the_model_of_a_config_file(
    source: Path, converted: Path, forked_python: str, tmp_path: Path
) -> None:
    folder, written = tmp_path / "run", tmp_path / "server.yaml"
    folder.mkdir()
    [port] = free_ports(1)
    written.write_text(f"model-path: {source}\nload-format: gguf\ndevice: cpu\n")
    words = ["--config", str(written), "--scheduler", "pie", "--port", str(port)]
    with serving(folder, *words, python=forked_python):
        server = Server(f"http://127.0.0.1:{port}", folder / "log")
        models = json.loads(server.fetch("/v1/models"))["data"]
        assert [model["id"] for model in models] == [source.stem]
        tokens, _ = server.generate([40, 7, 300, 11], 8)
    assert Reference(converted).check([40, 7, 300, 11, *tokens[:-1]], tokens) > 4


@pytest.mark.engine
def test_the_server_checks_its_flags_before_the_conversion(
    forked_python: str, tmp_path: Path
) -> None:
    model = files(tmp_path / "one", "model.gguf") / "model.gguf"
    command = [forked_python, "-m", "pie_driver_sglang", "serve", str(model), "--device", "cpu"]
    command.append("--port=0")
    for flags, words in (
        (["--no-such-flag"], "--no-such-flag"),
        (["--scheduler", "pie", "--max-prefill-tokens", "0"], "max_prefill_tokens"),
    ):
        failed = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=200)
        assert failed.returncode == 1
        assert words in failed.stderr
        assert "convert" not in failed.stderr
