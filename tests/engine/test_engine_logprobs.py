"""Log-probabilities of the public engine."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from pie_driver_sglang.cli import generate
from pie_driver_sglang.cli.generate import Prompt
from pie_driver_sglang.frontends.offline.engine import Engine
from pie_driver_sglang.frontends.offline.logprobs import ORIGINAL
from support.models.expected_logprobs import LogprobParams, check_answer
from support.models.reference import Reference, random_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

GREEDY = {"temperature": 0, "ignore_eos": True}
KINDS = [
    LogprobParams(),
    LogprobParams(0),
    LogprobParams(0, 3, (7, 9, 7)),
    LogprobParams(11, 20),
    LogprobParams(30, 0, (5,)),
    LogprobParams(69, 2),
    LogprobParams(70, 1),
]
"""Prompts have 70 tokens: more than a step."""


class TestLogprobs:
    def test_many_at_once(self, engine: Engine, reference: Reference) -> None:
        """Prompts in parts, shared prefixes, requests that are retracted, neighbours without."""
        shared = random_tokens(reference.vocab_size, 40, "shared")
        prompts = [
            [*(shared if n % 3 else ()), *random_tokens(reference.vocab_size, 70, "own", n)][:70]
            for n in range(35)
        ]
        before = engine.get_server_info()["internal_states"][0]["retractions"]
        kinds = [KINDS[n % len(KINDS)] for n in range(len(prompts))]
        listed = [kind.arguments() for kind in kinds]
        arguments = {name: [one[name] for one in listed] for name in listed[0]}
        arguments["return_logprob"][4] = False
        sampling = {**GREEDY, "max_new_tokens": 40}
        found = engine.generate(input_ids=prompts, sampling_params=sampling, **arguments)
        assert engine.get_server_info()["internal_states"][0]["retractions"] > before
        plain = found.pop(4)
        assert not [name for name in plain["meta_info"] if "logprob" in name]
        del prompts[4], kinds[4]
        for answer, kind, prompt in zip(found, kinds, prompts, strict=True):
            check_answer(answer, kind, prompt, reference)
            # What comes after the first token that is asked for is computed.
            if kind.logprob_start_len >= 0:
                assert answer["meta_info"]["cached_tokens"] <= kind.logprob_start_len

    def test_streams_and_samples(self, engine: Engine, reference: Reference) -> None:
        requested, prompt = LogprobParams(50, 2), random_tokens(reference.vocab_size, 60, "samples")
        sampling = {"temperature": 1.5, "n": 3, "max_new_tokens": 6, "ignore_eos": True}
        last: dict[int, dict[str, Any]] = {}
        for answer in engine.generate(
            input_ids=prompt, sampling_params=sampling, stream=True, **requested.arguments()
        ):
            before = last.get(answer["index"])
            last[answer["index"]] = answer
            count = answer["meta_info"]["completion_tokens"]
            assert len(answer["meta_info"]["output_top_logprobs"]) == count
            if before is not None:
                tops = before["meta_info"]["output_top_logprobs"]
                assert answer["meta_info"]["output_top_logprobs"][: len(tops)] == tops
        assert sorted(last) == [0, 1, 2]
        for answer in last.values():
            check_answer(answer, requested, prompt, reference, divisor=1.5)

    @pytest.mark.parametrize("temperature", [0, 2.0])
    def test_a_request_for_no_token_is_scored(
        self, engine: Engine, reference: Reference, temperature: float
    ) -> None:
        requested, prompt = LogprobParams(-1, 0, (11, 12)), [5, 6, 7]
        sampling = {"temperature": temperature, "max_new_tokens": 0}
        answer = engine.generate(
            input_ids=prompt, sampling_params=sampling, **requested.arguments()
        )
        assert answer["output_ids"] == []
        assert answer["meta_info"]["completion_tokens"] == 0
        check_answer(answer, requested, prompt, reference, divisor=temperature or 1)

    def test_before_the_temperature(
        self, engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(ORIGINAL, "true")
        sampling = {"temperature": 1.5, "max_new_tokens": 4, "ignore_eos": True}
        requested, prompt = LogprobParams(-1, 4), [5, 6, 7]
        answer = engine.generate(
            input_ids=prompt, sampling_params=sampling, **requested.arguments()
        )
        check_answer(answer, requested, prompt, reference)

    def test_the_command_writes_them_with_texts(self, engine: Engine, reference: Reference) -> None:
        assert engine.tokenizer is not None
        output = io.StringIO()
        options = generate._parser().parse_args(["--logprobs", "2", "--prompt-logprobs"])
        prompts = [Prompt("def main():", None, {}, {})]
        sampling = {**GREEDY, "max_new_tokens": 3}
        generate.answer(engine, prompts, sampling, output, generate.logprobs_of(options))
        line = json.loads(output.getvalue())
        [prompt] = engine.tokenizer.encode(["def main():"])
        meta = {**line, "output_token_logprobs_length": 3}
        decode = engine.tokenizer.decode
        answer = {"meta_info": meta, "output_ids": line["output_ids"]}
        texts = lambda token: decode([token], skip_special_tokens=False)  # noqa: E731
        check_answer(answer, LogprobParams(0, 2), prompt, reference, texts)
