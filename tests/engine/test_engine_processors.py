"""Custom logit processors of the public engine: Python in the driver, and SGLang's own natively."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.offline.engine import Engine
from support.models.reference import Reference, random_tokens
from support.models.tiny_models import build_llama
from support.process import engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
THINKING, END, NEW_LINE = 151_667, 151_668, 198
"""Of SGLang's `Qwen3ThinkingBudgetLogitProcessor`."""

SOURCE = """
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor, Qwen3ThinkingBudgetLogitProcessor
)

def force(logits, token):
    logits[:] = -float("inf")
    logits[:, token] = 0.0
    return logits

class Forces(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        return force(logits, custom_param_list[0]["token"])

class Follows(CustomLogitProcessor):
    '''Forces what the prompt and the output say; counts its calls in the parameters.'''
    def __call__(self, logits, custom_param_list):
        [params] = custom_param_list
        request = params["__req__"]
        params["calls"] = params.get("calls", 0) + 1
        assert params["calls"] == 1 + len(request.output_ids)
        total = sum(request.origin_input_ids) + 3 * sum(request.output_ids)
        return force(logits, (total + len(request.output_ids)) % params.get("modulus", 90))

class Bans(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        logits[:, custom_param_list[0]["tokens"]] = -float("inf")
        return logits

class Nothing(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        assert custom_param_list == [None]
        return logits

class Raises(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        if len(custom_param_list[0]["__req__"].output_ids) == custom_param_list[0]["after"]:
            raise RuntimeError("no more\\nof it")
        return logits

class Exits(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        raise SystemExit(3)

class Cancels(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        raise BaseException("as a cancelled task")

class Generates(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        raise GeneratorExit

class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError

class Mutes(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        raise Unreadable

class Surrogates(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        raise ValueError(chr(0xD800) + "!")

class Cuts(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        return logits[:, :5]

class Blurs(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        return logits * float("nan")

class Forbids(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        return logits - float("inf")

class Forgets(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        logits[:] = 0

class InPython(Qwen3ThinkingBudgetLogitProcessor):
    '''By its value, not by its name: it goes to the driver.'''
"""


@functools.cache
def processors() -> dict[str, Any]:
    """The classes of `SOURCE`, which are pickled by their values, as those of a script are."""
    namespace = {"__name__": "__main__"}
    exec(SOURCE, namespace)
    return namespace


def text_of(name: str) -> str:
    text: str = processors()[name].to_str()
    return text


@pytest.fixture(scope="module")
def allowing(forked_python: str) -> Iterator[Engine]:
    with engines.small(
        forked_python,
        48,
        max_step_ms=0,
        enable_custom_logit_processor=True,
        speculative_algorithm="NGRAM",
    ) as found:
        yield found


def prompt_of(reference: Reference, tokens: int, *name: Any) -> list[int]:
    return random_tokens(reference.vocab_size, tokens, *name)


