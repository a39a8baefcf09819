"""The driver's greedy tokens and logits against transformers, in float32."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request
from support.models import tiny_models
from support.models.reference import GAP, Context, Pages, Reference, random_tokens
from support.process import drivers, engine_process

pytestmark = pytest.mark.engine

LENGTHS = (1, 15, 16, 17, 63, 130)
CHUNK = 32
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A driver of the matrix."""

    model: str
    page_size: int
    chunk: int | None
    ranks: int = 1

    def __str__(self) -> str:
        chunk = f"-chunk{self.chunk}" if self.chunk else ""
        ranks = f"-tp{self.ranks}" if self.ranks > 1 else ""
        return f"{self.model}-page{self.page_size}{chunk}{ranks}"

    @property
    def options(self) -> dict[str, Any]:
        """`[driver.options]`."""
        chunk = {"chunked_prefill_size": self.chunk} if self.chunk else {}
        return {"page_size": self.page_size, **chunk}


SIZES = ((16, None), (16, None, 2))
MORE_SIZES = ((1, None), (64, None), (16, CHUNK))
ALIKE = ("llama-tied", "qwen2", "mistral")
"""Their layers attend as Llama's do, which covers pages and chunks of other sizes for them.
`test_logits` covers small ones for each model."""
CASES = [
    Case(model, *sizes)
    for model in tiny_models.model_names()
    for sizes in (SIZES if model in ALIKE else SIZES + MORE_SIZES)
]


