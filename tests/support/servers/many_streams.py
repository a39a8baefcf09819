"""Many concurrent streams, some of them aborted: their ends, and what the server keeps."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import aiohttp

from support.servers.pie_server import state, wait_until
from support.servers.sglang_server import Server, event

TOKENS = 24


class Plan(NamedTuple):
    """A stream of a flood.

    Attributes:
        prompt: Which one.
        leaves_after: Outputs after which its client goes; None if it stays.
        by_name: It has its request aborted instead.
    """

    prompt: int
    leaves_after: int | None = None
    by_name: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """How it may end. Who wants to go may have all tokens before."""
        if self.leaves_after is None:
            return ("length",)
        return ("length", "abort" if self.by_name else "left")


class Outcome(NamedTuple):
    """What came of a stream.

    Attributes:
        end: Its finish reason, `left` if its client went, `lost` if it just ended.
        said: Its tokens, or its text.
        tokens: How many tokens it has, by the server's word; None if it did not say so.
    """

    end: str
    said: Sequence[int] | str
    tokens: int | None


def flood(server: Server, streams: int, share: float = 0.1, seed: int = 1) -> Counter[str]:
    """Streams at once, of which a share is given up, and checks every one of them.

    Returns:
        How many streams ended with which outcome.
    """
    chance = random.Random(seed)
    prompts = [[chance.randrange(5, 4000) for _ in range(4 + 3 * number)] for number in range(12)]
    expected = [server.generate(prompt, TOKENS)[0] for prompt in prompts]
    assert [len(tokens) for tokens in expected] == [TOKENS] * len(prompts)
    before = state(server)
    plans = [_plan(chance, len(prompts), share, chance.random() < 0.5) for _ in range(streams)]
    ends = _check(plans, asyncio.run(_ask(server, prompts, plans)), expected)

    def is_over() -> bool:
        now = state(server)
        return bool(now["running"] == now["waiting"] == now["open_requests"] == 0)

    wait_until(is_over, 60, "every request has ended")
    after = state(server)
    # The front end asks once for each; requests that came and went unseen are not lost either.
    assert after["finished"] - before["finished"] == streams
    assert after["restarts"] == before["restarts"]
    # No page is held by a request: what is not free is in the cache, and all of that can go.
    assert after["pages_free"] + after["pages_cached"] == after["pages_total"]
    server.flush()
    left = state(server)
    assert left["pages_free"] == left["pages_total"]
    return ends


def flood_completions(url: str, model: str, streams: int, share: float = 0.1) -> Counter[str]:
    """Streams of texts at once by OpenAI's API, a share of whose clients go; checks every one.

    Returns:
        How many streams ended with which outcome.
    """
    chance = random.Random(2)
    prompts = [f"def f{number}(x):\n" * (1 + number % 3) for number in range(12)]
    alone = [Plan(number) for number in range(len(prompts))]
    first = asyncio.run(_complete(url, model, prompts, alone))
    expected = [outcome.said for outcome in first]
    assert all(expected)
    # Each stayed, so this holds them to their length.
    _check(alone, first, expected)
    plans = [_plan(chance, len(prompts), share) for _ in range(streams)]
    return _check(plans, asyncio.run(_complete(url, model, prompts, plans)), expected)


def _plan(chance: random.Random, prompts: int, share: float, by_name: bool = False) -> Plan:
    leaves = chance.randrange(TOKENS // 2) if chance.random() < share else None
    return Plan(chance.randrange(prompts), leaves, by_name)


def _check(
    plans: Sequence[Plan], outcomes: Sequence[Outcome], expected: Sequence[Sequence[int] | str]
) -> Counter[str]:
    """Holds each stream to what its prompt's tokens are, and to an outcome that it may have."""
    for plan, outcome in zip(plans, outcomes, strict=True):
        wanted, said = expected[plan.prompt], outcome.said
        assert outcome.end in plan.ends, (plan, outcome)
        assert said == wanted[: len(said)], (plan, outcome, wanted)
        if outcome.end == "length":
            assert (said, outcome.tokens) == (wanted, TOKENS), (plan, outcome, wanted)
    return Counter(outcome.end for outcome in outcomes)


@contextlib.asynccontextmanager
async def _clients() -> AsyncIterator[aiohttp.ClientSession]:
    # A kept connection may be closed by the server at the moment of its next request.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@contextlib.asynccontextmanager
async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events of an answer; its connection is closed at the end of the block."""
    async with session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        yield (found async for line in answer.content if (found := event(line)))


async def _complete(
    url: str, model: str, prompts: Sequence[str], plans: Sequence[Plan]
) -> list[Outcome]:
    async with _clients() as session:

        async def request(plan: Plan) -> Outcome:
            body = {"model": model, "prompt": prompts[plan.prompt], "max_tokens": TOKENS}
            body |= {"temperature": 0, "stream": True, "ignore_eos": True}
            body |= {"stream_options": {"include_usage": True}}
            text, end, chunks, tokens = "", "lost", 0, None
            async with _stream(session, f"{url}/v1/completions", body) as events:
                async for found in events:
                    for choice in found["choices"]:
                        text += choice["text"]
                        end = choice.get("finish_reason") or end
                    if usage := found.get("usage"):
                        tokens = usage["completion_tokens"]
                    chunks += 1
                    leaves = plan.leaves_after is not None and chunks > plan.leaves_after
                    if leaves and end == "lost":
                        return Outcome("left", text, tokens)
            return Outcome(end, text, tokens)

        return list(await asyncio.gather(*map(request, plans)))


async def _ask(
    server: Server, prompts: Sequence[list[int]], plans: Sequence[Plan]
) -> list[Outcome]:
    async with _clients() as session:

        async def request(number: int, plan: Plan) -> Outcome:
            rid = f"flood-{number:05}-"
            body = server.body(prompts[plan.prompt], TOKENS, stream=True, rid=rid)
            outcome = Outcome("lost", [], None)
            aborted = False
            async with _stream(session, f"{server.url}/generate", body) as events:
                async for found in events:
                    tokens, meta = found["output_ids"], found["meta_info"]
                    reason = (meta["finish_reason"] or {"type": "lost"})["type"]
                    outcome = Outcome(reason, tokens, meta["completion_tokens"])
                    if reason != "lost" or plan.leaves_after is None or aborted:
                        continue
                    if len(tokens) <= plan.leaves_after:
                        continue
                    if not plan.by_name:
                        return outcome._replace(end="left")
                    aborted = True
                    address = f"{server.url}/abort_request"
                    async with session.post(address, json={"rid": rid}) as done:
                        assert done.status == 200
            return outcome

        return list(await asyncio.gather(*(request(*each) for each in enumerate(plans))))
