"""Many streams at once, some of which are given up: what comes, and what is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from pie_server import state, wait_until
from sglang_server import Server

TOKENS = 24


class Plan(NamedTuple):
    """A stream of a flood.

    Attributes:
        prompt: Which one.
        leaves_after: Tokens after which its client goes; None if it stays.
        by_name: It has its request aborted instead.
    """

    prompt: int
    leaves_after: int | None
    by_name: bool


def flood(server: Server, streams: int, share: float = 0.1, seed: int = 1) -> Counter[str]:
    """Streams at once, of which a share is given up, and checks every one of them.

    Returns:
        How many streams ended in which way.
    """
    chance = random.Random(seed)
    prompts = [[chance.randrange(5, 4000) for _ in range(4 + 3 * number)] for number in range(12)]
    expected = [server.generate(prompt, TOKENS)[0] for prompt in prompts]
    before = state(server)
    plans = []
    for _ in range(streams):
        leaves = chance.randrange(TOKENS // 2) if chance.random() < share else None
        plans.append(Plan(chance.randrange(len(prompts)), leaves, chance.random() < 0.5))
    outcomes = asyncio.run(_ask(server, prompts, plans))
    ends = Counter(end for end, _ in outcomes)
    for plan, (end, tokens) in zip(plans, outcomes, strict=True):
        wanted = expected[plan.prompt]
        assert tokens == wanted[: len(tokens)], (plan, tokens, wanted)
        assert end == "length" or plan.leaves_after is not None, (plan, end)
        if end == "length":
            assert tokens == wanted

    def is_over() -> bool:
        now = state(server)
        return bool(now["running"] == now["waiting"] == now["open_requests"] == 0)

    wait_until(is_over, 60, "every request has ended")
    after = state(server)
    # The front end asks once for each; requests that came and went unseen are not lost either.
    assert after["finished"] - before["finished"] == streams
    assert after["restarts"] == before["restarts"]
    server.flush()
    left = state(server)
    assert left["pages_free"] == left["pages_total"]
    return ends


def flood_completions(url: str, model: str, streams: int, share: float = 0.1) -> Counter[str]:
    """Streams of texts at once at an OpenAI door, a share of whose clients go; checks every one.

    Returns:
        How many streams ended in which way.
    """
    chance = random.Random(2)
    prompts = [f"def f{number}(x):\n" * (1 + number % 3) for number in range(12)]
    expected = asyncio.run(_complete(url, model, prompts, [(n, None) for n in range(12)]))
    plans = []
    for _ in range(streams):
        leaves = chance.randrange(TOKENS // 2) if chance.random() < share else None
        plans.append((chance.randrange(len(prompts)), leaves))
    outcomes = asyncio.run(_complete(url, model, prompts, plans))
    for (prompt, leaves), (end, text) in zip(plans, outcomes, strict=True):
        wanted = expected[prompt][1]
        assert wanted.startswith(text), (prompt, end, text, wanted)
        assert end == ("length" if leaves is None else end), (prompt, end)
        if end == "length":
            assert text == wanted
    return Counter(end for end, _ in outcomes)


async def _complete(
    url: str, model: str, prompts: Sequence[str], plans: Sequence[tuple[int, int | None]]
) -> list[tuple[str, str]]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(prompt: int, leaves_after: int | None) -> tuple[str, str]:
            body = {"model": model, "prompt": prompts[prompt], "max_tokens": TOKENS}
            body |= {"temperature": 0, "stream": True, "ignore_eos": True}
            text, chunks = "", 0
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    data = line.decode().strip().removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    [choice] = json.loads(data)["choices"] or [{"text": ""}]
                    text += choice["text"]
                    chunks += 1
                    if choice.get("finish_reason"):
                        return str(choice["finish_reason"]), text
                    if leaves_after is not None and chunks > leaves_after:
                        return "left", text
            return "lost", text

        return list(await asyncio.gather(*(ask(*plan) for plan in plans)))


async def _ask(
    server: Server, prompts: Sequence[list[int]], plans: Sequence[Plan]
) -> list[tuple[str, list[int]]]:
    # A kept connection may be closed by the server at the moment of its next request.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        asked = (
            _stream(session, server, prompts[plan.prompt], plan, f"flood-{number:05}-")
            for number, plan in enumerate(plans)
        )
        return list(await asyncio.gather(*asked))


async def _stream(
    session: aiohttp.ClientSession, server: Server, prompt: list[int], plan: Plan, rid: str
) -> tuple[str, list[int]]:
    body = server.body(prompt, TOKENS, stream=True, rid=rid)
    tokens: list[int] = []
    aborted = False
    async with session.post(f"{server.url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            text = line.decode().strip().removeprefix("data: ")
            if not text or text == "[DONE]":
                continue
            found: dict[str, Any] = json.loads(text)
            tokens = found["output_ids"]
            reason = found["meta_info"]["finish_reason"]
            if reason is not None:
                return reason["type"], tokens
            if plan.leaves_after is None or len(tokens) <= plan.leaves_after or aborted:
                continue
            if not plan.by_name:
                return "left", tokens
            aborted = True
            async with session.post(f"{server.url}/abort_request", json={"rid": rid}) as done:
                assert done.status == 200
    return "lost", tokens
