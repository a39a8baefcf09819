"""Frames that no correct client sends: each costs itself alone, and the next one is served."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import drivers
import runtime_client as rc
from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.driver.serving_loop import run_batch, serve, warm_up
from pie_driver_sglang.engine.executor import ModelInfo
from pie_driver_sglang.errors import LostError, RingError
from pie_driver_sglang.kernels.sampling.reference import Outputs

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


class Good(NamedTuple):
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
def good(llama_driver: drivers.Driver) -> Good:
    client = llama_driver.client()
    frame = _core.encode_forward([good_request()])
    (answer,) = client.forward([good_request()]).tokens
    assert len(answer) == 2
    return Good(client, frame, answer)


def mixed_frame() -> bytes:
    """Two requests with masks, several samplers and everything else that has a length."""
    plain = rc.Context([4, 4, 4], [80, 81], context_id=3)
    return _core.encode_forward(
        [good_request(), plain.request(Sampler.multinomial(1.0, 3), Sampler.top_k(0.7, 5))]
    )


def expect_status(good: Good, frame: bytes, status: int) -> rc.Answer:
    answer = rc.decode(good.client.call(frame))
    assert (answer.status, answer.aborted) == (status, False)
    good.check()
    return answer


@pytest.mark.engine
class TestGarbage:
    """Bytes that are no archive."""

    @pytest.mark.parametrize("length", [0, 1, 8, 175, 176, 295, 296, 297, 4096])
    @pytest.mark.parametrize("byte", [b"\x7f", b"\xff"])
    def test_one_byte_repeated(self, good: Good, length: int, byte: bytes) -> None:
        expect_status(good, byte * length, MALFORMED)

    def test_every_truncation(self, good: Good) -> None:
        frame = mixed_frame()
        answers = [good.client.call(frame[:length]) for length in range(len(frame))]
        for answer in answers:
            answered_properly(answer)
        # The root is the end of a frame: other bytes in its place may mean something too.
        refused = [rc.decode(answer).status == MALFORMED for answer in answers]
        assert all(refused[:296])
        assert sum(refused) > 0.9 * len(refused)
        good.check()

    def test_a_front_that_is_missing(self, good: Good) -> None:
        frame = mixed_frame()
        for cut in range(8, len(frame) - 296 + 1, 8):
            answer = rc.decode(good.client.call(frame[cut:]))
            assert answer.status == MALFORMED, cut
        good.check()

    def test_flipped_bits_are_answered_whatever_they_mean(self, good: Good) -> None:
        source = random.Random(20)
        frame = mixed_frame()
        for _ in range(1500):
            edited = bytearray(frame)
            for _ in range(source.randint(1, 4)):
                edited[source.randrange(len(frame))] ^= 1 << source.randrange(8)
            answered_properly(good.client.call(bytes(edited)))
        good.check()

    def test_flipped_bits_of_the_root(self, good: Good) -> None:
        frame = _core.encode_forward([good_request()])
        for bit in range(8 * 296):
            edited = bytearray(frame)
            edited[len(frame) - 296 + bit // 8] ^= 1 << bit % 8
            answered_properly(good.client.call(bytes(edited)))
        good.check()

    @pytest.mark.parametrize("name", rc.VECTORS)
    @pytest.mark.parametrize("count", [2**32 - 1, 2**31, 2**29, 10_000])
    def test_an_array_that_reaches_beyond_the_frame(
        self, good: Good, name: str, count: int
    ) -> None:
        expect_status(good, rc.with_length(mixed_frame(), name, count), MALFORMED)

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(data=st.data())
    def test_any_bytes_get_an_answer(self, good: Good, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from([b"", A1, good.frame, rc.copy_frame(2, [1], [2])]))
        cut = data.draw(st.integers(0, len(frame)))
        noise = data.draw(st.binary(max_size=700))
        root = data.draw(st.sampled_from([b"", frame[-296:]]))
        answered_properly(good.client.call(frame[:cut] + noise + root))
        good.check()

    @pytest.mark.parametrize("seed", [0, 1])
    def test_a_slot_full_of_garbage(
        self, good: Good, llama_driver: drivers.Driver, seed: int
    ) -> None:
        with rc.Region(llama_driver.region) as region:
            capacity = region.request_bytes
        noise = random.Random(seed).randbytes(capacity)
        expect_status(good, noise, MALFORMED)
        expect_status(good, noise[:-296] + good.frame[-296:], MALFORMED)

    def test_the_client_refuses_a_frame_larger_than_the_slot(
        self, good: Good, llama_driver: drivers.Driver
    ) -> None:
        with rc.Region(llama_driver.region) as region:
            capacity, sent = region.request_bytes, region.sent()
            with pytest.raises(RingError, match=str(capacity)):
                good.client.call(bytes(capacity + 1))
            assert region.sent() == sent
        good.check()

    @pytest.mark.parametrize("length", [2**32 - 1, None])
    def test_a_slot_that_announces_more_than_it_holds(
        self, good: Good, llama_driver: drivers.Driver, length: int | None
    ) -> None:
        with rc.Region(llama_driver.region, writable=True) as region:
            slot = region.slots - 1
            region.send(slot, b"", length=length or region.request_bytes + 1)
            good.check()  # Wakes the driver, which looks at every slot.
            rc.eventually(lambda: region.answered(slot), "the answer")
            answer = rc.decode(region.answer(slot))
        assert answer.status == MALFORMED


def answered_properly(answer: bytes) -> None:
    """An edited frame may still be valid; its answer must be one either way."""
    decoded = rc.decode(answer)
    assert not decoded.aborted
    if decoded.status is not None:
        assert decoded.status in (-1, 0, MALFORMED, OUT_OF_RANGE, UNSUPPORTED)


@pytest.mark.engine
class TestWrongLengths:
    """Valid archives whose arrays contradict each other: Status 2 for the frame."""

    REQUIRED = (
        "position_ids",
        "kv_page_indptr",
        "kv_last_page_lens",
        "qo_indptr",
        "sampling_indptr",
        "sampler_indptr",
        "token_ids",
        "kv_page_indices",
        "samplers",
        "sampling_indices",
        "masks",
        "mask_indptr",
        "adapter_bindings",
    )

    @pytest.mark.parametrize("name", REQUIRED)
    def test_one_element_is_missing(self, good: Good, name: str) -> None:
        frame = mixed_frame()
        _, count = rc.vector(frame, name)
        expect_status(good, rc.with_length(frame, name, count - 1), MALFORMED)

    @pytest.mark.parametrize("name", ["context_ids", "output_spec_flags"])
    def test_what_may_be_missing(self, good: Good, name: str) -> None:
        frame = rc.with_length(good.frame, name, 0)
        assert rc.decode(good.client.call(frame)).tokens == [good.answer]

    @pytest.mark.parametrize(
        "name", ["qo_indptr", "kv_page_indptr", "sampling_indptr", "sampler_indptr", "mask_indptr"]
    )
    @pytest.mark.parametrize(("index", "value"), [(0, 1), (1, 2**32 - 1), (1, 1000), (2, 0)])
    def test_offsets_that_do_not_rise_to_the_end(
        self, good: Good, name: str, index: int, value: int
    ) -> None:
        expect_status(good, rc.with_u32(mixed_frame(), name, index, value), MALFORMED)

    def test_sampling_and_samplers_are_divided_alike(self, good: Good) -> None:
        expect_status(good, rc.with_u32(mixed_frame(), "sampler_indptr", 1, 1), MALFORMED)

    def test_no_requests_at_all(self, good: Good) -> None:
        answer = rc.decode(good.client.call(_core.encode_forward([], 5)))
        assert (answer.status, answer.tokens, answer.driver_id) == (None, [], 5)
        good.check()

    def test_a_status_names_the_driver_that_was_asked(self, good: Good) -> None:
        edited = rc.with_length(_core.encode_forward([good_request()], 77), "position_ids", 1)
        assert expect_status(good, edited, MALFORMED).driver_id == 77


def tokens_request(tokens: Sequence[int], /, **changed: Any) -> Request:
    """A request in pages of its own."""
    return rc.Context(list(tokens), [200, 201], context_id=4).request(**changed)


def bad(**changed: Any) -> Request:
    return tokens_request([8, 8, 8], **changed)


def one_slot(row: int, sampler: Sampler) -> list[tuple[int, Sampler]]:
    return [(row, sampler)]


FAULTS: dict[str, Callable[[], Request]] = {
    "page id": lambda: bad(pages=[10**6]),
    "largest page id": lambda: bad(pages=[2**32 - 1]),
    "no pages": lambda: bad(pages=[]),
    "last page length 0": lambda: bad(last_page_len=0),
    "last page length 17": lambda: bad(last_page_len=17),
    "last page length huge": lambda: bad(last_page_len=2**32 - 1),
    "more tokens than the pages hold": lambda: bad(last_page_len=2),
    "KV longer than the table": lambda: bad(pages=[200] * 5000),
    "token id": lambda: bad(tokens=[8, 300, 8]),
    "largest token id": lambda: bad(tokens=[8, 2**32 - 1, 8]),
    "position": lambda: bad(positions=[0, 1, 512]),
    "largest position": lambda: bad(positions=[0, 1, 2**32 - 1]),
    "sampling index": lambda: bad(samplers=one_slot(3, Sampler.greedy())),
    "largest sampling index": lambda: bad(samplers=one_slot(2**32 - 1, Sampler.greedy())),
    "samplers without tokens": lambda: bad(
        tokens=[], positions=[], samplers=one_slot(0, Sampler.greedy())
    ),
    "neither tokens nor samplers": lambda: bad(tokens=[], positions=[], samplers=[]),
    "too few mask rows": lambda: bad(masks=[[0, 1], [0, 2]]),
    "too many mask rows": lambda: bad(masks=[[0, 1], [0, 2], [0, 3], [0, 4]]),
    "adapter": lambda: bad(adapter_id=1),
    "draft token id": lambda: bad(drafts=[300], draft_positions=[3], last_page_len=4),
    "draft position": lambda: bad(drafts=[3], draft_positions=[600]),
    "a good request but one sampler row": lambda: bad(
        samplers=[(0, Sampler.greedy()), (9, Sampler.greedy())]
    ),
}


@pytest.mark.engine
class TestFaultyRequest:
    """One request of a batch that cannot be served: empty ranges for it, nothing for the others."""

    @pytest.mark.parametrize("name", FAULTS)
    def test_the_others_keep_their_tokens(self, good: Good, name: str) -> None:
        faulty = FAULTS[name]()
        reply = good.client.forward([good_request(), faulty, good_request(context_id=8)])
        assert reply.status is None
        assert reply.tokens[1:] == [[], good.answer]
        assert len(reply.tokens[0]) == 2  # Its KV is the later one's: the pages are the same.
        good.check()

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_faulty_request_alone_gets_no_tokens(self, good: Good, name: str) -> None:
        reply = good.client.forward([FAULTS[name]()])
        assert (reply.status, reply.tokens) == (None, [[]])
        good.check()

    def test_all_of_them_in_one_batch(self, good: Good) -> None:
        faulty = [make() for make in FAULTS.values()]
        reply = good.client.forward([*faulty, good_request(), *faulty])
        expected: list[list[int]] = [[] for _ in range(2 * len(FAULTS) + 1)]
        expected[len(FAULTS)] = good.answer
        assert reply.tokens == expected
        good.check()

    @pytest.mark.parametrize("name", FAULTS)
    def test_no_kv_of_another_page_is_touched(self, good: Good, name: str) -> None:
        """A stored context continues as if the faulty request had never been sent."""
        prompt = list(range(40, 60))
        undisturbed = rc.greedy_tokens(good.client, prompt, 300, 3)
        context = rc.Context(list(prompt), list(range(300, 308)))
        for expected in undisturbed:
            good.client.forward([FAULTS[name]()])
            (tokens,) = good.client.forward([context.request()]).tokens
            assert tokens == [expected]
            context.take(tokens[0])

    @pytest.mark.parametrize(
        "sampler",
        [
            (1, 1.0, 301),
            (1, 1.0, 2**32 - 1),
            (1, math.inf, 5),
            (2, 1.0, -1.0),
            (2, 1.0, math.nan),
            (2, 1.0, math.inf),
            (3, 1.0, math.nan),
            (3, 1.0, -2.0),
            (3, 1.0, 2.0),
            (4, 1.0, 0, 0.0),
            (4, math.nan, 5, math.nan),
            (0, math.inf, 5),
            (0, -math.inf, 5),
        ],
        ids=str,
    )
    def test_parameters_out_of_range_are_clamped(
        self, good: Good, sampler: tuple[int, *tuple[float, ...]]
    ) -> None:
        other = rc.Context([4, 4, 4], [80, 81]).request(Sampler.greedy(), Sampler.greedy())
        frame = _core.encode_forward([good_request(), other])
        answer = rc.decode(good.client.call(rc.with_sampler(frame, 2, *sampler)))
        assert answer.tokens[0] == good.answer
        assert len(answer.tokens[1]) == 2
        assert all(0 <= token < 300 for token in answer.tokens[1])

    def test_an_unknown_sampler_is_malformed(self, good: Good) -> None:
        expect_status(good, rc.with_sampler(good.frame, 0, 11), MALFORMED)
        expect_status(good, rc.with_sampler(good.frame, 0, 255), MALFORMED)

    def test_an_embedding_sampler_gives_no_token(self, good: Good) -> None:
        frame = _core.encode_forward([good_request(), bad()])
        answer = rc.decode(good.client.call(rc.with_sampler(frame, 2, 5)))
        assert answer.tokens == [good.answer, []]

    def test_the_frame_of_the_protocol(self, good: Good) -> None:
        # Its first token is 1000: outside of this vocabulary, as is 2000.
        assert rc.decode(good.client.call(A1)).tokens == [[], []]
        mended = rc.with_u32(rc.with_u32(A1, "token_ids", 0, 7), "token_ids", 1, 8)
        assert [len(tokens) for tokens in rc.decode(good.client.call(mended)).tokens] == [1, 1]

    def test_drafts_without_their_positions_stay_within_the_model(self, good: Good) -> None:
        context = rc.Context([1] * 510, list(range(400, 433)))
        request = context.request(drafts=[2, 3, 4], last_page_len=14)
        reply = good.client.forward([good_request(), request])
        assert reply.tokens == [good.answer, []]


@pytest.mark.engine
class TestColdOperations:
    """Copies, adapters, audio and health."""

    @pytest.mark.parametrize(
        ("direction", "sources", "targets", "resource", "status"),
        [
            (2, [], [], 0, 0),
            (2, [210], [211], 0, 0),
            (2, [210], [210], 0, 0),
            (2, [210, 211], [212], 0, MALFORMED),
            (2, [], [212], 0, MALFORMED),
            (2, [10**6], [210], 0, OUT_OF_RANGE),
            (2, [210], [2**32 - 1], 0, OUT_OF_RANGE),
            (2, [210, 211], [212, 4096], 0, OUT_OF_RANGE),
            (0, [210], [0], 0, UNSUPPORTED),
            (1, [0], [210], 0, UNSUPPORTED),
            (3, [0], [1], 0, UNSUPPORTED),
            (2, [0], [1], 1, UNSUPPORTED),
            (4, [210], [211], 0, MALFORMED),
            (2, [210], [211], 2, MALFORMED),
        ],
    )
    def test_copy(
        self,
        good: Good,
        direction: int,
        sources: list[int],
        targets: list[int],
        resource: int,
        status: int,
    ) -> None:
        frame = rc.copy_frame(direction, sources, targets, resource=resource)
        expect_status(good, frame, status)

    def test_a_refused_copy_copies_nothing(self, good: Good) -> None:
        page = GOOD_PAGES[0]
        good.check()
        expect_status(good, rc.copy_frame(2, [300, 4096], [page, 301]), OUT_OF_RANGE)
        step = rc.Context([*PROMPT, 1], list(GOOD_PAGES), stored=len(PROMPT))
        before = good.client.forward([step.request()]).tokens
        expect_status(good, rc.copy_frame(2, [300, 301], [page]), MALFORMED)
        # Rewriting only the last token reads the page that the copy would have overwritten.
        assert good.client.forward([step.request()]).tokens == before

    @pytest.mark.parametrize("path", ["", "/a/b", "/adapters/llama-lora.safetensors", "x" * 5000])
    @pytest.mark.parametrize(
        ("operation", "status"), [(0, UNSUPPORTED), (1, UNSUPPORTED), (2, 4), (3, 4), (4, -1)]
    )
    def test_adapter(self, good: Good, operation: int, status: int, path: str) -> None:
        expect_status(good, rc.adapter_frame(operation, path), status)

    def test_the_adapter_frames_are_those_of_the_protocol(self) -> None:
        short = rc.adapter_frame(0, "/a/b")
        assert (len(short), short[32:40]) == (296, b"/a/b\xff\xff\xff\xff")
        long = rc.adapter_frame(0, "/adapters/llama-lora.safetensors")
        assert (len(long), long[64:72].hex()) == (328, "a0000000c0ffffff")

    def test_an_adapter_path_that_is_no_text(self, good: Good) -> None:
        frame = bytearray(rc.adapter_frame(0, "/a/b"))
        frame[33] = 0xC0
        expect_status(good, bytes(frame), MALFORMED)

    def test_an_unknown_operation(self, good: Good) -> None:
        expect_status(good, rc.adapter_frame(5, ""), MALFORMED)

    def test_health(self, good: Good) -> None:
        assert expect_status(good, rc.health_frame(7), 0).driver_id == 7

    def test_an_unknown_payload(self, good: Good) -> None:
        frame = bytearray(rc.health_frame())
        frame[8] = 4
        expect_status(good, bytes(frame), MALFORMED)


VANISHING = """
import sys
from pie_driver_sglang import _core
client = _core.Client(sys.argv[1], spin_budget_us=0, timeout_s=60.0)
frame = sys.stdin.buffer.read()
print("ready", flush=True)
client.call(frame)
"""


@pytest.mark.engine
class TestVanishingClient:
    """A client that is killed between its request and the answer."""

    def test_while_its_batch_runs(self, good: Good, llama_driver: drivers.Driver) -> None:
        tokens = 512
        pages = list(range(500, 532))
        request = Request([7] * tokens, list(range(tokens)), pages, 16)
        frame = _core.encode_forward([request] * 60)
        for _ in range(3):
            with rc.Region(llama_driver.region) as region:
                self.send_and_die(llama_driver, region, frame)
            good.check()

    @pytest.mark.parametrize("frame", [b"", b"\xff" * 5000, rc.copy_frame(2, [7], [8])])
    def test_whatever_it_sent(self, good: Good, llama_driver: drivers.Driver, frame: bytes) -> None:
        with rc.Region(llama_driver.region) as region:
            self.send_and_die(llama_driver, region, frame)
        good.check()

    @staticmethod
    def send_and_die(driver: drivers.Driver, region: rc.Region, frame: bytes) -> None:
        sent = region.sent()
        with subprocess.Popen(
            [sys.executable, "-c", VANISHING, driver.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as client:
            assert client.stdin is not None
            client.stdin.write(frame)
            client.stdin.close()
            rc.eventually(lambda: region.sent() > sent, "the request")
            client.kill()
        rc.eventually(lambda: not region.in_flight(), "the answer")


@pytest.mark.engine
class TestEndurance:
    """Thousands of bad frames leave no memory and no log lines over."""

    def test_memory_and_log_stay_small(self, good: Good, llama_driver: drivers.Driver) -> None:
        pid = llama_driver.process.pid
        self.flood(good, 500)
        memory, log = rc.resident_bytes(pid), len(llama_driver.stderr().splitlines())
        self.flood(good, 6000)
        assert rc.resident_bytes(pid) - memory < 16 << 20
        assert len(llama_driver.stderr().splitlines()) - log < 200
        good.check()

    def test_the_log_says_that_lines_were_left_out(
        self, good: Good, llama_driver: drivers.Driver
    ) -> None:
        for _ in range(50):
            good.client.call(b"junk")
        text = llama_driver.logged("from now on at most once in 10 s")
        assert re.search(r"WARNING pie_driver_sglang: .*answered status 2", text)
        assert "Traceback" not in text

    @staticmethod
    def flood(good: Good, count: int) -> None:
        source = random.Random(count)
        faulty = [make() for make in FAULTS.values()]
        for number in range(count):
            match number % 5:
                case 0:
                    good.client.call(source.randbytes(source.randrange(2000)))
                case 1:
                    good.client.call(rc.with_length(good.frame, "position_ids", 1))
                case 2:
                    good.client.forward([faulty[number % len(faulty)]])
                case 3:
                    good.client.call(rc.adapter_frame(number % 5, "/a" * (number % 400)))
                case _:
                    good.client.copy("D2D", [number], [10**6])


# --- without a model ----------------------------------------------------------------------------


class FakeEngine:
    """Computes nothing; fails when told to."""

    recovers = True

    def __init__(self, planner: _core.Planner) -> None:
        self.block: npt.NDArray[np.uint8] = np.zeros(planner.block_bytes, dtype=np.uint8)
        _, offset, capacity = dict(planner.layout)["top_ks"]
        self.top_ks = self.block[offset : offset + 4 * capacity].view(np.int32)
        self.error: BaseException | None = None
        self.fails_in = ""
        self.passes = 0
        self.copies: list[tuple[str, list[int], list[int]]] = []
        self.state_copies: list[tuple[list[int], list[int]]] = []
        self.states: list[list[int]] = []
        self.host_pages = self.state_slots = 0
        self.token = 42
        self.loss: str | None = None
        self.copy_ns = 0
        self.waited_ns = 0
        self.at_forward: Callable[[], object] = lambda: None
        self.at_copy: Callable[[], object] = lambda: None

    @property
    def model_info(self) -> ModelInfo:
        sizes = {"host_pages": self.host_pages, "state_slots": self.state_slots}
        return ModelInfo(64, 16, 300, 512, "llama3", "float32", "none", **sizes)

    def find_loss(self) -> str | None:
        return self.loss

    def forward(self, batch: _core.Pass) -> None:
        self.passes += 1
        if batch.states is not None:
            self.states.append(np.frombuffer(batch.states, np.int64).tolist())
        self.waited_ns += self.copy_ns
        self.at_forward()
        self.fail("forward")

    def sample(self, group: _core.SlotGroup) -> Outputs:
        self.fail("sample")
        tokens = group.greedy + group.plain + group.filtered
        listed = int(self.top_ks[tokens : tokens + group.dists].sum())
        return Outputs(
            torch.full((tokens,), self.token),
            torch.zeros(listed, dtype=torch.int64),
            *map(torch.zeros, (listed, 300 * group.logits, len(group.labels) // 16)),
            torch.zeros(group.entropies),
        )

    def take_waits(self) -> tuple[int, int]:
        self.fail("take_waits")
        waited, self.waited_ns = self.waited_ns, 0
        return waited, 0

    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.fail("copy_pages")
        self.at_copy()
        self.copies.append((direction, list(sources), list(targets)))

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.fail("copy_states")
        self.state_copies.append((list(sources), list(targets)))

    def fail(self, where: str) -> None:
        if self.error is not None and self.fails_in == where:
            raise self.error


class Served(NamedTuple):
    """A server with a fake engine, and a client of it."""

    client: _core.Client
    engine: FakeEngine
    reports: list[tuple[str, str]]
    name: str


def make_planner(states: int = 0) -> _core.Planner:
    return _core.Planner(
        states=states,
        page_size=16,
        total_pages=64,
        vocab_size=300,
        max_positions=512,
        row_pages=36,
        max_requests=16,
        chunk_tokens=64,
        max_slots=32,
        random_seed=42,
    )


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A driver without recurrent state, or with as many slots as the parameter says."""
    name = f"/pie_shmem_g{drivers.new_group_id()}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    planner = make_planner(getattr(request, "param", 0))
    engine = FakeEngine(planner)
    reports: list[tuple[str, str]] = []
    server.serve(planner, engine.block.data, lambda kind, text: reports.append((kind, text)))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            serve(server, engine, None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = _core.Client(name, timeout_s=20.0)
    try:
        yield Served(client, engine, reports, name)
        engine.at_copy = server.stop
        client.copy("D2D", [0], [0])
    finally:
        thread.join(20.0)
        Path("/dev/shm", name.removeprefix("/")).unlink(missing_ok=True)
    assert not thread.is_alive()
    assert not ended


def small(count: int = 1, **changed: Any) -> list[Request]:
    return [rc.Context([5, 6], [index]).request(**changed) for index in range(count)]


@contextlib.contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="pie_driver_sglang"):
        yield caplog.records


