"""Hostile calls of a running engine: none harms it, or other calls. Run by test_engine.py."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_driver_sglang.errors import ConfigError, DriverError, StartError
from pie_driver_sglang.frontends.offline.engine import Engine

SHORT = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 4}
LONG = {**SHORT, "max_new_tokens": 900}
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.binary(max_size=4),
        st.text(st.characters(), max_size=4),
        st.builds(object),
        st.just("\ud800"),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=4,
)
ARGUMENTS = (
    "prompt",
    "input_ids",
    "sampling_params",
    "rid",
    "priority",
    "session_id",
    "extra_key",
    "lora_path",
    "require_reasoning",
    "return_logprob",
    "top_logprobs_num",
    "logprob_start_len",
    "token_ids_logprob",
    "image_data",
)


def idle(engine: Engine) -> None:
    """Waits until nothing runs."""
    end = time.monotonic() + 120
    while engine.get_server_info()["internal_states"][0]["running"] or engine._requests._queues:
        gc.collect()
        assert time.monotonic() < end
        time.sleep(0.05)


def refused(call: Callable[[], Any]) -> None:
    """Whether it works or not: an error is one of this package, and its message one line."""
    try:
        call()
    except DriverError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        assert str(error)


class TestHostileCalls:
    @settings(
        max_examples=120,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(name=st.sampled_from(ARGUMENTS), value=JUNK)
    def test_any_value_of_an_argument_is_served_or_refused(
        self, engine: Engine, name: str, value: Any
    ) -> None:
        arguments: dict[str, Any] = {"prompt": "a", "sampling_params": SHORT, name: value}
        if name == "input_ids":
            del arguments["prompt"]
        refused(lambda: engine.generate(**arguments))
        assert len(engine.generate("def f", SHORT)["output_ids"]) == 4

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"prompt": 7}, "`prompt` is 7, expected a text or a list of texts"),
            ({"prompt": b"a"}, "`prompt` is b'a'"),
            ({"prompt": {"a": 1}}, "`prompt` is {'a': 1}"),
            ({"prompt": ["a", 7]}, "an entry of `prompt` is 7"),
            ({"prompt": "\ud800"}, "a character of `prompt` is '\\ud800'"),
            ({"input_ids": 7}, "`input_ids` is 7"),
            ({"input_ids": "abc"}, "`input_ids` is 'abc'"),
            ({"input_ids": [1, "x"]}, "an entry of `input_ids` is 'x'"),
            ({"input_ids": [[1], [2.5]]}, "an entry of `input_ids` is 2.5"),
            ({"input_ids": [-1]}, "an entry of `input_ids` is -1, expected token ids from 0 to"),
            ({"input_ids": [2**40]}, "an entry of `input_ids` is 1099511627776"),
            ({"prompt": "a", "rid": 7}, "`rid` is 7"),
            ({"prompt": "a", "rid": [7]}, "an entry of `rid` is 7"),
            ({"prompt": "a", "sampling_params": 7}, "`sampling_params` is 7"),
            ({"prompt": "a", "sampling_params": [7]}, "`sampling_params` is 7"),
            ({"prompt": "a", "lora_path": 7}, "`lora_path` is 7"),
            ({"prompt": "a", "lora_path": [["x"]]}, "no adapter ['x'] is loaded"),
        ],
    )
    def test_a_wrong_type_is_named(
        self, engine: Engine, arguments: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ConfigError) as refusal:
            engine.generate(**arguments)
        assert text in str(refusal.value)
        assert refusal.value.hint
        assert len(str(refusal.value).splitlines()) == 1

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(name=JUNK, path=JUNK)
    def test_an_adapter_of_anything_is_refused(self, engine: Engine, name: Any, path: Any) -> None:
        found = engine.load_lora_adapter(name, path)
        assert not found.success
        assert len(found.error_message.splitlines()) == 1

    def test_iterators_that_are_left_half_way(self, engine: Engine) -> None:
        for start in (
            lambda: engine.generate("a", LONG, stream=True),
            lambda: engine.as_completed(["a", "b"], [SHORT, LONG], rid=["x", "y"], priority=1),
        ):
            answers = start()
            next(answers)
            del answers
            idle(engine)

        async def leave() -> None:
            async for _ in await engine.async_generate("a", LONG, stream=True):
                break

        asyncio.run(leave())
        idle(engine)
        # Of a loop that is closed before its iterators are.
        loop = asyncio.new_event_loop()
        answers = loop.run_until_complete(engine.async_generate("a", LONG, stream=True))
        loop.run_until_complete(anext(answers))
        loop.close()
        del answers
        idle(engine)

    def test_a_task_that_is_cancelled_harms_no_other(self, engine: Engine) -> None:
        expected = engine.generate("def f", SHORT)["output_ids"]

        async def ask() -> Any:
            tasks = [asyncio.ensure_future(engine.async_generate("a", LONG)) for _ in range(4)]
            other = asyncio.ensure_future(engine.async_generate("def f", SHORT))
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return await other

        assert asyncio.run(ask())["output_ids"] == expected
        idle(engine)

    @pytest.mark.parametrize("streams", [False, True])
    def test_ctrl_c_ends_its_call_alone(self, engine: Engine, streams: bool) -> None:
        expected = engine.generate("def f", SHORT)["output_ids"]
        others: list[Any] = []
        other = threading.Thread(target=lambda: others.append(engine.generate("def f", SHORT)))

        def interrupt() -> None:
            while not engine._requests._queues:
                time.sleep(0.001)
            other.start()
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sending = threading.Thread(target=interrupt)
        sending.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                for _ in range(100):
                    found = engine.generate("a", LONG, stream=streams)
                    assert not streams or list(found)
        finally:
            signal.signal(signal.SIGINT, before)
        sending.join()
        other.join()
        assert others[0]["output_ids"] == expected
        idle(engine)

    def test_sessions_have_numbers_of_their_own(self, engine: Engine) -> None:
        def number(name: str) -> int:
            found: int = engine._extra(None, name, None)["session"]
            return found

        first, second = number("a"), number("b")
        engine.end_session("a")
        third = number("c")
        assert len({first, second, third}) == 3
        assert number("b") == second
        assert number("a") not in (first, second, third)
        found: list[int] = []
        names = [f"s{index}" for index in range(64)]
        threads = [
            threading.Thread(target=lambda: found.extend(map(number, names))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == len(names)
        for name in ("a", "b", "c", *names, "never", 7):
            engine.end_session(name)  # type: ignore[arg-type]

    def test_a_fork_refuses_and_the_engine_goes_on(self, engine: Engine) -> None:
        stream = engine.generate("a", {**SHORT, "max_new_tokens": 32}, stream=True)
        next(stream)
        pid = os.fork()
        if not pid:
            os._exit(_fork_status(engine, stream))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(list(stream)[-1]["output_ids"]) == 32
        assert len(engine.generate("def f", SHORT)["output_ids"]) == 4


def _fork_status(engine: Engine, stream: Any) -> int:
    """What a fork can do with the engine: nothing, and it hears so at once."""
    signal.alarm(60)
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate("a", SHORT),
        lambda: next(stream),
        engine.flush_cache,
        engine.get_server_info,
        lambda: engine.end_session("b"),
    ]
    engine._sessions["b"] = 1
    for number, call in enumerate(calls, 1):
        try:
            call()
        except StartError as error:
            if "this is a fork of it" not in str(error):
                return 10 + number
        else:
            return number
    if engine.load_lora_adapter("x", "/tmp").success:
        return 20
    stream.close()
    engine.shutdown()
    return 0
