"""Rank texts by their similarity to a question, with a server of an embedding model.

Start a server first, for example

    pie-sglang serve Qwen/Qwen3-Embedding-0.6B --is-embedding
    python examples/embeddings.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI

KEY = os.environ.get("PIE_API_KEY", "none")
QUESTION = "How are KV pages reused?"
TEXTS = [
    "Requests with a common prefix share its pages.",
    "The gateway listens on port 30000.",
    "A tokenizer splits text into tokens.",
]

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key=KEY)
model = client.models.list().data[0].id

answer = client.embeddings.create(model=model, input=[QUESTION, *TEXTS])
question, *texts = (each.embedding for each in answer.data)
# Embeddings of this model have length 1: the dot product is the cosine.
scores = [sum(a * b for a, b in zip(question, text, strict=True)) for text in texts]
for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
    print(f"{score:.3f} {text}")
