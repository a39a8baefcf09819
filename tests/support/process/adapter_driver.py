"""A driver with LoRA adapters, and the models that PEFT has merged them into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pie_driver_sglang._core import Sampler
from support.models import lora_adapters, tiny_models
from support.models.lora_adapters import CONFIGS
from support.models.reference import Context, Pages, Reference, random_tokens
from support.process import drivers, vllm_drivers
from support.process.traced_driver import Traced

PAGE = 16
CHUNK = 32
SLOTS = 3
LOADED = 4
TOLERANCE = 1e-4
OK, MALFORMED, UNSUPPORTED, FAILED = 0, 2, 4, 5
MODEL = "llama-32"
"""A model that both libraries can run."""
NAMES = list(CONFIGS)


class Library(NamedTuple):
    """An inference library, and how to start drivers on it."""

    name: str
    fork: Callable[[Path], drivers.Driver]

    def options(self, slots: int = SLOTS, **more: Any) -> dict[str, Any]:
        """Of a driver with adapters; a pass has at most `slots`, no adapter being one of them.

        VLLM counts without that one, and wants one at least.
        """
        common = {"enable_lora": True, "max_lora_rank": 16, "cpu_mem_budget_in_gb": 1, **more}
        if self.name == "vllm":
            own = {"max_loras": max(1, slots - 1), "max_cpu_loras": LOADED}
            return {**common, **own, "block_size": PAGE, "max_num_batched_tokens": CHUNK}
        own = {"max_loras_per_batch": slots, "max_loaded_loras": LOADED}
        return {**common, **own, "page_size": PAGE, "chunked_prefill_size": CHUNK}


SGLANG = Library("sglang", drivers.fork)
OPTIONS = SGLANG.options()


@pytest.fixture(scope="session", params=["sglang", "vllm"])
def library(request: pytest.FixtureRequest) -> Library:
    """SGLang, or vLLM."""
    if request.param == "sglang":
        return SGLANG
    program = request.getfixturevalue("vllm_python")
    return Library("vllm", lambda config: vllm_drivers.fork(config, program))


class DriverHarness:
    """A driver, and the models that its adapters make: number 0 is the base."""

    def __init__(
        self, driver: drivers.Driver, model: str, folder: Path, traced: Traced | None = None
    ) -> None:
        self.driver = driver
        self.traced = traced
        self.client = traced.client if traced else driver.client()
        self.model = model
        self.folder = folder
        self.allocator = Pages(driver.caps["total_pages"], PAGE)
        self.host = Pages(driver.caps["swap_pool_size"], PAGE)
        self.snapshots = [tiny_models.build(model, folder)]
        self.references = [Reference(self.snapshots[0])]

    def load_all(self, names: Sequence[str]) -> None:
        """Loads one adapter after the other, as 1, 2, ..."""
        for number, name in enumerate(names, 1):
            made = lora_adapters.make(self.model, name, self.folder)
            assert self.client.adapter("Load", number, str(made.adapter)) == OK
            self.snapshots.append(made.merged)
            self.references.append(Reference(made.merged))

    def context(self, number: int) -> Context:
        """An empty context, of an adapter unless `number` is 0."""
        return Context(self.allocator, adapter_id=number or -1)

    def check_logits(self, numbers: Sequence[int], length: int) -> list[list[float]]:
        """One batch over the same prompt, each request with another binding."""
        tokens = random_tokens(tiny_models.VOCABULARY, length, "logits")
        rows = sorted({0, length // 2, length - 1})
        requests = []
        for number in numbers:
            context = self.context(number)
            requests.append(context.append(tokens, rows=rows, sampler=Sampler.raw_logits()))
        replies = self.client.forward(requests).logits
        for number, found in zip(numbers, replies, strict=True):
            expected = self.references[number].logits(tokens)[rows]
            torch.testing.assert_close(
                torch.tensor(found),
                expected,
                atol=TOLERANCE,
                rtol=0,
            )
        return [found[-1] for found in replies]

    def check_greedy(self, contexts: Sequence[Context], steps: int) -> None:
        """Decodes contexts together; all but their last tokens are stored."""
        tokens = [context.tokens.pop() for context in contexts]
        for context in contexts:
            context.positions.pop()
        found: list[list[int]] = [[] for _ in contexts]
        for _ in range(steps):
            pairs = zip(contexts, tokens, strict=True)
            replies = self.client.forward([context.append([token]) for context, token in pairs])
            tokens = [token for [token] in replies.tokens]
            for tail, token in zip(found, tokens, strict=True):
                tail.append(token)
        for context, tail in zip(contexts, found, strict=True):
            self.reference(context).check(context.tokens, tail)

    def reference(self, context: Context) -> Reference:
        return self.references[max(context.adapter_id, 0)]

    def start(self, number: int, length: int) -> Context:
        """A context with a stored prompt and a token behind it that is not stored."""
        context = self.context(number)
        prompt = random_tokens(tiny_models.VOCABULARY, length, "prompt")
        [[token]] = self.client.forward([context.append(prompt)]).tokens
        self.reference(context).check(context.tokens, [token])
        context.tokens.append(token)
        context.positions.append(length)
        return context


EVERYTHING = range(len(NAMES) + 1)


@pytest.fixture(scope="module")
def made(models_folder: Path) -> lora_adapters.Made:
    return lora_adapters.make(MODEL, "linear", models_folder)


@pytest.fixture
def fresh(
    request: pytest.FixtureRequest, library: Library, models_folder: Path, tmp_path: Path
) -> Iterator[DriverHarness]:
    """A driver that has no adapters yet; its parameter is the number of ranks, by default one."""
    snapshot = tiny_models.build(MODEL, models_folder)
    devices = drivers.spread(getattr(request, "param", 1))
    config = drivers.write_config(tmp_path, snapshot, options=library.options(), **devices)
    with library.fork(config) as driver:
        yield DriverHarness(driver, MODEL, models_folder)
    assert driver.stop() == 0


def bound_logits(harness: DriverHarness, number: int) -> list[float] | None:
    """Logits of a short prompt under an adapter; None when the request failed."""
    tokens = random_tokens(tiny_models.VOCABULARY, 9, "bound")
    context = Context(harness.allocator, adapter_id=number)
    request = context.append(tokens, sampler=Sampler.raw_logits())
    [rows] = harness.client.forward([request]).logits or [[]]
    context.release()
    return rows[0] if rows else None
