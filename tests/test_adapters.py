"""LoRA adapters of a running driver, against models that PEFT has merged them into."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import adapter_process
import drivers
import lora_adapters
import runtime_client as rc
import tiny_models
from lora_adapters import CONFIGS, edit
from pie_driver_sglang._core import Request, Sampler
from reference import Context, MaskedReference, Pages, Reference, random_tokens
from traced_driver import Traced, start

pytestmark = pytest.mark.engine

PAGE = 16
CHUNK = 32
SLOTS = 3
LOADED = 4
TOLERANCE = 1e-4
OK, MALFORMED, UNSUPPORTED, FAILED = 0, 2, 4, 5
OPTIONS = {
    "enable_lora": True,
    "max_lora_rank": 16,
    "max_loras_per_batch": SLOTS,
    "max_loaded_loras": LOADED,
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "cpu_mem_budget_in_gb": 1,
}
NAMES = list(CONFIGS)


class Bench:
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
            context.append(tokens)
            requests.append(_probe(context, tokens, rows))
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


def _probe(context: Context, tokens: Sequence[int], rows: Sequence[int]) -> Request:
    return Request(
        list(tokens),
        list(range(len(tokens))),
        context.pages,
        (len(tokens) - 1) % PAGE + 1,
        [(row, Sampler.raw_logits()) for row in rows],
        context_id=context.id,
        adapter_id=context.adapter_id,
    )


@pytest.fixture(
    scope="module",
    params=[("llama", 1), ("qwen3", 1), ("llama", 2), ("qwen3", 2)],
    ids=["llama", "qwen3", "llama-tp2", "qwen3-tp2"],
)
def served(
    request: pytest.FixtureRequest, models_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A driver with all adapters of `CONFIGS` loaded, more than host memory may keep.

    Qwen3 has one head of keys and values, which two ranks share, and a tied LM head.
    """
    drivers.start_fork_server()
    model, ranks = request.param
    snapshot = tiny_models.build(model, models_folder)
    with contextmanager(start)(
        tmp_path_factory.mktemp(model), snapshot, ranks, **OPTIONS
    ) as traced:
        bench = Bench(traced.driver, model, models_folder, traced)
        bench.load_all(NAMES)
        yield bench
    assert not traced.driver.region.exists()


EVERYTHING = range(len(NAMES) + 1)


class TestParity:
    """Seven adapters and none, where a pass holds three and host memory four of them."""

    @pytest.mark.parametrize("length", [1, 17, CHUNK, 75])
    def test_logits_of_a_mixed_batch_and_of_each_alone(self, served: Bench, length: int) -> None:
        together = served.check_logits([*EVERYTHING, 0, *reversed(EVERYTHING)], length)
        for number in EVERYTHING:
            [alone] = served.check_logits([number], length)
            assert torch.tensor(alone).sub(torch.tensor(together[number])).abs().max() < TOLERANCE

    def test_adapters_differ(self, served: Bench) -> None:
        """The tolerance tells the adapters apart."""
        rows = torch.tensor(served.check_logits(EVERYTHING, 20))
        for one, other in itertools.combinations(rows, 2):
            assert (one - other).abs().max() > 0.1

    def test_greedy_decode(self, served: Bench) -> None:
        contexts = [served.start(number, 5 + 9 * number) for number in EVERYTHING]
        served.check_greedy(contexts, 12)

    def test_steps_that_are_full_of_adapters(self, served: Bench) -> None:
        """What pads nine rows takes no slot beside theirs."""
        served.check_greedy([served.start(number, 9) for number in [1, 2, SLOTS] * 3], 3)

    def test_batches_without_adapters_take_the_graph_path(self, served: Bench) -> None:
        """Nothing stays of the adapters before, those of the LM head included."""
        assert served.traced is not None
        batches = [[0], [4], [0, 0], [0, 6], [0], [7], [0]]
        for numbers in batches:
            contexts = [served.start(number, 21) for number in numbers]
            before = len(served.traced.paths())
            served.check_greedy(contexts, 3)
            path = "python" if any(numbers) else "graph"
            assert served.traced.paths()[before:] == [path] * 3, numbers

    def test_prefill_beside_decode(self, served: Bench) -> None:
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
    def test_drafts(self, served: Bench, number: int) -> None:
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
    def test_masks(self, served: Bench, number: int) -> None:
        """Rows that see the first token and the last few, beside requests without a mask."""
        tokens = random_tokens(tiny_models.VOCABULARY, 24, "masked")
        masks = [[0, 1, max(0, row - 5), min(row, 5)] for row in range(len(tokens))]
        masks[0] = [0, 1]
        visible = [[c == 0 or r - 5 < c <= r for c in range(24)] for r in range(24)]
        context, causal = served.context(number), served.context(2)
        masked = context.append(tokens, masks=masks, rows=range(24))
        found, plain = served.client.forward([masked, causal.append(tokens)]).tokens
        reference = MaskedReference(served.snapshots[number])
        best = reference.logits(tokens, range(24), visible).argmax(-1).tolist()
        assert found == best
        served.references[2].check(tokens, plain)

    def test_a_replay_a_fork_and_a_swapped_context(self, served: Bench) -> None:
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
        bench = Bench(driver, model, models_folder)
        bench.load_all(["linear", "attention"])
        bench.check_logits([0, 1, 2], 40)
        bench.check_greedy([bench.start(number, 20) for number in (2, 0, 1)], 6)
    assert driver.stop() == 0


