"""Attention masks, against transformers in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from support.models import tiny_models
from support.models.reference import Context, MaskedReference, Pages, random_tokens
from support.process import drivers

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
PAGE = 16
CHUNK = 64
MODELS = (("llama", 1), ("qwen3", 1), ("gemma3", 1), ("gemma2", 1), ("llama", 2))
"""And over how many ranks they are spread."""

Bits = list[bool]


def runs(bits: Sequence[bool]) -> list[int]:
    """Run lengths, false first."""
    lengths = [len(list(group)) for _, group in itertools.groupby(bits)]
    return [0, *lengths] if bits and bits[0] else lengths


class Sent(NamedTuple):
    """A request, and which tokens of its context its logit rows belong to."""

    request: Request
    context: Masked
    rows: list[int]
    drafts: list[int]


class Masked(Context):
    """A context that remembers what each of its rows could see."""

    def __init__(self, allocator: Pages) -> None:
        super().__init__(allocator)
        self.seen: list[Bits] = []

    def causal(self, count: int) -> list[Bits]:
        """Rows of tokens about to be appended that see all before themselves, and themselves."""
        first = len(self.tokens) + 1
        return [[True] * length for length in range(first, first + count)]

    def send(
        self,
        tokens: Sequence[int],
        rows: list[Bits] | None = None,
        *,
        drafts: Sequence[int] = (),
        positions: Sequence[int] | None = None,
        dropped: Sequence[int] = (),
        sampled: Sequence[int] | None = None,
    ) -> Sent:
        """Appends tokens that see what `rows` says, by default what is causal.

        Args:
            tokens: The input.
            rows: Which KV indices each token sees.
            drafts: Tokens to verify after them.
            positions: Of the input.
            dropped: Numbers of the pages that the runtime leaves out.
            sampled: Rows whose logits come back; by default all.
        """
        start = len(self.tokens)
        self.seen += self.causal(len(tokens) + len(drafts)) if rows is None else rows
        if rows is not None:
            self.seen += self.causal(len(tokens) + len(drafts))[len(tokens) :]
        self.append(tokens, drafts=drafts, positions=positions)
        chosen = list(range(len(tokens)) if sampled is None else sampled)
        samplers = [(row, Sampler.raw_logits()) for row in chosen]
        if drafts:
            samplers.insert(0, (len(tokens) - 1, Sampler.greedy()))
        kept = [page for page in range(len(self.pages)) if page not in dropped]
        masks = None
        if rows is not None:
            masks = [
                runs([bit for index, bit in enumerate(row) if index // PAGE in kept])
                for row in rows
            ]
        request = Request(
            list(tokens),
            self.positions[start : start + len(tokens)],
            [self.pages[page] for page in kept],
            (start + len(tokens) - 1) % PAGE + 1,
            samplers,
            context_id=self.id,
            masks=masks,
            drafts=list(drafts),
        )
        return Sent(request, self, [start + row for row in chosen], list(drafts))


class DriverHarness:
    """A driver of float32, and the reference of its model."""

    def __init__(self, driver: drivers.Driver, reference: MaskedReference) -> None:
        self.client = driver.client()
        self.reference = reference
        self.allocator = Pages(driver.caps["total_pages"], PAGE)
        self._contexts: list[Masked] = []

    def context(self) -> Masked:
        """An empty context."""
        self._contexts.append(Masked(self.allocator))
        return self._contexts[-1]

    def tokens(self, count: int, *seed: Any) -> list[int]:
        """Reproducible tokens."""
        return random_tokens(self.reference.vocab_size, count, "masks", *seed)

    def run(self, *sent: Sent) -> _core.Reply:
        """Sends one frame and compares all logits that come back."""
        reply = self.client.forward([each.request for each in sent])
        assert reply.status is None
        assert not reply.aborted
        for found, each in zip(reply.logits or [[] for _ in sent], sent, strict=True):
            assert len(found) == len(each.rows)
            if each.rows:
                assert_close(found, self.expected(each.context)[each.rows])
        return reply

    def expected(self, context: Masked) -> torch.Tensor:
        """Reference logits of all rows of a context."""
        return self.reference.logits(context.tokens, context.positions, context.seen)

    def release(self) -> None:
        """Gives all pages back."""
        for context in self._contexts:
            context.release()
        self._contexts.clear()


def assert_close(found: Sequence[Sequence[float]], expected: torch.Tensor) -> None:
    got = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=MODELS, ids=lambda param: f"{param[0]}-tp{param[1]}")
def shared(
    request: pytest.FixtureRequest, models_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriverHarness]:
    drivers.start_fork_server()
    model, ranks = request.param
    snapshot = tiny_models.build(model, models_folder)
    reference = MaskedReference(snapshot)
    options = {"page_size": PAGE, "chunked_prefill_size": CHUNK}
    folder, devices = tmp_path_factory.mktemp("masks"), drivers.spread(ranks)
    config = drivers.write_config(folder, snapshot, options=options, **devices)
    with drivers.running(config) as driver:
        yield DriverHarness(driver, reference)


@pytest.fixture
def harness(shared: DriverHarness) -> Iterator[DriverHarness]:
    yield shared
    shared.release()


def window(context: Masked, count: int, size: int, sink: int = 0) -> list[Bits]:
    """Rows that see the first `sink` tokens, and the last `size` up to their own."""
    rows = context.causal(count)
    return [[key < sink or key > len(row) - 1 - size for key in range(len(row))] for row in rows]


def scattered(context: Masked, count: int, *, ahead: bool, density: float = 0.5) -> list[Bits]:
    """Random rows; `ahead` lets them see later tokens of the same request."""
    generator = random.Random(repr((len(context.tokens), count, ahead, density)))
    stored = len(context.tokens) + count
    lengths = itertools.repeat(stored) if ahead else map(len, context.causal(count))
    rows = zip(range(count), lengths, strict=False)
    return [[generator.random() < density for _ in range(length)] for _, length in rows]


SHAPES: dict[str, Callable[[Masked, int], list[Bits]]] = {
    "window": lambda context, count: window(context, count, 9),
    "sink": lambda context, count: window(context, count, 7, sink=4),
    "random": lambda context, count: scattered(context, count, ahead=False),
    "random, few": lambda context, count: scattered(context, count, ahead=False, density=0.04),
    "all see all": lambda context, count: [[True] * (len(context.tokens) + count)] * count,
    "random ahead": lambda context, count: scattered(context, count, ahead=True),
    "nothing but the prefix": lambda context, count: (
        [[*[True] * len(context.tokens), False]] * count
    ),
    "nothing": lambda _, count: [[False]] * count,
    "too long": lambda context, count: [
        [*row, False, True] * 9 for row in window(context, count, 5)
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_extend_and_decode(harness: DriverHarness, shape: str) -> None:
    """Rows of every request see what the mask says, and are seen as they were computed."""
    context = harness.context()
    for step, count in enumerate((37, 5, 1, 1, 12)):
        rows = SHAPES[shape](context, count)
        # Bits after the stored tokens mean nothing.
        stored = len(context.tokens) + count
        sent = context.send(harness.tokens(count, shape, step), rows)
        context.seen[-count:] = [row[:stored] for row in rows]
        harness.run(sent)
    harness.run(context.send(harness.tokens(6, "afterwards")))


def test_a_mask_changes_the_logits(harness: DriverHarness) -> None:
    """The reference is sensitive: a driver without masks could not pass."""
    context = harness.context()
    harness.run(context.send(harness.tokens(30, "sensitive"), window(context, 30, 3)))
    masked = harness.expected(context)
    context.seen = [[True] * (row + 1) for row in range(30)]
    assert float((harness.expected(context) - masked)[5:].abs().amax(1).min()) > 100 * TOLERANCE


@pytest.mark.parametrize("ahead", [False, True], ids=["behind", "ahead"])
def test_query_tokens_that_attend_to_nothing(harness: DriverHarness, ahead: bool) -> None:
    """Blind rows among seeing ones; their own KV is seen by others."""
    context = harness.context()
    rows = scattered(context, 40, ahead=ahead)
    for blind in (0, 7, 8, 39):
        rows[blind] = [False] * 3
    harness.run(context.send(harness.tokens(40, "blind"), rows))
    harness.run(context.send(harness.tokens(1, "blind"), [[False] * 41]))
    harness.run(context.send(harness.tokens(3, "seeing")))


def test_empty_mask_rows_are_causal(harness: DriverHarness) -> None:
    """Also among rows that are not."""
    context = harness.context()
    rows = window(context, 20, 4)
    for row in range(0, 20, 3):
        rows[row] = []
    sent = context.send(harness.tokens(20, "empty"), rows)
    context.seen = [row or [True] * (index + 1) for index, row in enumerate(rows)]
    harness.run(sent)


def test_long_prompt_in_chunks(harness: DriverHarness) -> None:
    """A mask that looks back only may be cut anywhere."""
    context = harness.context()
    harness.run(context.send(harness.tokens(21, "first"), sampled=[]))
    harness.run(context.send(harness.tokens(200, "chunks"), window(context, 200, 50, sink=3)))
    harness.run(context.send(harness.tokens(1, "chunks"), window(context, 1, 30, sink=3)))


def test_a_request_with_a_non_causal_mask_is_not_split(harness: DriverHarness) -> None:
    """It moves to a pass of its own when it does not fit the pass of its neighbours."""
    first, second, third = (harness.context() for _ in range(3))
    harness.run(
        first.send(harness.tokens(40, "first"), scattered(first, 40, ahead=False)),
        second.send(harness.tokens(CHUNK, "second"), scattered(second, CHUNK, ahead=True)),
        third.send(harness.tokens(30, "third"), scattered(third, 30, ahead=True)),
    )


def test_a_request_that_sees_ahead_too_far_is_refused_alone(harness: DriverHarness) -> None:
    good, bad = harness.context(), harness.context()
    refused = bad.send(
        harness.tokens(CHUNK, "bad"), scattered(bad, CHUNK, ahead=True), drafts=[5], sampled=[0]
    )
    reply = harness.client.forward([refused.request, good.send(harness.tokens(20, "good")).request])
    assert reply.tokens[0] == reply.logits[0] == []
    assert_close(reply.logits[1], harness.expected(good))


@pytest.mark.parametrize("shape", ["sink", "random", "random ahead"])
def test_masks_beside_drafts(harness: DriverHarness, shape: str) -> None:
    """Input rows see what the mask says, drafts all before themselves."""
    context = harness.context()
    harness.run(context.send(harness.tokens(20, "before"), sampled=[]))
    for step, count in enumerate((11, 1)):
        tokens = harness.tokens(count, "input", step)
        rows = [row[: len(context.tokens) + count] for row in SHAPES[shape](context, count)]
        drafts = continuation(harness, context, tokens, rows, 3)
        sent = context.send(tokens, rows, drafts=drafts[:2])
        reply = harness.run(sent)
        assert reply.tokens == [drafts]
    # A wrong draft ends the answer.
    tokens = harness.tokens(3, "last")
    rows = SHAPES[shape](context, 3)
    [right, *_] = continuation(harness, context, tokens, rows, 1)
    wrong = (right + 1) % harness.reference.vocab_size
    reply = harness.run(context.send(tokens, rows, drafts=[wrong, wrong]))
    assert reply.tokens == [[right]]


def continuation(
    harness: DriverHarness, context: Masked, tokens: list[int], rows: list[Bits], count: int
) -> list[int]:
    """What follows the input greedily; nothing is appended."""
    found: list[int] = []
    following = context.positions[-1] + 1
    for _ in range(count):
        stored = [*context.tokens, *tokens, *found]
        positions = [*context.positions, *range(following, following + len(tokens) + len(found))]
        behind = range(len(stored) - len(found), len(stored))
        seen = [*context.seen, *rows, *([True] * (row + 1) for row in behind)]
        best = harness.reference.logits(stored, positions, seen)[-1].topk(2)
        assert best.values[0] - best.values[1] > 2 * TOLERANCE
        found.append(int(best.indices[0]))
    return found


def test_trimmed_pages(harness: DriverHarness) -> None:
    """The protocol's example: pages that no row sees are not even listed; positions stay."""
    context = harness.context()
    prompt = harness.tokens(319, "trimmed")
    harness.run(context.send(prompt, window(context, 319, 64, sink=4), sampled=[318]))
    decode = context.send(
        harness.tokens(1, "decode"), window(context, 1, 64, sink=4), dropped=range(1, 16)
    )
    assert len(context.pages) == 20
    harness.run(decode)
    tail = context.send(
        harness.tokens(9, "tail"), window(context, 9, 40, sink=4), dropped=range(1, 16)
    )
    harness.run(tail)


