"""Page copies of a running driver: swapped contexts continue with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Sampler
from support.models.reference import Context, Pages, random_tokens
from support.models.tiny_models import VOCABULARY
from support.process import drivers

pytestmark = pytest.mark.engine

PAGE = 16
BUDGET = 1 << 30
OK, MALFORMED, OUT_OF_RANGE = 0, 2, 3
PAGE_BYTES = {"float32": 2 * 2 * PAGE * 2 * 16 * 4, "bfloat16": 2 * 2 * PAGE * 2 * 16 * 2}
"""The tiny Llama: layers, keys and values, tokens, heads, their width, bytes."""


class DriverHarness:
    """A driver with a host pool, and the runtime's allocators."""

    def __init__(self, driver: drivers.Driver) -> None:
        self.driver = driver
        self.client = driver.client()
        self.device = Pages(driver.caps["total_pages"], PAGE)
        self.host = Pages(driver.caps["swap_pool_size"], PAGE)

    def copy(self, direction: str, sources: list[int], targets: list[int]) -> None:
        assert self.client.copy(direction, sources, targets) == OK

    def started(self, tokens: list[int]) -> Context:
        """A context that stores `tokens`."""
        context = Context(self.device)
        assert len(self.client.forward([context.append(tokens)]).tokens[0]) == 1
        return context

    def logits(self, context: Context, token: int) -> list[float]:
        """Logits after one more token, bit for bit."""
        request = context.append([token], sampler=Sampler.raw_logits())
        ((row,),) = self.client.forward([request]).logits
        assert len(row) == VOCABULARY
        return row

    def greedy(self, context: Context, token: int, steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            ((token,),) = self.client.forward([context.append([token])]).tokens
            found.append(token)
        return found

    def store_page(self, page: int, tokens: list[int]) -> None:
        request = _core.Request(tokens, list(range(PAGE)), [page], PAGE)
        assert self.client.forward([request]).tokens == [[]]

    def page_logits(self, page: int, prompt: list[int]) -> list[float]:
        """Logits of a page's last token, which is stored again, over those that the page holds."""
        sampler = [(0, Sampler.raw_logits())]
        request = _core.Request(prompt[-1:], [PAGE - 1], [page], PAGE, sampler)
        ((row,),) = self.client.forward([request]).logits
        return row


@pytest.fixture(
    scope="module",
    params=[("float32", 1), ("bfloat16", 1), ("float32", 2)],
    ids=lambda param: f"{param[0]}-tp{param[1]}",
)
def driver(
    request: pytest.FixtureRequest, llama_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    dtype, ranks = request.param
    config = drivers.write_config(
        tmp_path_factory.mktemp("copies"),
        llama_snapshot,
        activation_dtype=dtype,
        options={"cpu_mem_budget_in_gb": 1, "page_size": PAGE},
        **drivers.spread(ranks),
    )
    with drivers.running(config) as driver:
        # Each rank has a part of the budget, and the same part of a page.
        assert driver.caps["swap_pool_size"] == BUDGET // PAGE_BYTES[dtype]
        yield driver


@pytest.fixture
def harness(driver: drivers.Driver) -> DriverHarness:
    return DriverHarness(driver)


def prompt(length: int, *seed: object) -> list[int]:
    return random_tokens(VOCABULARY, length, *seed)


def take(pages: Pages, count: int) -> list[int]:
    return [pages.take() for _ in range(count)]


def continues_alike(harness: DriverHarness, disturbed: Context, undisturbed: Context) -> None:
    """Both contexts hold the same tokens; what follows is the same to the last bit."""
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.pages != undisturbed.pages
    for token in prompt(3, "next"):
        assert harness.logits(disturbed, token) == harness.logits(undisturbed, token)
    assert harness.greedy(disturbed, 7, 20) == harness.greedy(undisturbed, 7, 20)


@pytest.mark.parametrize("length", [16, 70, 300])
@pytest.mark.parametrize("order", ["as allocated", "scattered"])
def test_a_swapped_context_continues(harness: DriverHarness, length: int, order: str) -> None:
    tokens = prompt(length, "swapped")
    undisturbed, context = harness.started(tokens), harness.started(tokens)
    slots = take(harness.host, len(context.pages))
    if order == "scattered":
        slots = random.Random(length).sample(range(200), len(slots))
    former = context.pages
    harness.copy("D2H", former, slots)
    harness.device.give_back(reversed(former))
    others = [harness.started(prompt(length, "over it", number)) for number in range(2)]
    assert set(former) <= {page for other in others for page in other.pages}
    context.pages = take(harness.device, len(former))
    assert not set(context.pages) & set(former)
    harness.copy("H2D", slots, context.pages)
    continues_alike(harness, context, undisturbed)


def test_two_contexts_alternate(harness: DriverHarness) -> None:
    """The slots of one are read while its neighbours are written."""
    first, second = prompt(50, "first"), prompt(50, "second")
    undisturbed = [harness.started(first), harness.started(second)]
    one, two = harness.started(first), harness.started(second)
    slots = take(harness.host, 8)
    harness.copy("D2H", one.pages, slots[::2])
    harness.copy("D2H", two.pages, slots[1::2])
    # Each comes back where the other was.
    one.pages, two.pages = two.pages, one.pages
    harness.copy("H2D", slots[::2], one.pages)
    harness.copy("H2D", slots[1::2], two.pages)
    continues_alike(harness, one, undisturbed[0])
    continues_alike(harness, two, undisturbed[1])


def test_a_fork_continues(harness: DriverHarness) -> None:
    tokens = prompt(70, "forked")
    undisturbed, parent = harness.started(tokens), harness.started(tokens)
    child = parent.fork(lambda sources, targets: harness.copy("D2D", sources, targets))
    assert child.pages[:-1] == parent.pages[:-1]
    harness.greedy(parent, 9, 5)
    continues_alike(harness, child, undisturbed)


def test_a_context_moves_within_the_host(harness: DriverHarness) -> None:
    tokens = prompt(70, "moved")
    undisturbed, context = harness.started(tokens), harness.started(tokens)
    other = harness.started(prompt(70, "other"))
    count = len(context.pages)
    first, second = take(harness.host, count), take(harness.host, count)
    harness.copy("D2H", context.pages, first)
    harness.copy("H2H", first, second)
    harness.copy("D2H", other.pages, first)
    context.pages = take(harness.device, count)
    harness.copy("H2D", second, context.pages)
    continues_alike(harness, context, undisturbed)


def test_lists_that_overlap_are_copied_pair_by_pair(harness: DriverHarness) -> None:
    """Random calls in every direction on a few pages, against lists of what the pages hold."""
    source = random.Random(11)
    limits = {"D": 6, "H": 5}
    prompts = [prompt(PAGE, "page", number) for number in range(limits["D"])]
    spare = limits["D"]
    expected: list[list[float]] = []
    for _ in range(12):
        held = {pool: [source.randrange(limits["D"]) for _ in range(limits[pool])] for pool in "DH"}
        for page, tokens in enumerate(prompts):
            harness.store_page(page, tokens)
        if not expected:
            expected = [harness.page_logits(page, tokens) for page, tokens in enumerate(prompts)]
            assert all(row != expected[0] for row in expected[1:])
        harness.copy("D2H", held["H"], list(range(limits["H"])))
        for page, number in enumerate(held["D"]):
            harness.store_page(page, prompts[number])
        for _ in range(4):
            direction = source.choice(["D2D", "D2H", "H2D", "H2H"])
            reads, writes = direction[0], direction[2]
            count = source.randrange(1, 6)
            sources = [source.randrange(limits[reads]) for _ in range(count)]
            targets = [source.randrange(limits[writes]) for _ in range(count)]
            harness.copy(direction, sources, targets)
            for one, other in zip(sources, targets, strict=True):
                held[writes][other] = held[reads][one]
        for page, number in enumerate(held["D"]):
            assert harness.page_logits(page, prompts[number]) == expected[number]
        for slot, number in enumerate(held["H"]):
            harness.copy("H2D", [slot], [spare])
            assert harness.page_logits(spare, prompts[number]) == expected[number]


@pytest.mark.parametrize("direction", ["D2D", "D2H", "H2D", "H2H"])
class TestBounds:
    """Ids are checked against the pool that they belong to."""

    def limits(self, harness: DriverHarness, direction: str) -> tuple[int, int]:
        limits = {
            "D": harness.driver.caps["total_pages"],
            "H": harness.driver.caps["swap_pool_size"],
        }
        assert limits["D"] < limits["H"]
        return limits[direction[0]], limits[direction[2]]

    def test_the_last_ones(self, harness: DriverHarness, direction: str) -> None:
        sources, targets = self.limits(harness, direction)
        assert harness.client.copy(direction, [sources - 1, 0], [targets - 1, 1]) == OK
        assert harness.client.copy(direction, [sources], [0]) == OUT_OF_RANGE
        assert harness.client.copy(direction, [0, 0], [0, targets]) == OUT_OF_RANGE
        assert harness.client.copy(direction, [2**32 - 1], [0]) == OUT_OF_RANGE

    def test_lists_of_unequal_lengths_are_malformed(
        self, harness: DriverHarness, direction: str
    ) -> None:
        assert harness.client.copy(direction, [], []) == OK
        assert harness.client.copy(direction, [0], []) == MALFORMED
        assert harness.client.copy(direction, [0, 1], [2, 3, 4]) == MALFORMED
        assert harness.client.health() == OK


def test_a_budget_that_the_machine_does_not_have(llama_snapshot: Path, tmp_path: Path) -> None:
    options = {"cpu_mem_budget_in_gb": 2**20}
    config = drivers.write_config(tmp_path, llama_snapshot, options=options)
    with pytest.raises(drivers.StartFailedError) as caught:
        drivers.fork(config)
    assert caught.value.returncode == 1
    last = caught.value.stderr.strip().splitlines()
    text = "\n".join(last[-3:])
    assert "`cpu_mem_budget_in_gb` is 1048576" in text
    assert "GiB of memory available" in text
    assert "at most" in text
    assert "loading" not in caught.value.stderr