@pytest.fixture(scope="module")
def made(models_folder: Path) -> lora_adapters.Made:
    return lora_adapters.make("llama", "linear", models_folder)


@pytest.fixture
def fresh(request: pytest.FixtureRequest, models_folder: Path, tmp_path: Path) -> Iterator[Bench]:
    """A driver that has no adapters yet; its parameter is the number of ranks, by default one."""
    snapshot = tiny_models.build("llama", models_folder)
    devices = drivers.spread(getattr(request, "param", 1))
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS, **devices)
    with drivers.fork(config) as driver:
        yield Bench(driver, "llama", models_folder)
    assert driver.stop() == 0


ON_ANY_RANKS = pytest.mark.parametrize("fresh", [1, 2], ids=["tp1", "tp2"], indirect=True)
ON_TWO_RANKS = pytest.mark.parametrize("fresh", [2], ids=["tp2"], indirect=True)


def bound_logits(bench: Bench, number: int) -> list[float] | None:
    """Logits of a short prompt under an adapter; None when the request failed."""
    tokens = random_tokens(tiny_models.VOCABULARY, 9, "bound")
    context = Context(bench.allocator, adapter_id=number)
    context.append(tokens)
    [rows] = bench.client.forward([_probe(context, tokens, [8])]).logits or [[]]
    context.release()
    return rows[0] if rows else None


