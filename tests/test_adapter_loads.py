"""LoRA adapters that are loaded while the driver serves requests."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pie_driver_sglang._core import Client, Load, Request, Sampler
from pie_driver_sglang.driver.adapter_loads import AdapterLoads, _timeout_s
from support.models import lora_adapters, tiny_models
from support.process import drivers
from support.process import runtime_client as rc
from support.process.adapter_driver import (
    FAILED,
    MODEL,
    OK,
    OPTIONS,
    DriverHarness,
    bound_logits,
)
from support.sglang_scripts import lora_manager

pytestmark = pytest.mark.engine

BASE, FIRST = 0, 1
"""Adapter 1 is loaded."""


class Held:
    """A driver whose ranks read no weights while its gate is shut."""

    def __init__(self, harness: DriverHarness, gate: Path, ranks: int) -> None:
        self.bench = harness
        self.driver = harness.driver
        self.client = harness.client
        self._gate = gate
        self._ranks = ranks

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Within it nothing is read to its end."""
        (self._gate / "shut").touch()
        try:
            yield
        finally:
            self.open()

    def open(self) -> None:
        """Lets everything be read."""
        (self._gate / "shut").unlink(missing_ok=True)
        for file in self._gate.glob("waits-*"):
            file.unlink()

    def wait_until_all_ranks_read(self) -> None:
        """Waits until each rank stands at the gate."""
        rc.eventually(
            lambda: len(list(self._gate.glob("waits-*"))) == self._ranks, "reading on all ranks"
        )

    def loading(
        self, number: int, adapter: Path, client: Client | None = None
    ) -> contextlib.AbstractContextManager[list[object]]:
        """Loads an adapter in a thread; the list receives the status."""
        call = functools.partial((client or self.client).adapter, "Load", number, str(adapter))
        return rc.background(call)


@contextlib.contextmanager
def held(folder: Path, models: Path, ranks: int = 1, client_timeout_s: str = "") -> Iterator[Held]:
    gate = folder / "gate"
    gate.mkdir()
    snapshot = tiny_models.build(MODEL, models)
    config = drivers.write_config(folder, snapshot, options=OPTIONS, **drivers.spread(ranks))
    prepare = functools.partial(lora_manager.hold_reads, str(gate), client_timeout_s)
    with drivers.running(config, prepare) as driver:
        harness = DriverHarness(driver, MODEL, models)
        harness.load_all(["linear"])
        one = Held(harness, gate, ranks)
        one.open()
        yield one


@pytest.fixture(scope="module")
def made(models_folder: Path) -> lora_adapters.Made:
    return lora_adapters.make(MODEL, "ranks", models_folder)


@pytest.fixture(scope="module")
def other(models_folder: Path) -> lora_adapters.Made:
    return lora_adapters.make(MODEL, "mlp", models_folder)


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_serving_continues_while_an_adapter_is_read(
    models_folder: Path,
    made: lora_adapters.Made,
    other: lora_adapters.Made,
    tmp_path: Path,
    ranks: int,
) -> None:
    """Prompts and decodes with and without adapters, copies and refusals; the answer comes last."""
    with held(tmp_path, models_folder, ranks) as one:
        harness, client, load = one.bench, one.client, one.client.adapter
        former = bound_logits(harness, FIRST)
        with rc.Region(one.driver.region) as region:
            with one.shut(), one.loading(2, made.adapter) as status:
                one.wait_until_all_ranks_read()
                harness.check_greedy([harness.start(number, 20) for number in (BASE, BASE)], 5)
                harness.check_greedy([harness.start(number, 20) for number in (FIRST, BASE)], 5)
                harness.check_logits([BASE, FIRST], 40)
                assert client.copy("D2D", [0, 1], [2, 3]) == OK
                client.health()
                assert bound_logits(harness, 2) is None
                assert load("Load", 0, "/a") != OK
                assert (status, region.in_flight()) == ([], 1)
                one.open()
            assert status == [OK]
            new = bound_logits(harness, 2)
            assert new not in (None, former)
            # The same of an adapter that takes the place of another one, and of one that fails.
            with one.shut(), one.loading(FIRST, made.adapter) as status:
                one.wait_until_all_ranks_read()
                assert bound_logits(harness, FIRST) == former
                assert status == []
                one.open()
            assert status == [OK]
            assert bound_logits(harness, FIRST) == new
            broken = lora_adapters.edit(other.adapter, tmp_path / "broken", r=3)
            with one.shut(), one.loading(FIRST, broken) as status:
                one.wait_until_all_ranks_read()
                assert status == []
                one.open()
            assert status == [FAILED]
            assert bound_logits(harness, FIRST) == new


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_two_loads_of_an_id_are_finished_in_their_order(
    models_folder: Path,
    made: lora_adapters.Made,
    other: lora_adapters.Made,
    tmp_path: Path,
    ranks: int,
) -> None:
    with held(tmp_path, models_folder, ranks) as one:
        harness = one.bench
        assert one.client.adapter("Load", 8, str(made.adapter)) == OK
        assert one.client.adapter("Load", 9, str(other.adapter)) == OK
        expected = [bound_logits(harness, number) for number in (8, 9)]
        one.open()
        with rc.Region(one.driver.region) as region:
            for paths in ((made.adapter, other.adapter), (other.adapter, made.adapter)):
                with one.shut(), one.loading(7, paths[0]) as first:
                    one.wait_until_all_ranks_read()
                    with one.loading(7, paths[1]) as second:
                        rc.eventually(lambda: region.in_flight() == 2, "the second load")
                        # The third one finds no place, and the slots that are left stay free.
                        assert one.client.adapter("Load", 9, str(made.adapter)) == FAILED
                        harness.check_greedy([harness.start(FIRST, 9)], 2)
                        assert (first, second) == ([], [])
                        one.open()
                assert (first, second) == ([OK], [OK])
                last = expected[0 if paths[1] == made.adapter else 1]
                assert bound_logits(harness, 7) == last
        one.driver.logged("2 adapters are being read already", "try again later")
        assert bound_logits(harness, 9) == expected[1]


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_a_load_that_takes_too_long_is_answered(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path, ranks: int
) -> None:
    """Before its client gives up, so that its slot is free for what comes then."""
    with held(tmp_path, models_folder, ranks, client_timeout_s="2.4") as one:
        harness = one.bench
        with one.shut():
            assert one.client.adapter("Load", 7, str(made.adapter)) == FAILED
            one.driver.logged("it is not read within 2 s, and its client will give up")
            assert bound_logits(harness, 7) is None
            hasty = one.driver.client(timeout_s=1.0)
            with pytest.raises(TimeoutError):
                hasty.adapter("Load", 7, str(made.adapter))
            assert hasty.forward([_request()]).tokens
            # Both are still being read.
            assert one.client.adapter("Load", 7, str(made.adapter)) == FAILED
            one.driver.logged("2 adapters are being read already")
            harness.check_greedy([harness.start(FIRST, 9)], 2)
        rc.eventually(
            lambda: one.client.adapter("Load", 8, str(made.adapter)) == OK, "another load"
        )
        # What was answered by a failure has not come after all.
        assert bound_logits(harness, 7) is None
        assert bound_logits(harness, 8) is not None


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_a_driver_ends_while_it_reads(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path, ranks: int
) -> None:
    """Of its own accord or not, it waits for no file."""
    with held(tmp_path, models_folder, ranks) as one:
        client = one.driver.client(timeout_s=5.0)
        with one.shut(), one.loading(2, made.adapter, client) as status:
            one.wait_until_all_ranks_read()
            assert one.driver.stop() == 0
            rc.eventually(lambda: bool(status), "the client's answer")
        # An answer without a status: the request was refused.
        assert status == [None]


