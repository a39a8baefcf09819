"""Commands on an `Engine`: `generate` and the shell."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import pie_driver_sglang
from pie_driver_sglang.cli import generate, shell
from pie_driver_sglang.cli.conversation import Conversation
from pie_driver_sglang.cli.generate import Prompt
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.offline.engine import Engine
from support.models.pocket_prompts import GREEDY, TOKENS, WORDS, prompts
from support.models.tiny_models import POCKET
from support.servers.pie_server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


class TestGenerateCommand:
    def test_answers_are_lines_of_json(self, engine: Engine) -> None:
        texts = prompts(5, seed=7)
        requested = [Prompt(text, None, {}, {"id": index}) for index, text in enumerate(texts)]
        requested.append(Prompt(None, [5, 6, 7], {"n": 2, "temperature": 1.0}, {}))
        output = io.StringIO()
        summary = generate.answer(engine, requested, dict(GREEDY), output)
        lines = [json.loads(line) for line in output.getvalue().splitlines()]
        assert sorted(line["index"] for line in lines) == [0, 1, 2, 3, 4, 5, 5]
        assert sorted(line["sample"] for line in lines if line["index"] == 5) == [0, 1]
        whole = engine.generate(texts, GREEDY)
        for line in lines:
            if line["index"] < 5:
                assert line["text"] == whole[line["index"]]["text"]
                assert line["prompt"] == texts[line["index"]]
                assert line["id"] == line["index"]
            assert line["completion_tokens"] == TOKENS
        assert summary.startswith(f"{7 * TOKENS} tokens in ")
        assert "of them cached" in summary


class TestShell:
    def talk(self, engine: Engine, lines: Sequence[str]) -> list[str]:
        output = io.StringIO()
        assert engine.tokenizer is not None
        sampling = {"temperature": 0, "max_new_tokens": 12}
        conversation = Conversation(engine, engine.tokenizer, sampling)
        found = shell.Shell(conversation, engine, output)
        for line in lines:
            if not found.take(line):
                break
        return output.getvalue().splitlines()

    def test_a_conversation_is_kept_saved_and_forked(self, engine: Engine, tmp_path: Path) -> None:
        path = tmp_path / "talk.json"
        said = self.talk(
            engine,
            [
                "/system You write Python.",
                "write a loop",
                "/fork",
                "and another",
                "/stats",
                f"/save {path}",
                "/fork 1",
                "/reset",
                f"/load {path}",
                "",
                "/exit",
                "never",
            ],
        )
        text = "\n".join(said)
        assert said[0] == "instructions: You write Python."
        assert "branch 1 is kept" in text
        assert "saved 5 messages" in text
        assert "branch 1: 3 messages" in text
        assert "the conversation is empty" in text
        assert f"5 messages from {path}" in text
        assert "last answer: " in text
        assert "engine: steps " in text
        messages = json.loads(path.read_text())["messages"]
        assert [message["role"] for message in messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]

    def test_generated_tokens_are_in_the_prefix_cache(self, engine: Engine) -> None:
        assert engine.tokenizer is not None
        engine.flush_cache()
        sampling = {"temperature": 0, "max_new_tokens": 12}
        conversation = Conversation(engine, engine.tokenizer, sampling)
        conversation.system = " ".join(WORDS[:80])
        list(conversation.ask("first"))
        assert conversation.meta["cached_tokens"] == 0
        list(conversation.ask("second"))
        assert conversation.meta["cached_tokens"] >= 64

    def test_a_wrong_command_is_a_line(self, engine: Engine, tmp_path: Path) -> None:
        (tmp_path / "bad.json").write_text("[]")
        said = self.talk(
            engine,
            ["/rest", "/load", f"/load {tmp_path / 'bad.json'}", "/fork 9", "/fork x", "/help"],
        )
        assert "there is no command /rest (did you mean `/reset`" in said[0]
        assert "no file is named" in said[1]
        assert "holds no conversation" in said[2]
        assert "there is no branch 9" in said[3]
        assert "is not the number of a branch" in said[4]
        assert len(said) == 5 + len(shell.Shell.COMMANDS)

    def test_ctrl_c_stops_the_answer_only(self, engine: Engine) -> None:
        class Interrupting(io.StringIO):
            """Ctrl-C after the second piece."""

            pieces = 0

            def write(self, text: str) -> int:
                self.pieces += 1
                if self.pieces == 2:
                    raise KeyboardInterrupt
                return super().write(text)

        assert engine.tokenizer is not None
        output = Interrupting()
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 800}
        conversation = Conversation(engine, engine.tokenizer, sampling)
        found = shell.Shell(conversation, engine, output)
        assert found.take("go on")
        assert output.getvalue().endswith(" [stopped]\n")
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
        wait_until(
            lambda: engine.get_server_info()["internal_states"][0]["running"] == 0,
            120,
            "it is idle",
        )
        conversation.reset()
        assert found.take("/stats")


def test_a_shut_engine_refuses_calls(tmp_path: Path) -> None:
    """The whole command over a pipe, then an engine whose driver cannot start."""
    command = [sys.executable, "-m", "pie_driver_sglang", "shell", "--device", "cpu"]
    command += ["--model", str(POCKET), "--temperature", "0", "--max-new-tokens", "8"]
    result = subprocess.run(
        command,
        input="def main():\n/stats\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr
    assert "last answer: " in result.stdout
    assert "loading" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "config.json").write_text((POCKET / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(POCKET / name)
    with pytest.raises(StartError, match="no weights"):
        pie_driver_sglang.Engine(model_path=str(tmp_path), device="cpu")
