"""Requests that harm nobody: each hostile one is answered, and its neighbours do not notice.

The table is in `support/hostile/hostile_requests.py`. `make soak` sends the same ones for as long
as you like.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pie_driver_sglang import Engine
from pie_driver_sglang.errors import ConfigError
from support.hostile import attack_clients, hostile_requests
from support.hostile.attack_clients import Address, Neighbours
from support.hostile.hostile_requests import ENGINE, GATEWAY, ROWS, SGLANG, Call, Row
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.servers import gateway_server, pie_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LORA: Final = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj")


class Target(NamedTuple):
    """A server under attack, with its neighbours.

    Attributes:
        kind: Its frontend.
        address: Where it listens.
        path: Of an endpoint that takes a prompt and streams.
        neighbours: Clients with known answers.
        processes: Those that must live.
        folder: Where nothing may be written.
    """

    kind: str
    address: Address
    path: str
    neighbours: Neighbours
    processes: list[psutil.Process]
    folder: Path

    def check(self) -> None:
        """The neighbours have their answers, and no process has ended."""
        self.neighbours.wait_round()
        assert self.neighbours.troubles == []
        ended = [each for each in self.processes if not each.is_running()]
        assert ended == []


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that a pickle makes where it is read."""
    return tmp_path_factory.mktemp("marker") / "made"


@pytest.fixture(scope="class", params=[SGLANG, GATEWAY])
def target(
    request: pytest.FixtureRequest,
    forked_python: str,
    marker: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    """A server with eight neighbours, who ask while everything else happens."""
    folder = tmp_path_factory.mktemp("hostile")
    with contextlib.ExitStack() as stack:
        if request.param == SGLANG:
            flags = ("--scheduler", "pie", "--served-model-name", "pocket", *LORA)
            serving = pie_server.running(folder, *flags, python=forked_python)
            server, process = stack.enter_context(serving)
            pid, path, send = process.pid, "/generate", attack_clients.generate_by_sglang
        else:
            pytest.importorskip("smg")
            server = stack.enter_context(gateway_server.running(folder, python=forked_python))
            pid, path, send = (
                server.process.pid,
                "/v1/completions",
                attack_clients.complete_by_openai,
            )
        address = Address.of(server.url)
        neighbours = Neighbours(lambda number: send(address, number))
        processes = [psutil.Process(pid), *fork_server.family(pid)]
        with neighbours:
            yield Target(request.param, address, path, neighbours, processes, marker)


def calls_of(target: Target, kind: str) -> list[Call]:
    """The requests of a kind, for a frontend."""
    if kind == "chats":
        return hostile_requests.chat_calls()
    if kind == "bodies":
        return hostile_requests.body_calls(target.path)
    if kind == "endpoints":
        return hostile_requests.sglang_calls(str(target.folder)) if target.kind == SGLANG else []
    written = hostile_requests.for_sglang if target.kind == SGLANG else hostile_requests.for_gateway
    return [written(row) for row in ROWS[kind] if target.kind in row.at]


def listed(troubles: Mapping[str, Collection[str]]) -> str:
    return "\n".join(f"{name}: {', '.join(found)}" for name, found in troubles.items())


class TestServers:
    @pytest.mark.parametrize("kind", [*ROWS, "chats", "endpoints", "bodies"])
    def test_requests(self, target: Target, kind: str) -> None:
        calls = calls_of(target, kind)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda call: attack_clients.attack(target.address, call), calls)
        troubles = {call.name: found for call, found in zip(calls, found, strict=True) if found}
        target.check()
        assert not target.folder.exists(), "a pickle was read"
        assert not troubles, listed(troubles)

    def test_bytes_that_are_no_request(self, target: Target) -> None:
        for name, data in attack_clients.raw_bytes(target.path).items():
            answer = attack_clients.give(target.address, data)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 "), (name, answer[:100])
            assert not answer.startswith(b"HTTP/1.1 5"), (name, answer)
        target.check()

    def test_connections_that_send_nothing(self, target: Target) -> None:
        with attack_clients.held(target.address, 200) as idle:
            assert len(idle) > 50
            target.check()
        begun = attack_clients.stream_request(target.path)[:60]
        with attack_clients.held(target.address, 200, begun):
            target.check()

    def test_clients_that_do_not_read(self, target: Target) -> None:
        with attack_clients.held(target.address, 16, attack_clients.stream_request(target.path)):
            target.check()
        # Those that go while their requests wait, run, and have just been sent.
        for _ in range(8):
            with attack_clients.held(target.address, 8, attack_clients.stream_request(target.path)):
                pass
        target.check()

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_any_json(self, target: Target, data: st.DataObject) -> None:
        """Whatever JSON has, wherever it stands: depth, integers of any size, NaN, surrogates."""
        names = [*PARAMS, *FIELDS]
        fields = data.draw(st.dictionaries(st.sampled_from(names), any_json(), max_size=4))
        body = hostile_requests.written(request_of(target, fields)).encode()
        reply = attack_clients.send(target.address, target.path, body)
        assert target.neighbours.troubles == []
        assert attack_clients.complaint(reply) is None, body[:2000]


