"""The wire extension, on the graph path and on the Python path.

Expected are the tokens of a naive loop over transformers' logits, which counts tokens in a list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Extension, Request, Sampler
from support.models.reference import Reference, random_tokens
from support.process import drivers
from support.process import runtime_client as rc
from support.process.extension_params import PENALTIES, ExtensionParams

pytestmark = pytest.mark.engine

STEPS = 10
GAP = 2e-3
"""Logits that are closer may come in either order."""


@pytest.fixture
def client(each_driver: drivers.Driver) -> _core.Client:
    return each_driver.client()


@pytest.fixture(params=[False, True], ids=["graph_path", "python"])
def probed(request: pytest.FixtureRequest) -> bool:
    """Whether batches go on the Python path, because of a probe."""
    return bool(request.param)


class Continuation:
    """One sequence with its parameters, and what it has produced."""

    def __init__(self, params: ExtensionParams, prompt: list[int], page: int, context: int) -> None:
        self.params, self.prompt = params, len(prompt)
        self.context = rc.Context(prompt, list(range(page, page + 4)), context_id=context)

    @property
    def output(self) -> list[int]:
        return self.context.tokens[self.prompt :]

    def request(self, probed: bool, **changed: Any) -> Request:
        samplers = [Sampler.greedy(), *([Sampler.entropy()] if probed else [])]
        extension = self.params.extension(self.prompt, changed.pop("history", ()))
        return self.context.request(*samplers, extension=extension, **changed)

    def check(self, reference: Reference, token: int) -> None:
        """Takes a token, which must be the best one, or as good as that."""
        logits = reference.logits(self.context.tokens)[-1]
        expected = self.params.adjusted(logits, self.output)
        behind = float(expected.max() - expected[token])
        assert behind <= GAP, f"token {token} after {self.output} is {behind} behind"
        self.context.take(token)


def advance(
    client: _core.Client, sequences: Sequence[Continuation], reference: Reference, probed: bool
) -> None:
    reply = client.forward([sequence.request(probed) for sequence in sequences])
    assert reply.status is None
    for sequence, tokens in zip(sequences, reply.tokens, strict=True):
        (token,) = tokens
        sequence.check(reference, token)


def sequences_of(
    reference: Reference, kinds: Sequence[ExtensionParams], first_page: int = 0
) -> list[Continuation]:
    prompts = (random_tokens(reference.vocab_size, 9, "extension", n) for n in range(len(kinds)))
    return [
        Continuation(params, prompt, first_page + 4 * number, 50 + number)
        for number, (params, prompt) in enumerate(zip(kinds, prompts, strict=True))
    ]


def test_every_parameter_and_their_neighbours(
    client: _core.Client, reference: Reference, probed: bool
) -> None:
    """All kinds in one batch, with a row that asks for nothing, in an order that changes."""
    sequences = sequences_of(reference, [*PENALTIES.values(), ExtensionParams()])
    for step in range(STEPS):
        turned = sequences[step % 3 :] + sequences[: step % 3]
        advance(client, turned, reference, probed)
    repeated = Counter(sequences[0].output).most_common(1)[0][1]
    plain = Counter(sequences[-1].output).most_common(1)[0][1]
    assert repeated <= plain or repeated == 1


def test_evicted_pages_that_are_recomputed(
    client: _core.Client, reference: Reference, probed: bool
) -> None:
    """The output is computed again with the prompt, in other pages and another row."""
    for sequence in sequences_of(reference, [PENALTIES["all"], PENALTIES["frequency"]]):
        for _ in range(4):
            advance(client, [sequence], reference, probed)
        context = sequence.context
        context.pages = [page + 20 for page in context.pages]
        context.stored, context.context_id = 0, context.context_id + 40
        for _ in range(4):
            advance(client, [sequence], reference, probed)


def test_output_that_comes_from_a_cached_prefix(
    client: _core.Client, reference: Reference, probed: bool
) -> None:
    """Pages that plain requests have filled: what counts of them is the request's history."""
    (sequence,) = sequences_of(reference, [PENALTIES["frequency"]])
    for _ in range(7):
        advance(client, [sequence], reference, probed)
    context = sequence.context
    # Another request, which asks for nothing, has computed the same tokens elsewhere.
    other = rc.Context(list(context.tokens[:-1]), [40, 41, 42], context_id=99)
    client.forward([other.request()])
    context.pages, context.context_id = other.pages, 98
    context.stored = len(context.tokens) - 1
    history = context.tokens[sequence.prompt : context.stored]
    (tokens,) = client.forward([sequence.request(probed, history=history)]).tokens
    sequence.check(reference, tokens[0])
    for _ in range(3):
        advance(client, [sequence], reference, probed)