class TestStates:
    """Slots of recurrent state on their way from a frame to the engine."""

    @pytest.mark.parametrize("served", [4], indirect=True)
    def test_requests(self, served: Served) -> None:
        requests = [
            rc.Context([5, 6], [0]).request(state_slot=3, state_reset=True),
            rc.Context([5, 6], [1]).request(state_slot=0),
        ]
        assert served.client.forward(requests).tokens == [[42], [42]]
        assert served.engine.states == [[4, 1, 1, 0]]
        for bad in ({"state_slot": 4}, {"state_slot": 0, "drafts": [1]}):
            reply = served.client.forward([rc.Context([5, 6], [0]).request(**bad)])
            assert reply.tokens == [[]]
        assert served.client.forward(small(1)).tokens == [[]]
        kinds = [kind for kind, _ in served.reports]
        assert kinds == ["state-slot", "state-drafts", "state-slot"]

    @pytest.mark.parametrize("served", [4], indirect=True)
    def test_copies(self, served: Served) -> None:
        assert served.client.copy("D2D", [3, 1], [1, 2], states=True) == 0
        assert served.engine.state_copies == [([3], [1]), ([1], [2])]
        assert served.client.copy("D2D", [4], [1], states=True) == 3
        assert served.client.copy("D2H", [1], [1], states=True) == 4
        assert served.client.copy("D2D", [4], [1]) == 0
        assert served.engine.copies == [("D2D", [4], [1])]

    def test_a_model_without_them(self, served: Served) -> None:
        assert served.client.copy("D2D", [0], [1], states=True) == 4
        assert served.client.forward(small(1, state_slot=9)).tokens == [[42]]
        assert served.engine.states == []

    @pytest.mark.parametrize("slots", [1, 3])
    def test_the_warm_up(self, slots: int) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner(slots)
        engine = FakeEngine(planner)
        engine.state_slots = slots
        reports: list[tuple[str, str]] = []
        server.serve(planner, engine.block.data, lambda kind, text: reports.append((kind, text)))
        try:
            warm_up(server, engine)
        finally:
            server.unlink()
        assert not reports
        assert engine.state_copies == [([0], [0])]
        # One, all of them, a prefill, all together, a mask.
        together = [part for slot in range(slots) for part in (slot + 1, 1)]
        assert engine.states[:3] == [[1, 1], together, [1, 1]]
        assert sorted(engine.states[3][::2]) == [*range(1, slots + 1)]


