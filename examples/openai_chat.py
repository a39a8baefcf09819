"""Chat with a server through the `openai` client: an answer, a stream, and log-probabilities.

Start a server first, for example `pie-sglang serve smollm2 --device cpu`, then run

    python examples/openai_chat.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import math
import os

from openai import OpenAI

KEY = os.environ.get("PIE_API_KEY", "none")
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key=KEY)
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    max_tokens=32,
)
print("answer:", answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three primary colours."}],
    max_tokens=48,
    stream=True,
    # SGLang's parameters that OpenAI's API does not have go into the body.
    extra_body={"top_k": 20, "min_p": 0.05},
)
print("stream: ", end="")
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()

scored = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is the sky blue? Answer yes or no."}],
    temperature=0,
    max_tokens=4,
    logprobs=True,
    top_logprobs=3,
)
logprobs = scored.choices[0].logprobs
for token in (logprobs.content if logprobs else None) or []:
    likely = ", ".join(f"{top.token!r} {math.exp(top.logprob):.0%}" for top in token.top_logprobs)
    print(f"token {token.token!r}: {likely}")
