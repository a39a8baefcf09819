"""Programs in SGLang's language against the server."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from support import REPOSITORY
from support.servers.pie_server import PROMPT, generate, state
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENTRY = (
    "# Functions about numbers, each with a test that shows what it does, and no more than that.\n"
)


@pytest.fixture
def language(server: Server) -> Any:
    import sglang

    sglang.set_default_backend(sglang.RuntimeEndpoint(server.url))
    return sglang


class TestPrograms:
    def test_gen_continues_its_own_text(self, language: Any, server: Server) -> None:
        @language.function
        def program(s: Any) -> None:
            s += PROMPT
            s += language.gen("first", max_tokens=6, temperature=0, ignore_eos=True)
            s += "\n# then\n"
            s += language.gen("second", max_tokens=6, temperature=0, ignore_eos=True)

        found = program.run()
        params = {"max_new_tokens": 6, "ignore_eos": True}
        first = generate(server, PROMPT, **params)["text"]
        assert found["first"] == first
        assert found["second"] == generate(server, f"{PROMPT}{first}\n# then\n", **params)["text"]

    def test_branches_share_their_prefix(self, language: Any, server: Server) -> None:
        @language.function
        def program(s: Any) -> None:
            s += ENTRY
            # A fork has its text computed first, if the program's own thread has taken it by then.
            s.sync()
            branches = s.fork(4)
            for number, branch in enumerate(branches):
                branch += f"def function_{number}("
                branch += language.gen("code", max_tokens=4, temperature=0, ignore_eos=True)
            for branch in branches:
                s += branch["code"]

        server.flush()
        before = state(server)
        found = program.run()
        after = state(server)
        cached = after["cached_tokens"] - before["cached_tokens"]
        prompts = after["prompt_tokens"] - before["prompt_tokens"]
        # Every branch found the pages of the text that all have in common.
        assert cached >= 0.25 * prompts
        alone = generate(server, f"{ENTRY}def function_2(", max_new_tokens=4, ignore_eos=True)
        assert alone["text"] in found.text()

    def test_a_stream_has_the_text(self, language: Any) -> None:
        @language.function
        def program(s: Any) -> None:
            s += PROMPT
            # On a busy machine tokens arrive together, but not so many.
            s += language.gen("text", max_tokens=64, temperature=0, ignore_eos=True)

        parts = list(program.run(stream=True).text_iter())
        assert "".join(parts) == program.run().text()
        assert len(parts) > 2

    def test_choices_by_likelihood(self, language: Any) -> None:
        """SGLang's two other methods count with the first log-probability, which is None."""
        from sglang.lang import choices

        @language.function
        def program(s: Any, method: Any) -> None:
            s += "for i in range(10):\n    print("
            s += language.gen("what", choices=["i", "\n\n\n", "zebra"], choices_method=method)

        assert program.run(method=choices.token_length_normalized)["what"] == "i"

    def test_a_regular_expression_constrains_the_answer(self, language: Any) -> None:
        @language.function
        def program(s: Any) -> None:
            s += "version = "
            s += language.gen("number", regex=r"[0-9]\.[0-9]{2}", max_tokens=12, temperature=1)
            s += language.gen("count", dtype=int, max_tokens=8)

        found = program.run()
        assert found["number"].replace(".", "").isdigit()
        assert len(found["number"]) == 4
        int(found["count"])

    def test_the_example_runs(self, server: Server) -> None:
        command = [sys.executable, str(REPOSITORY / "examples/programs.py"), "--url", server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "prompt tokens were there" in done.stdout
