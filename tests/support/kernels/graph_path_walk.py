"""A random walk of contexts through a driver: starts, ends, forks, moved pages, drafts.

Each step is sent three times: alone, which the graph path takes; with a probe for each token, so
that a decode runs as the graph path's graph, but is sampled in the Python path; and with a prompt
in the same batch, which makes it a pass of SGLang's. The last one's logits say which tokens a
rounding error may exchange.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from pie_driver_sglang._core import Client, Request, Sampler

MOST_CONTEXTS = 12
LONGEST = 200


@dataclass
class _Context:
    number: int
    tokens: list[int]
    stored: int = 0
    """Tokens whose KV is there."""
    pages: list[int] = field(default_factory=list)


class Difference(NamedTuple):
    """A token on which the graph path disagrees with an eager pass."""

    step: int
    token: int
    eager: int
    gap: float
    """Between the two logits, as the eager pass has them."""
    best: float
    """The larger of the two."""


class Walk:
    """Drives a driver; an eager pass's tokens are taken."""

    def __init__(self, client: Client, pages: int, page_size: int, vocab: int, seed: int) -> None:
        """Starts without contexts, with `pages` free pages."""
        self._client = client
        self._page_size = page_size
        self._vocab = vocab
        self._random = random.Random(seed)
        self._free = list(range(pages))
        self._prompt = Request([1, 2], [0, 1], [self._free.pop()], 2, [])
        self._contexts: list[_Context] = []
        self._numbers = 0
        self.differences: list[Difference] = []
        self.compared = 0

    def run(self, steps: int) -> None:
        """Takes steps and compares the paths."""
        for step in range(steps):
            self._mutate()
            self._step(step)

    def _mutate(self) -> None:
        draw = self._random.random()
        if not self._contexts or (draw < 0.15 and len(self._contexts) < MOST_CONTEXTS):
            self._numbers += 1
            prompt = self._tokens(self._random.choice([1, 3, 8, 17, 40]))
            self._contexts.append(_Context(self._numbers, prompt))
        elif draw < 0.25 and len(self._contexts) < MOST_CONTEXTS:
            self._fork(self._random.choice(self._contexts))
        elif draw < 0.35:
            self._move_page(self._random.choice(self._contexts))
        self._random.shuffle(self._contexts)
        for context in [c for c in self._contexts if len(c.tokens) > LONGEST]:
            self._leave(context)
        if draw > 0.95 and len(self._contexts) > 1:
            self._leave(self._contexts[0])

    def _leave(self, context: _Context) -> None:
        self._contexts.remove(context)
        used = {page for other in self._contexts for page in other.pages}
        self._free += [page for page in dict.fromkeys(context.pages) if page not in used]
        self._random.shuffle(self._free)

    def _fork(self, parent: _Context) -> None:
        """A child that shares full pages and copies the last one."""
        self._numbers += 1
        full = parent.stored // self._page_size
        child = _Context(self._numbers, list(parent.tokens), parent.stored, parent.pages[:full])
        for page in parent.pages[full:]:
            child.pages.append(self._copy(page))
        self._contexts.append(child)

    def _move_page(self, context: _Context) -> None:
        owners = [c for c in self._contexts if set(c.pages) & set(context.pages)]
        if context.pages and owners == [context]:
            index = self._random.randrange(len(context.pages))
            old = context.pages[index]
            context.pages[index] = self._copy(old)
            self._free.append(old)

    def _copy(self, page: int) -> int:
        target = self._free.pop()
        if self._client.copy("D2D", [page], [target]) != 0:
            raise RuntimeError(f"copying page {page} to {target} failed")
        return target

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def _step(self, step: int) -> None:
        batch = [c for c in self._contexts if self._random.random() < 0.8] or self._contexts[:1]
        counts = [0, 0, 0, 1, 3]
        if self._random.random() < 0.3:
            batch = [c for c in batch if c.stored == len(c.tokens) - 1] or batch
            counts = [0]
        drafts = [self._tokens(self._random.choice(counts)) for _ in batch]
        for context, guesses in zip(batch, drafts, strict=True):
            end = len(context.tokens) + len(guesses)
            while len(context.pages) * self._page_size < end:
                context.pages.append(self._free.pop())
        pairs = list(zip(batch, drafts, strict=True))
        probes = [self._request(*pair, probe=True) for pair in pairs]
        frames = {
            "graph": [self._request(*pair, probe=False) for pair in pairs],
            "probed": probes,
            "eager": [*probes, self._prompt],
        }
        # Each stores the rows anew, and what follows reads those of the last.
        order = self._random.sample(list(frames), k=len(frames))
        replies = {path: self._client.forward(frames[path]) for path in order}
        eager = replies.pop("eager")
        for number, context in enumerate(batch):
            # The probe is of the last input's row, whose token comes first.
            wanted, (values, *_) = eager.tokens[number][0], eager.logits[number]
            for reply in replies.values():
                self.compared += 1
                token = reply.tokens[number][0]
                if token != wanted:
                    gap, best = values[wanted] - values[token], values[wanted]
                    self.differences.append(Difference(step, token, wanted, gap, best))
            context.stored = len(context.tokens)
            context.tokens.append(wanted)

    def _request(self, context: _Context, drafts: list[int], *, probe: bool) -> Request:
        end = len(context.tokens)
        start = min(context.stored, end - 1)
        pages = context.pages[: -(-(end + len(drafts)) // self._page_size)]
        row = end - start - 1
        slots = [(row, Sampler.greedy())]
        if probe:
            slots.append((row, Sampler.raw_logits()))
        return Request(
            context.tokens[start:],
            list(range(start, end)),
            pages,
            (end - 1) % self._page_size + 1,
            slots,
            context_id=context.number,
            drafts=drafts,
        )