class TestLife:
    """Loads, replacements and evictions."""

    @ON_ANY_RANKS
    def test_a_second_load_replaces(self, fresh: Bench, made: lora_adapters.Made) -> None:
        other = lora_adapters.make("llama", "ranks", fresh.folder)
        load = fresh.client.adapter
        assert bound_logits(fresh, 7) is None
        assert load("Load", 7, str(made.adapter)) == OK
        first = bound_logits(fresh, 7)
        assert load("Load", 7, str(other.adapter)) == OK
        second = bound_logits(fresh, 7)
        assert first is not None
        assert second is not None
        assert first != second
        assert load("Load", 7, "/nowhere") == FAILED
        assert bound_logits(fresh, 7) == second
        # Not half of the new one either, whose layers are fewer.
        assert load("Load", 8, str(other.adapter)) == OK
        assert bound_logits(fresh, 8) == second

    def test_a_failed_load_leaves_the_old_one_where_room_is_short(self, fresh: Bench) -> None:
        made = [lora_adapters.make("llama", "linear", fresh.folder, seed) for seed in range(LOADED)]
        moved = fresh.folder / "moved"
        shutil.rmtree(moved, ignore_errors=True)
        shutil.copytree(made[0].adapter, moved)
        assert fresh.client.adapter("Load", 1, str(moved)) == OK
        for number, one in enumerate(made[1:], 2):
            assert fresh.client.adapter("Load", number, str(one.adapter)) == OK
        before = bound_logits(fresh, 1)
        for number in range(2, LOADED + 1):
            bound_logits(fresh, number)
        # It has been used least recently, and its files are worth nothing now.
        (moved / "adapter_config.json").write_text("{}")
        assert fresh.client.adapter("Load", 1, str(moved)) == FAILED
        assert bound_logits(fresh, 1) == before

    @ON_TWO_RANKS
    def test_a_load_that_fails_on_one_rank_fails_on_all(
        self, fresh: Bench, made: lora_adapters.Made
    ) -> None:
        leader = fresh.driver.process.pid
        [worker] = rc.children(leader)
        other = lora_adapters.make("llama", "ranks", fresh.folder)
        load = fresh.client.adapter
        assert load("Load", 7, str(made.adapter)) == OK
        before = bound_logits(fresh, 7)
        for number, (pid, failure) in enumerate(((leader, ": on rank 1: "), (worker, ": ")), 8):
            # Only this process has a thread of this number.
            path = f"/proc/self/task/{pid}/root{other.adapter}"
            assert load("Load", 7, path) == FAILED
            assert load("Load", number, path) == FAILED
            fresh.driver.logged(f"'{failure}'/proc/self/task/{pid}/root")
            assert bound_logits(fresh, 7) == before
            assert bound_logits(fresh, number) is None
        assert load("Load", 8, str(other.adapter)) == OK
        assert bound_logits(fresh, 8) not in (before, None)
        assert bound_logits(fresh, 7) == before

    def test_either_path_of_the_same_adapter(self, fresh: Bench, made: lora_adapters.Made) -> None:
        file = made.adapter / "adapter_model.safetensors"
        assert fresh.client.adapter("Load", 1, str(file)) == OK
        assert fresh.client.adapter("Load", 2**63 - 2, f"{made.adapter}/") == OK
        assert bound_logits(fresh, 1) == bound_logits(fresh, 2**63 - 2)

    @ON_ANY_RANKS
    def test_an_evicted_adapter_comes_back(self, fresh: Bench) -> None:
        count = 2 * LOADED
        made = [lora_adapters.make("llama", "linear", fresh.folder, seed) for seed in range(count)]
        expected = []
        for number, one in enumerate(made, 1):
            assert fresh.client.adapter("Load", number, str(one.adapter)) == OK
            expected.append(bound_logits(fresh, number))
        assert None not in expected
        assert len({tuple(row or ()) for row in expected}) == count
        for number in [*range(1, count + 1), *range(count, 0, -1), 3, 8, 1, 6]:
            assert bound_logits(fresh, number) == expected[number - 1]

    def test_a_slot_keeps_nothing_of_its_former_adapter(
        self, models_folder: Path, tmp_path: Path
    ) -> None:
        """All adapters take turns in the only slot."""
        snapshot = tiny_models.build("llama", models_folder)
        options = {**OPTIONS, "max_loras_per_batch": 1}
        with drivers.fork(drivers.write_config(tmp_path, snapshot, options=options)) as driver:
            bench = Bench(driver, "llama", models_folder)
            bench.load_all(NAMES)
            order = [one for pair in itertools.permutations(EVERYTHING, 2) for one in pair]
            bench.check_logits(order, 6)
        assert driver.stop() == 0

    @pytest.mark.parametrize("how", ["removed", "changed", "broken"])
    def test_only_requests_of_a_lost_adapter_fail(self, fresh: Bench, how: str) -> None:
        count = 2 * LOADED
        made = [lora_adapters.make("llama", "linear", fresh.folder, seed) for seed in range(count)]
        lost = fresh.folder / f"lost-{how}"
        shutil.rmtree(lost, ignore_errors=True)
        shutil.copytree(made[0].adapter, lost)
        assert fresh.client.adapter("Load", 1, str(lost)) == OK
        before = bound_logits(fresh, 1)
        for number, one in enumerate(made[1:], 2):
            assert fresh.client.adapter("Load", number, str(one.adapter)) == OK
        aside = fresh.folder / f"aside-{how}"
        shutil.rmtree(aside, ignore_errors=True)
        lost.rename(aside)
        if how == "changed":
            shutil.copytree(made[1].adapter, lost)
        if how == "broken":
            shutil.copytree(made[0].adapter, lost)
            (lost / "adapter_model.safetensors").write_bytes(b"nonsense")
        numbers = [-1, 1, 5, 1, 8, -1, 2, 1]
        tokens = random_tokens(tiny_models.VOCABULARY, 50, "lost")
        fresh.references += [Reference(one.merged) for one in made]
        contexts = [Context(fresh.allocator, adapter_id=number) for number in numbers]
        replies = fresh.client.forward([context.append(tokens) for context in contexts]).tokens
        for context, found in zip(contexts, replies, strict=True):
            if context.adapter_id == 1:
                assert found == []
            else:
                fresh.reference(context).check(tokens, found)
        reason = "has changed" if how != "removed" else "is missing"
        log = fresh.driver.logged("request 7 of context", "rejected: adapter 1 is lost", reason)
        for index in (1, 7):
            assert re.search(rf"request {index} of context \d+ rejected: adapter 1 is lost", log)
        # It is served again as soon as it is there.
        shutil.rmtree(lost, ignore_errors=True)
        aside.rename(lost)
        assert bound_logits(fresh, 1) == before

    def test_lost_requests_store_nothing(self, fresh: Bench, made: lora_adapters.Made) -> None:
        """Pages that a failed request names are what they were."""
        folder = fresh.folder / "vanishing"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made.adapter, folder)
        assert fresh.client.adapter("Load", 1, str(folder)) == OK
        for number in range(2, LOADED + 2):
            one = lora_adapters.make("llama", "linear", fresh.folder, number)
            assert fresh.client.adapter("Load", number, str(one.adapter)) == OK
        shutil.rmtree(folder)
        context = fresh.start(0, 30)
        other = random_tokens(tiny_models.VOCABULARY, 30, "other")
        overwrite = Request(
            other, list(range(30)), context.pages, 14, [(29, Sampler.greedy())], adapter_id=1
        )
        assert fresh.client.forward([overwrite]).tokens == [[]]
        fresh.check_greedy([context], 6)


