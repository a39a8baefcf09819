"""Ask a server through LangChain: a stream, a tool call and its result, and JSON by a class.

Start a server with a parser of tool calls first, for example

    pie-sglang serve smollm2 --device cpu --tool-call-parser qwen25
    python examples/langchain_chat.py --url http://127.0.0.1:30000

It needs `langchain-openai`, best in an environment of its own. In the server's, install a version
before 1.1.10: later ones need another `openai` than SGLang 0.5.17 pins.
"""

from __future__ import annotations

import argparse
import os
from typing import Annotated, Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

KEY = os.environ.get("PIE_API_KEY", "none")
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
server: Any = {"base_url": f"{parser.parse_args().url}/v1", "api_key": KEY}
chat = ChatOpenAI(
    **server,
    model=OpenAI(**server).models.list().data[0].id,
    temperature=0,
    max_tokens=96,
    # SGLang's parameters that OpenAI's API does not have go into the body.
    extra_body={"repetition_penalty": 1.05},
)

print("stream: ", end="")
for chunk in chat.stream("What is the capital of France?"):
    print(chunk.text, end="", flush=True)
print()


@tool
def get_weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """Get the temperature of a city in degrees Celsius."""
    return f"21 degrees in {city}"


messages: list[Any] = [HumanMessage("How warm is it in Paris?")]
# `strict`: the arguments follow the schema. A larger model chooses the tool by itself.
called = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(messages)
result = get_weather.invoke(called.tool_calls[0])
print("call:", called.tool_calls[0]["name"], called.tool_calls[0]["args"], "->", result.content)
print("answer:", chat.invoke([*messages, called, result]).text)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


city = chat.with_structured_output(City).invoke("Describe Tokyo as JSON: name and population.")
print("city:", repr(city))
