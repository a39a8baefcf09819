"""`pie-sglang generate`: prompts, options of the engine, and answers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pie_driver_sglang
from pie_driver_sglang.cli import engine_options, generate, main
from pie_driver_sglang.errors import ConfigError, StartError
from support import REPOSITORY
from support.models.tiny_models import POCKET


class Pipe(io.StringIO):
    """stdin that is no terminal."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestPrompts:
    def test_prompts_come_from_arguments_then_from_a_file(self, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize(
        ("flag", "value", "text"),
        [
            ("--temperature", "-1", "`temperature` is -1.0"),
            ("--temperature", "nan", "`temperature` is nan"),
            ("--top-p", "0", "`top_p` is 0.0"),
            ("--top-k", "-2", "`top_k` is -2"),
            ("--min-p", "1.5", "`min_p` is 1.5"),
            ("--frequency-penalty", "3", "`frequency_penalty` is 3.0"),
            ("--presence-penalty", "-2.5", "`presence_penalty` is -2.5"),
            ("--repetition-penalty", "0", "`repetition_penalty` is 0.0"),
            ("--max-new-tokens", "-1", "`max_new_tokens` is -1"),
            ("--sampling-seed", "-1", "`sampling_seed` is -1"),
        ],
    )
    def test_wrong_sampling_starts_nothing(
        self, flag: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(generate, "started", None)
        with pytest.raises(ConfigError, match=re.escape(text)) as refusal:
            generate.main(["Hello", f"{flag}={value}"])
        assert refusal.value.hint

    def test_wrong_sampling_of_a_line_starts_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(generate, "started", None)
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "a"}\n{"prompt": "b", "sampling_params": {"top_p": 2}}\n')
        with pytest.raises(ConfigError, match=r"`top_p` is 2\.0"):
            generate.main(["--file", str(file)])

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
        keys = [(0, None), (1, 0), (1, 1), (1, 2), (2, None), (3, 0), (3, 1)]
        assert found == {key: str(number) for number, key in enumerate(keys)}

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