class TestProbes:
    """A batch's probes count its own waits alone."""

    def test_a_failed_batch_leaves_nothing_to_the_next(self, served: Served) -> None:
        # A request without a sampler makes the answer an archive, which has probes.
        frame = [*small(1), Request([5], [0], [9], 1)]
        served.engine.copy_ns = 7_000_000
        served.engine.fails_in, served.engine.error = "sample", RuntimeError("late")
        assert served.client.forward(frame).aborted
        served.engine.copy_ns, served.engine.error = 2_000_000, None
        reply = served.client.forward(frame)
        assert not reply.fast
        assert reply.probes[2] == 2000

    def test_the_warm_up_leaves_nothing_to_the_first_batch(self) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner()
        engine = FakeEngine(planner)
        server.serve(planner, engine.block.data, lambda kind, text: None)
        engine.copy_ns = 3_000_000
        warm_up(server, engine)
        engine.copy_ns = 1_000_000
        batch = server.warm_up(_core.encode_forward(small(1)))
        assert run_batch(batch, engine).h2d_ns == 1_000_000
        server.unlink()

    @pytest.mark.parametrize(
        ("host_pages", "directions"), [(0, ["D2D"]), (1, ["D2D", "D2H", "H2D", "H2H"])]
    )
    def test_the_warm_up_copies_as_the_runtime_may(
        self, host_pages: int, directions: list[str]
    ) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        server.unlink()
        planner = make_planner()
        engine = FakeEngine(planner)
        engine.host_pages = host_pages
        server.serve(planner, engine.block.data, lambda kind, text: None, host_pages=host_pages)
        warm_up(server, engine)
        assert engine.copies == [(direction, [0], [0]) for direction in directions]


