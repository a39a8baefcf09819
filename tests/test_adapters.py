"""Loads, replacements and evictions of LoRA adapters in a running driver."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest

from pie_driver_sglang._core import Request, Sampler
from support.models import lora_adapters, tiny_models
from support.models.lora_adapters import edit
from support.models.reference import Context, Reference, random_tokens
from support.process import drivers, fork_server
from support.process import runtime_client as rc
from support.process.adapter_driver import (
    EVERYTHING,
    FAILED,
    LOADED,
    MODEL,
    NAMES,
    OK,
    OPTIONS,
    DriverHarness,
    Library,
    bound_logits,
)
from support.process.adapter_driver import fresh as fresh
from support.process.adapter_driver import library as library
from support.process.adapter_driver import made as made
from support.sglang_scripts import lora_manager

pytestmark = pytest.mark.engine


ON_ANY_RANKS = pytest.mark.parametrize("fresh", [1, 2], ids=["tp1", "tp2"], indirect=True)
ON_TWO_RANKS = pytest.mark.parametrize("fresh", [2], ids=["tp2"], indirect=True)


class TestLife:
    """Loads, replacements and evictions."""

    @ON_ANY_RANKS
    def test_a_second_load_replaces(self, fresh: DriverHarness, made: lora_adapters.Made) -> None:
        other = lora_adapters.make(MODEL, "ranks", fresh.folder)
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

    def test_a_failed_load_keeps_the_old_adapter_where_host_memory_is_short(
        self, fresh: DriverHarness
    ) -> None:
        made = [lora_adapters.make(MODEL, "linear", fresh.folder, seed) for seed in range(LOADED)]
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
        self, fresh: DriverHarness, made: lora_adapters.Made
    ) -> None:
        pid = fresh.driver.process.pid
        # On vLLM other processes stand for both.
        leader, worker = fork_server.forks(pid) or (pid, *rc.children(pid))
        other = lora_adapters.make(MODEL, "ranks", fresh.folder)
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

    def test_either_path_of_the_same_adapter(
        self, fresh: DriverHarness, made: lora_adapters.Made
    ) -> None:
        file = made.adapter / "adapter_model.safetensors"
        assert fresh.client.adapter("Load", 1, str(file)) == OK
        assert fresh.client.adapter("Load", 2**63 - 2, f"{made.adapter}/") == OK
        assert bound_logits(fresh, 1) == bound_logits(fresh, 2**63 - 2)

    @ON_ANY_RANKS
    def test_an_evicted_adapter_comes_back(self, fresh: DriverHarness) -> None:
        count = 2 * LOADED
        made = [lora_adapters.make(MODEL, "linear", fresh.folder, seed) for seed in range(count)]
        expected = []
        for number, one in enumerate(made, 1):
            assert fresh.client.adapter("Load", number, str(one.adapter)) == OK
            expected.append(bound_logits(fresh, number))
        assert None not in expected
        assert len({tuple(row or ()) for row in expected}) == count
        for number in [*range(1, count + 1), *range(count, 0, -1), 3, 8, 1, 6]:
            assert bound_logits(fresh, number) == expected[number - 1]

    def test_a_slot_keeps_nothing_of_its_former_adapter(
        self, library: Library, models_folder: Path, tmp_path: Path
    ) -> None:
        """All adapters take turns in as few slots as there may be."""
        snapshot = tiny_models.build(MODEL, models_folder)
        options = library.options(slots=1)
        with library.fork(drivers.write_config(tmp_path, snapshot, options=options)) as driver:
            harness = DriverHarness(driver, MODEL, models_folder)
            harness.load_all(NAMES)
            order = [one for pair in itertools.permutations(EVERYTHING, 2) for one in pair]
            harness.check_logits(order, 6)
        assert driver.stop() == 0

    @pytest.mark.parametrize("how", ["removed", "changed", "broken"])
    def test_only_requests_of_a_lost_adapter_fail(self, fresh: DriverHarness, how: str) -> None:
        count = 2 * LOADED
        made = [lora_adapters.make(MODEL, "linear", fresh.folder, seed) for seed in range(count)]
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

    def test_lost_requests_store_nothing(
        self, fresh: DriverHarness, made: lora_adapters.Made
    ) -> None:
        """Pages that a failed request names are what they were."""
        folder = fresh.folder / "vanishing"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made.adapter, folder)
        assert fresh.client.adapter("Load", 1, str(folder)) == OK
        for number in range(2, LOADED + 2):
            one = lora_adapters.make(MODEL, "linear", fresh.folder, number)
            assert fresh.client.adapter("Load", number, str(one.adapter)) == OK
        shutil.rmtree(folder)
        context = fresh.start(0, 30)
        other = random_tokens(tiny_models.VOCABULARY, 30, "other")
        overwrite = Request(
            other, list(range(30)), context.pages, 14, [(29, Sampler.greedy())], adapter_id=1
        )
        assert fresh.client.forward([overwrite]).tokens == [[]]
        fresh.check_greedy([context], 6)


def test_ranks_agree_on_their_adapters(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """Whatever fails on one rank alone."""
    good = str(made.adapter)
    changed = str(edit(made.adapter, tmp_path / "changed", lora_alpha=17))
    copied, gone = str(tmp_path / "copied"), str(tmp_path / "gone")
    shutil.copytree(made.adapter, copied)
    steps = [
        lora_manager.Load(1, (good, copied)),
        lora_manager.Load(2, (good, gone)),
        lora_manager.Load(2, (gone, good)),
        lora_manager.Load(2, (good, changed)),
        lora_manager.Load(2, (good, good), broken=1),
        lora_manager.Load(1, (changed, changed), broken=0),
        *(lora_manager.Load(number, (good, good)) for number in range(3, 3 + LOADED)),
        # The first one has been evicted, and one rank has lost its files.
        lora_manager.Fetch([1, 3], moved=(None, (copied, gone))),
        lora_manager.Fetch([1, 4], moved=(None, (gone, copied))),
    ]
    snapshot = tiny_models.build(MODEL, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS, **drivers.spread(2))
    leader, worker = drivers.call(lora_manager.run_on_ranks, tmp_path, str(config), steps)
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
    snapshot = tiny_models.build(MODEL, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    counts: list[int] = drivers.call(
        lora_manager.count_loaded, tmp_path, str(config), str(made.adapter)
    )
    assert counts[:8] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert counts[8:-1] == [LOADED] * (len(counts) - 9)
    assert counts[-1] == LOADED - 1


def test_the_loading_thread_pins_for_a_gpu(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """And takes its rank's part: the copy into a slot is all that steps wait for then."""
    snapshot = tiny_models.build(MODEL, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    assert drivers.call(lora_manager.pin_loaded, tmp_path, str(config), str(made.adapter)) == (
        [("cuda:1", "adapters")],
        {"adapters"},
    )


def test_other_threads_pin_while_a_manager_is_made(tmp_path: Path) -> None:
    here, there = drivers.call(lora_manager.pin_on_threads, tmp_path)
    assert (here, there) == ([False, False], [True, True])
