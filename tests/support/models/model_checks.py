"""The checks behind docs/supported-models.md, on a running driver.

The same checks serve the CPU in float32 (tests/test_models.py) and a GPU
(benches/gpu/models_check.py); only what counts as equal differs.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pie_driver_sglang._core import Client, Reply, Request, Sampler
from support.models.reference import Context, MaskedReference, Pages, Reference, random_tokens

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from support.process.drivers import Driver

CHUNK: Final = 32
"""The `chunked_prefill_size` that drivers under these checks are started with."""
SWAP_GIB: Final = 1
"""Their `cpu_mem_budget_in_gb`."""
YES: Final = "yes"
REFUSED: Final = "refused"
SUBJECTS: Final = ("runs", "masks", "drafts", "copies")

Equal = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], None]
"""Asserts that found and expected logits, ``[rows, vocabulary]`` each, are equal. The last are what
the reference computes in the type that is served, None where that is not known."""


class Served(NamedTuple):
    """A driver of a model, and the same model in transformers."""

    client: Client
    pages: Pages
    host: Pages
    states: Pages | None
    """Slots of recurrent state, of a model that has some."""
    reference: Reference
    rounded: Reference | None
    """The reference in the type that is served, if that rounds more."""
    masked: Callable[[], MaskedReference]
    equal: Equal
    gap: float
    """Distance of the two best logits from which on the best one must be found."""

    def prompt(self, length: int, *seed: Any) -> list[int]:
        """Reproducible tokens."""
        return random_tokens(self.reference.vocab_size, length, *seed)

    def context(self) -> Context:
        """An empty context."""
        return Context(self.pages, self.states.take() if self.states else None)

    def check_rows(self, context: Context, rows: torch.Tensor) -> None:
        """Logits of the context's last rows against transformers."""
        expected, rounded = (
            reference.logits(context.tokens)[-len(rows) :] if reference else None
            for reference in (self.reference, self.rounded)
        )
        self.equal(rows, expected, rounded)


def served_on_cpu(driver: Driver, snapshot: Path, tolerance: float) -> Served:
    """A driver of a model in float32, whose logits differ from transformers' by the tolerance."""

    def nearly_equal(found: torch.Tensor, expected: torch.Tensor, _: object) -> None:
        error = float((found - expected).abs().max())
        assert error <= tolerance, f"logits off by {error}"

    page_size = driver.caps["kv_page_size"]
    return Served(
        client=driver.client(),
        pages=Pages(driver.caps["total_pages"], page_size),
        host=Pages(driver.caps["swap_pool_size"], page_size),
        states=None,
        reference=Reference(snapshot),
        rounded=None,
        # torch has no experts in float64.
        masked=functools.partial(MaskedReference, snapshot, "float32"),
        equal=nearly_equal,
        gap=1e-3,
    )


def find_out(served: Served) -> dict[str, str]:
    """Each subject's cell. What neither works nor is refused says so."""
    checks = {"runs": _runs, "masks": _masks, "drafts": _drafts, "copies": _copies}
    return {name: _cell(check, served) for name, check in checks.items()}


def _cell(check: Callable[[Served], str], served: Served) -> str:
    try:
        return check(served)
    except AssertionError as error:
        return f"WRONG: {str(error).splitlines()[0]}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"


def _runs(served: Served) -> str:
    """Prefill in several passes, appending, decode among prefills, decode, by all logits."""
    a, b, c = (served.context() for _ in range(3))
    frames = [[(a, 20)], [(b, 3 * CHUNK + 7)], [(b, 1), (c, CHUNK + 1), (a, 5)]]
    frames += [[(a, 1), (b, 1), (c, 1)]] * 3
    for number, frame in enumerate(frames):
        parts = [(context, served.prompt(count, number)) for context, count in frame]
        requests = [_scored(context, tokens) for context, tokens in parts]
        reply = served.client.forward(requests)
        for (context, _), rows in zip(parts, _logits(reply), strict=True):
            served.check_rows(context, rows)
    for context in (a, b, c):
        context.release()
    return YES


