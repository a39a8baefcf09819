"""A valid request with a known token, to send beside faulty ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from support.process import drivers
from support.process import runtime_client as rc

MALFORMED, OUT_OF_RANGE, UNSUPPORTED = 2, 3, 4
PROMPT = [5, 17, 99, 200, 31, 77, 3]
GOOD_PAGES = range(64, 72)

# The decode batch of the protocol's appendix A.1, byte for byte.
A1 = bytes.fromhex(
    """
    e8030000 d0070000 14000000 0f000000 07000000 03000000 09000000 00000000
    02000000 03000000 05000000 10000000 00000000 01000000 02000000 00000000
    00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
    00000000 00000000 01000000 02000000 02000000 00000000 0000803f 00000000
    00000000 0000803f 01000000 00000000 00000000 01000000 02000000 00000000
    ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff
    00000000 00000000 00000000 00000000 0b000000 00000000 0c000000 00000000
    00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000
    00000000 00000000 00000000 00000000 00000000 ecfeffff 02000000 ecfeffff
    02000000 ecfeffff 03000000 f0feffff 03000000 f4feffff 02000000 f4feffff
    03000000 f8feffff 00000000 f0feffff 00000000 ecfeffff 00000000 e4feffff
    03000000 ecfeffff 00000000 e4feffff 03000000 e8feffff 02000000 e8feffff
    03000000 ecfeffff 02000000 04ffffff 03000000 0cffffff 02000000 24ffffff
    00000000 1cffffff 00000000 14ffffff 03000000 18ffffff 02000000 14ffffff
    02000000 01000000 18ffffff 03000000 1cffffff 00000000 14ffffff 00000000
    0cffffff 00000000 04ffffff 01000000 00ffffff 00000000 f8feffff 01000000
    f4feffff 00000000 ecfeffff 00000000 e4feffff 00000000 dcfeffff 01000000
    d8feffff 00000000 d0feffff 03000000
    """
)


class ValidClient(NamedTuple):
    """A request whose right answer is known."""

    client: _core.Client
    frame: bytes
    answer: list[int]

    def check(self) -> None:
        """The driver still serves, and serves rightly."""
        assert rc.decode(self.client.call(self.frame)).tokens == [self.answer]


def good_request(**changed: Any) -> Request:
    slots = [(row, Sampler.greedy()) for row in (6, 2)]
    context = rc.Context(PROMPT, list(GOOD_PAGES), context_id=9)
    return context.request(**{"samplers": slots, **changed})


@pytest.fixture(scope="module")
def good(llama_driver: drivers.Driver) -> ValidClient:
    client = llama_driver.client()
    frame = _core.encode_forward([good_request()])
    (answer,) = client.forward([good_request()]).tokens
    assert len(answer) == 2
    return ValidClient(client, frame, answer)


def expect_status(good: ValidClient, frame: bytes, status: int) -> rc.Answer:
    answer = rc.decode(good.client.call(frame))
    assert (answer.status, answer.aborted) == (status, False)
    good.check()
    return answer


def tokens_request(tokens: Sequence[int], /, **changed: Any) -> Request:
    """A request in pages of its own."""
    return rc.Context(list(tokens), [200, 201], context_id=4).request(**changed)