class DriverHarness:
    """A driver, the reference for its model, and the runtime's side of the conversation."""

    def __init__(self, driver: drivers.Driver, reference: Reference) -> None:
        self.driver = driver
        self.client = driver.client()
        self.reference = reference
        self.page_size: int = driver.caps["kv_page_size"]
        self.allocator = Pages(driver.caps["total_pages"], self.page_size)
        self.contexts: list[Context] = []

    def context(self) -> Context:
        """An empty context; its pages are given back at the end of the test."""
        return self.keep(Context(self.allocator))

    def keep(self, context: Context) -> Context:
        """Gives the pages of a forked context back at the end of the test."""
        self.contexts.append(context)
        return context

    def prompt(self, length: int, *seed: Any) -> list[int]:
        """Reproducible tokens."""
        return random_tokens(self.reference.vocab_size, length, *seed)

    def send(self, *requests: Request) -> list[list[int]]:
        """The tokens of each request of one frame."""
        reply = self.client.forward(list(requests))
        assert reply.status is None
        assert not reply.aborted
        assert len(reply.tokens) == len(requests)
        return reply.tokens

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copies pages within the pool."""
        assert self.client.copy("D2D", sources, targets) == 0

    def extend(self, context: Context, tokens: Sequence[int], **how: Any) -> int:
        """Appends tokens in a frame of their own and returns the one sampled from the last row."""
        [[token]] = self.send(context.append(tokens, **how))
        return token

    def decode(self, contexts: Sequence[Context], tokens: list[int], steps: int) -> None:
        """Decodes contexts together and checks everything sampled.

        Args:
            contexts: All tokens but the last one are stored.
            tokens: The last token of each.
            steps: How many more tokens to sample.
        """
        found: list[list[int]] = [[] for _ in contexts]
        for _ in range(steps):
            pairs = zip(contexts, tokens, strict=True)
            replies = self.send(*(context.append([token]) for context, token in pairs))
            tokens = [reply[0] for reply in replies]
            for tail, token in zip(found, tokens, strict=True):
                tail.append(token)
        for context, tail in zip(contexts, found, strict=True):
            self.reference.check(context.tokens, tail, positions=context.positions)

    def generate(self, context: Context, prompt: Sequence[int], steps: int = 4) -> None:
        """Prefills in one frame, decodes alone and checks everything sampled."""
        token = self.extend(context, prompt)
        self.reference.check(context.tokens, [token], positions=context.positions)
        self.decode([context], [token], steps)

    def decided_prompt(self, length: int, steps: int, *seed: Any) -> tuple[list[int], list[int]]:
        """A prompt whose greedy continuation leaves no choice, and that continuation."""
        for attempt in range(20):
            prompt = self.prompt(length, *seed, attempt)
            continuation, gap = self.reference.greedy(prompt, steps)
            if gap > GAP:
                return prompt, continuation
        raise AssertionError("the model is undecided too often")


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    """Models of transformers, loaded on first use."""
    drivers.start_fork_server()
    return {}


def load_reference(references: dict[str, Reference], name: str, snapshot: Path) -> Reference:
    if name not in references:
        references[name] = Reference(snapshot)
    return references[name]


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(
    request: pytest.FixtureRequest,
    references: dict[str, Reference],
    models_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[drivers.Driver, Reference]]:
    """A driver of the matrix, shared by all tests, and its reference."""
    case: Case = request.param
    snapshot = tiny_models.snapshot(case.model, models_folder)
    reference = load_reference(references, case.model, snapshot)
    folder = tmp_path_factory.mktemp(case.model)
    devices = drivers.spread(case.ranks)
    config = drivers.write_config(folder, snapshot, options=case.options, **devices)
    with drivers.running(config) as driver:
        assert driver.caps["kv_page_size"] == case.page_size
        yield driver, reference


@pytest.fixture(scope="module")
def shared_bench(served: tuple[drivers.Driver, Reference]) -> DriverHarness:
    return DriverHarness(*served)


@pytest.fixture
def harness(shared_bench: DriverHarness) -> Iterator[DriverHarness]:
    """The driver of the case with all of its pages free, but not empty."""
    assert shared_bench.driver.process.poll() is None, "the driver has ended"
    yield shared_bench
    for context in shared_bench.contexts:
        context.release()
    shared_bench.contexts.clear()


def test_a_swapped_page_changes_the_tokens(harness: DriverHarness) -> None:
    """The model is sensitive: a driver that mixed up pages could not pass the other tests."""
    ours, other = harness.context(), harness.context()
    length = max(harness.page_size, 16) + 4
    harness.extend(ours, harness.prompt(length, "ours"))
    harness.extend(other, harness.prompt(length, "other"))
    tail = harness.prompt(12, "tail")
    rows = range(len(tail))
    right = harness.send(ours.append(tail, rows=rows))[0]
    assert harness.reference.check(ours.tokens, right) > len(tail) // 2
    assert len(set(right)) > len(tail) // 3
    swapped = max(1, 16 // harness.page_size)
    pages = other.pages[:swapped] + ours.pages[swapped:]
    positions = ours.positions[-len(tail) :]
    wrong = harness.send(ours.request(tail, positions, rows=rows, pages=pages))[0]
    assert wrong != right


@pytest.mark.parametrize("length", LENGTHS)
def test_single_context(harness: DriverHarness, length: int) -> None:
    harness.generate(harness.context(), harness.prompt(length), steps=6)


@pytest.mark.parametrize("sizes", [(1, 14, 2, 17, 30, 66), (63, 1, 1, 65), (16, 48, 3)], ids=str)
def test_prompt_in_pieces(harness: DriverHarness, sizes: tuple[int, ...]) -> None:
    context = harness.context()
    for size in sizes:
        token = harness.extend(context, harness.prompt(size, "piece", len(context.tokens)))
        harness.reference.check(context.tokens, [token])
    harness.decode([context], [token], 4)


def test_long_prompt_in_one_frame(harness: DriverHarness) -> None:
    context = harness.context()
    prompt = harness.prompt(min(401, harness.reference.context_length - 16))
    rows = sorted({0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, len(prompt) // 2, len(prompt) - 1})
    found = harness.send(context.append(prompt, rows=rows))[0]
    harness.reference.check(context.tokens, found, rows=rows)
    harness.decode([context], found[-1:], 4)


def test_prompt_scoring(harness: DriverHarness) -> None:
    """Every row sampled, in any order, some twice."""
    context = harness.context()
    harness.extend(context, harness.prompt(21, "first"))
    tail = harness.prompt(75, "scored")
    rows = [*range(len(tail)), 3, 3, len(tail) - 1]
    random.Random(1).shuffle(rows)
    found = harness.send(context.append(tail, rows=rows))[0]
    harness.reference.check(context.tokens, found, rows=[21 + row for row in rows])


def test_mixed_batches(harness: DriverHarness) -> None:
    """Contexts join and leave one by one: 1 to 16 in a frame, prefills with decodes, any order."""
    shuffle = random.Random(harness.page_size).shuffle
    running: dict[int, Context] = {}
    sampled: dict[int, list[int]] = {}
    for step in range(32):
        requests: list[tuple[int, Request]] = []
        for index, context in running.items():
            requests.append((index, context.append(sampled[index][-1:])))
        if step < 16:
            running[step], sampled[step] = harness.context(), []
            prompt = harness.prompt((step * 37) % 101 + 1, "mixed", step)
            requests.append((step, running[step].append(prompt)))
        shuffle(requests)
        replies = harness.send(*(request for _, request in requests))
        for (index, _), [token] in zip(requests, replies, strict=True):
            sampled[index].append(token)
        if step >= 15:
            context = running.pop(step * 7 % 16)
            harness.reference.check(context.tokens, sampled[step * 7 % 16])
            context.release()
        if not running:
            break
    assert not running


def test_shared_prefix(harness: DriverHarness) -> None:
    """Four contexts begin with the very same pages."""
    first = harness.context()
    prefix = harness.prompt(2 * max(harness.page_size, 16), "prefix")
    harness.extend(first, prefix)
    contexts = [first, *(harness.keep(first.fork(harness.copy)) for _ in range(3))]
    assert all(context.pages == first.pages for context in contexts)
    suffixes = [harness.prompt(5 + 6 * index, "suffix", index) for index in range(len(contexts))]
    pairs = zip(contexts, suffixes, strict=True)
    replies = harness.send(*(context.append(suffix) for context, suffix in pairs))
    for context, [token] in zip(contexts, replies, strict=True):
        harness.reference.check(context.tokens, [token])
    harness.decode(contexts, [token for [token] in replies], 4)


def test_forks_diverge(harness: DriverHarness) -> None:
    """Forks of forks, in the middle of a page, which is copied with its unused space."""
    root = harness.context()
    harness.extend(root, harness.prompt(70, "root"))
    left = harness.keep(root.fork(harness.copy))
    harness.extend(left, harness.prompt(3, "left"))
    leaf = harness.keep(left.fork(harness.copy))
    contexts = [leaf, root, left]
    tokens = harness.prompt(len(contexts), "next")
    harness.decode(contexts, tokens, 5)


def test_rewind_and_rewrite(harness: DriverHarness) -> None:
    context = harness.context()
    harness.extend(context, harness.prompt(70, "kept"))
    for length in (66, 64, 37, 16, 15):
        context.rewind(length)
        tail = harness.prompt(9, "rewritten", length)
        token = harness.extend(context, tail)
        harness.reference.check(context.tokens, [token])
        harness.decode([context], [token], 2)


@pytest.mark.parametrize("gap", [0, 37], ids=["shifted", "with a gap"])
def test_positions_differ_from_storage(harness: DriverHarness, gap: int) -> None:
    """All positions shifted by a constant; then also a gap in the middle."""
    context = harness.context()
    head, tail = harness.prompt(33, "head"), harness.prompt(12, "tail")
    harness.extend(context, head, positions=range(50, 50 + len(head)))
    first = 50 + len(head) + gap
    rows = range(len(tail))
    request = context.append(tail, positions=range(first, first + len(tail)), rows=rows)
    found = harness.send(request)[0]
    harness.reference.check(context.tokens, found, positions=context.positions)
    if gap:
        plain = harness.reference.rows([*head, *tail])[-len(tail) :]
        assert found != [token for token, _ in plain]
    harness.decode([context], found[-1:], 3)


@pytest.mark.parametrize("length", [1, 3], ids=["one token", "three tokens"])
def test_the_later_of_two_writers_wins(harness: DriverHarness, length: int) -> None:
    """An orphaned decode and what replaced it, in one frame: the latter sees and leaves its own."""
    context = harness.context()
    for stored in (5, 16, 31):
        context.rewind(0)
        harness.extend(context, harness.prompt(stored, "written"))
        orphan = context.append(harness.prompt(1, "orphan", stored))
        context.rewind(stored)
        final = harness.prompt(length, "final", stored)
        ignored, found = harness.send(orphan, context.append(final))
        assert len(ignored) == 1
        harness.reference.check(context.tokens, found)
        tail = harness.prompt(9, "tail", stored)
        found = harness.send(context.append(tail, rows=range(len(tail))))[0]
        harness.reference.check(context.tokens, found)


def test_same_request_twice_in_a_frame(harness: DriverHarness) -> None:
    context = harness.context()
    harness.extend(context, harness.prompt(20, "stored"))
    tail = harness.prompt(14, "twice")
    request = context.append(tail)
    first, second = harness.send(request, request)
    assert first == second
    harness.reference.check(context.tokens, first)
    harness.decode([context], first, 3)


def test_replay_into_new_pages(harness: DriverHarness) -> None:
    """A suspended context comes back, without samplers, in a batch with another's decode."""
    suspended, running = harness.context(), harness.context()
    token = harness.extend(suspended, harness.prompt(41, "suspended"))
    other = harness.extend(running, harness.prompt(18, "running"))
    tokens = list(suspended.tokens)
    suspended.rewind(0)
    harness.generate(harness.context(), harness.prompt(100, "takes the pages"), steps=1)
    replay = suspended.append(tokens, rows=[], context_id=0, masks=suspended.causal_masks(tokens))
    replies = harness.send(running.append([other]), replay)
    assert replies[1] == []
    harness.reference.check(running.tokens, replies[0])
    harness.decode([suspended, running], [token, replies[0][0]], 4)