def test_forks_count_for_themselves(
    client: _core.Client, reference: Reference, probed: bool
) -> None:
    """Sequences that share the pages of their prompt, whose outputs differ."""
    prompt = random_tokens(reference.vocab_size, 16, "forks")
    whole = rc.Context(list(prompt), [0], context_id=70)
    client.forward([whole.request()])
    forks = []
    for number, params in enumerate(
        [PENALTIES["frequency"], PENALTIES["repetition"], PENALTIES["bias"]]
    ):
        fork = Continuation(params, list(prompt), 0, 71 + number)
        fork.context.pages = [0, 5 + 2 * number, 6 + 2 * number]
        # The last token of the prompt is computed once more.
        fork.context.stored = 15
        forks.append(fork)
    for _ in range(STEPS):
        advance(client, forks, reference, probed)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_count_as_far_as_they_are_accepted(
    client: _core.Client, reference: Reference, right: int
) -> None:
    """Each place counts the drafts before it; rejected ones are forgotten."""
    (sequence,) = sequences_of(reference, [PENALTIES["all"]])
    context = sequence.context
    advance(client, [sequence], reference, False)
    for _ in range(3):
        ahead = Continuation(sequence.params, list(context.tokens), 0, 0)
        ahead.prompt = sequence.prompt
        drafts = []
        for _ in range(3):
            logits = reference.logits(ahead.context.tokens)[-1]
            drafts.append(int(sequence.params.adjusted(logits, ahead.output).argmax()))
            ahead.context.take(drafts[-1])
        wrong = [(token + 1) % reference.vocab_size for token in drafts]
        sent = drafts[:right] + wrong[right:]
        pages = context.pages[: -(-(len(context.tokens) + 3) // rc.PAGE)]
        (tokens,) = client.forward([sequence.request(False, drafts=sent, pages=pages)]).tokens
        assert len(tokens) == right + 1
        for token in tokens:
            sequence.check(reference, token)
        context.stored = len(context.tokens) - 1


def test_prompts_in_parts_and_a_seed(client: _core.Client, reference: Reference) -> None:
    """All samplers together: the same seed draws the same, in any batch and on either path."""
    prompt = random_tokens(reference.vocab_size, 20, "parts")
    sampler = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}

    def sampled(seed: int, page: int, *, parts: bool, probed: bool) -> list[int]:
        context = rc.Context(list(prompt), list(range(page, page + 3)), context_id=page + 1)
        samplers = [Sampler.greedy(), *([Sampler.entropy()] if probed else [])]
        if parts:
            part = rc.Context(prompt[:11], context.pages, context_id=page + 1)
            client.forward([part.request(samplers=[])])
            context.stored = 11
        for _ in range(6):
            extension = Extension(**sampler, seed=seed)
            request = context.request(*samplers, extension=extension)
            others = [rc.Context([5, 6], [60], context_id=91).request()] * (page % 2)
            context.take(client.forward([*others, request]).tokens[-1][0])
        return context.tokens[len(prompt) :]

    first = sampled(2**40 + 7, 0, parts=False, probed=False)
    assert sampled(2**40 + 7, 5, parts=True, probed=True) == first
    assert any(sampled(seed, 10, parts=False, probed=False) != first for seed in range(3))


def test_a_mask_of_bits_alone_and_with_the_rest(client: _core.Client, reference: Reference) -> None:
    words = -(-reference.vocab_size // 32)
    mask = [0] * words
    mask[1] = 0b1011
    allowed = {32, 33, 35}
    context = rc.Context([4, 5, 6], [0, 1], context_id=5)
    for params in (ExtensionParams(), ExtensionParams(logit_bias=((40, 100.0), (33, 50.0)))):
        for samplers in ([Sampler.greedy()], [Sampler.greedy(), Sampler.entropy()]):
            extension = params.extension(3, mask=mask)
            reply = client.forward([context.request(*samplers, extension=extension)])
            assert reply.tokens[0][0] in (allowed if not params.logit_bias else {33})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1, it must be 0 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0, it must be above 0"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p is 1.5, it must be from 0 to 1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is NaN, it must be finite"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0, it must be above 0"),
        ({"logit_bias": [(10**6, 1.0)]}, "logit_bias is 1000000, it must be ids of the voc"),
        ({"logit_bias": [(1, float("inf"))]}, "logit_bias is inf, it must be finite"),
        ({"mask": [1]}, "mask is 1, it must be one bit for each token"),
        ({"history": [1] * 9}, "history is 9, it must be no longer than what is stored"),
    ],
)
def test_wrong_values_cost_their_request_alone(
    llama_driver: drivers.Driver, changed: dict[str, Any], text: str
) -> None:
    contexts = [rc.Context([4, 5, 6], [2 * n], context_id=n + 1) for n in range(2)]
    bad, good = contexts[0].request(extension=Extension(**changed)), contexts[1].request()
    reply = llama_driver.client().forward([bad, good])
    assert reply.status is None
    assert [len(tokens) for tokens in reply.tokens] == [0, 1]
    llama_driver.logged(text)


def test_an_extension_of_other_requests_is_refused(llama_driver: drivers.Driver) -> None:
    request = rc.Context([4, 5, 6], [0]).request
    frame = _core.encode_forward([request(), request(extension=Extension(presence_penalty=1.0))])
    # One row of 8 words, without lists, before the end of 5.
    row = len(frame) - 20 - 32
    assert frame[row : row + 4] == (1).to_bytes(4, "little")
    client = llama_driver.client()
    for number, status in ((1, None), (9, 2)):
        changed = frame[:row] + number.to_bytes(4, "little") + frame[row + 4 :]
        assert rc.decode(client.call(changed)).status == status
    llama_driver.logged("a row for request 9, but the frame has 2 requests")
