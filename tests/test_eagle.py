"""EAGLE heads: their drafts are those of the trained head, and change no token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pie_driver_sglang._core import Client, Sampler
from pie_driver_sglang.engine.eager_steps import CpuGraphRunner
from pie_driver_sglang.engine.graph_runner import StepGraph
from pie_driver_sglang.engine.model_drafts import ModelDrafter
from support.models.eagle_heads import HeadReference
from support.models.reference import GAP, Context, Pages
from support.models.tiny_models import POCKET
from support.process import drivers, engines
from support.servers import pie_server

pytestmark = pytest.mark.engine

PAGE = 4
"""Tokens: chains of drafts cross the ends of pages."""
NUM_DRAFTS = 3
ROUNDS = 200
"""At most: measured times decide how many drafts there are, on a busy machine few in a round."""
"""Until which drafts were proposed and accepted: the policy tries what does not pay rarely."""
STEPS = 20
"""Of a round."""
MODEL_S = 0.02
"""Seconds that a step of the model takes at least."""
TEMPERATURE = 0.7
SAMPLES = 600
SAMPLED_TOGETHER = 5
"""Requests of a step: with their drafts as many rows as the largest graph has."""


class Bench(NamedTuple):
    """A driver with a head."""

    head: HeadReference
    client: Client
    pages: Pages
    host: Pages

    def within(self, sources: list[int], targets: list[int]) -> None:
        assert self.client.copy("D2D", sources, targets) == 0

    def through_the_host(self, sources: list[int], targets: list[int]) -> None:
        slots = [self.host.take() for _ in sources]
        assert self.client.copy("D2H", sources, slots) == 0
        assert self.client.copy("H2D", slots, targets) == 0
        self.host.give_back(slots)


class Decoded:
    """A context that is decoded greedily, and what was drafted for it."""

    def __init__(self, bench: Bench, prompt: list[int], *, wants: bool = True) -> None:
        self.bench, self.context, self.wants = bench, Context(bench.pages), wants
        self.inputs, self.prompt = prompt, prompt
        self.drafts: list[int] = []
        self.produced: list[int] = []
        self.proposed: list[tuple[list[int], list[int]]] = []
        """Contexts, up to the token that was sampled, and their drafts."""
        self.accepted = 0

    def take(self, tokens: list[int], drafts: list[int]) -> None:
        """An answer."""
        rejected = len(self.drafts) - (len(tokens) - 1)
        assert tokens[:-1] == self.drafts[: len(tokens) - 1]
        self.accepted += len(tokens) - 1
        self.context.rewind(len(self.context.tokens) - rejected)
        self.produced += tokens
        self.inputs, self.drafts = tokens[-1:], drafts
        if drafts:
            self.proposed.append(([*self.context.tokens, tokens[-1]], drafts))


def decode(bench: Bench, stories: list[Decoded], steps: int) -> None:
    """Decodes contexts together."""
    for _ in range(steps):
        requests = [
            story.context.append(story.inputs, drafts=story.drafts, wants_drafts=story.wants)
            for story in stories
        ]
        reply = bench.client.forward(requests)
        assert reply.status is None
        drafts = reply.drafts or [[]] * len(stories)
        for story, tokens, own in zip(stories, reply.tokens, drafts, strict=True):
            story.take(tokens, own)


def check_drafts(bench: Bench, stories: list[Decoded]) -> int:
    """Asserts that drafts are the head's own; returns how many were compared."""
    compared = 0
    for story in stories:
        for context, drafts in story.proposed:
            expected, gap = bench.head.drafts(context, len(drafts))
            if gap > GAP:
                assert drafts == expected, f"after {len(context)} tokens"
                compared += len(drafts)
    return compared


def prepare_model() -> None:
    """Has SGLang's pools assert on slots beyond their ends, as its CUDA kernel does anyway.

    And has the model take as long as a larger one, beside which drafts of its head pay off.
    """
    os.environ["SGLANG_ENABLE_ASYNC_ASSERT"] = "1"
    run_model = CpuGraphRunner._run_model

    def run_slowly(runner: CpuGraphRunner, graph: StepGraph) -> None:
        time.sleep(MODEL_S)
        run_model(runner, graph)

    CpuGraphRunner._run_model = run_slowly  # type: ignore[method-assign]


def draft_twice() -> None:
    """Has each step draft as a CUDA graph does, too, and asserts that the drafts are the same.

    In a graph every slot is a row of the head's passes, padding and unsampled ones included.
    """
    prepare_model()
    draft = ModelDrafter.draft

    def compared(drafter: ModelDrafter, *arguments: Any) -> torch.Tensor:
        drafter._compacts = False
        captured = draft(drafter, *arguments)
        drafter._compacts = True
        found = draft(drafter, *arguments)
        assert torch.equal(captured, found)
        return found

    ModelDrafter.draft = compared  # type: ignore[assignment]