def test_pages_move_between_frames(harness: DriverHarness) -> None:
    """All pages change, then some; other contexts overwrite the former ones."""
    context = harness.context()
    token = harness.extend(context, harness.prompt(70, "moved"))
    context.move(harness.copy)
    harness.generate(harness.context(), harness.prompt(80, "over the former pages"), steps=1)
    harness.decode([context], [token], 2)
    [[token]] = harness.send(context.append(harness.prompt(1, "moved again")))
    former = context.pages[0]
    context.pages[0] = harness.allocator.take()
    harness.copy([former], context.pages[:1])
    harness.allocator.give_back([former])
    harness.generate(harness.context(), harness.prompt(80, "over the first page"), steps=1)
    harness.decode([context], [token], 2)


@pytest.mark.parametrize("trailing", [False, True], ids=["bare", "padded"])
def test_causal_masks_are_no_masks(harness: DriverHarness, trailing: bool) -> None:
    context = harness.context()
    for size in (23, 1, 30):
        tokens = harness.prompt(size, "masked", size)
        masks = context.causal_masks(tokens)
        end = len(context.tokens) + size
        if trailing:
            masks = [[*mask, end - mask[1]] if mask[1] < end else mask for mask in masks]
        token = harness.extend(context, tokens, masks=masks)
        harness.reference.check(context.tokens, [token])
    harness.decode([context], [token], 2)


