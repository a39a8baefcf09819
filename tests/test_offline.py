"""The offline engine without drivers: outputs, requests and shutdown."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pie_driver_sglang
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
from pie_driver_sglang.frontends.offline.outputs import SequenceOutput
from pie_driver_sglang.frontends.offline.requests import (
    Call,
    NewRequest,
    OpenRequests,
    OutputQueue,
    batched_by_size,
)
from pie_driver_sglang.frontends.offline.sampling import (
    SamplingParameters,
    parse_sampling,
)
from pie_driver_sglang.observability.active import ActiveFile


def output(request: int, tokens: Sequence[int], finish: str | None = None, **more: Any) -> Any:
    """An output of the native runtime."""
    values = {
        "request": request,
        "sample": 0,
        "token_ids": list(tokens),
        "finish_reason": finish,
        "stop_token": None,
        "stop_string": None,
        "stop_regex": None,
        "error": None,
        "cached_tokens": 0,
    }
    return SimpleNamespace(**{**values, **more})


class TestAnswer:
    PROMPT = (5, 6)

    def answer(
        self, tokenizer: ModelTokenizer, streams: bool = False, **sampling: Any
    ) -> SequenceOutput:
        return SequenceOutput("name", self.PROMPT, parse_sampling(sampling), tokenizer, streams)

    @pytest.mark.parametrize("streams", [False, True])
    def test_an_end_by_length(self, tokenizer: ModelTokenizer, streams: bool) -> None:
        (tokens,) = tokenizer.encode(["def main"])
        answer = self.answer(tokenizer, streams)
        answer.add(output(1, tokens[:1]))
        assert not answer.is_finished
        answer.add(output(1, tokens[1:], "length", cached_tokens=1))
        answer.finish_text()
        found = answer.as_dict()
        assert found["text"] == "def main"
        assert found["output_ids"] == tokens
        meta = found["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": len(tokens)}
        assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("name", 2, 1)
        assert meta["completion_tokens"] == len(tokens)
        assert meta["e2e_latency"] > 0

    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize("no_stop_trim", [False, True])
    def test_an_end_by_a_token(
        self, tokenizer: ModelTokenizer, streams: bool, no_stop_trim: bool
    ) -> None:
        tokens = tokenizer.encode(["a b"])[0]
        answer = self.answer(tokenizer, streams, no_stop_trim=no_stop_trim)
        answer.add(output(1, tokens, "stop", stop_token=tokens[-1]))
        answer.finish_text()
        found = answer.as_dict()
        expected = tokenizer.decode(tokens if no_stop_trim else tokens[:-1])
        assert found["text"] == expected
        assert found["output_ids"] == tokens
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[-1]}

    @pytest.mark.parametrize("streams", [False, True])
    @pytest.mark.parametrize("no_stop_trim", [False, True])
    def test_an_end_by_a_text(
        self, tokenizer: ModelTokenizer, streams: bool, no_stop_trim: bool
    ) -> None:
        (tokens,) = tokenizer.encode(["return self.value"])
        stops = {"stop": ["never", "lf.v"], "no_stop_trim": no_stop_trim}
        answer = self.answer(tokenizer, streams, **stops)
        for token in tokens[:-1]:
            answer.add(output(1, [token]))
            if streams and not no_stop_trim:
                assert "return self".startswith(answer.as_dict()["text"])
        answer.add(output(1, tokens[-1:], "stop", stop_string=1))
        answer.finish_text()
        found = answer.as_dict()
        assert found["text"] == ("return self.v" if no_stop_trim else "return se")
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "lf.v"}

    def test_an_error_reaches_the_caller(self, tokenizer: ModelTokenizer) -> None:
        answer = self.answer(tokenizer)
        answer.add(output(1, [], "error", error="the queue is full"))
        finish = answer.as_dict()["meta_info"]["finish_reason"]
        assert finish == {"type": "abort", "message": "the queue is full"}

    def test_without_a_tokenizer_there_is_no_text(self) -> None:
        answer = SequenceOutput("name", self.PROMPT, SamplingParameters(), None, False)
        answer.add(output(1, [3], "length"))
        answer.finish_text()
        assert "text" not in answer.as_dict()


class FakeRuntime:
    """Requests and outputs by hand."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.submitted: list[Any] = []
        self.aborted: list[int] = []
        self.is_shut = threading.Event()

    def submit(self, tokens: Any, **parameters: Any) -> int:
        self.submitted.append((tokens, parameters))
        return 0

    def submit_all(self, requests: Any) -> list[int]:
        placed = [parameters["into"] is requests for _, parameters in self.submitted]
        return [number for number, here in enumerate(placed, 1) if here]

    def abort(self, number: int) -> None:
        self.aborted.append(number)

    def poll(self, timeout_s: float) -> list[Any]:
        try:
            return self.outputs.get(timeout=0.05)
        except queue.Empty:
            return []

    def shutdown(self) -> None:
        self.is_shut.set()


