"""The tokenizer of the offline engine: streamed text, chat templates and stop strings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer, StopFilter, overlap, render
from support.models.tiny_models import POCKET


class TestTokenizer:
    @given(text=st.text(max_size=60))
    def test_a_text_comes_back(self, tokenizer: ModelTokenizer, text: str) -> None:
        (tokens,) = tokenizer.encode([text])
        assert tokenizer.decode(tokens) == text

    @given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 4), max_size=40))
    def test_a_stream_is_the_text_and_has_no_cut_characters(
        self, tokenizer: ModelTokenizer, text: str, cuts: list[int]
    ) -> None:
        (tokens,) = tokenizer.encode([text])
        stream = tokenizer.stream([1, 2, 3])
        pieces = []
        for size in [*cuts, *[1] * len(tokens)]:
            pieces.append(stream.push(tokens[:size]))
            tokens = tokens[size:]
        # U+FFFD itself cannot be told from a character that is not complete.
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.push([], is_last=True) == text

    def test_one_text_has_one_list(self, tokenizer: ModelTokenizer) -> None:
        assert [tokenizer.encode("def f(x):")] == tokenizer.encode(["def f(x):"])

    def test_what_is_incomplete_at_the_end_is_shown(self, tokenizer: ModelTokenizer) -> None:
        (tokens,) = tokenizer.encode(["\N{GRINNING FACE}"])
        assert len(tokens) > 1
        stream = tokenizer.stream([])
        assert stream.push(tokens[:1]) == ""
        assert "\ufffd" in stream.push([], is_last=True)

    def test_special_tokens_are_left_out_unless_they_are_wanted(
        self, tokenizer: ModelTokenizer
    ) -> None:
        end = tokenizer.token("<|im_end|>")
        assert end is not None
        assert end in tokenizer.end_tokens
        assert tokenizer.stream([]).push([end], is_last=True) == ""
        assert tokenizer.stream([], skip_special=False).push([end], is_last=True) == "<|im_end|>"

    @given(text=st.text(max_size=60))
    def test_the_vocabulary_adds_up_to_the_text(self, tokenizer: ModelTokenizer, text: str) -> None:
        (tokens,) = tokenizer.encode([text])
        vocabulary = _vocabulary(tokenizer)
        assert b"".join(vocabulary[token] for token in tokens) == text.encode()

    def test_special_tokens_add_nothing(self, tokenizer: ModelTokenizer) -> None:
        vocabulary = _vocabulary(tokenizer)
        assert {vocabulary[token] for token in tokenizer.end_tokens} == {b""}

    def test_a_conversation_follows_the_template(self, tokenizer: ModelTokenizer) -> None:
        text = tokenizer.chat([{"role": "user", "content": "hi"}])
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        tokens = tokenizer.encode_plain(text)
        assert tokens[0] == tokenizer.token("<|im_start|>")
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text

    def test_other_ways_to_keep_a_template(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").symlink_to(POCKET / "tokenizer.json")
        assert not ModelTokenizer(tmp_path).can_chat
        with pytest.raises(ConfigError, match="no chat template"):
            ModelTokenizer(tmp_path).chat([])
        listed = [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}]
        config = {"chat_template": listed, "eos_token": {"content": "<|im_end|>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        found = ModelTokenizer(tmp_path)
        assert found.chat([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"
        assert found.end_tokens == {found.token("<|im_end|>")}
        (tmp_path / "chat_template.jinja").write_text("file")
        assert ModelTokenizer(tmp_path).chat([]) == "file"

    def test_templates_run_in_a_sandbox(self) -> None:
        with pytest.raises(ConfigError, match="chat template refuses"):
            render("{{ ''.__class__.__mro__ }}")
        with pytest.raises(ConfigError, match="roles must alternate"):
            render("{{ raise_exception('roles must alternate') }}")
        assert render("{{ {'ä': 1} | tojson }}") == '{"ä": 1}'

    @pytest.mark.parametrize("text", [None, "{", "[]"])
    def test_a_folder_without_a_tokenizer_is_refused(
        self, tmp_path: Path, text: str | None
    ) -> None:
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer\.json") as refusal:
            ModelTokenizer(tmp_path)
        assert refusal.value.hint


_VOCABULARIES: dict[int, list[bytes]] = {}


def _vocabulary(tokenizer: ModelTokenizer) -> list[bytes]:
    return _VOCABULARIES.setdefault(id(tokenizer), tokenizer.vocabulary())


class TestStops:
    @given(
        text=st.text("abc", max_size=30),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
        cuts=st.lists(st.integers(1, 5), max_size=30),
    )
    def test_nothing_of_a_stop_string_is_shown_before_the_end(
        self, text: str, stops: list[str], cuts: list[int]
    ) -> None:
        # As a runtime does it: the text ends with the piece in which a stop string is complete.
        held, shown, rest = StopFilter(stops), "", text
        seen, matched = "", None
        for size in [*cuts, *[1] * len(text)]:
            piece, rest = rest[:size], rest[size:]
            seen += piece
            shown += held.push(piece)
            assert text.startswith(shown)
            found = [(seen.find(stop), stop) for stop in stops if stop in seen]
            if found:
                _, matched = min(found)
                break
        shown += held.finish(matched)
        if matched is None:
            assert shown == text
        else:
            assert shown == seen[: seen.find(matched)]
            assert not any(stop in shown for stop in stops)

    @pytest.mark.parametrize(
        ("text", "stop", "length"),
        [("abc", "cd", 1), ("abc", "x", 0), ("abcd", "cd", 2), ("acdb", "cd", 3), ("aa", "aab", 2)],
    )
    def test_the_overlap(self, text: str, stop: str, length: int) -> None:
        assert overlap(text, stop) == length


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather in a t\u00f6wn.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]
TOOL_TEMPLATE = (
    "{%- if tools %}# Tools\n{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}"
    "\n{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}"
    "{%- else %}{{ message.content }}{%- endif %}\n{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{%- if not enable_thinking %}-{%- endif %}"
    "{%- endif %}"
)


@pytest.mark.filterwarnings("ignore")
def test_tools_are_rendered_as_by_transformers(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    shutil.copytree(POCKET, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    named = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": TOOL_TEMPLATE},
    ]
    path.write_text(json.dumps({**config, "chat_template": named}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ModelTokenizer(folder)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
    messages = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "yes"},
    ]
    for tools in (TOOLS, None):
        for variables in ({}, {"enable_thinking": True}, {"add_generation_prompt": True}):
            given = {"tools": tools, "tokenize": False, **variables}
            text = ours.apply_chat_template(messages, **given)
            assert text == theirs.apply_chat_template(messages, **given)
            assert ("weather" in text) == (tools is not None)
            tokens = ours.apply_chat_template(messages, **{**given, "tokenize": True})
            assert tokens == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"return_dict": True}, "`return_dict`"),
        ({"continue_final_message": True}, "`continue_final_message`"),
        ({"tools": [print]}, "an entry of `tools` is <built-in function print>"),
        ({"tools": [{"a": print}]}, "not JSON serializable"),
        ({"template": "x", "text": object()}, "not JSON serializable"),
    ],
)
def test_what_a_template_does_not_take_is_one_line(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shutil.copytree(POCKET, tmp_path, dirs_exist_ok=True)
    template = TOOL_TEMPLATE + "{%- if text %}{{ text | tojson }}{%- endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ModelTokenizer(tmp_path)
    messages = [{"role": "user", "content": "Is it warm?"}]
    with pytest.raises(ConfigError) as refusal:
        tokenizer.apply_chat_template(messages, **arguments)
    assert words in refusal.value.message
    assert len(refusal.value.message.splitlines()) == 1
    assert tokenizer.apply_chat_template(messages, tokenize=False, return_dict=False)
