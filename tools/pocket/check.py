"""Check the exported folder: its size, that it loads offline, and its logits."""

import argparse
from pathlib import Path

import torch
from network import Pocket, Shape
from sample import PROMPTS, Sampler
from vocabulary import ADDED_TOKENS, VOCAB_SIZE

MAX_BYTES = 12_000_000
TOLERANCE = 1e-4
MODULES = ("socket", "tkinter", "logging")


def main() -> None:
    """Run every check; the first that fails raises `AssertionError`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/pocket"))
    folder: Path = parser.parse_args().model
    check_size(folder)
    sampler = Sampler(folder)
    check_tokenizer(sampler)
    check_logits(sampler)
    check_context(sampler)


def check_size(folder: Path) -> None:
    """Compare the folder with the limit for what the repository carries."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"size: {size:,} bytes")
    assert size <= MAX_BYTES


def check_tokenizer(sampler: Sampler) -> None:
    """Round-trip text, and look up every added token."""
    tokenizer = sampler.tokenizer
    text = "def f(x):\n\treturn 'é 日本 \U0001f40d' + x  # e\u0301 100\r\n\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert [tokenizer.encode(token) for token in ADDED_TOKENS] == [
        [VOCAB_SIZE - len(ADDED_TOKENS) + index] for index in range(len(ADDED_TOKENS))
    ]
    turn = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    print("tokenizer: round trip, added tokens and template are right")


@torch.no_grad()
def check_logits(sampler: Sampler) -> None:
    """Compare the exported model with the network it was trained as, over the whole context."""
    config = sampler.model.config
    ours = Pocket(Shape(rope_theta=config.rope_parameters["rope_theta"])).eval()
    weights = {k: w for k, w in sampler.model.state_dict().items() if k != "lm_head.weight"}
    ours.load_state_dict(weights)
    tokens = torch.randint(
        VOCAB_SIZE, (1, config.max_position_embeddings), generator=torch.Generator().manual_seed(0)
    )
    theirs, mine = sampler.model(tokens).logits, ours(tokens)
    difference = (theirs - mine).abs().max().item()
    agree = (theirs.argmax(-1) == mine.argmax(-1)).float().mean().item()
    print(f"logits: largest difference {difference:.1e} of {mine.abs().max().item():.1f}")
    print(f"logits: the likeliest token agrees at {agree:.2%} of {tokens.numel()} positions")
    assert difference < TOLERANCE


def check_context(sampler: Sampler) -> None:
    """See that greedy completions depend on the prompt, near and far; count their distinct lines.

    Loops are counted, not refused: greedy decoding of a model of this size runs into them.
    """
    completions = [sampler.complete(prompt, 64, 0.0) for prompt in PROMPTS]
    assert len(set(completions)) == len(PROMPTS)
    far = [sampler.complete(f"import {name}\n\n\ndef close(", 64, 0.0) for name in MODULES]
    assert len(set(far)) > 1
    for completion in completions:
        lines = [line for line in completion.splitlines() if line.strip()]
        print(f"greedy: {len(set(lines))} of {len(lines)} lines are distinct")


if __name__ == "__main__":
    main()