def test_masked_and_plain_requests_in_one_frame(harness: DriverHarness) -> None:
    """Prefills and decodes of both kinds, in turns and in any order."""
    contexts = [harness.context() for _ in range(6)]
    shapes = [None, "window", "random ahead", None, None, "sink"]
    for step, counts in enumerate([(20, 9, 14, 33, 1, 70), (1,) * 6, (1, 3, 1, 2, 1, 1)]):
        sent = []
        for context, shape, count in zip(contexts, shapes, counts, strict=True):
            rows = None if shape is None else SHAPES[shape](context, count)
            sent.append(context.send(harness.tokens(count, "mixed", step, count), rows))
        random.Random(step).shuffle(sent)
        harness.run(*sent)


def test_a_causal_mask_is_no_mask(harness: DriverHarness) -> None:
    """To the last bit, in whatever form it is written."""
    tokens = harness.tokens(30, "causal")
    plain = harness.client.forward([harness.context().send(tokens).request])
    for tail in ([], [5], [9, 0]):
        context = harness.context()
        sent = context.send(tokens, [[*row, *[False] * sum(tail)] for row in context.causal(30)])
        assert harness.client.forward([sent.request]).logits == plain.logits


def test_replay(harness: DriverHarness) -> None:
    """A suspended context is computed anew, in one request, in a batch with a decode."""
    context, other = harness.context(), harness.context()
    harness.run(other.send(harness.tokens(5, "other")))
    for count in (25, 4, 1):
        harness.run(
            context.send(harness.tokens(count, "replayed", count), window(context, count, 8, 2))
        )
    replayed = harness.context()
    sent = replayed.send(context.tokens, context.seen, sampled=[])
    harness.run(other.send(harness.tokens(1, "other")), sent)
    harness.run(replayed.send(harness.tokens(1, "next")))


