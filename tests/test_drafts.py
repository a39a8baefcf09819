"""Drafts that the driver returns: they change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pie_driver_sglang._core import Client, Request
from support.models import lora_adapters
from support.models.reference import Context, Pages, random_tokens
from support.process import drivers

pytestmark = pytest.mark.engine

PAGE = 4
NUM_DRAFTS = 3
MOST_STEPS = 2000
"""Until what does not pay was tried."""
FIRST_REPORT = 256
"""Steps with requests that ask for drafts; afterwards the log says what became of them."""
OPTIONS: dict[str, object] = {
    "page_size": PAGE,
    "cpu_mem_budget_in_gb": 1,
    "cuda_graph_max_bs": 16,
    "spec_ngram_enabled": True,
    "spec_ngram_num_drafts": NUM_DRAFTS,
}


class DriverHarness(NamedTuple):
    """A driver that drafts."""

    driver: drivers.Driver
    client: Client
    pages: Pages
    host: Pages
    vocab: int

    def prompt(self, length: int, *seed: object) -> list[int]:
        return random_tokens(self.vocab, length, *seed)

    def loop(self, *seed: object) -> list[int]:
        """A prompt that says the same four times, so that what follows is known."""
        return self.prompt(7, *seed) * 4

    def within(self, sources: list[int], targets: list[int]) -> None:
        assert self.client.copy("D2D", sources, targets) == 0

    def through_the_host(self, sources: list[int], targets: list[int]) -> None:
        slots = [self.host.take() for _ in sources]
        assert self.client.copy("D2H", sources, slots) == 0
        assert self.client.copy("H2D", slots, targets) == 0
        self.host.give_back(slots)


@pytest.fixture(scope="module")
def harness(
    llama_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriverHarness]:
    folder = tmp_path_factory.mktemp("drafts")
    config = drivers.write_config(folder, llama_snapshot, options=OPTIONS)
    with drivers.fork(config) as driver:
        assert driver.caps["system_speculation_supported"]
        assert driver.caps["enable_system_speculation"]
        pages = Pages(driver.caps["total_pages"], PAGE)
        host = Pages(driver.caps["swap_pool_size"], PAGE)
        yield DriverHarness(driver, driver.client(), pages, host, driver.caps["vocab_size"])
    assert driver.stop() == 0


class Story:
    """A context that is decoded with drafts, or without."""

    def __init__(
        self, harness: DriverHarness, context: Context, inputs: list[int], *, wants: bool
    ) -> None:
        self.bench, self.context, self.inputs, self.wants = harness, context, inputs, wants
        self.drafts: list[int] = []
        self.produced: list[int] = []
        self.drafted = self.accepted = 0

    def request(self) -> Request:
        """The next step: what is not stored yet, and the drafts of the last answer."""
        return self.context.append(self.inputs, drafts=self.drafts, wants_drafts=self.wants)

    def take(self, tokens: list[int], drafts: list[int], positions: list[int]) -> None:
        """An answer."""
        rejected = len(self.drafts) - (len(tokens) - 1)
        self.drafted += len(self.drafts)
        self.accepted += len(tokens) - 1
        self.context.rewind(len(self.context.tokens) - rejected)
        assert 1 <= len(tokens) <= len(self.drafts) + 1
        self.produced += tokens
        self.inputs, self.drafts = tokens[-1:], drafts
        assert len(drafts) <= (NUM_DRAFTS if self.wants else 0)
        first = self.context.positions[-1] + 2
        assert positions == list(range(first, first + len(drafts)))


def run(harness: DriverHarness, stories: list[Story], steps: int) -> None:
    """Decodes all stories together."""
    for _ in range(steps):
        reply = harness.client.forward([story.request() for story in stories])
        assert reply.status is None
        assert not reply.aborted
        nothing: list[list[int]] = [[]] * len(stories)
        drafts = zip(
            stories,
            reply.tokens,
            reply.drafts or nothing,
            reply.draft_positions or nothing,
            strict=True,
        )
        for story, tokens, own, positions in drafts:
            story.take(tokens, own, positions)


def only(vocab: int, token: int) -> list[int]:
    """A mask that leaves one token."""
    return [token, 1, vocab - token - 1]


def drafts_behind(
    harness: DriverHarness, context: Context, inputs: list[int], token: int
) -> list[int]:
    """What is drafted after `token`, which the step is made to choose.

    What does not pay is drafted now and then, so it may take a while.
    """
    length = len(context.tokens)
    for _ in range(MOST_STEPS):
        mask = only(harness.vocab, token)
        request = context.append(inputs, logit_mask=mask, wants_drafts=True)
        context.rewind(length)
        reply = harness.client.forward([request])
        assert reply.tokens == [[token]]
        if reply.drafts and reply.drafts[0]:
            return reply.drafts[0]
    raise AssertionError("no drafts")


def test_greedy_tokens_are_those_without_drafts(harness: DriverHarness) -> None:
    plain, drafted = (
        [
            Story(harness, Context(harness.pages), prompt, wants=wants)
            for prompt in ([*harness.prompt(9, "a")], harness.loop("b"), harness.prompt(30, "c"))
        ]
        for wants in (False, True)
    )
    run(harness, plain, 160)
    run(harness, drafted, 160)
    for a, b in zip(plain, drafted, strict=True):
        assert len(b.produced) >= len(a.produced)
        assert b.produced[: len(a.produced)] == a.produced
        assert a.drafted == 0
    assert sum(story.drafted for story in drafted) > 0
    for story in (*plain, *drafted):
        story.context.release()


def test_beside_a_request_without_logprobs(harness: DriverHarness) -> None:
    contexts = [Context(harness.pages) for _ in range(2)]
    asks, does_not = (
        Story(harness, context, harness.loop("beside"), wants=wants)
        for context, wants in zip(contexts, (True, False), strict=True)
    )
    # Where a wider step seems dear, on a busy machine, drafts are tried now and then only.
    for _ in range(6):
        run(harness, [asks, does_not], 60)
        if asks.drafted:
            break
    length = min(len(asks.produced), len(does_not.produced))
    assert asks.produced[:length] == does_not.produced[:length]
    assert asks.drafted > 0
    for context in contexts:
        context.release()


def test_contexts_of_an_adapter_get_drafts(
    llama_snapshot: Path, models_folder: Path, tmp_path: Path
) -> None:
    """What their steps cost is learnt apart from what others do."""
    options = {**OPTIONS, "enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 2}
    config = drivers.write_config(tmp_path, llama_snapshot, options=options)
    name = next(iter(lora_adapters.CONFIGS))
    made = lora_adapters.make("llama", name, models_folder)
    with drivers.fork(config) as driver:
        pages, host = (Pages(driver.caps[k], PAGE) for k in ("total_pages", "swap_pool_size"))
        harness = DriverHarness(driver, driver.client(), pages, host, driver.caps["vocab_size"])
        assert harness.client.adapter("Load", 1, str(made.adapter)) == 0
        bound = Context(pages, adapter_id=1)
        story = Story(harness, bound, harness.loop("bound"), wants=True)
        for _ in range(6):
            run(harness, [story], 60)
            if story.drafted:
                break
        assert story.drafted > 0
    assert driver.stop() == 0


def test_nobody_gets_none(harness: DriverHarness) -> None:
    """The same request gets drafts when it says whose it is."""
    cycle = list(dict.fromkeys(harness.prompt(11, "nobody")))
    context, somebody = Context(harness.pages), Context(harness.pages)
    assert drafts_behind(harness, somebody, cycle * 3, cycle[0])
    request = context.append(
        cycle * 3, logit_mask=only(harness.vocab, cycle[0]), context_id=0, wants_drafts=True
    )
    for _ in range(MOST_STEPS // 4):
        reply = harness.client.forward([request])
        assert reply.tokens == [[cycle[0]]]
        assert not any(reply.drafts)
    # It still pays to draft here.
    somebody.rewind(0)
    assert drafts_behind(harness, somebody, cycle * 3, cycle[0])
    context.release()
    somebody.release()


@pytest.mark.parametrize("change", ["fork", "move", "swap"])
def test_pages_bring_their_text(harness: DriverHarness, change: str) -> None:
    """A context drafts from tokens that another one stored, wherever they were copied to."""
    cycle = list(dict.fromkeys(harness.prompt(11, "cycle", change)))
    parent = Context(harness.pages)
    text = cycle * 3
    harness.client.forward([parent.append(text[:-1])])
    child = parent.fork(harness.within)
    if change == "move":
        child.move(harness.within)
    elif change == "swap":
        child.move(harness.through_the_host)
    # The parent's pages say something else before the child is heard.
    parent.rewind(0)
    harness.client.forward([parent.append(harness.prompt(len(text), "other", change))])
    drafts = drafts_behind(harness, child, text[-1:], cycle[0])
    assert drafts == cycle[1 : 1 + len(drafts)]
    parent.release()
    child.release()


def test_two_tokens_continue_nothing(harness: DriverHarness) -> None:
    context = Context(harness.pages)
    loop = harness.loop("two")
    harness.client.forward([context.append(loop)])
    length = len(context.tokens)
    for _ in range(MOST_STEPS // 4):
        two = context.append(loop[:1], rows=[0, 0], wants_drafts=True)
        context.rewind(length)
        reply = harness.client.forward([two])
        assert len(reply.tokens[0]) == 2
        assert not any(reply.drafts)
    context.release()


def test_the_log_has_draft_acceptance(harness: DriverHarness) -> None:
    context = Context(harness.pages)
    run(harness, [Story(harness, context, harness.loop("log"), wants=True)], FIRST_REPORT)
    context.release()
    harness.driver.logged(" drafts accepted (")