def test_drafts_change_nothing(harness: DriverHarness) -> None:
    """Right, wrong and partly right drafts, across page borders, with a context without any."""
    prompt, continuation = harness.decided_prompt(max(13, harness.page_size - 3), 24, "drafts")
    context, other = harness.context(), harness.context()
    produced = [harness.extend(context, prompt)]
    neighbour = harness.extend(other, harness.prompt(12, "neighbour"))
    plans = [(4, 4), (3, 0), (5, 2), (1, 1), (4, 1), (2, 0), (5, 5)]
    for count, right in plans:
        drafts = continuation[len(produced) : len(produced) + count]
        wrong = harness.reference.vocab_size - 1
        if right < len(drafts):
            drafts[right] = wrong if drafts[right] != wrong else wrong - 1
        expected = continuation[len(produced) : len(produced) + right + 1]
        request = context.append(produced[-1:], drafts=drafts)
        found, [neighbour_next] = harness.send(request, other.append([neighbour]))
        assert found == expected
        harness.reference.check(other.tokens, [neighbour_next])
        context.rewind(len(context.tokens) - (count - right))
        produced += found
        neighbour = neighbour_next
    assert produced == continuation[: len(produced)]
    harness.decode([context], produced[-1:], 2)


def test_drafts_behind_several_inputs(harness: DriverHarness) -> None:
    """A prompt and its drafts in one request; only the last row and the drafts are sampled."""
    prompt, continuation = harness.decided_prompt(27, 6, "prompt with drafts")
    context = harness.context()
    [found] = harness.send(context.append(prompt, drafts=continuation[:5]))
    assert found == continuation
    harness.decode([context], found[-1:], 2)


