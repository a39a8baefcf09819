"""Logits of batches with LoRA adapters, against models that PEFT has merged them into."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from support.models import tiny_models
from support.models.reference import MaskedReference, random_tokens
from support.process import drivers
from support.process.adapter_driver import (
    CHUNK,
    EVERYTHING,
    MODEL,
    NAMES,
    OK,
    SLOTS,
    TOLERANCE,
    DriverHarness,
    Library,
)
from support.process.adapter_driver import library as library
from support.process.traced_driver import start

pytestmark = pytest.mark.engine


@pytest.fixture(
    scope="module",
    params=[(MODEL, 1), ("qwen3", 1), (MODEL, 2), ("qwen3", 2)],
    ids=["llama", "qwen3", "llama-tp2", "qwen3-tp2"],
)
def served(
    request: pytest.FixtureRequest,
    library: Library,
    models_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DriverHarness]:
    """A driver with all adapters of `CONFIGS` loaded, more than host memory may keep.

    Qwen3 has one head of keys and values, which two ranks share, and a tied LM head.
    """
    drivers.start_fork_server()
    model, ranks = request.param
    snapshot = tiny_models.build(model, models_folder)
    folder = tmp_path_factory.mktemp(model)
    with contextmanager(start)(
        folder, snapshot, ranks, library.fork, **library.options()
    ) as traced:
        harness = DriverHarness(traced.driver, model, models_folder, traced)
        harness.load_all(NAMES)
        yield harness
    assert not traced.driver.region.exists()


class TestParity:
    """Seven adapters and none, where a pass holds three and host memory four of them."""

    @pytest.mark.parametrize("length", [1, 17, CHUNK, 75])
    def test_logits_of_a_mixed_batch_and_of_each_alone(
        self, served: DriverHarness, length: int
    ) -> None:
        together = served.check_logits([*EVERYTHING, 0, *reversed(EVERYTHING)], length)
        for number in EVERYTHING:
            [alone] = served.check_logits([number], length)
            assert torch.tensor(alone).sub(torch.tensor(together[number])).abs().max() < TOLERANCE

    def test_adapters_differ(self, served: DriverHarness) -> None:
        """The tolerance tells the adapters apart."""
        rows = torch.tensor(served.check_logits(EVERYTHING, 20))
        for one, other in itertools.combinations(rows, 2):
            assert (one - other).abs().max() > 0.1

    def test_greedy_decode(self, served: DriverHarness) -> None:
        contexts = [served.start(number, 5 + 9 * number) for number in EVERYTHING]
        served.check_greedy(contexts, 12)

    def test_steps_that_are_full_of_adapters(self, served: DriverHarness) -> None:
        """What pads nine rows takes no slot beside theirs."""
        served.check_greedy([served.start(number, 9) for number in [1, 2, SLOTS] * 3], 3)

    def test_batches_without_adapters_take_the_graph_path(self, served: DriverHarness) -> None:
        """Nothing stays of the adapters before, those of the LM head included."""
        assert served.traced is not None
        batches = [[0], [4], [0, 0], [0, 6], [0], [7], [0]]
        for numbers in batches:
            contexts = [served.start(number, 21) for number in numbers]
            before = len(served.traced.paths())
            served.check_greedy(contexts, 3)
            path = "python" if any(numbers) else "graph"
            assert served.traced.paths()[before:] == [path] * 3, numbers

    def test_prefill_beside_decode(self, served: DriverHarness) -> None:
        running = [served.start(number, 20) for number in (1, 0, 4)]
        prompt = random_tokens(tiny_models.VOCABULARY, 45, "joins")
        joining = [served.context(number) for number in (6, 1, 0)]
        requests = []
        for one, other in zip(running, joining, strict=True):
            token = one.tokens.pop()
            one.positions.pop()
            requests += [one.append([token]), other.append(prompt)]
        replies = served.client.forward(requests).tokens
        pairs = [context for pair in zip(running, joining, strict=True) for context in pair]
        for context, found in zip(pairs, replies, strict=True):
            served.reference(context).check(context.tokens, found)

    @pytest.mark.parametrize("number", [1, 6, 7])
    def test_drafts(self, served: DriverHarness, number: int) -> None:
        context = served.start(number, 21)
        anchor = context.tokens.pop()
        context.positions.pop()
        [*drafts], _ = served.references[number].greedy([*context.tokens, anchor], 3)
        wrong = (drafts[2] + 1) % tiny_models.VOCABULARY
        request = context.append([anchor], drafts=[*drafts[:2], wrong])
        base = served.start(0, 21)
        base_token = base.tokens.pop()
        replies = served.client.forward([request, base.append([base_token])]).tokens
        assert replies[0] == drafts

    @pytest.mark.parametrize("number", [1, 4, 6])
    def test_masks(self, served: DriverHarness, library: Library, number: int) -> None:
        """Rows that see the first token and the last few, beside requests without a mask."""
        tokens = random_tokens(tiny_models.VOCABULARY, 24, "masked")
        masks = [[0, 1, max(0, row - 5), min(row, 5)] for row in range(len(tokens))]
        masks[0] = [0, 1]
        visible = [[c == 0 or r - 5 < c <= r for c in range(24)] for r in range(24)]
        context, causal = served.context(number), served.context(2)
        masked = context.append(tokens, masks=masks, rows=range(24))
        found, plain = served.client.forward([masked, causal.append(tokens)]).tokens
        if library.name == "vllm":
            # Its attention is causal, so that masks are refused.
            assert found == []
            served.references[2].check(tokens, plain)
            return
        reference = MaskedReference(served.snapshots[number])
        best = reference.logits(tokens, range(24), visible).argmax(-1).tolist()
        assert found == best
        served.references[2].check(tokens, plain)

    def test_a_replay_a_fork_and_a_swapped_context(self, served: DriverHarness) -> None:
        number = 4
        context, other = served.start(number, 40), served.start(1, 40)
        token = context.tokens.pop()
        context.positions.pop()

        def copy(sources: list[int], targets: list[int]) -> None:
            assert served.client.copy("D2D", sources, targets) == OK

        child = context.fork(copy)
        slots = [served.host.take() for _ in context.pages]
        assert served.client.copy("D2H", context.pages, slots) == OK
        context.pages = [served.allocator.take() for _ in slots]
        assert served.client.copy("H2D", slots, context.pages) == OK
        replayed = served.context(number)
        tokens = list(context.tokens)
        request = replayed.append(
            tokens, rows=[], context_id=0, masks=replayed.causal_masks(tokens)
        )
        assert served.client.forward([request]).tokens == [[]]
        contexts = [context, child, replayed]
        for one in contexts:
            one.tokens.append(token)
            one.positions.append(len(tokens))
        served.check_greedy([*contexts, other], 5)


@pytest.mark.parametrize("model", ["llama-tied", "qwen2", "mistral", "gemma3", "gemma2"])
def test_other_models(model: str, models_folder: Path, tmp_path: Path) -> None:
    snapshot = tiny_models.build(model, models_folder)
    options = {"enable_lora": True}
    with drivers.fork(drivers.write_config(tmp_path, snapshot, options=options)) as driver:
        harness = DriverHarness(driver, model, models_folder)
        harness.load_all(["linear", "attention"])
        harness.check_logits([0, 1, 2], 40)
        harness.check_greedy([harness.start(number, 20) for number in (2, 0, 1)], 6)
    assert driver.stop() == 0
