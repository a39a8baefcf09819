"""Faulty requests in well-formed frames: they get no tokens, the others keep theirs."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from support.process import drivers
from support.process import runtime_client as rc
from support.process.valid_requests import (
    A1,
    GOOD_PAGES,
    MALFORMED,
    OUT_OF_RANGE,
    PROMPT,
    UNSUPPORTED,
    ValidClient,
    expect_status,
    good_request,
    tokens_request,
)
from support.process.valid_requests import good as good


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
    def test_the_others_keep_their_tokens(self, good: ValidClient, name: str) -> None:
        faulty = FAULTS[name]()
        reply = good.client.forward([good_request(), faulty, good_request(context_id=8)])
        assert reply.status is None
        assert reply.tokens[1:] == [[], good.answer]
        assert len(reply.tokens[0]) == 2  # Its KV is the later one's: the pages are the same.
        good.check()

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_faulty_request_alone_gets_no_tokens(self, good: ValidClient, name: str) -> None:
        reply = good.client.forward([FAULTS[name]()])
        assert (reply.status, reply.tokens) == (None, [[]])
        good.check()

    def test_all_of_them_in_one_batch(self, good: ValidClient) -> None:
        faulty = [make() for make in FAULTS.values()]
        reply = good.client.forward([*faulty, good_request(), *faulty])
        expected: list[list[int]] = [[] for _ in range(2 * len(FAULTS) + 1)]
        expected[len(FAULTS)] = good.answer
        assert reply.tokens == expected
        good.check()

    @pytest.mark.parametrize("name", FAULTS)
    def test_no_kv_of_another_page_is_touched(self, good: ValidClient, name: str) -> None:
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
        self, good: ValidClient, sampler: tuple[int, *tuple[float, ...]]
    ) -> None:
        other = rc.Context([4, 4, 4], [80, 81]).request(Sampler.greedy(), Sampler.greedy())
        frame = _core.encode_forward([good_request(), other])
        answer = rc.decode(good.client.call(rc.with_sampler(frame, 2, *sampler)))
        assert answer.tokens[0] == good.answer
        assert len(answer.tokens[1]) == 2
        assert all(0 <= token < 300 for token in answer.tokens[1])

    def test_an_unknown_sampler_is_malformed(self, good: ValidClient) -> None:
        expect_status(good, rc.with_sampler(good.frame, 0, 11), MALFORMED)
        expect_status(good, rc.with_sampler(good.frame, 0, 255), MALFORMED)

    def test_an_embedding_sampler_gives_no_token(self, good: ValidClient) -> None:
        frame = _core.encode_forward([good_request(), bad()])
        answer = rc.decode(good.client.call(rc.with_sampler(frame, 2, 5)))
        assert answer.tokens == [good.answer, []]

    def test_the_frame_of_the_protocol(self, good: ValidClient) -> None:
        # Its first token is 1000: outside of this vocabulary, as is 2000.
        assert rc.decode(good.client.call(A1)).tokens == [[], []]
        mended = rc.with_u32(rc.with_u32(A1, "token_ids", 0, 7), "token_ids", 1, 8)
        assert [len(tokens) for tokens in rc.decode(good.client.call(mended)).tokens] == [1, 1]

    def test_drafts_without_their_positions_stay_within_the_model(self, good: ValidClient) -> None:
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
        good: ValidClient,
        direction: int,
        sources: list[int],
        targets: list[int],
        resource: int,
        status: int,
    ) -> None:
        frame = rc.copy_frame(direction, sources, targets, resource=resource)
        expect_status(good, frame, status)

    def test_a_refused_copy_copies_nothing(self, good: ValidClient) -> None:
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
    def test_adapter(self, good: ValidClient, operation: int, status: int, path: str) -> None:
        expect_status(good, rc.adapter_frame(operation, path), status)

    def test_the_adapter_frames_are_those_of_the_protocol(self) -> None:
        short = rc.adapter_frame(0, "/a/b")
        assert (len(short), short[32:40]) == (296, b"/a/b\xff\xff\xff\xff")
        long = rc.adapter_frame(0, "/adapters/llama-lora.safetensors")
        assert (len(long), long[64:72].hex()) == (328, "a0000000c0ffffff")

    def test_an_adapter_path_that_is_no_text(self, good: ValidClient) -> None:
        frame = bytearray(rc.adapter_frame(0, "/a/b"))
        frame[33] = 0xC0
        expect_status(good, bytes(frame), MALFORMED)

    def test_an_unknown_operation(self, good: ValidClient) -> None:
        expect_status(good, rc.adapter_frame(5, ""), MALFORMED)

    def test_health(self, good: ValidClient) -> None:
        assert expect_status(good, rc.health_frame(7), 0).driver_id == 7

    def test_an_unknown_payload(self, good: ValidClient) -> None:
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

    def test_while_its_batch_runs(self, good: ValidClient, llama_driver: drivers.Driver) -> None:
        tokens = 512
        pages = list(range(500, 532))
        request = Request([7] * tokens, list(range(tokens)), pages, 16)
        frame = _core.encode_forward([request] * 60)
        for _ in range(3):
            with rc.Region(llama_driver.region) as region:
                self.send_and_die(llama_driver, region, frame)
            good.check()

    @pytest.mark.parametrize("frame", [b"", b"\xff" * 5000, rc.copy_frame(2, [7], [8])])
    def test_whatever_it_sent(
        self, good: ValidClient, llama_driver: drivers.Driver, frame: bytes
    ) -> None:
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

    def test_memory_and_log_stay_small(
        self, good: ValidClient, llama_driver: drivers.Driver
    ) -> None:
        pid = llama_driver.process.pid
        self.flood(good, 500)
        memory, log = rc.resident_bytes(pid), len(llama_driver.stderr().splitlines())
        self.flood(good, 6000)
        assert rc.resident_bytes(pid) - memory < 16 << 20
        assert len(llama_driver.stderr().splitlines()) - log < 200
        good.check()

    def test_the_log_counts_suppressed_lines(
        self, good: ValidClient, llama_driver: drivers.Driver
    ) -> None:
        for _ in range(50):
            good.client.call(b"junk")
        text = llama_driver.logged("from now on at most once in 10 s")
        assert re.search(r"WARNING pie_driver_sglang: .*answered status 2", text)
        assert "Traceback" not in text

    @staticmethod
    def flood(good: ValidClient, count: int) -> None:
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
