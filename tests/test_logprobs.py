"""Logprobs on the graph path and on the Python path, with one rank and two.

Expected is what transformers' logits give, after penalties and biases for tokens that are drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Extension, Sampler
from support.models.reference import Reference, random_tokens
from support.process import drivers
from support.process import runtime_client as rc
from support.process.extension_params import PENALTIES, ExtensionParams

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
LEAST = torch.finfo(torch.float32).min
STEPS = 4

PositionLogprobs = tuple[float, list[tuple[float, int]], list[float]]


class Wanted(NamedTuple):
    """What a request asks of its tokens."""

    top: int = 0
    given: tuple[int, ...] = ()
    scaled: bool = False
    penalties: ExtensionParams = ExtensionParams()
    temperature: float = 0.0

    def extension(self, prompt: int, **more: Any) -> Extension:
        sampling = {"temperature": self.temperature, "seed": 5} if self.temperature else {}
        return self.penalties.extension(
            prompt,
            logprobs=self.top,
            logprobs_of=list(self.given),
            logprobs_scaled=self.scaled,
            **sampling,
            **more,
        )

    def check(self, position: PositionLogprobs, logits: torch.Tensor, token: int) -> None:
        """Compares a position with those of `logits`, the vocabulary's."""
        divisor = self.temperature if self.scaled and self.temperature else 1.0
        expected = torch.log_softmax(logits.double() / divisor, dim=-1).clamp(min=LEAST)
        own, top, given = position
        assert own == pytest.approx(float(expected[token]), abs=TOLERANCE)
        assert given == pytest.approx([float(expected[token]) for token in self.given], abs=1e-4)
        values, ids = [value for value, _ in top], [token for _, token in top]
        best = expected.topk(self.top).values.tolist()
        assert values == pytest.approx(best, abs=TOLERANCE)
        assert values == pytest.approx([float(expected[token]) for token in ids], abs=TOLERANCE)
        assert len(set(ids)) == self.top
        assert values == sorted(values, reverse=True)


WANTED = {
    "own": Wanted(),
    "top": Wanted(top=5),
    "most": Wanted(top=20, given=(7,)),
    "given": Wanted(given=(3, 3, 200, 0)),
    "adjusted": Wanted(top=3, given=(11, 7), penalties=PENALTIES["all"]),
    "warm": Wanted(top=4, temperature=1.7),
    "scaled": Wanted(top=4, given=(9,), scaled=True, temperature=1.7),
    "biased": Wanted(top=2, given=(11,), penalties=PENALTIES["bias"], scaled=True, temperature=0.6),
}


@pytest.fixture
def client(each_driver: drivers.Driver) -> _core.Client:
    return each_driver.client()


@pytest.fixture(params=[False, True], ids=["graph_path", "python"])
def samplers(request: pytest.FixtureRequest) -> list[Sampler]:
    """With a probe batches go on the Python path."""
    return [Sampler.greedy(), *([Sampler.entropy()] if request.param else [])]


def logprobs_of(reply: Any) -> dict[int, tuple[list[PositionLogprobs], list[PositionLogprobs]]]:
    """Those of each request, of its prompt and of its tokens."""
    assert reply.status is None
    return {request: (prompt, tokens) for request, prompt, tokens in reply.position_logprobs}


def test_each_token_has_the_requested_logprobs(
    client: _core.Client, reference: Reference, samplers: list[Sampler]
) -> None:
    """All kinds in one batch in an order that changes, with neighbours that ask for nothing."""
    wanted = [*WANTED.values(), None, None]
    prompts = [random_tokens(reference.vocab_size, 9, "logprobs", n) for n in range(len(wanted))]
    contexts = [
        rc.Context(list(prompt), [4 * n, 4 * n + 1], context_id=20 + n)
        for n, prompt in enumerate(prompts)
    ]
    for step in range(STEPS):
        order = [(n + 3 * step) % len(wanted) for n in range(len(wanted))]
        requests = [
            contexts[n].request(*samplers, extension=ask.extension(9) if ask else None)
            for n, ask in ((n, wanted[n]) for n in order)
        ]
        reply = client.forward(requests)
        positions = logprobs_of(reply)
        assert sorted(positions) == [at for at, n in enumerate(order) if wanted[n]]
        for at, n in enumerate(order):
            context, ask = contexts[n], wanted[n]
            ((token,), logits) = (reply.tokens[at], reference.logits(context.tokens)[-1])
            if ask is not None:
                (prompt, (position,)) = positions[at]
                assert prompt == []
                ask.check(position, ask.penalties.adjusted(logits, context.tokens[9:]), token)
            context.take(token)


