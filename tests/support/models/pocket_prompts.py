"""Prompts of different lengths for the model in the repository, and greedy sampling parameters."""

from __future__ import annotations

import random

from support.models.tiny_models import POCKET

TOKENS = 24
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
WORDS = (POCKET / "README.md").read_text().split()


def prompts(count: int, seed: int) -> list[str]:
    """Texts of different lengths; some share a prefix."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        first = draw.choice([0, 40, draw.randrange(len(WORDS) - 60)])
        found.append(" ".join(WORDS[first : first + draw.randint(2, 60)]))
    return found