PARAMS: Final = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop",
    "stop_token_ids", "stop_regex", "logit_bias", "json_schema", "regex", "ebnf", "ignore_eos",
    "frequency_penalty", "repetition_penalty", "sampling_seed", "custom_params", "structural_tag",
)  # fmt: skip
FIELDS: Final = (
    "text", "input_ids", "rid", "stream", "return_logprob", "logprob_start_len", "priority",
    "top_logprobs_num", "token_ids_logprob", "session_params", "lora_path", "extra_key",
    "sampling_params", "image_data", "return_hidden_states", "routing_key", "custom_labels",
)  # fmt: skip


def any_json() -> st.SearchStrategy[Any]:
    """Values of JSON, and what some writers and readers take for one."""
    numbers = st.one_of(st.integers(), st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**300]))
    odd = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-0.0"]).map(
        hostile_requests.number
    )
    texts = st.text(st.characters(exclude_categories=()), max_size=12)
    deep = st.builds(hostile_requests.nested, st.integers(1, 700), lists=st.booleans())
    leaves = st.one_of(st.none(), st.booleans(), numbers, st.floats(), odd, texts)
    some = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )
    return st.one_of(some, deep)


def request_of(target: Target, fields: dict[str, Any]) -> dict[str, Any]:
    if target.kind == GATEWAY:
        return {"model": "pocket", "prompt": hostile_requests.PROMPT, "max_tokens": 4, **fields}
    params = {name: value for name, value in fields.items() if name in PARAMS}
    others = {name: value for name, value in fields.items() if name not in PARAMS}
    # Without a limit an answer is as long as the context.
    text = hostile_requests.LONG_PROMPT if "max_new_tokens" in params else hostile_requests.PROMPT
    params = {"max_new_tokens": 4, **params}
    return {"text": text, "sampling_params": params, **others}


# ---------------------------------------------------------------------------------------------
# The engine
# ---------------------------------------------------------------------------------------------

REFUSALS: Final = (ConfigError, ValueError, TypeError)


@pytest.fixture(scope="class")
def engine(forked_python: str) -> Iterator[tuple[Engine, Neighbours]]:
    with mock.patch.object(sys, "executable", forked_python):
        found = Engine(model_path=str(POCKET), device="cpu")

    def send(number: int) -> Any:
        params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        prompt = [20 + 7 * number, 300 + number, 9]
        return found.generate(input_ids=prompt, sampling_params=params)["output_ids"]

    with found, Neighbours(send) as neighbours:
        yield found, neighbours


def refused_well(call: Any) -> str | None:
    """What is wrong with how a call ends, if anything is."""
    try:
        call()
    except REFUSALS as error:
        text = str(error)
        return (
            f"a refusal of {len(text)} bytes" if len(text) > attack_clients.MOST_REFUSAL else None
        )
    except (Exception, RecursionError) as error:
        return repr(error)[:400]
    return None


class TestEngine:
    @pytest.mark.parametrize("kind", [*ROWS])
    def test_requests(self, engine: tuple[Engine, Neighbours], kind: str) -> None:
        found, neighbours = engine

        def attack(row: Row) -> set[str]:
            requested = hostile_requests.for_engine(row)
            with ThreadPoolExecutor(row.copies) as pool:
                call = lambda: found.generate(**requested)  # noqa: E731
                ends = [pool.submit(refused_well, call) for _ in range(row.copies)]
                return {wrong for end in ends if (wrong := end.result()) is not None}

        rows = [row for row in ROWS[kind] if ENGINE in row.at]
        with ThreadPoolExecutor(4) as pool:
            ends = zip(rows, pool.map(attack, rows), strict=True)
            troubles = {row.name: wrong for row, wrong in ends if wrong}
        neighbours.wait_round()
        assert neighbours.troubles == []
        assert not troubles, listed(troubles)

    def test_calls_that_are_given_up(self, engine: tuple[Engine, Neighbours]) -> None:
        found, neighbours = engine
        long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
        for _ in range(8):
            next(found.generate("a", long, stream=True))

        async def give_up() -> None:
            calls = [asyncio.create_task(found.async_generate("a", long)) for _ in range(8)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

        asyncio.run(give_up())
        neighbours.wait_round()
        assert neighbours.troubles == []
