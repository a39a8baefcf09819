"""Malformed frames of a client: each gets an answer, and the driver continues."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_driver_sglang import _core
from pie_driver_sglang._core import Sampler
from pie_driver_sglang.errors import RingError
from support.process import drivers
from support.process import runtime_client as rc
from support.process.valid_requests import (
    A1,
    MALFORMED,
    OUT_OF_RANGE,
    UNSUPPORTED,
    ValidClient,
    expect_status,
    good_request,
)
from support.process.valid_requests import good as good


def mixed_frame() -> bytes:
    """Two requests with masks, several samplers and everything else that has a length."""
    plain = rc.Context([4, 4, 4], [80, 81], context_id=3)
    return _core.encode_forward(
        [good_request(), plain.request(Sampler.multinomial(1.0, 3), Sampler.top_k(0.7, 5))]
    )


@pytest.mark.engine
class TestGarbage:
    """Bytes that are no archive."""

    @pytest.mark.parametrize("length", [0, 1, 8, 175, 176, 295, 296, 297, 4096])
    @pytest.mark.parametrize("byte", [b"\x7f", b"\xff"])
    def test_one_byte_repeated(self, good: ValidClient, length: int, byte: bytes) -> None:
        expect_status(good, byte * length, MALFORMED)

    def test_every_truncation(self, good: ValidClient) -> None:
        frame = mixed_frame()
        answers = [good.client.call(frame[:length]) for length in range(len(frame))]
        for answer in answers:
            answered_properly(answer)
        # The root is the end of a frame: other bytes in its place may mean something too.
        refused = [rc.decode(answer).status == MALFORMED for answer in answers]
        assert all(refused[:296])
        assert sum(refused) > 0.9 * len(refused)
        good.check()

    def test_a_front_that_is_missing(self, good: ValidClient) -> None:
        frame = mixed_frame()
        for cut in range(8, len(frame) - 296 + 1, 8):
            answer = rc.decode(good.client.call(frame[cut:]))
            assert answer.status == MALFORMED, cut
        good.check()

    def test_flipped_bits_are_answered_whatever_they_mean(self, good: ValidClient) -> None:
        source = random.Random(20)
        frame = mixed_frame()
        for _ in range(1500):
            edited = bytearray(frame)
            for _ in range(source.randint(1, 4)):
                edited[source.randrange(len(frame))] ^= 1 << source.randrange(8)
            answered_properly(good.client.call(bytes(edited)))
        good.check()

    def test_flipped_bits_of_the_root(self, good: ValidClient) -> None:
        frame = _core.encode_forward([good_request()])
        for bit in range(8 * 296):
            edited = bytearray(frame)
            edited[len(frame) - 296 + bit // 8] ^= 1 << bit % 8
            answered_properly(good.client.call(bytes(edited)))
        good.check()

    @pytest.mark.parametrize("name", rc.VECTORS)
    @pytest.mark.parametrize("count", [2**32 - 1, 2**31, 2**29, 10_000])
    def test_an_array_that_reaches_beyond_the_frame(
        self, good: ValidClient, name: str, count: int
    ) -> None:
        expect_status(good, rc.with_length(mixed_frame(), name, count), MALFORMED)

    @settings(
        max_examples=150,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(data=st.data())
    def test_any_bytes_get_an_answer(self, good: ValidClient, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from([b"", A1, good.frame, rc.copy_frame(2, [1], [2])]))
        cut = data.draw(st.integers(0, len(frame)))
        noise = data.draw(st.binary(max_size=700))
        root = data.draw(st.sampled_from([b"", frame[-296:]]))
        answered_properly(good.client.call(frame[:cut] + noise + root))
        good.check()

    @pytest.mark.parametrize("seed", [0, 1])
    def test_a_slot_full_of_garbage(
        self, good: ValidClient, llama_driver: drivers.Driver, seed: int
    ) -> None:
        with rc.Region(llama_driver.region) as region:
            capacity = region.request_bytes
        noise = random.Random(seed).randbytes(capacity)
        expect_status(good, noise, MALFORMED)
        expect_status(good, noise[:-296] + good.frame[-296:], MALFORMED)

    def test_the_client_refuses_a_frame_larger_than_the_slot(
        self, good: ValidClient, llama_driver: drivers.Driver
    ) -> None:
        with rc.Region(llama_driver.region) as region:
            capacity, sent = region.request_bytes, region.sent()
            with pytest.raises(RingError, match=str(capacity)):
                good.client.call(bytes(capacity + 1))
            assert region.sent() == sent
        good.check()

    @pytest.mark.parametrize("length", [2**32 - 1, None])
    def test_a_slot_that_announces_more_than_it_holds(
        self, good: ValidClient, llama_driver: drivers.Driver, length: int | None
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
    def test_one_element_is_missing(self, good: ValidClient, name: str) -> None:
        frame = mixed_frame()
        _, count = rc.vector(frame, name)
        expect_status(good, rc.with_length(frame, name, count - 1), MALFORMED)

    @pytest.mark.parametrize("name", ["context_ids", "output_spec_flags"])
    def test_what_may_be_missing(self, good: ValidClient, name: str) -> None:
        frame = rc.with_length(good.frame, name, 0)
        assert rc.decode(good.client.call(frame)).tokens == [good.answer]

    @pytest.mark.parametrize(
        "name", ["qo_indptr", "kv_page_indptr", "sampling_indptr", "sampler_indptr", "mask_indptr"]
    )
    @pytest.mark.parametrize(("index", "value"), [(0, 1), (1, 2**32 - 1), (1, 1000), (2, 0)])
    def test_offsets_that_do_not_rise_to_the_end(
        self, good: ValidClient, name: str, index: int, value: int
    ) -> None:
        expect_status(good, rc.with_u32(mixed_frame(), name, index, value), MALFORMED)

    def test_sampling_indices_and_samplers_have_the_same_lengths(self, good: ValidClient) -> None:
        expect_status(good, rc.with_u32(mixed_frame(), "sampler_indptr", 1, 1), MALFORMED)

    def test_no_requests_at_all(self, good: ValidClient) -> None:
        answer = rc.decode(good.client.call(_core.encode_forward([], 5)))
        assert (answer.status, answer.tokens, answer.driver_id) == (None, [], 5)
        good.check()

    def test_a_status_echoes_the_driver_id(self, good: ValidClient) -> None:
        edited = rc.with_length(_core.encode_forward([good_request()], 77), "position_ids", 1)
        assert expect_status(good, edited, MALFORMED).driver_id == 77
