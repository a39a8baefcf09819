"""Requests by the installed `openai` client; run with several of its versions."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai

TEXT: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 8}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def request(client: openai.OpenAI) -> None:
    """Every kind of call, once."""
    assert client.models.list().data[0].id == "default"
    answer = client.completions.create(prompt="def f(x):", **TEXT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    stream = client.completions.create(prompt="def f(x):", stream=True, **TEXT)
    assert "".join(part.choices[0].text for part in stream) == answer.choices[0].text
    chat = client.chat.completions.create(messages=HELLO, **TEXT)
    parts = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **TEXT
    )
    chunks = list(parts)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8
    several = client.completions.create(prompt=["a", "b"], n=2, **TEXT)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    stopped = client.completions.create(prompt="def f(x):", stop=["\n"], **TEXT)
    assert "\n" not in stopped.choices[0].text
    answered = client.responses.create(model="default", input="Hello", max_output_tokens=8)
    assert answered.status in ("completed", "incomplete")
    try:
        client.completions.create(prompt="x", **{**TEXT, "max_tokens": -1})
    except openai.BadRequestError as error:
        assert error.status_code == 400
    else:
        raise AssertionError("a negative number of tokens was taken")


async def request_at_once(client: openai.AsyncOpenAI) -> None:
    """Streams side by side, one of which is given up."""

    async def read(count: int) -> int:
        stream = await client.chat.completions.create(messages=HELLO, stream=True, **TEXT)
        found = 0
        async for _ in stream:
            found += 1
            if found == count:
                await stream.close()
                break
        return found

    assert min(await asyncio.gather(*(read(99 if number else 2) for number in range(8)))) >= 2


def main() -> None:
    """Asks the server at the address given."""
    address = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
    print("openai", openai.__version__)
    with openai.OpenAI(**address) as client:
        request(client)

    async def request_all() -> None:
        async with openai.AsyncOpenAI(**address) as client:
            await request_at_once(client)

    asyncio.run(request_all())
    print("all is as it should be")


if __name__ == "__main__":
    main()
