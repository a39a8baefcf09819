"""Load a LoRA adapter into a running server, ask with and without it, and unload it.

Start a server with adapters enabled first, for example

    pie-sglang serve smollm2 --device cpu --enable-lora --max-lora-rank 16 --lora-target-modules all
    python examples/lora_adapter.py --url http://127.0.0.1:30000 --adapter FOLDER

FOLDER is what PEFT's `save_pretrained` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI

KEY = os.environ.get("PIE_API_KEY", "none")
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("--adapter", required=True, type=Path)
options = parser.parse_args()
client = OpenAI(base_url=f"{options.url}/v1", api_key=KEY)
model = client.models.list().data[0].id
name = options.adapter.name


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Calls one of SGLang's own endpoints."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(options.url + path, data, headers)) as found:
        answer: dict[str, Any] = json.load(found)
    return answer


def ask(adapter: str | None) -> str:
    """Returns the answer by an adapter, or by the model alone."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
        extra_body={"lora_path": adapter} if adapter else {},
    )
    return answer.choices[0].message.content or ""


print("loaded:", post("/load_lora_adapter", {"lora_name": name, "lora_path": str(options.adapter)}))
print("the model:", ask(None))
print(f"with {name}:", ask(name))
print("unloaded:", post("/unload_lora_adapter", {"lora_name": name})["success"])