class TestPython:
    def test_neighbours_see_nothing_of_it(self, allowing: Engine, reference: Reference) -> None:
        """Ones that force, that follow the sequence, that fail; retracted, in parts, cached."""
        shared = prompt_of(reference, 30, "shared")
        kinds: list[tuple[str | None, dict[str, Any]]] = [
            (None, {}),
            ("Forces", {"token": 7}),
            ("Follows", {"modulus": 250}),
            ("Raises", {"after": 3}),
        ]
        prompts, texts, samplings = [], [], []
        for number in range(24):
            own = prompt_of(reference, 70, "own", number)
            prompts.append([*(shared if number % 3 else ()), *own][:70])
            name, params = kinds[number % 4]
            texts.append(None if name is None else text_of(name))
            samplings.append({**GREEDY, "max_new_tokens": 40, "custom_params": params or None})
        before = allowing.get_server_info()["internal_states"][0]["retractions"]
        found = allowing.generate(
            input_ids=prompts, sampling_params=samplings, custom_logit_processor=texts
        )
        assert allowing.get_server_info()["internal_states"][0]["retractions"] > before
        for number, (answer, prompt) in enumerate(zip(found, prompts, strict=True)):
            output, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
            name = kinds[number % 4][0]
            if name in (None, "Raises"):
                reference.check([*prompt, *output[:-1]], output)
            if name == "Raises":
                assert len(output) == 3
                assert reason["type"] == "abort"
                assert "processor failed: RuntimeError: no more of it" in reason["message"]
                continue
            assert (len(output), reason["type"]) == (40, "length")
            if name == "Forces":
                assert output == [7] * 40
            elif name == "Follows":
                assert output == follow(prompt, 40, 250)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("Exits", "SystemExit: 3"),
            ("Cancels", "BaseException: as a cancelled task"),
            ("Generates", "GeneratorExit"),
            ("Mutes", "Unreadable: an error without a text"),
            ("Surrogates", "ValueError: \\ud800!"),
            ("Cuts", "ValueError: it returned logits of shape [1, 5], expected [1, "),
            ("Blurs", "without a finite largest one"),
            ("Forbids", "without a finite largest one"),
            ("Forgets", "TypeError: it returned NoneType, expected the logits"),
        ],
    )
    def test_what_it_does_wrong_is_said(self, allowing: Engine, name: str, message: str) -> None:
        found = allowing.generate(
            input_ids=[[5, 6, 7], [5, 6, 7]],
            sampling_params=GREEDY,
            custom_logit_processor=[text_of(name), None],
        )
        assert message in found[0]["meta_info"]["finish_reason"]["message"]
        assert found[1]["meta_info"]["finish_reason"]["type"] == "length"

    def test_a_pickle_that_does_not_load(self, allowing: Engine) -> None:
        answer = allowing.generate(
            input_ids=[5], sampling_params=GREEDY, custom_logit_processor='{"callable": "80042e"}'
        )
        assert "UnpicklingError" in answer["meta_info"]["finish_reason"]["message"]

    def test_with_the_other_parameters(self, allowing: Engine, reference: Reference) -> None:
        prompt = prompt_of(reference, 20, "others")
        plain, _ = reference.greedy(prompt, 1)
        banned = {**GREEDY, "custom_params": {"tokens": plain}}
        text = text_of("Bans")
        # A bias cannot outweigh what is banned.
        biased = {**banned, "logit_bias": {str(plain[0]): 50.0}}
        samplings = [banned, biased, {**banned, "n": 2, "temperature": 1.0, "sampling_seed": 3}]
        for sampling in samplings:
            found = allowing.generate(
                input_ids=prompt, sampling_params=sampling, custom_logit_processor=text
            )
            for answer in found if isinstance(found, list) else [found]:
                assert len(answer["output_ids"]) == 8
                assert plain[0] not in answer["output_ids"]
        nothing = allowing.generate(
            input_ids=prompt,
            sampling_params={**GREEDY, "repetition_penalty": 1.3, "regex": "[a-z ]+"},
            custom_logit_processor=text_of("Nothing"),
            return_logprob=True,
        )
        expected = allowing.generate(
            input_ids=prompt,
            sampling_params={**GREEDY, "repetition_penalty": 1.3, "regex": "[a-z ]+"},
            return_logprob=True,
        )
        assert nothing["output_ids"] == expected["output_ids"]
        for one, other in zip(
            nothing["meta_info"]["output_token_logprobs"],
            expected["meta_info"]["output_token_logprobs"],
            strict=True,
        ):
            assert one[0] == pytest.approx(other[0], abs=1e-4)

    def test_a_stream(self, allowing: Engine) -> None:
        sampling = {**GREEDY, "custom_params": {"modulus": 100}}
        stream = allowing.generate(
            input_ids=[5, 6], sampling_params=sampling, stream=True,
            custom_logit_processor=text_of("Follows"),
        )  # fmt: skip
        assert [*stream][-1]["output_ids"] == follow([5, 6], 8, 100)

    def test_empty_parameters_have_the_request(self, allowing: Engine) -> None:
        found = allowing.generate(
            input_ids=[5, 6],
            sampling_params={**GREEDY, "custom_params": {}},
            custom_logit_processor=text_of("Follows"),
        )
        assert found["output_ids"] == follow([5, 6], 8, 90)