def test_positions_of_the_users_own(harness: DriverHarness) -> None:
    """Bits name KV indices, whatever the positions."""
    context = harness.context()
    positions = [50 + 3 * row for row in range(20)]
    harness.run(
        context.send(harness.tokens(20, "own"), window(context, 20, 6), positions=positions)
    )
    rows = scattered(context, 7, ahead=True)
    harness.run(context.send(harness.tokens(7, "own"), rows, positions=[5, 5, 9, 200, 0, 5, 6]))


def test_tree_decoding(harness: DriverHarness) -> None:
    """Every node of a tree in one request gives what its branch gives alone."""
    # The windows of the models, which count KV indices, reach back to the first token.
    prompt = harness.tokens(11, "root")
    parents = [-1, 0, 0, 1, 1, 2, 4, 5, 5]
    nodes = harness.tokens(len(parents), "nodes")

    def branch(node: int) -> list[int]:
        """The nodes from the root to this one."""
        return [] if node < 0 else [*branch(parents[node]), node]

    context = harness.context()
    harness.run(context.send(prompt, sampled=[10]))
    branches = [branch(node) for node in range(len(parents))]
    rows = [[True] * 11 + [key in path for key in range(len(parents))] for path in branches]
    positions = [11 + len(path) - 1 for path in branches]
    sent = context.send(nodes, rows, positions=positions)
    tree = harness.run(sent).logits[0]
    for node, path in enumerate(branches):
        alone = harness.context()
        reply = harness.run(
            alone.send([*prompt, *(nodes[each] for each in path)], sampled=[10 + len(path)])
        )
        assert_close([tree[node]], torch.tensor(reply.logits[0], dtype=torch.float64))