def _with_tensors(
    change: Callable[[dict[str, torch.Tensor]], object],
) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        file = changed / "adapter_model.safetensors"
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file({k: v.clone() for k, v in tensors.items()}, file)
        return changed

    return build


def _with_settings(**settings: Any) -> Callable[[Path, Path], Path]:
    return lambda adapter, folder: edit(adapter, folder, **settings)


def _without(name: str) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        (changed / name).unlink()
        return changed

    return build


def _with_file(name: str, content: bytes) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        (changed / name).write_bytes(content)
        return changed

    return build


def _link(name: str, target: str) -> Callable[[Path, Path], Path]:
    def build(adapter: Path, folder: Path) -> Path:
        changed = edit(adapter, folder)
        (changed / name).unlink()
        (changed / name).symlink_to(target)
        return changed

    return build


def _pipe(_: Path, folder: Path) -> Path:
    folder.mkdir()
    os.mkfifo(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return folder


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = Q0.replace("lora_A", "lora_B")


def _wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q0] = torch.zeros(8, 65)


def _long(tensors: dict[str, torch.Tensor]) -> None:
    tensors[B0] = torch.zeros(80, 8)


def _ranks(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in list(tensors.items()):
        double = torch.cat([tensor] * 4, dim=0 if "lora_A" in name else 1)
        tensors[name] = double


BROKEN: Mapping[str, tuple[Callable[[Path, Path], Path], tuple[str, ...]]] = {
    "no configuration": (_without("adapter_config.json"), ("adapter_config.json is missing",)),
    "no weights": (
        _without("adapter_model.safetensors"),
        ("adapter_model.safetensors is missing",),
    ),
    "a file that is none": (
        lambda adapter, folder: adapter / "nothing.safetensors",
        ("cannot be read",),
    ),
    "a pipe": (_pipe, ("cannot be read",)),
    "a text": (_with_file("adapter_model.safetensors", b"hello"), ("not a safetensors file",)),
    "an empty file": (_with_file("adapter_model.safetensors", b""), ("is empty",)),
    "no JSON": (_with_file("adapter_config.json", b"\xff{"), ("not what PEFT writes",)),
    "a list": (_with_file("adapter_config.json", b"[]"), ("not what PEFT writes",)),
    "no rank": (_with_settings(r=None), ("missing required field `r`",)),
    "a rank of zero": (_with_settings(r=0), ("r = 0",)),
    "a text for a rank": (_with_settings(r="8"), ("$.r",)),
    "DoRA": (_with_settings(use_dora=True), ("use_dora = True", "plain LoRA")),
    "a bias": (_with_settings(bias="all"), ("bias = 'all'",)),
    "whole modules": (_with_settings(modules_to_save=["lm_head"]), ("modules_to_save",)),
    "another method": (_with_settings(peft_type="IA3"), ("peft_type = 'IA3'",)),
    "another rank": (_with_settings(r=4), ("rank 8", "says 4")),
    "a broken pattern": (_with_settings(alpha_pattern={"(": 3}), ("pattern", "'('")),
    "a pattern without end": (
        _with_settings(rank_pattern={"(?=q)q_proj": 8}),
        ("rank_pattern", "look-around", "name the layers in full"),
    ),
    "a file without end": (_link("adapter_model.safetensors", "/proc/kmsg"), ("is empty",)),
    "a configuration without end": (_link("adapter_config.json", "/dev/zero"), ("regular file",)),
    "a large rank": (_with_tensors(_ranks), ("rank 32", "max_lora_rank = 32")),
    "wide weights": (_with_tensors(_wide), ("[8, 65]", "[rank, 64]")),
    "long weights": (_with_tensors(_long), ("[80, 8]", "[64, rank]")),
    "half a pair": (_with_tensors(lambda tensors: tensors.pop(B0)), ("lacks lora_B",)),
    "no tensors": (_with_tensors(lambda tensors: tensors.clear()), ("no LoRA weights",)),
    "integers": (
        _with_tensors(lambda tensors: tensors.update({Q0: torch.zeros(8, 64).int()})),
        ("not floats",),
    ),
    "a scalar": (_with_tensors(lambda tensors: tensors.update({Q0: torch.zeros(())})), ("[]",)),
    "no numbers": (
        _with_tensors(lambda tensors: tensors[Q0].fill_(float("nan"))),
        ("not all finite",),
    ),
    "a layer too many": (
        _with_tensors(lambda tensors: tensors.update({Q0.replace(".0.", ".2."): tensors[Q0]})),
        ("layers.2", "targets", "down_proj"),
    ),
    "another layer": (
        _with_tensors(
            lambda tensors: tensors.update({Q0.replace("q_proj", "c_attn"): tensors[Q0]})
        ),
        ("c_attn",),
    ),
    "an image's layer": (
        _with_tensors(
            lambda tensors: tensors.update({Q0.replace(".layers", ".vision.layers"): tensors[Q0]})
        ),
        ("vision",),
    ),
    "a magnitude": (
        _with_tensors(
            lambda tensors: tensors.update(
                {Q0.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)}
            )
        ),
        ("lora_magnitude_vector",),
    ),
}


