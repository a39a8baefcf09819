"""Log-probabilities over HTTP."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
from support.models.expected_logprobs import LogprobParams, check_answer
from support.models.reference import Reference, random_tokens
from support.servers.pie_server import PROMPT
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class TestLogprobs:
    @pytest.mark.parametrize("stream", [False, True])
    def test_generate(self, server: Server, reference: Reference, stream: bool) -> None:
        """What SGLang's front end makes of the columns is what its engine answers."""
        kinds = [
            LogprobParams(),
            LogprobParams(0, 3, (7, 9)),
            LogprobParams(25, 20),
            LogprobParams(29),
            LogprobParams(30, 0, (5,)),
        ]
        for number, kind in enumerate(kinds):
            prompt = random_tokens(reference.vocab_size, 30, "http", number)
            body = server.body(prompt, 5, stream=stream, **kind.arguments())
            found = server.fetch("/generate", body)
            if stream:
                lines = [line for line in found.split("\n\n") if line]
                # A front end that comes late has several tokens in one.
                assert 2 <= len(lines) <= 6
                assert lines[-1] == "data: [DONE]"
                found = lines[-2].removeprefix("data: ")
            check_answer(json.loads(found), kind, prompt, reference)

    def test_a_mixed_batch(self, server: Server, reference: Reference) -> None:
        """Requests with and without them in one message."""
        prompts = [random_tokens(reference.vocab_size, 9, "mixed", n) for n in range(4)]
        requested = LogprobParams(0, 2).arguments()
        listed = {name: [value] * 4 for name, value in requested.items() if value is not None}
        listed["return_logprob"] = [True, False, True, False]
        body = {**server.body([], 4), "input_ids": prompts, **listed}
        found = json.loads(server.fetch("/generate", body))
        for number, (answer, prompt) in enumerate(zip(found, prompts, strict=True)):
            if number % 2:
                assert "output_token_logprobs" not in answer["meta_info"]
            else:
                check_answer(answer, LogprobParams(0, 2), prompt, reference)

    def test_texts(self, server: Server, reference: Reference, tokenizer: ModelTokenizer) -> None:
        kind = LogprobParams(0, 2)
        body = {"text": PROMPT, "return_text_in_logprobs": True, **kind.arguments()}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 3}
        [prompt] = tokenizer.encode([PROMPT])
        answer = json.loads(server.fetch("/generate", body))
        check_answer(answer, kind, prompt, reference, lambda id: tokenizer.texts([id])[0])

    def test_score(self, server: Server, reference: Reference) -> None:
        labels = [11, 12, 13]
        prompt = random_tokens(reference.vocab_size, 6, "score")
        body = {"model": "m", "query": prompt[:4], "items": [prompt[4:]], "label_token_ids": labels}
        [scores] = json.loads(server.fetch("/v1/score", {**body, "apply_softmax": True}))["scores"]
        expected = reference.logits(prompt)[-1][labels].softmax(-1).tolist()
        assert scores == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("stream", [False, True])
    def test_completions(
        self, client: Any, reference: Reference, tokenizer: ModelTokenizer, stream: bool
    ) -> None:
        answer = client.completions.create(
            model="m",
            prompt=PROMPT,
            temperature=0,
            max_tokens=4,
            logprobs=3,
            echo=True,
            stream=stream,
        )
        chunks = list(answer) if stream else [answer]
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        values = [value for part in parts for value in part.token_logprobs]
        texts = [text for part in parts for text in part.tokens]
        tops = [top for part in parts for top in part.top_logprobs]
        [prompt] = tokenizer.encode([PROMPT])
        tokens = [*prompt, *reference.greedy(prompt, 4)[0]]
        assert texts == tokenizer.texts(tokens)
        logprobs = reference.logits(tokens).log_softmax(-1)
        expected = [float(logprobs[at, token]) for at, token in enumerate(tokens[1:])]
        assert values[0] is tops[0] is None
        assert values[1:] == pytest.approx(expected, abs=1e-4)
        for at, top in enumerate(tops[1:]):
            best = logprobs[at].topk(3).values.tolist()
            assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=1e-4)

    @pytest.mark.parametrize("stream", [False, True])
    def test_chat(self, client: Any, stream: bool) -> None:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            max_tokens=4,
            logprobs=True,
            top_logprobs=5,
            stream=stream,
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        content = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
        assert len(content) == 4
        for entry in content:
            top = [one.logprob for one in entry.top_logprobs]
            assert len(top) == 5
            assert top == sorted(top, reverse=True)
            # It is greedy.
            assert top[0] == entry.logprob
            assert math.fsum(map(math.exp, top)) <= 1 + 1e-4

    @pytest.mark.filterwarnings("ignore")
    def test_choices(self, server: Server, reference: Reference, tokenizer: ModelTokenizer) -> None:
        """SGLang's frontend language asks for log-probabilities of prompts."""
        import sglang

        [prompt] = tokenizer.encode([PROMPT])
        likely = tokenizer.decode(reference.greedy(prompt, 4)[0])

        def choose(s: Any) -> None:
            s += PROMPT
            s += sglang.gen("answer", choices=[" zebra zebra", likely], temperature=0)

        backend = sglang.RuntimeEndpoint(server.url)
        assert sglang.function(choose).run(backend=backend)["answer"] == likely

    @pytest.mark.parametrize(
        "name", ["greedy_token_selection", "unconditional_likelihood_normalized"]
    )
    def test_other_choices_methods(
        self, name: str, server: Server, reference: Reference, tokenizer: ModelTokenizer
    ) -> None:
        """SGLang's client counts with the first row's None, and asks for no unconditional rows."""
        import sglang
        from sglang.lang import choices

        method = getattr(choices, name)
        [prompt] = tokenizer.encode([PROMPT])
        likely = tokenizer.decode(reference.greedy(prompt, 4)[0])
        options = [" zebra zebra", likely]
        program = SimpleNamespace(text_=PROMPT, images_=[])
        client = sglang.RuntimeEndpoint(server.url)
        with pytest.raises((TypeError, IndexError), match=r"NoneType|out of bounds"):
            client.select(program, options, 0.0, method)

        def rows(**prompts: Any) -> list[list[list[Any]]]:
            body = {
                **prompts,
                "sampling_params": {"max_new_tokens": 0, "temperature": 0},
                "return_logprob": True,
            }
            answers = json.loads(server.fetch("/generate", body))
            return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

        # Without that row, and with the others, the methods decide. The rows are the options' own:
        # a shared token may differ in its last bits, by which the greedy method would decide.
        texts = [PROMPT + option for option in options]
        found = rows(text=texts, logprob_start_len=len(prompt) - 1)
        assert [row[0][0] for row in found] == [None, None]
        given = [row[1:] for row in found]
        ids = [[token for _, token, _ in row] for row in given]
        decided = method(
            choices=options,
            normalized_prompt_logprobs=[],
            input_token_logprobs=given,
            output_token_logprobs=[],
            unconditional_token_logprobs=rows(input_ids=ids, logprob_start_len=0),
        )
        assert decided.decision == likely