def ask(client: _core.Client, where: str) -> bool:
    """Asks for what fails there; whether the answer says so."""
    if where == "copy_pages":
        return client.copy("D2D", [1], [2]) == 5
    return client.forward(small()).aborted


class TestEngineFailure:
    """An exception costs its frame alone."""

    @pytest.mark.parametrize("where", ["forward", "sample", "take_waits"])
    @pytest.mark.parametrize(
        "error", [RuntimeError("out of luck"), MemoryError(), ValueError(), KeyError("key")]
    )
    def test_the_batch_is_aborted_and_the_next_one_is_served(
        self,
        served: Served,
        where: str,
        error: Exception,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        served.engine.error, served.engine.fails_in = error, where
        with logged(caplog) as records:
            reply = served.client.forward(small(3))
            rc.eventually(lambda: records, "the log line")
            served.client.health()
        assert reply.aborted
        assert reply.status == rc.ABORT_STATUS
        (record,) = records
        assert record.exc_info is not None
        assert record.exc_info[1] is error
        assert "3 requests and 6 tokens" in record.getMessage()
        served.engine.error = None
        assert served.client.forward(small(3)).tokens == [[42]] * 3

    def test_a_failure_in_a_later_pass(self, served: Served) -> None:
        long = rc.Context([5] * 200, list(range(13))).request()
        served.engine.fails_in, served.engine.error = "sample", RuntimeError("late")
        assert served.client.forward([long]).aborted
        assert served.engine.passes == 4  # 200 tokens in passes of 64.
        served.engine.error = None
        assert served.client.forward([long]).tokens == [[42]]

    @pytest.mark.parametrize("token", [300, -1, 2**40])
    def test_tokens_of_logits_that_are_no_numbers(self, served: Served, token: int) -> None:
        served.engine.token = token
        reply = served.client.forward([*small(2), Request([5], [0], [9], 1)])
        assert (reply.aborted, reply.tokens) == (False, [[], [], []])
        served.engine.token = 7
        assert served.client.forward(small()).tokens == [[7]]

    def test_many_failures_in_a_row(self, served: Served) -> None:
        served.engine.error, served.engine.fails_in = RuntimeError("again"), "forward"
        for _ in range(200):
            assert served.client.forward(small(4)).aborted
        served.engine.error = None
        assert served.client.forward(small(4)).tokens == [[42]] * 4

    @pytest.mark.parametrize("where", ["forward", "sample", "copy_pages"])
    def test_one_rank_of_several_cannot_go_on(self, where: str) -> None:
        """The others wait for it in a collective operation; the request is aborted."""

        def spoil(engine: FakeEngine) -> None:
            engine.recovers = False
            engine.error, engine.fails_in = RuntimeError("no luck"), where

        with pytest.raises(RuntimeError, match="no luck"):
            self.serve_one(spoil, where)

    @pytest.mark.parametrize("where", ["forward", "sample", "copy_pages"])
    def test_a_device_that_is_lost(self, where: str, caplog: pytest.LogCaptureFixture) -> None:
        """The request is answered; then serving ends, without a traceback in the log."""

        def spoil(engine: FakeEngine) -> None:
            engine.loss = "cuda:0 can run nothing any more: an illegal memory access"
            engine.error, engine.fails_in = RuntimeError("no luck"), where

        with caplog.at_level(logging.INFO), pytest.raises(LostError, match="cuda:0") as caught:
            self.serve_one(spoil, where)
        assert "start the driver again" in caught.value.hint
        assert str(caught.value.__cause__) == "no luck"
        assert not caplog.records

    @staticmethod
    def serve_one(spoil: Callable[[FakeEngine], None], where: str) -> None:
        """Serves until the loop ends by itself; one request comes, and is answered by an abort."""
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner()
        engine = FakeEngine(planner)
        spoil(engine)
        server.serve(planner, engine.block.data, lambda kind, text: None)
        client = _core.Client(name, timeout_s=20.0)
        with rc.background(lambda: ask(client, where)) as answers:
            try:
                serve(server, engine, None)
            finally:
                server.unlink()
        assert answers == [True]

    def test_a_copy_that_fails(self, served: Served, caplog: pytest.LogCaptureFixture) -> None:
        served.engine.error, served.engine.fails_in = RuntimeError("no copy"), "copy_pages"
        with logged(caplog) as records:
            assert served.client.copy("D2D", [1, 2], [3, 4]) == 5
            rc.eventually(lambda: records, "the log line")
        (record,) = records
        assert record.exc_info is not None
        assert "D2D copy of 2 pages" in record.getMessage()
        served.engine.error = None
        assert served.client.copy("D2D", [1, 2], [3, 4]) == 0
        assert served.engine.copies == [("D2D", [1, 2], [3, 4])]
        # Lists that overlap come in parts.
        assert served.client.copy("D2D", [1, 2], [2, 3]) == 0
        assert served.engine.copies[1:] == [("D2D", [1], [2]), ("D2D", [2], [3])]

    def test_a_client_that_gives_up_is_reported(self, served: Served) -> None:
        path = Path("/dev/shm", served.name.removeprefix("/"))
        with rc.Region(path, writable=True) as region:
            frame = _core.encode_forward(small())
            waiting = threading.Event()
            served.engine.at_forward = lambda: waiting.wait(10.0)
            with rc.background(lambda: served.client.call(frame)):
                rc.eventually(lambda: served.engine.passes, "the forward pass")
                slot = next(s for s in range(region.slots) if not region.answered(s))
                region.send(slot, rc.health_frame())  # The slot is used again.
                waiting.set()
                rc.eventually(lambda: region.answered(slot), "the answer")
        rc.eventually(lambda: served.reports, "the report")
        assert [kind for kind, _ in served.reports] == ["stale"]


class TestWithoutPython:
    """What needs no model is answered by the native half."""

    FLOOD = 3000

    def test_requests_without_tokens_do_not_enter_the_loop(self, served: Served) -> None:
        idle = Request([], [], [1], 4, context_id=3)
        for _ in range(self.FLOOD):
            assert served.client.forward([idle, idle]).tokens == [[], []]
        assert served.engine.passes == 0
        assert served.reports == []

    def test_frames_without_requests(self, served: Served) -> None:
        for _ in range(self.FLOOD):
            assert served.client.forward([]).tokens == []
        assert served.engine.passes == 0

    def test_health_and_empty_copies(self, served: Served) -> None:
        for _ in range(self.FLOOD):
            assert served.client.health() == 0
            assert served.client.copy("D2D", [], []) == 0
        assert served.engine.copies == []
        assert served.reports == []

    def test_batches_of_faulty_requests_only(self, served: Served) -> None:
        for _ in range(300):
            assert served.client.forward(small(2, pages=[99])).tokens == [[], []]
        assert served.engine.passes == 0
        assert {kind for kind, _ in served.reports} == {"page-id"}
        # The answer comes before the report.
        rc.eventually(lambda: len(served.reports) == 600, "the last report")

    def test_bad_frames_are_reported_and_answered(self, served: Served) -> None:
        for number in range(300):
            answer = rc.decode(served.client.call(struct.pack(">I", 0x7F000000 + number) * 100))
            assert answer.status == MALFORMED
        assert served.engine.passes == 0
        assert {kind for kind, _ in served.reports} == {"malformed"}

    def test_an_idle_request_beside_a_working_one(self, served: Served) -> None:
        idle = Request([], [], [1], 4)
        reply = served.client.forward([idle, *small(), idle])
        assert reply.tokens == [[], [42], []]
        assert served.engine.passes == 1

    def test_several_clients_at_once(self, served: Served) -> None:
        def call(number: int) -> None:
            for _ in range(200):
                if number % 2:
                    assert served.client.forward(small(3)).tokens == [[42]] * 3
                else:
                    assert rc.decode(served.client.call(b"junk")).status == MALFORMED

        with contextlib.ExitStack() as stack:
            results = [
                stack.enter_context(rc.background(lambda number=number: call(number)))  # type: ignore[misc]
                for number in range(4)
            ]
        assert results == [[None]] * 4
        assert served.engine.passes == 400


class TestStop:
    """The end of the iteration."""

    def test_requests_that_wait_are_aborted(self) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        client = _core.Client(name, timeout_s=10.0)
        with (
            rc.background(client.health) as health,
            rc.background(lambda: ask(client, "forward")) as asked,
        ):
            with rc.Region(Path("/dev/shm", name.removeprefix("/"))) as region:
                rc.eventually(
                    lambda: sum(not region.answered(slot) for slot in range(region.slots)) == 2,
                    "the requests",
                )
            server.unlink()
        assert asked == [True]
        assert health == [rc.ABORT_STATUS]

    def test_a_waiting_server_is_stopped_by_another_thread(self) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner()
        engine = FakeEngine(planner)
        server.serve(planner, engine.block.data, lambda _kind, _text: None)
        thread = threading.Thread(target=serve, args=(server, engine, None), daemon=True)
        thread.start()
        try:
            assert _core.Client(name).health() == 0  # The thread waits by now.
            server.stop()
            thread.join(10.0)
            assert not thread.is_alive()
        finally:
            Path("/dev/shm", name.removeprefix("/")).unlink(missing_ok=True)
