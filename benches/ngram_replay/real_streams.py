"""Token streams of a real model on real text for the replay: what was given and then said.

    python benches/ngram_replay/real_streams.py MODEL target/real_streams.json

MODEL is the folder of a chat model, such as SmolLM2-135M-Instruct. It answers greedily the requests
of `benches/gpu/real_texts.py`: summaries, code edits, translations and chats about Python's
documentation and sources, until it ends or has said 160 tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from real_texts import KINDS, make_requests

SAID = 160
REQUESTS = 8
"""Of each workload."""
BATCH = 8


def answer(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    """What the model says greedily to a batch of prompts, its end token included."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        said = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=SAID,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    found = []
    for prompt, row in zip(prompts, said[:, longest:].tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        found.append({"given": prompt, "said": row[:end]})
    return found


def main(folder: Path, path: Path) -> None:
    """Makes the streams of all workloads and writes them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def chat(request: str) -> list[int]:
        messages = [{"role": "user", "content": request}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    streams = {}
    for kind in KINDS:
        prompts = [chat(request) for request in make_requests(kind, REQUESTS)]
        batches = (prompts[first : first + BATCH] for first in range(0, REQUESTS, BATCH))
        streams[kind] = [each for batch in batches for each in answer(model, tokenizer, batch)]
        given, said = (sum(len(e[key]) for e in streams[kind]) for key in ("given", "said"))
        print(f"{kind:12}{REQUESTS:4} streams, {given:6} tokens given, {said:6} said", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(streams))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
