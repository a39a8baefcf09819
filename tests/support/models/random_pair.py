"""Two checkpoints of one small model, with different random weights, and what both generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from support.models.tiny_models import COMMON, add_tokenizer, randomize

PROMPT: Final = [5, 9, 77, 3, 41, 8, 120, 64]
TOKENS: Final = 24


class Checkpoint(NamedTuple):
    """A checkpoint.

    Attributes:
        folder: Its files.
        model: The same in transformers.
        tokens: What it generates from `PROMPT`, greedily.
    """

    folder: Path
    model: Any
    tokens: list[int]


def checkpoint(folder: Path, seed: int, **settings: Any) -> Checkpoint:
    """Makes a Llama with the weights of a seed in `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**{**COMMON, **settings}))
        randomize(model)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return Checkpoint(folder, model, greedy_tokens_of(model))


def greedy_tokens_of(model: Any, prompt: list[int] | None = None) -> list[int]:
    """The tokens after a prompt."""
    import torch

    ids = torch.tensor([prompt or PROMPT])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens
