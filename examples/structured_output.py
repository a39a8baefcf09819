"""Answers in a given form: JSON by a schema, and a tool call whose result the model is told.

Start a server with a parser of tool calls first, for example

    pie-sglang serve smollm2 --device cpu --tool-call-parser qwen25
    python examples/structured_output.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from openai import OpenAI

KEY = os.environ.get("PIE_API_KEY", "none")
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key=KEY)
model = client.models.list().data[0].id

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe Tokyo as JSON with name and population."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    temperature=0,
    max_tokens=96,
)
city = json.loads(answer.choices[0].message.content or "")
print("city:", city["name"], city["population"])

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        # The arguments follow the schema.
        "strict": True,
        "description": "Get the temperature of a city in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str) -> str:
    """Returns the weather; a program would look it up."""
    return json.dumps({"city": city, "celsius": 21})


messages: list[Any] = [{"role": "user", "content": "How warm is it in Paris?"}]
called = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[WEATHER],
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    temperature=0,
    max_tokens=96,
)
calls: Any = called.choices[0].message.tool_calls
result = get_weather(**json.loads(calls[0].function.arguments))
print("call:", calls[0].function.name, calls[0].function.arguments, "->", result)

# Small models' chat templates know no tool messages, so the result is told in words.
messages += [
    {"role": "assistant", "content": "I look it up."},
    {"role": "user", "content": f"The tool returned {result}. Answer in one sentence."},
]
final = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
print("answer:", final.choices[0].message.content)