@pytest.fixture(scope="module")
def loader(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A driver for loads that fail; adapter 1 is loaded."""
    snapshot = tiny_models.build("llama", models_folder)
    config = drivers.write_config(tmp_path_factory.mktemp("loader"), snapshot, options=OPTIONS)
    with drivers.fork(config) as driver:
        bench = Bench(driver, "llama", models_folder)
        made = lora_adapters.make("llama", "linear", models_folder)
        assert bench.client.adapter("Load", 1, str(made.adapter)) == OK
        yield bench
    assert driver.stop() == 0


class TestRefusals:
    """What cannot be loaded or bound."""

    def test_operations(self, loader: Bench) -> None:
        call = loader.client.adapter
        for number in (0, 2**63 - 1, 2**63, 2**64 - 1):
            assert call("Load", number, "/a") == MALFORMED
        loader.driver.logged("adapter id 0 is outside 1 to 9223372036854775806")
        for operation in ("Save", "ZoInit", "ZoUpdate"):
            assert call(operation, 1) == UNSUPPORTED
        assert call("GenerateAudio", 0, "{}") == -1
        assert call("Load", 2, "") == MALFORMED
        assert call("Load", 2, "a\0b") == MALFORMED
        assert call("Load", 2, "x" * 5000) == FAILED
        loader.driver.logged("adapter 2 cannot be loaded from 'xxx", "File name too long")
        assert len(loader.driver.stderr()) < 20_000

    def test_only_loaded_adapters_can_be_bound(self, loader: Bench) -> None:
        numbers = [-1, 0, 1, -2, 2, 2**63 - 1, -(2**63), 1]
        tokens = random_tokens(tiny_models.VOCABULARY, 20, "bindings")
        contexts = [Context(loader.allocator, adapter_id=number) for number in numbers]
        replies = loader.client.forward([context.append(tokens) for context in contexts]).tokens
        assert [len(found) for found in replies] == [1, 0, 1, 0, 0, 0, 0, 1]
        loader.references[0].check(tokens, replies[0])

    def test_reasons(self, fresh: Bench) -> None:
        for number in (0, -2, 5):
            assert bound_logits(fresh, number) is None
        fresh.driver.logged("adapter id 0 names nothing", "id -2 names", "adapter 5 is not loaded")

    def test_an_adapter_without_rows_of_its_own(self, loader: Bench) -> None:
        """A request without tokens may name anything."""
        reply = loader.client.forward([Request([], [], [], 1, adapter_id=99)])
        assert reply.tokens == [[]]

    def test_adapters_are_off_by_default(self, llama_driver: drivers.Driver) -> None:
        client = llama_driver.client()
        assert client.adapter("Load", 1, "/anything") == UNSUPPORTED
        request = Request([5], [0], [0], 1, [(0, Sampler.greedy())], adapter_id=1)
        assert client.forward([request]).tokens == [[]]
        llama_driver.logged(
            "adapters are off; set `enable_lora = true` in the options",
            "rejected: adapters are off, so 1 cannot be bound; set `enable_lora = true`",
        )

    def test_layers_that_the_options_leave_out(
        self, models_folder: Path, made: lora_adapters.Made, tmp_path: Path
    ) -> None:
        options = {**OPTIONS, "lora_target_modules": ["q_proj", "k_proj", "v_proj"]}
        snapshot = tiny_models.build("llama", models_folder)
        with drivers.fork(drivers.write_config(tmp_path, snapshot, options=options)) as driver:
            bench = Bench(driver, "llama", models_folder)
            assert bench.client.adapter("Load", 1, str(made.adapter)) == FAILED
            bench.driver.logged("only targets k_proj, q_proj, v_proj", "lora_target_modules")
            attention = lora_adapters.make("llama", "attention", models_folder)
            assert bench.client.adapter("Load", 1, str(attention.adapter)) == OK


def test_failed_loads_leave_nothing_behind(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """Each with its reason; SGLang's manager knows afterwards what it knew before."""
    paths = {}
    for number, (name, (build, _)) in enumerate(BROKEN.items()):
        paths[name] = str(build(made.adapter, tmp_path / f"broken-{number}"))
    snapshot = tiny_models.build("llama", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    receiver, sender = multiprocessing.Pipe()
    good = str(made.adapter)
    arguments = (str(config), good, paths, sender, str(tmp_path / "stderr"))
    process = drivers.fork_call(adapter_process.load_broken, arguments)
    sender.close()
    with receiver:
        assert receiver.poll(60.0)
        results: dict[str, tuple[str, str, bool]] = receiver.recv()
    assert process.wait(30.0) == 0
    assert results.keys() == BROKEN.keys() | {"SGLang's own"}
    for name, (error, text, unchanged) in results.items():
        assert error == "AdapterError", (name, error, text)
        assert unchanged, f"{name} left something behind"
        for part in BROKEN.get(name, (None, ("SGLang does not take it",)))[1]:
            assert part in text, (name, text)


def test_ranks_agree_on_their_adapters(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """Whatever fails on one rank alone."""
    good = str(made.adapter)
    changed = str(edit(made.adapter, tmp_path / "changed", lora_alpha=17))
    copied, gone = str(tmp_path / "copied"), str(tmp_path / "gone")
    shutil.copytree(made.adapter, copied)
    steps = [
        adapter_process.Load(1, (good, copied)),
        adapter_process.Load(2, (good, gone)),
        adapter_process.Load(2, (gone, good)),
        adapter_process.Load(2, (good, changed)),
        adapter_process.Load(2, (good, good), broken=1),
        adapter_process.Load(1, (changed, changed), broken=0),
        *(adapter_process.Load(number, (good, good)) for number in range(3, 3 + LOADED)),
        # The first one has been evicted, and one rank has lost its files.
        adapter_process.Fetch([1, 3], moved=(None, (copied, gone))),
        adapter_process.Fetch([1, 4], moved=(None, (gone, copied))),
    ]
    snapshot = tiny_models.build("llama", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS, **drivers.spread(2))
    receiver, sender = multiprocessing.Pipe()
    arguments = (str(config), steps, sender, str(tmp_path / "stderr"))
    process = drivers.fork_call(adapter_process.run_on_ranks, arguments)
    sender.close()
    with receiver:
        assert receiver.poll(60.0)
        leader, worker = receiver.recv()
    assert process.wait(30.0) == 0
    kept = [state for _, state in leader]
    assert kept == [state for _, state in worker]
    # None of the failures has left anything behind.
    assert kept[:6] == kept[:1] * 6
    for said in ([text for text, _ in results] for results in (leader, worker)):
        assert said[0] == ""
        assert re.match("on rank 1: '.*' cannot be read: ", said[1])
        assert re.match("'.*' cannot be read: ", said[2])
        assert "has changed while it was read" in said[3]
        assert said[4].startswith("on rank 1: SGLang does not take it: the shapes differ")
        assert said[5].startswith("SGLang does not take it: the shapes differ")
        assert said[6:-2] == [""] * LOADED
        assert re.match("""{1: "on rank 1: '.*' cannot be read: """, said[-2])
        assert said[-1] == ""


def test_host_memory_is_bounded(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    snapshot = tiny_models.build("llama", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    receiver, sender = multiprocessing.Pipe()
    arguments = (str(config), str(made.adapter), sender, str(tmp_path / "stderr"))
    process = drivers.fork_call(adapter_process.count_loaded, arguments)
    sender.close()
    with receiver:
        assert receiver.poll(60.0)
        counts: list[int] = receiver.recv()
    assert process.wait(30.0) == 0
    assert counts[:8] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert counts[8:-1] == [LOADED] * (len(counts) - 9)
    assert counts[-1] == LOADED - 1


def test_the_loading_thread_pins_for_a_gpu(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """And takes its rank's part: the copy into a slot is all that steps wait for then."""
    snapshot = tiny_models.build("llama", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    receiver, sender = multiprocessing.Pipe()
    arguments = (str(config), str(made.adapter), sender, str(tmp_path / "stderr"))
    process = drivers.fork_call(adapter_process.pin_loaded, arguments)
    sender.close()
    with receiver:
        assert receiver.poll(60.0)
        assert receiver.recv() == ([("cuda:1", "adapters")], {"adapters"})
    assert process.wait(30.0) == 0


def test_other_threads_pin_while_a_manager_is_made(tmp_path: Path) -> None:
    receiver, sender = multiprocessing.Pipe()
    arguments = (sender, str(tmp_path / "stderr"))
    process = drivers.fork_call(adapter_process.pin_on_threads, arguments)
    sender.close()
    with receiver:
        assert receiver.poll(60.0)
        here, there = receiver.recv()
    assert process.wait(30.0) == 0
    assert (here, there) == ([False, False], [True, True])
