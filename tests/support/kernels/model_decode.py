"""Decodes of random contexts by a loaded model, and their logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler

LENGTHS = (1, 16, 17, 45, 100)
STEPS = 2
DRAWN = 3
"""Tokens of a context after its prompt. Others would make others of quantized rows ties."""
TOLERANCE = 1e-4


class Contexts:
    """Contexts of random tokens, in pages of their own, that are decoded together; or one alone."""

    def __init__(
        self, first_page: int, page_size: int, vocab: int, *, only: int | None = None
    ) -> None:
        draw = random.Random(11)
        self._numbers = range(len(LENGTHS)) if only is None else [only]
        self._tokens = [[draw.randrange(vocab) for _ in range(n + DRAWN)] for n in LENGTHS]
        self._page_size = page_size
        pages = list(range(first_page, first_page + 64))
        draw.shuffle(pages)
        self._pages = [pages[8 * number : 8 * number + 8] for number in range(len(LENGTHS))]

    def frame(self, step: int) -> bytes:
        """The prompts (-1), or the decode of this number."""
        return _core.encode_forward([self._request(c, step) for c in self._numbers])

    def _request(self, context: int, step: int) -> Request:
        length = LENGTHS[context]
        start, end = (0, length) if step < 0 else (length + step, length + step + 1)
        used = self._pages[context][: -(-end // self._page_size)]
        return Request(
            self._tokens[context][start:end],
            list(range(start, end)),
            used,
            (end - 1) % self._page_size + 1,
            [(end - start - 1, Sampler.greedy())],
        )


def decode(
    server: Any,
    engine: Any,
    contexts: Contexts,
    patch: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """``[steps, contexts, vocabulary]`` logits, decodes with some patch."""
    import torch

    found = []
    for step in range(-1, STEPS):
        batch = server.warm_up(contexts.frame(step))
        while (staged := batch.stage()) is not None:
            assert staged.decode == (step >= 0)
            with patch() if staged.decode else nullcontext():
                engine.forward(staged)
            with torch.inference_mode():
                logits = engine.logits(torch.arange(staged.tokens))
            while (group := batch.stage_slots()) is not None:
                batch.put_outputs(engine.sample(group).tokens.numpy())
        batch.commit()
        if step >= 0:
            found.append(logits)
    return torch.stack(found)