class TestRequests:
    ONE = NewRequest([1], 1, {"n": 1})
    TWO = NewRequest([2], 2, {"n": 2})

    def test_outputs_reach_their_calls(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        one, other = Call(requests), Call(requests)
        one.submit([self.ONE])
        other.submit([self.TWO])
        runtime.outputs.put(
            [
                output(2, [7], "length", sample=1),
                output(1, [8], "length"),
                output(99, [9], "length"),
                output(2, [6], "length"),
            ]
        )
        assert [event.output.token_ids for event in other.events()] == [[7], [6]]
        assert [event.output.token_ids for event in one.events()] == [[8]]
        assert one.is_over
        assert other.is_over
        requests.close()
        assert runtime.is_shut.is_set()
        assert not runtime.aborted

    def test_what_a_caller_leaves_is_aborted(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        with Call(requests) as call:
            call.submit([self.ONE, self.ONE])
            runtime.outputs.put([output(1, [5], "length")])
            next(call.events())
        assert runtime.aborted == [2]
        requests.close()

    def test_requests_are_numbered_through_over_several_parts(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE, self.TWO])
        call.submit([self.ONE])
        runtime.outputs.put([output(3, [7], "length"), output(2, [8])])
        events = call.events()
        assert [next(events).request for _ in range(2)] == [2, 1]
        call.abort()
        assert runtime.aborted == [1, 2]
        requests.close()

    def test_a_shutdown_ends_calls_with_an_error(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE])
        threading.Timer(0.1, requests.close).start()
        with pytest.raises(StartError, match="the engine has ended"):
            next(call.events())
        with pytest.raises(StartError, match="is shut down"):
            call.submit([self.ONE])
        requests.close()

    def test_a_loop_that_closes_harms_no_other_call(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        left, other = Call(requests), Call(requests)
        left.submit([self.ONE])
        other.submit([self.TWO])
        loop = asyncio.new_event_loop()
        notified: list[int] = []

        def wake() -> None:
            # As where the loop is closed between a look and a call.
            notified.append(1)
            loop.close()
            loop.call_soon_threadsafe(lambda: None)

        with pytest.raises(RuntimeError, match="closed"):
            left._outputs.notify(wake)
        runtime.outputs.put([output(1, [8]), output(2, [6], "length")])
        runtime.outputs.put([output(1, [9]), output(2, [7], "length", sample=1)])
        assert [event.output.token_ids for event in other.events()] == [[6], [7]]
        assert len(notified) == 2, "it is not called again"
        later = Call(requests)
        later.submit([self.ONE])
        runtime.outputs.put([output(3, [5], "length")])
        assert [event.output.token_ids for event in later.events()] == [[5]]
        requests.close()

    def test_a_call_that_nobody_refers_to_is_aborted(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE, self.TWO])
        events = call.events()
        runtime.outputs.put([output(2, [5])])
        next(events)
        del call, events
        gc.collect()
        assert runtime.aborted == [1, 2]
        assert not requests._queues
        requests.close()

    def test_a_poll_that_fails_ends_all_calls_and_the_drivers(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE])
        runtime.outputs.put(cast(Any, None))
        with pytest.raises(StartError, match="the engine has ended"):
            next(call.events())
        with pytest.raises(StartError, match="is shut down"):
            Call(requests).submit([self.ONE])
        assert "all calls end" in caplog.text
        assert not runtime.is_shut.is_set()
        requests.close()
        assert runtime.is_shut.is_set()

    def test_a_shutdown_within_a_submission_does_not_wait_for_it(self) -> None:
        """As of a signal handler, which interrupts the thread that hands requests in."""

        class Interrupted(FakeRuntime):
            def submit_all(self, requests: Any) -> list[int]:
                found = super().submit_all(requests)
                # Its thread waits for the lock that this one holds.
                self.outputs.put([output(99, [1])])
                ours.close()
                return found

        runtime = Interrupted()
        ours = OpenRequests(runtime)
        with pytest.raises(StartError, match="is shut down"):
            Call(ours).submit([self.ONE])
        assert not ours._queues
        ours.close()
        assert not ours._thread.is_alive()

    def test_ctrl_c_in_a_submission_leaves_no_request(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)

        def register(numbers: Iterable[int]) -> None:
            assert list(numbers) == [1]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            requests.submit([self.ONE], OutputQueue(), register, streams=False)
        assert runtime.aborted == [1]
        assert not requests._queues
        requests.close()

    def test_a_fork_cannot_use_it_and_ends_nothing(self) -> None:
        runtime = FakeRuntime()
        requests = OpenRequests(runtime)
        call = Call(requests)
        call.submit([self.ONE])
        with mock.patch.object(os, "getpid", return_value=os.getpid() + 1):
            with pytest.raises(StartError, match="this is a fork of it") as refusal:
                next(call.events())
            assert "spawn" in refusal.value.hint
            with pytest.raises(StartError, match="this is a fork of it"):
                Call(requests).submit([self.ONE])
            call.abort()
            requests.close()
        assert not runtime.aborted
        assert not runtime.is_shut.is_set()
        requests.close()


@given(sizes=st.lists(st.integers(0, 9), max_size=30), most=st.integers(1, 20))
def test_parts_are_as_large_as_can_be_and_keep_the_order(sizes: list[int], most: int) -> None:
    parts = list(batched_by_size(sizes, int, most))
    assert [size for part in parts for size in part] == sizes
    assert all(part and (sum(part) <= most or len(part) == 1) for part in parts)
    assert all(sum(part) + later[0] > most for part, later in itertools.pairwise(parts))


def test_an_engine_that_nobody_refers_to_is_shut_down() -> None:
    """With a runtime by hand: as a notebook's cell that is run again leaves it."""
    runtime = FakeRuntime()
    engine = object.__new__(pie_driver_sglang.Engine)
    engine._attach(runtime, OpenRequests(runtime), ActiveFile())
    thread = engine._requests._thread
    # A cycle, as tracebacks and notebooks make them.
    engine.self = engine  # type: ignore[attr-defined]
    del engine
    gc.collect()
    assert runtime.is_shut.is_set()
    assert not thread.is_alive()


def test_the_engine_is_the_packages_own() -> None:
    assert pie_driver_sglang.Engine.__module__ == "pie_driver_sglang.frontends.offline.engine"