def forbid_drafts() -> None:
    """Has each step fail that runs passes of the head for drafts."""

    def draft(*_: Any) -> torch.Tensor:
        raise RuntimeError("the head drafts")

    ModelDrafter.draft = draft  # type: ignore[method-assign]


@contextlib.contextmanager
def served(head: HeadReference, folder: Path, prepare: Callable[[], None]) -> Iterator[Bench]:
    """A driver; `prepare` is called in its process first."""
    options: dict[str, object] = {
        "page_size": PAGE,
        "cpu_mem_budget_in_gb": 1,
        "cuda_graph_max_bs": 16,
        "chunked_prefill_size": 16,
        "spec_eagle_path": str(head.save(folder / "head")),
        "spec_eagle_num_drafts": NUM_DRAFTS,
    }
    config = drivers.write_config(folder, POCKET, options=options)
    with drivers.fork(config, prepare) as driver:
        assert driver.caps["enable_system_speculation"]
        pages = Pages(driver.caps["total_pages"], PAGE)
        yield Bench(head, driver.client(), pages, Pages(driver.caps["swap_pool_size"], PAGE))
    assert driver.stop() == 0


@pytest.fixture(scope="module", params=[True, False], ids=["eagle3", "eagle2"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    head = HeadReference(eagle3=request.param)
    with served(head, tmp_path_factory.mktemp("eagle"), prepare_model) as made:
        yield made


def test_drafts_are_the_heads_and_change_no_token(bench: Bench) -> None:
    texts = bench.head.texts
    compared = accepted = 0
    for attempt in range(ROUNDS):
        # The second prompt is longer than a chunk, which the Python path computes in parts.
        prompts = [texts[attempt % 20, :16].tolist(), texts[attempt % 20 + 1, :37].tolist()]
        drafted = [Decoded(bench, prompt) for prompt in prompts]
        decode(bench, drafted, STEPS)
        compared += check_drafts(bench, drafted)
        for story in drafted:
            # The texts are the model's own greedy answers.
            text = texts[attempt % 20 + (len(story.prompt) > 16)].tolist()
            expected = text[len(story.prompt) :][: len(story.produced)]
            assert story.produced[: len(expected)] == expected
            accepted += story.accepted
            story.context.release()
        if compared > 10 and accepted > 0:
            break
    assert compared > 10
    assert accepted > 0


def test_steps_without_drafts_run_no_pass_of_the_head(bench: Bench, tmp_path: Path) -> None:
    """Drafts that begin after such steps are the head's own: its KV of these tokens is stored."""
    prompts = [bench.head.texts[row, :16].tolist() for row in (11, 12)]
    with served(bench.head, tmp_path, forbid_drafts) as forbidden:
        decode(forbidden, [Decoded(forbidden, prompt, wants=False) for prompt in prompts], STEPS)
    compared = 0
    for _ in range(ROUNDS):
        stories = [Decoded(bench, prompt, wants=False) for prompt in prompts]
        decode(bench, stories, STEPS // 2)
        assert not any(story.proposed for story in stories)
        for story in stories:
            story.wants = True
        decode(bench, stories, STEPS)
        compared += check_drafts(bench, stories)
        for story in stories:
            story.context.release()
        if compared > 10:
            break
    assert compared > 10


def test_sampled_tokens_keep_their_distribution(bench: Bench, tmp_path: Path) -> None:
    """Chi-square tests of a token after a prompt, and of the next one where its draft was accepted.

    The drafts are the head's chain, and the seeds of samples are fixed.
    """
    head = bench.head
    prompt = head.texts[7, :16].tolist()
    drafts, _ = head.drafts(prompt, 2)
    with torch.inference_mode():
        logits = head.model(torch.tensor([prompt + drafts]), use_cache=False).logits[0, 15:]
    expected = (logits.double() / TEMPERATURE).softmax(-1)
    with served(head, tmp_path, draft_twice) as twice:
        sampled = sample(twice, prompt, drafts)
    assert_follows([tokens[0] for tokens in sampled], expected[0])
    accepted = [tokens for tokens in sampled if len(tokens) > 1]
    assert all(tokens[0] == drafts[0] for tokens in accepted)
    assert_follows([tokens[1] for tokens in accepted], expected[1])


def sample(bench: Bench, prompt: list[int], drafts: list[int]) -> list[list[int]]:
    """`SAMPLES` answers to a prompt and its drafts, of seeds from 2 on."""
    sampled: list[list[int]] = []
    contexts = [Context(bench.pages) for _ in range(SAMPLED_TOGETHER)]
    for context in contexts:
        bench.client.forward([context.append(prompt[:-1])])
    for first in range(2, 2 + SAMPLES, SAMPLED_TOGETHER):
        requests = [
            context.append(
                prompt[-1:],
                drafts=drafts,
                sampler=Sampler.multinomial(TEMPERATURE, first + number),
                wants_drafts=True,
            )
            for number, context in enumerate(contexts)
        ]
        reply = bench.client.forward(requests)
        assert reply.status is None
        sampled += reply.tokens
        for context in contexts:
            context.rewind(len(prompt) - 1)
    return sampled


def assert_follows(sampled: list[int], expected: torch.Tensor) -> None:
    """Pearson's chi-square test; tokens of which fewer than 5 are expected are counted together."""
    counts = torch.bincount(torch.tensor(sampled), minlength=len(expected)).double()
    means = expected * len(sampled)
    likely = means >= 5
    assert int(likely.sum()) >= 4

    def pooled(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[likely], values[~likely].sum()[None]])

    statistic = float(((pooled(counts) - pooled(means)) ** 2 / pooled(means)).sum())
    freedom = torch.tensor(float(likely.sum()), dtype=torch.float64)
    tail = torch.special.gammaincc(freedom / 2, torch.tensor(statistic / 2, dtype=torch.float64))
    assert float(tail) > 1e-3


@pytest.mark.parametrize("change", ["fork", "move", "swap"])
def test_pages_bring_the_states_of_the_head(bench: Bench, change: str) -> None:
    """What the head needs of a context lies in its pages, wherever they are copied to."""
    text = bench.head.texts[3].tolist()
    compared = 0
    for attempt in range(ROUNDS):
        parent = Context(bench.pages)
        bench.client.forward([parent.append(text[:21])])
        child = parent.fork(bench.within)
        if change == "move":
            child.move(bench.within)
        elif change == "swap":
            child.move(bench.through_the_host)
        # The parent's pages hold another text before the child is decoded.
        parent.rewind(0)
        bench.client.forward([parent.append(bench.head.texts[4 + attempt % 20, :21].tolist())])
        story = Decoded(bench, text[21:22])
        story.context = child
        decode(bench, [story], STEPS)
        compared += check_drafts(bench, [story])
        parent.release()
        child.release()
        if compared:
            break
    assert compared > 0


def test_the_engine_answers_as_without_drafts(forked_python: str, tmp_path: Path) -> None:
    """With log-probabilities, a grammar and temperatures; with retractions, and after a restart."""
    head = HeadReference(eagle3=False)
    texts = head.texts
    arguments = {
        "dtype": "float32",
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(head.save(tmp_path / "head")),
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
    }
    prompts = [texts[row, :16].tolist() for row in range(8)]
    greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 24}
    with engines.small(forked_python, 20, **arguments) as engine:
        info = engine.get_server_info()
        assert info["active"]["drafts"] == "eagle"

        def check_answers() -> None:
            answers = engine.generate(
                input_ids=prompts, sampling_params=greedy, return_logprob=True
            )
            for row, answer in enumerate(answers):
                expected = texts[row, 16:40]
                assert answer["output_ids"] == expected.tolist()
                logits = head.model(texts[row : row + 1, :39], use_cache=False).logits[0, 15:]
                exact = logits.log_softmax(-1)[torch.arange(24), expected].tolist()
                found = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
                assert found == pytest.approx(exact, abs=1e-3)

        check_answers()
        schema = json.dumps(
            {
                "type": "object",
                "properties": {"a": {"enum": [1, 2]}},
                "required": ["a"],
                "additionalProperties": False,
            }
        )
        constrained = engine.generate(
            input_ids=prompts[:2],
            sampling_params=[
                {"temperature": 0, "max_new_tokens": 24, "json_schema": schema},
                {"temperature": 1, "max_new_tokens": 24, "json_schema": schema, "sampling_seed": 5},
            ],
        )
        assert all(json.loads(answer["text"])["a"] in (1, 2) for answer in constrained)
        (pid,) = engine.get_server_info()["internal_states"][0]["driver_pids"]
        os.kill(pid, signal.SIGKILL)
        check_answers()


@pytest.mark.timeout(600)
def test_an_http_server_drafts_by_a_head(forked_python: str, tmp_path: Path) -> None:
    """SGLang's flags; answers are those without drafts, whole and streamed."""
    head, folder = HeadReference(eagle3=True), tmp_path / "server"
    folder.mkdir()
    flags = (
        "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2",
        "--speculative-draft-model-path", str(head.save(tmp_path / "head")),
        "--speculative-eagle-topk", "1", "--dtype", "float32", "--skip-tokenizer-init",
    )  # fmt: skip
    prompts, answers = head.texts[:8, :16].tolist(), head.texts[:8, 16:].tolist()
    tokens = len(answers[0])
    with pie_server.running(folder, *flags, python=forked_python) as (server, _):
        assert json.loads(server.fetch("/server_info"))["active"]["drafts"] == "eagle"
        before = pie_server.state(server)["accepted"]

        def some_are_accepted() -> bool:
            with ThreadPoolExecutor(len(prompts)) as pool:
                found = list(pool.map(lambda prompt: server.generate(prompt, tokens)[0], prompts))
            assert found == answers
            return bool(pie_server.state(server)["accepted"] > before)

        pie_server.wait_until(some_are_accepted, 120, "drafts are accepted")
        assert list(server.stream(prompts[0], tokens))[-1] == answers[0]
