"""Generate text without a server.

Try it without a GPU: `python examples/offline_engine.py --device cpu`.

One engine answers a batch, streams one answer, and returns several samples of a prompt. Prompts
that share a prefix share its KV: the second call computes only what is new.
"""

from __future__ import annotations

import argparse

from pie_driver_sglang import Engine

INSTRUCTIONS = "You are an atlas. Complete each sentence about a country with one word, and stop.\n"
PROMPTS = [f"{INSTRUCTIONS}The capital of {country} is" for country in ("France", "Italy")]


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a folder, a repository or smollm2")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    options = parser.parse_args()

    with Engine(model_path=options.model, device=options.device) as engine:
        greedy = {"temperature": 0, "max_new_tokens": 16}
        for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, greedy), strict=True):
            print(f"{prompt.splitlines()[-1]!r} -> {answer['text']!r}")

        shown = ""
        for answer in engine.generate(PROMPTS[0], greedy, stream=True):
            print(answer["text"][len(shown) :], end="", flush=True)
            shown = answer["text"]
        cached = answer["meta_info"]["cached_tokens"]
        print(f"\n{cached} tokens of the prompt were in the cache")

        warm = {"temperature": 1.0, "max_new_tokens": 8, "n": 3}
        for number, sample in enumerate(engine.generate(PROMPTS[1], warm), 1):
            print(f"sample {number}: {sample['text']!r}")


if __name__ == "__main__":
    main()