def test_a_pool_without_mask_support_refuses_masks_alone(
    models_folder: Path, tmp_path: Path
) -> None:
    snapshot = tiny_models.build("llama", models_folder)
    options = {"page_size": PAGE, "kv_cache_dtype": "fp8_e4m3"}
    with drivers.fork(drivers.write_config(tmp_path, snapshot, options=options)) as driver:
        allocator = Pages(driver.caps["total_pages"], PAGE)
        masked, plain = Masked(allocator), Masked(allocator)
        tokens = random_tokens(tiny_models.VOCABULARY, 9)
        requests = [
            masked.send(tokens, window(masked, 9, 3)).request,
            plain.send(tokens, plain.causal(9)).request,
        ]
        client = driver.client()
        assert [len(rows) for rows in client.forward(requests).logits] == [0, 9]
        alone = Masked(allocator)
        reply = client.forward([alone.send(tokens, window(alone, 9, 3)).request])
        assert not any(reply.logits)
        driver.logged(
            "the attention mask is not causal",
            "attention masks that are not causal are refused: the model's KV",
        )


@pytest.mark.interpreted("benches/gpu/mask_check.py", "--device", "cpu")
def test_both_implementations_agree_with_dense_attention(interpreted: str) -> None:
    """Soft caps, windows, sinks, odd sizes; the kernel of the GPU in Triton's interpreter."""
    assert interpreted.count("ok  triton") == interpreted.count("ok  torch") == 5