def test_loads_are_answered_when_the_loop_ends() -> None:
    engine = mock.Mock(spec=["begin_load"])
    loads = AdapterLoads(engine, lambda: None)
    load = mock.Mock(spec=Load, adapter_id=1, path="/adapter")
    loads.begin(load)
    load.commit.assert_not_called()
    loads.close()
    load.commit.assert_called_once_with(FAILED)


def test_others_are_served_between_the_parts_of_a_load() -> None:
    """Each part asks for the next one; loads end in their order, and one that is late in one go."""
    engine = mock.Mock(spec=["begin_load", "finish_load"])
    wake = mock.Mock()
    loads = AdapterLoads(engine, wake)
    first, second = (mock.Mock(spec=Load, adapter_id=7, path=f"/{n}") for n in range(2))
    numbers = []
    for load in (first, second):
        loads.begin(load)
        number, *_, done = engine.begin_load.call_args[0]
        numbers.append(number)
        done()
    wake.reset_mock()
    engine.finish_load.side_effect = [False, False, True, False, True]
    for count in (1, 2):
        loads.process_finished()
        assert wake.call_count == count
        first.commit.assert_not_called()
    loads.process_finished()
    first.commit.assert_called_once_with(OK)
    second.commit.assert_not_called()
    assert wake.call_count == 3
    for opened in loads._open.values():
        opened.until = 0.0
    loads.process_finished()
    second.commit.assert_called_once_with(OK)
    calls = [call.args[0] for call in engine.finish_load.call_args_list]
    assert calls == [numbers[0]] * 3 + [numbers[1]] * 2


def test_an_adapter_is_copied_layer_by_layer(
    models_folder: Path, made: lora_adapters.Made, tmp_path: Path
) -> None:
    """Its slot has in the end what one copy puts there, even if others needed it meanwhile."""
    snapshot = tiny_models.build(MODEL, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    results, left, layers = drivers.call(
        lora_manager.copy_in_steps, tmp_path, str(config), str(made.adapter)
    )
    # The ends of the model are a part, too.
    assert results == [(layers + 1, False, True), (2, False, True)]
    assert left == 3


@pytest.mark.parametrize(
    ("timeout", "patience"),
    [(None, 50), ("", 50), ("6", 5), ("1.2e1", 10), ("0", 50), ("-3", 50), ("inf", 50), ("x", 50)],
)
def test_a_load_may_take_less_time_than_its_client_waits(
    timeout: str | None, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIE_SHMEM_HARD_TIMEOUT_S", raising=False)
    if timeout is not None:
        monkeypatch.setenv("PIE_SHMEM_HARD_TIMEOUT_S", timeout)
    assert _timeout_s() == patience


def _request() -> Request:
    return Request([5], [0], [0], 1, [(0, Sampler.greedy())])