def test_a_token_that_cannot_come_is_least_probable(
    client: _core.Client, reference: Reference, samplers: list[Sampler]
) -> None:
    """Of three allowed tokens five best are wanted; a mask of bits, and one of the protocol."""
    words = -(-reference.vocab_size // 32)
    bits = [0, 0b1011, *[0] * (words - 2)]
    logits = reference.logits([4, 5, 6])[-1]
    kept = torch.full_like(logits, -torch.inf)
    kept[[32, 33, 35]] = logits[[32, 33, 35]]
    wanted = Wanted(top=5, given=(33, 34))
    context = rc.Context([4, 5, 6], [0], context_id=5)
    reply = client.forward([context.request(*samplers, extension=wanted.extension(3, mask=bits))])
    ((_, (position,)),) = logprobs_of(reply).values()
    wanted.check(position, kept, reply.tokens[0][0])
    assert position[2][1] == LEAST


@pytest.mark.parametrize("right", [0, 2, 3])
def test_each_accepted_draft_has_logprobs(
    client: _core.Client, reference: Reference, right: int
) -> None:
    wanted = Wanted(top=3, given=(7,), penalties=PENALTIES["frequency"])
    prompt = random_tokens(reference.vocab_size, 9, "drafts")
    context = rc.Context(list(prompt), [0, 1], context_id=40)
    context.take(client.forward([context.request(extension=wanted.extension(9))]).tokens[0][0])
    ahead, drafts = list(context.tokens), []
    for _ in range(3):
        adjusted = wanted.penalties.adjusted(reference.logits(ahead)[-1], ahead[9:])
        drafts.append(int(adjusted.argmax()))
        ahead.append(drafts[-1])
    sent = [token if n < right else (token + 1) % 200 for n, token in enumerate(drafts)]
    reply = client.forward([context.request(extension=wanted.extension(9), drafts=sent, pages=[0])])
    ((prompt_positions, positions),) = logprobs_of(reply).values()
    (tokens,) = reply.tokens
    assert prompt_positions == []
    assert len(tokens) == len(positions) == right + 1
    for token, position in zip(tokens, positions, strict=True):
        logits = reference.logits(context.tokens)[-1]
        wanted.check(position, wanted.penalties.adjusted(logits, context.tokens[9:]), token)
        context.take(token)


@pytest.mark.parametrize("parts", [(37,), (10, 27), (1, 20, 16)], ids=str)
@pytest.mark.parametrize("first", [1, 13, 36])
def test_tokens_of_a_prompt_have_those_of_the_logits_before_them(
    client: _core.Client, reference: Reference, parts: Sequence[int], first: int
) -> None:
    """Whatever parts it comes in. Penalties, biases and temperatures do not touch them."""
    wanted = Wanted(top=4, given=(5, 250), penalties=PENALTIES["bias"], temperature=1.3)
    prompt = random_tokens(reference.vocab_size, 37, "prompt", first)
    logits = reference.logits(prompt)
    other = rc.Context([5, 6], [60], context_id=61)
    found: list[PositionLogprobs] = []
    for start, end in itertools.pairwise(itertools.accumulate(parts, initial=0)):
        last = end == len(prompt)
        # The token after a part is not in it.
        extension = wanted.extension(
            37, prompt_logprobs=(first, len(prompt), 0 if last else prompt[end])
        )
        part = rc.Context(prompt[:end], [0, 1, 2], stored=start, context_id=60)
        request = part.request(extension=extension, **({} if last else {"samplers": []}))
        reply = client.forward([other.request(), request])
        of_prompt, of_tokens = logprobs_of(reply).get(1, ([], []))
        found += of_prompt
        assert len(of_tokens) == last
        if last:
            ((token,), (position,)) = (reply.tokens[1], of_tokens)
            wanted.check(position, wanted.penalties.adjusted(logits[-1], []), token)
    assert len(found) == len(prompt) - first
    for row, position in enumerate(found, first - 1):
        wanted._replace(scaled=False).check(position, logits[row], prompt[row + 1])
