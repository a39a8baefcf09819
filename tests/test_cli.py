"""`pie-sglang`: finding a command, its errors, the version, and the memory plan."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pie_driver_sglang
from pie_driver_sglang import _core
from pie_driver_sglang.cli import engine_options, generate, main, plan, version
from pie_driver_sglang.config import option_checks
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.memory.plan import GIB
from pie_driver_sglang.memory.plan_types import Device
from tiny_models import POCKET, REPOSITORY

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_8B_BYTES = 16_060_522_496
"""What the index of the published checkpoint says."""


def run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m pie_driver_sglang`."""
    command = [sys.executable, "-m", "pie_driver_sglang", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60)


def write_model(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **changed}))
    return folder


class TestProgram:
    @pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
    def test_help_names_every_command(
        self, words: Sequence[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main(words) == 0
        printed = capsys.readouterr().out
        for name, command in main.COMMANDS.items():
            assert f"  {name}" in printed
            assert command.summary in printed

    def test_without_a_command_the_help_is_an_error(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main.main([]) == main.USAGE
        printed = capsys.readouterr()
        assert not printed.out
        assert printed.err == main.usage()

    def test_a_misspelt_command_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["docter"]) == main.USAGE
        printed = capsys.readouterr().err
        assert "there is no command 'docter'" in printed
        assert "did you mean `doctor`?" in printed

    @pytest.mark.parametrize("name", main.COMMANDS)
    def test_every_command_explains_itself(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main.main([name, "--help"])
        assert ended.value.code == 0
        assert f"pie-sglang {name}" in capsys.readouterr().out

    def test_an_error_is_a_line_and_a_hint(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["plan", "--model", "/nowhere", "--device-gib", "8"]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("pie-sglang: the model '/nowhere' is neither a folder nor")
        assert lines[1:2] == [""]
        assert lines[2].startswith("hint: ")

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError()])
    def test_other_ends_have_a_status(
        self,
        error: BaseException,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        def fail(arguments: Sequence[str]) -> int:
            raise error

        monkeypatch.setattr(plan, "main", fail)
        monkeypatch.setattr("os.dup2", lambda *_: 0)
        status = main.main(["plan"])
        assert status == (main.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)

    def test_a_closed_pipe_is_no_traceback(self) -> None:
        command = f"{sys.executable} -m pie_driver_sglang doctor --json | true"
        result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in result.stderr
        assert "Exception" not in result.stderr


class TestModule:
    def test_a_word_is_a_command(self) -> None:
        result = run("--version")
        assert result.returncode == 0
        assert result.stdout.strip() == version.version_line()
        assert run("doctro").returncode == main.USAGE

    def test_the_runtimes_call_is_the_driver(self, tmp_path: Path) -> None:
        result = run("--config", str(tmp_path / "none.toml"), "--handshake-fd", "1")
        assert result.returncode == 1
        assert "none.toml' does not exist" in result.stderr

    def test_nothing_comes_from_the_working_directory(self, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text("raise SystemExit(99)")
        (tmp_path / "argparse.py").write_text("raise SystemExit(99)")
        assert run("--version", folder=tmp_path).returncode == 0
        assert run("plan", "--help", folder=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["plan", "--model", str(POCKET), "--device-gib", "8"],
        ["check", "/nowhere.toml"],
        ["doctor"],
    ],
    ids=lambda words: words[0],
)
def test_neither_torch_nor_sglang_is_imported(words: list[str]) -> None:
    text = (
        "import sys\n"
        "from pie_driver_sglang.cli.main import main\n"
        f"main({words!r})\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(','.join(names & {'torch', 'sglang', 'triton', 'transformers'}) or 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


class TestVersion:
    def test_it_names_the_release_and_the_build(self) -> None:
        line = version.version_line()
        assert line.startswith(f"pie-driver-sglang {pie_driver_sglang.__version__} (")
        assert _core.build_info()["profile"] in line

    def test_a_checkout_is_asked_for_its_commit(self, tmp_path: Path) -> None:
        package = tmp_path / "python" / "pie_driver_sglang"
        package.mkdir(parents=True)
        file = package / "__init__.py"
        assert version._checkout_commit(file) == ""
        for words in (
            ["init", "--quiet"],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "x"],
        ):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        head = subprocess.check_output(
            ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True
        ).strip()
        found = version._checkout_commit(file)
        assert len(found) >= 7
        assert head.startswith(found)

    def test_a_broken_checkout_has_none(self, tmp_path: Path) -> None:
        (tmp_path / ".git").write_text("gitdir: /nowhere")
        assert version._checkout_commit(tmp_path / "python" / "p" / "__init__.py") == ""

    def test_the_makefile_passes_the_commit_on(self) -> None:
        assert "PIE_DRIVER_COMMIT" in (REPOSITORY / "Makefile").read_text()


def planned(folder: Path, gib: float = 80, ranks: int = 1, **table: Any) -> plan.Planned:
    device = Device("cuda:0", int(gib * GIB), int(gib * GIB) - plan.CONTEXT_BYTES)
    return plan.make_plan(folder, device=device, table=table, ranks=ranks, dtype="bfloat16")


class TestPlan:
    def test_a_shape_alone_is_planned(self, tmp_path: Path) -> None:
        found = planned(write_model(tmp_path / "model"))
        assert found.weights == "the shape in config.json: an estimate"
        # 30 MB are tables of positions.
        tables = (131072 + 256) * 128 * 4
        assert found.plan.weights - tables == pytest.approx(LLAMA_8B_BYTES, rel=1e-3)
        assert found.plan.token_bytes == 32 * 8 * 2 * 128 * 2
        assert found.refusal is None
        assert found.plan.tokens * found.plan.token_bytes + found.plan.weights < 80 * GIB

    def test_an_index_is_exact(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        index = {"metadata": {"total_size": LLAMA_8B_BYTES}, "weight_map": {}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found = planned(folder)
        assert found.weights == "the index of its files"
        assert found.plan.weights == LLAMA_8B_BYTES + (131072 + 256) * 128 * 4

    def test_the_headers_of_the_weights_come_first(self) -> None:
        found = planned(POCKET)
        assert found.weights == "the headers of its files"
        assert 11 << 20 < found.plan.weights < 12 << 20

    def test_ranks_divide_the_weights(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        whole, half = planned(folder), planned(folder, ranks=2)
        assert half.plan.token_bytes == whole.plan.token_bytes // 2
        assert half.plan.weights == pytest.approx(whole.plan.weights / 2, rel=0.01)

    def test_what_does_not_fit_names_a_key_that_helps(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_model(tmp_path / "model")
        words = ["plan", "--model", str(folder), "--device-gib", "28"]
        assert main.main(words) == 1
        printed = capsys.readouterr().out
        assert "does not fit: the model needs more than" in printed
        length = int(printed.partition("hint: set `context_length = ")[2].partition("`")[0])
        assert main.main([*words, "--max-model-len", str(length)]) == 0
        assert f"contexts of {length:,} tokens" in capsys.readouterr().out
        assert main.main([*words, "--option", f"context_length={length + 16}"]) == 1

    def test_json_has_the_plan_in_bytes(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["plan", "--model", str(POCKET), "--device-gib", "8", "--json"]
        assert main.main(words) == 0
        document = json.loads(capsys.readouterr().out)
        parts = ("weights", "activations", "graphs", "tables", "reserve", "kv")
        assert sum(document["plan"][part] for part in parts) == document["device"]["free"]
        assert document["fits"] is True

    def test_options_change_it(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model")
        usual = planned(folder).plan
        assert planned(folder, kv_cache_dtype="fp8_e4m3").plan.token_bytes * 2 == usual.token_bytes
        assert planned(folder, disable_cuda_graph=True).plan.graphs == 0
        assert planned(folder, enable_lora=True).plan.adapters > GIB
        # All that is linear, in one byte; the vocabulary stays.
        less = usual.weights - planned(folder, quantization="fp8").plan.weights
        assert less == pytest.approx(32 * 218_103_808, rel=0.01)
        doubt = planned(folder, mem_fraction_static=0.97).warning
        assert doubt is not None
        assert "may run out of memory" in doubt

    def test_a_model_in_front_and_flags_of_the_server(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = str(write_model(tmp_path / "model"))

        def settings(*words: str) -> Any:
            main.main(["plan", *words, "--device-gib", "80", "--json"])
            return json.loads(capsys.readouterr().out)

        words = ["--quantization", "fp8", "--kv-cache-dtype=fp8_e4m3", "--context-length", "4096"]
        words += ["--mem-fraction-static", "0.8", "--disable-cuda-graph"]
        options = ["quantization=fp8", "kv_cache_dtype=fp8_e4m3", "context_length=4096"]
        options += ["mem_fraction_static=0.8", "disable_cuda_graph=true"]
        by_options = [word for each in options for word in ("--option", each)]
        planned = settings("--model", folder, *by_options)
        assert settings(folder, *words) == settings(*words, folder) == planned
        assert planned["plan"] != settings(folder)["plan"]
        with pytest.raises(SystemExit):
            main.main(["plan", "--device-gib", "80"])
        assert "no model is named" in capsys.readouterr().err

    def test_this_host_can_be_planned_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["plan", "--model", str(POCKET), "--cpu", "--dtype", "float32"]) == 0
        assert "memory planned for cpu" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            ({"hidden_size": None}, "no usable `hidden_size`"),
            ({"layer_types": ["linear_attention"]}, "keeps recurrent state"),
            ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "latent attention does not give"),
            ({"architectures": ["NoSuchForCausalLM"]}, "SGLang 0.5.17 has no NoSuchForCausalLM"),
        ],
    )
    def test_what_cannot_be_planned_says_why(
        self, tmp_path: Path, changed: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ConfigError, match=text) as refusal:
            planned(write_model(tmp_path / "model", **changed))
        assert refusal.value.hint

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--option", "page_size"], "is not KEY=VALUE"),
            (["--option", "pagesize=3"], "unknown option 'pagesize'"),
            (["--option", "page_size=many"], "option `page_size` is 'many'"),
            (["--device-gib", "-3"], "--device-gib is -3"),
            (["--max-model-len", "4096"], "option `context_length` is 4096"),
        ],
    )
    def test_wrong_words_are_named(
        self, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = ["plan", "--model", str(POCKET), "--device-gib", "8", *words]
        assert main.main(given) == 1
        assert text in capsys.readouterr().err

    def test_values_of_options_are_toml_or_text(self) -> None:
        assert option_checks.parse_option("a=3") == ("a", 3)
        assert option_checks.parse_option("a = true") == ("a", True)
        assert option_checks.parse_option('a=["x", "y"]') == ("a", ["x", "y"])
        assert option_checks.parse_option("a=triton,pie") == ("a", "triton,pie")
        assert option_checks.parse_option("a=b=c") == ("a", "b=c")


class TestDocument:
    TEXT = (REPOSITORY / "docs" / "commands.md").read_text()

    def test_it_lists_every_command(self) -> None:
        listed = set(re.findall(r"^\| `pie-sglang ([a-z]+)\b", self.TEXT, re.MULTILINE))
        assert listed == set(main.COMMANDS)

    @pytest.mark.parametrize("name", main.COMMANDS)
    def test_it_has_every_option(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main.main([name, "--help"])
        _, _, section = self.TEXT.partition(f"\n## `{name}`\n")
        section, _, _ = section.partition("\n## ")
        # `serve --help` ends with SGLang's flags, which its documentation explains.
        text, _, _ = capsys.readouterr().out.partition("\nSGLang's flags")
        options = set(re.findall(r"--[a-z][a-z-]*", text)) - {"--help"}
        assert {option for option in options if f"`{option}" not in section} == set()
        words = re.findall(r"`(--[a-z][a-z-]*)", section)
        assert {word for word in words if word not in options} == set()


class Pipe(io.StringIO):
    """stdin that is no terminal."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestPrompts:
    def test_they_come_from_words_then_from_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("one\n\n{not json\n")
        found = generate.read_prompts(["word"], str(file), Pipe("never"))
        assert [prompt.text for prompt in found] == ["word", "one", "{not json"]

    def test_a_pipe_is_read_where_nothing_else_is_given(self) -> None:
        lines = 'plain\n{"prompt": "p", "id": 3}\n'
        plain, other = generate.read_prompts([], None, Pipe(lines))
        assert plain.text == "plain"
        assert other == generate.Prompt("p", None, {}, {"id": 3})
        assert len(list(generate.read_prompts(["word"], None, Pipe(lines)))) == 1
        assert len(list(generate.read_prompts(["word"], "-", Pipe(lines)))) == 3
        assert list(generate.read_prompts([], None, Terminal(lines))) == []

    def test_objects_have_parameters_of_their_own(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.jsonl"
        line = {"input_ids": [1, 2], "sampling_params": {"temperature": 0}, "name": "a"}
        file.write_text(json.dumps(line))
        (found,) = generate.read_prompts([], str(file), Pipe())
        assert found == generate.Prompt(None, [1, 2], {"temperature": 0}, {"name": "a"})

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("{", "line 1 is not JSON"),
            ("[1]", "not a JSON object"),
            ("{}", "line 1 has no prompt"),
            ('{"prompt": "a", "input_ids": [1]}', "more than one"),
            ('{"prompt": 3}', "line 1 has no prompt"),
            ('{"prompt": "a", "sampling_params": 3}', "line 1 has no prompt"),
        ],
    )
    def test_wrong_lines_are_numbered(self, line: str, text: str) -> None:
        with pytest.raises(ConfigError, match=text) as refusal:
            list(generate.parse_lines([line], True))
        assert "input_ids" in refusal.value.hint

    def test_a_line_that_is_nested_too_deeply_is_numbered(self) -> None:
        with pytest.raises(ConfigError, match="line 2 is not JSON: it is nested too deeply"):
            list(generate.parse_lines(["", "[" * 100_000], True))

    def test_lines_end_with_line_breaks_alone(self, tmp_path: Path) -> None:
        """Other characters that Python takes for the end of a line are part of a text."""
        file = tmp_path / "prompts.jsonl"
        prompts = ["a\u2028b", "c\x85d", "e\x0bf"]
        lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in prompts]
        file.write_text("\r\n".join(lines), encoding="utf-8")
        found = generate.read_prompts([], str(file), Pipe())
        assert [prompt.text for prompt in found] == prompts
        assert [one.text for one in generate.read_prompts([], "-", Pipe("a\u2028b\nc"))] == [
            "a\u2028b",
            "c",
        ]

    def test_a_pipe_that_is_no_text(self) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
        with pytest.raises(ConfigError, match="cannot read prompts of stdin"):
            list(generate.read_prompts([], "-", stdin))

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read prompts"):
            list(generate.read_prompts([], str(tmp_path / "none"), Pipe()))
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="cannot read prompts"):
            list(generate.read_prompts([], str(tmp_path / "bytes"), Pipe()))

    def test_without_prompts_nothing_is_started(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal())
        assert main.main(["generate"]) == 1
        assert "there are no prompts" in capsys.readouterr().err


class TestEngineOptions:
    def test_the_model_is_pocket_in_a_clone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(REPOSITORY)
        assert Path(engine_options.default_model(None)).resolve() == POCKET.resolve()
        assert engine_options.default_model("other") == "other"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(pie_driver_sglang, "__file__", str(tmp_path / "a" / "b" / "c.py"))
        with pytest.raises(ConfigError, match="no model is named"):
            engine_options.default_model(None)

    def test_parameters_are_those_that_were_given(self) -> None:
        parser = argparse.ArgumentParser()
        engine_options.add_engine_options(parser)
        words = ["--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos"]
        found = engine_options.sampling_of(parser.parse_args(words), max_new_tokens=9)
        expected = {"temperature": 0.0, "stop": ["a", "b"], "ignore_eos": True}
        assert found == {**expected, "max_new_tokens": 9}

    def test_loading_is_shown_by_lines_off_a_terminal(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with engine_options.LoadingLine("model") as loading:
            loading(0.1, "a line")
            loading(0.2, "")
        assert capsys.readouterr().err == "a line\n"


class TestAnswers:
    """What `pie-sglang generate` writes, with an engine by hand."""

    def engine(self, count: int) -> Any:
        """It answers in reverse order."""
        meta = {"finish_reason": None, "prompt_tokens": 1, "completion_tokens": 1}
        meta["cached_tokens"] = 0

        def as_completed(**_: Any) -> Iterator[dict[str, Any]]:
            for index in reversed(range(count)):
                yield {"index": index, "text": str(index), "output_ids": [1], "meta_info": meta}

        return SimpleNamespace(as_completed=as_completed, tokenizer=None)

    def lines(self, prompts: Sequence[generate.Prompt], count: int) -> list[dict[str, Any]]:
        output = io.StringIO()
        generate.answer(self.engine(count), prompts, {}, output)
        return [json.loads(line) for line in output.getvalue().splitlines()]

    def test_answers_have_the_index_and_the_number_of_their_prompt(self) -> None:
        counts = [1, 3, 1, 2]
        prompts = [generate.Prompt("p", None, {"n": count}, {}) for count in counts]
        found = {
            (line["index"], line.get("sample")): line["text"]
            for line in self.lines(prompts, sum(counts))
        }
        places = [(0, None), (1, 0), (1, 1), (1, 2), (2, None), (3, 0), (3, 1)]
        assert found == {place: str(number) for number, place in enumerate(places)}

    @pytest.mark.parametrize("count", [2**62, -1, "x", 1.5, None, True, [3]])
    def test_a_wrong_count_is_left_to_the_engine(self, count: Any) -> None:
        """It refuses the call; no memory is taken for such a number of answers."""
        assert len(self.lines([generate.Prompt("p", None, {"n": count}, {})], 1)) == 1

    def test_any_character_can_be_written(self) -> None:
        others = {"id": "\ud800 \N{GRINNING FACE}"}
        [line] = self.lines([generate.Prompt("p", None, {}, others)], 1)
        assert line["id"] == others["id"]
        plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        generate.answer(self.engine(1), [generate.Prompt("ä", None, {}, {})], {}, plain)
        plain.seek(0)
        assert json.loads(plain.read())["prompt"] == "ä"

    def test_a_full_disk_is_one_line(self) -> None:
        with contextlib.suppress(OSError), Path("/dev/full").open("w", encoding="utf-8") as full:
            with pytest.raises(StartError, match="cannot be written: No space left") as failure:
                generate.answer(self.engine(1), [generate.Prompt("p", None, {}, {})], {}, full)
            assert failure.value.hint