def _masks(served: Served) -> str:
    """Rows that skip some of what was stored before, and some of their own request."""
    context = served.context()
    reply = served.client.forward([_scored(context, served.prompt(CHUNK, "stored"))])
    served.check_rows(context, *_logits(reply))
    choose = random.Random(1).random
    count, start = 20, CHUNK
    rows = [[choose() < 0.6 for _ in range(start + row)] + [True] for row in range(count)]
    tokens = served.prompt(count, "masked")
    reply = served.client.forward([_scored(context, tokens, masks=[_runs_of(row) for row in rows])])
    if not any(reply.logits):
        return REFUSED
    causal = [[True] * (row + 1) for row in range(start)]
    expected = served.masked().logits(context.tokens, context.positions, causal + rows)
    served.equal(*_logits(reply), expected[start:], None)
    context.release()
    return YES


def _drafts(served: Served) -> str:
    """Verified drafts give the tokens of plain decoding: all right, none, and some."""
    prompt, continuation = _decided(served, CHUNK - 3, 8)
    context = served.context()
    [produced] = served.client.forward([context.append(prompt)]).tokens
    assert produced == continuation[:1], f"{produced} instead of {continuation[:1]}"
    for count, right in ((2, 2), (2, 0), (2, 1)):
        known = len(produced)
        drafts = continuation[known : known + count]
        if right < count:
            drafts[right] = (drafts[right] + 1) % served.reference.vocab_size
        [found] = served.client.forward([context.append(produced[-1:], drafts=drafts)]).tokens
        if not found:
            return REFUSED
        expected = continuation[known : known + right + 1]
        assert found == expected, f"{found} instead of {expected}"
        context.rewind(len(context.tokens) - (count - right))
        produced += found
    context.release()
    return YES


def _copies(served: Served) -> str:
    """Copied and swapped pages serve as the former ones did, which are overwritten meanwhile."""
    context, other = served.context(), served.context()
    served.client.forward([context.append(served.prompt(CHUNK + 9, "copied"))])

    def move(copy: Callable[[list[int], list[int]], None]) -> None:
        former = list(context.pages)
        context.move(copy)
        if served.states and context.state is not None:
            other.state, context.state = context.state, served.states.take()
            states = ([other.state], [context.state])
            assert served.client.copy("D2D", *states, states=True) == 0, "a state is not copied"
        overwritten = served.prompt(len(former) * served.pages.size, "over", *former)
        other.pages, other.tokens, other.positions = former, [], []
        served.client.forward([other.append(overwritten)])
        rows = _logits(served.client.forward([_scored(context, served.prompt(2, *former))]))
        served.check_rows(context, *rows)

    def within(sources: list[int], targets: list[int]) -> None:
        assert served.client.copy("D2D", sources, targets) == 0, "the copy is refused"

    def through_the_host(sources: list[int], targets: list[int]) -> None:
        slots = [served.host.take() for _ in sources]
        assert served.client.copy("D2H", sources, slots) == 0, "swapping out is refused"
        assert served.client.copy("H2D", slots, targets) == 0, "swapping in is refused"
        served.host.give_back(slots)

    for copy in (within, through_the_host):
        move(copy)
    context.release()
    return YES


def _decided(served: Served, length: int, steps: int) -> tuple[list[int], list[int]]:
    for attempt in itertools.count():
        assert attempt < 200, "the model is undecided too often"
        prompt = served.prompt(length, "decided", attempt)
        continuation, gap = served.reference.greedy(prompt, steps)
        if gap > served.gap:
            return prompt, continuation
    raise AssertionError


def _scored(context: Context, tokens: Sequence[int], **how: Any) -> Request:
    """Appends tokens and asks for the logits of all of them."""
    return context.append(tokens, rows=range(len(tokens)), sampler=Sampler.raw_logits(), **how)


def _logits(reply: Reply) -> Iterator[torch.Tensor]:
    """Per request ``[rows, vocabulary]``."""
    import torch

    assert reply.status is None, f"status {reply.status}"
    assert not reply.aborted, "aborted"
    for rows in reply.logits:
        assert rows, "refused"
        yield torch.tensor(rows)


def _runs_of(bits: Sequence[bool]) -> list[int]:
    """Run lengths, false first."""
    lengths = [len(list(group)) for _, group in itertools.groupby(bits)]
    return [0, *lengths] if bits[0] else lengths