def test_driver_started_by_the_runtime(
    llama_driver: drivers.Driver, served_snapshot: Path, references: dict[str, Reference]
) -> None:
    """The other drivers are forked; this one is not."""
    harness = DriverHarness(llama_driver, load_reference(references, "llama-32", served_snapshot))
    harness.generate(harness.context(), harness.prompt(70), steps=8)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", tiny_models.model_names())
def test_logits(
    model: str,
    page_size: int,
    models_folder: Path,
    references: dict[str, Reference],
    tmp_path: Path,
) -> None:
    """Logits of every row within 1e-4: prefill, prefill in several passes, mixed, decode."""
    snapshot = tiny_models.snapshot(model, models_folder)
    reference = load_reference(references, model, snapshot)
    case = Case(model, page_size, CHUNK)
    config = drivers.write_config(tmp_path, snapshot, options=case.options)
    allocator = Pages(1024 // page_size, page_size)
    frames: list[list[tuple[Context, list[int]]]] = []
    a, b, c = (Context(allocator) for _ in range(3))

    def tokens(count: int) -> list[int]:
        return random_tokens(reference.vocab_size, count, model, len(frames))

    frames.append([(a, tokens(20))])
    frames.append([(b, tokens(131))])
    frames.append([(b, tokens(1)), (c, tokens(33)), (a, tokens(5))])
    frames.extend([(a, tokens(1)), (b, tokens(2)[1:]), (c, tokens(3)[2:])] for _ in range(3))
    expected: list[list[Any]] = []
    encoded: list[bytes] = []
    for frame in frames:
        requests = [context.append(tokens) for context, tokens in frame]
        encoded.append(_core.encode_forward(requests))
        rows = [reference.logits(context.tokens)[-len(tokens) :] for context, tokens in frame]
        expected.append([row for part in rows for row in part])
    for passes, wanted in zip(run_frames(config, encoded, tmp_path), expected, strict=True):
        assert len(passes) == -(-len(wanted) // CHUNK)
        found = [row for one in passes for row in one]
        for row, (logits, right) in enumerate(zip(found, wanted, strict=True)):
            error = float(abs(logits - right.numpy()).max())
            assert error <= TOLERANCE, f"row {row}: logits off by {error}"


def run_frames(config: Path, frames: list[bytes], folder: Path) -> list[list[Any]]:
    """Of each frame and pass, the logits of all rows; an engine in a process of its own runs them.

    Returns:
        For each frame one array per pass: ``[rows, vocabulary]`` float32.
    """
    ours, theirs = multiprocessing.Pipe()
    log = folder / "engine.stderr"
    process = drivers.fork_call(engine_process.serve_logits, (str(config), theirs, str(log)))
    theirs.close()
    with ours:
        try:
            ours.send(frames)
            found: list[list[Any]] = ours.recv()
        except (EOFError, ConnectionError):
            pytest.fail(f"the engine ended early:\n{log.read_text()}")
    assert process.wait(drivers.STOP_TIMEOUT_S) == 0
    return found