def follow(prompt: list[int], tokens: int, modulus: int) -> list[int]:
    output: list[int] = []
    for count in range(tokens):
        output.append((sum(prompt) + 3 * sum(output) + count) % modulus)
    return output


class TestRefusals:
    def test_the_operator_has_to_allow_it(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="--enable-custom-logit-processor"):
            engine.generate(input_ids=[5], custom_logit_processor=text_of("Forces"))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"custom_logit_processor": "x"}, "is not JSON"),
            ({"custom_logit_processor": 5}, "`custom_logit_processor` is 5"),
            ({"custom_logit_processor": ["x", "y"]}, "custom_logit_processor"),
            ({"sampling_params": {"custom_params": {"a": 1}}}, "there is none"),
            ({"sampling_params": {"custom_params": [1]}}, "`custom_params` is"),
            ({"sampling_params": {"custom_params": {"a": object()}}}, "cannot be sent"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, allowing: Engine, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            allowing.generate(input_ids=[5], **arguments)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Iterator[Engine]:
    """A random model whose vocabulary has the tokens of Qwen3's thinking."""
    folder: Path = build_llama(tmp_path_factory.mktemp("wide"), 151_936)
    options = {"skip_tokenizer_init": True, "enable_custom_logit_processor": True}
    with engines.running(forked_python, folder, **options) as found:
        yield found


class TestOwn:
    """SGLang's own processors: computed without Python, and the same as in Python."""

    @pytest.mark.parametrize(("budget", "thinks"), [(0, True), (5, True), (5, False), (30, True)])
    def test_a_thinking_budget_is_exact(self, wide: Engine, budget: int, thinks: bool) -> None:
        from sglang.srt.sampling import custom_logit_processor as own

        prompt = [11, 12, *([THINKING] if thinks else [])]
        sampling = {**GREEDY, "max_new_tokens": 20, "custom_params": {"thinking_budget": budget}}

        def run(text: str | None) -> list[int]:
            params = sampling if text else {**sampling, "custom_params": None}
            answer = wide.generate(
                input_ids=prompt, sampling_params=params, custom_logit_processor=text
            )
            tokens: list[int] = answer["output_ids"]
            return tokens

        plain = run(None)
        native = run(own.Qwen3ThinkingBudgetLogitProcessor.to_str())
        assert native == run(text_of("InPython"))
        if not thinks or budget == 30:
            assert native == plain
            return
        # A new line comes first, unless the model has just made one.
        assert native[:budget] == plain[:budget]
        ended = native.index(END)
        assert native[ended - 1] == NEW_LINE
        assert ended in (budget, budget + 1)

    def test_disallowed_tokens(self, wide: Engine) -> None:
        from sglang.srt.sampling import custom_logit_processor as own

        run: Callable[..., Any] = functools.partial(wide.generate, input_ids=[11, 12])
        plain = run(sampling_params=GREEDY)["output_ids"]
        sampling = {**GREEDY, "custom_params": {"token_ids": plain}}
        text = own.DisallowedTokensLogitsProcessor.to_str()
        found = run(sampling_params=sampling, custom_logit_processor=text)["output_ids"]
        assert not set(found) & set(plain)
        assert (
            found
            == run(
                sampling_params={**GREEDY, "custom_params": {"tokens": plain}},
                custom_logit_processor=text_of("Bans"),
            )["output_ids"]
        )

    def test_n_grams_are_not_repeated(self, wide: Engine) -> None:
        from sglang.srt.sampling import custom_logit_processor as own

        params = {"ngram_size": 2, "window_size": 50}
        sampling = {**GREEDY, "max_new_tokens": 30, "custom_params": params}
        answer = wide.generate(
            input_ids=[11, 12, 11],
            sampling_params=sampling,
            custom_logit_processor=own.DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
        )
        tokens = [11, 12, 11, *answer["output_ids"]]
        pairs = [*itertools.pairwise(tokens)]
        assert len(set(pairs)) == len(pairs)
