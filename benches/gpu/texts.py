"""Texts for models without a tokenizer of their own: as many tokens as asked, of a real tokenizer.

The tokenizer is the embedded model's, with words added until every token that a model of the
Qwen3 family can say has a text, which is this one token again. Decoding costs what it costs with
the model's own, and so does splitting texts; merging bytes to tokens costs less.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket"


def make_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Writes a tokenizer of so many tokens to `folder` and returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(POCKET / "tokenizer_config.json", folder)
    description: dict[str, Any] = json.loads((POCKET / "tokenizer.json").read_text())
    words: dict[str, int] = description["model"]["vocab"]
    first = max(*words.values(), *(token["id"] for token in description["added_tokens"])) + 1
    words.update({_word(number): number for number in range(first, vocabulary)})
    # A word that is there is taken whole; no merges lead to the new ones.
    description["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return folder


def _word(number: int) -> str:
    """A word of its own for a token, of letters alone: digits are tokens by themselves."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    # The letter in front stands for a space before the word.
    return f"Ġxq{letters}"


def make_texts(lengths: Iterable[int], seed: int) -> list[str]:
    """Texts of so many tokens each: random words that are one token."""
    words: dict[str, int] = json.loads((POCKET / "tokenizer.json").read_text())["model"]["vocab"]
    single = sorted(
        word.removeprefix("Ġ")
        for word in words
        if word.startswith("Ġ") and word[1:].isascii() and word[1:].isalpha()
    )
    draw = random.Random(seed)
    return ["".join(f" {word}" for word in draw.choices(single, k=count)) for count in lengths]
