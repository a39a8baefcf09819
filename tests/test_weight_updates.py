"""Weights that change while an engine serves, and memory that is released meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest

from pie_driver_sglang import Engine
from pie_driver_sglang.errors import DriverError
from support.models.random_pair import PROMPT, TOKENS, Checkpoint, checkpoint
from support.process import fork_server
from support.servers.sglang_server import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


class Pair(NamedTuple):
    """Two checkpoints of one model."""

    old: Checkpoint
    new: Checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("weights")
    made = Pair(checkpoint(folder / "old", 1), checkpoint(folder / "new", 2))
    assert made.old.tokens != made.new.tokens
    return made


def started(python: str, folder: Path, **options: Any) -> Engine:
    with mock.patch.object(sys, "executable", python):
        return Engine(model_path=str(folder), device="cpu", skip_tokenizer_init=True, **options)


@pytest.fixture(scope="module")
def running(pair: Pair, forked_python: str) -> Iterator[Engine]:
    with started(forked_python, pair.old.folder) as engine:
        yield engine


@pytest.fixture
def engine(running: Engine, pair: Pair) -> Engine:
    """The engine, with the old weights."""
    success, message = running.update_weights_from_disk(str(pair.old.folder))
    assert success, message
    return running


def tokens(engine: Engine) -> list[int]:
    found: list[int] = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    return found


def kill_driver(engine: Engine) -> None:
    state = engine.get_server_info()["internal_states"][0]
    os.kill(state["driver_pids"][0], signal.SIGKILL)
    until = time.monotonic() + 120
    while engine.get_server_info()["internal_states"][0]["restarts"] == state["restarts"]:
        assert time.monotonic() < until
        time.sleep(0.05)


class TestFromDisk:
    def test_twenty_updates_under_load(self, engine: Engine, pair: Pair) -> None:
        """No answer is lost, and each has tokens of one checkpoint only."""
        answers: list[list[int]] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.is_set():
                answers.append(tokens(engine))

        clients = [threading.Thread(target=ask) for _ in range(4)]
        for client in clients:
            client.start()
        for number in range(20):
            target = pair[(number + 1) % 2]
            success, message = engine.update_weights_from_disk(str(target.folder))
            assert success, message
            assert tokens(engine) == target.tokens
        ended.set()
        for client in clients:
            client.join()
        assert all(answer in (pair.old.tokens, pair.new.tokens) for answer in answers)
        assert {tuple(answer) for answer in answers} == {tuple(one.tokens) for one in pair}

    def test_a_stream_ends_with_the_weights_it_began_with(self, engine: Engine, pair: Pair) -> None:
        stream = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
        next(stream)
        outcome: list[tuple[bool, str]] = []
        update = threading.Thread(
            target=lambda: outcome.append(engine.update_weights_from_disk(str(pair.new.folder)))
        )
        update.start()
        *_, last = stream
        assert last["output_ids"] == pair.old.tokens
        update.join()
        assert outcome[0][0]
        # Nothing of the prompt is in the prefix index.
        again = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert (again["output_ids"], again["meta_info"]["cached_tokens"]) == (pair.new.tokens, 0)

    @pytest.mark.parametrize("damage", ["shape", "missing", "cut", "config", "unknown", "folder"])
    def test_what_does_not_fit_changes_nothing(
        self, engine: Engine, pair: Pair, tmp_path: Path, damage: str
    ) -> None:
        folder, words = DAMAGES[damage](pair.new, tmp_path / "damaged")
        success, message = engine.update_weights_from_disk(str(folder))
        assert (success, words in message) == (False, True), message
        assert "\n" not in message
        assert tokens(engine) == pair.old.tokens

    def test_other_formats_are_refused(self, engine: Engine, pair: Pair) -> None:
        success, message = engine.update_weights_from_disk(str(pair.new.folder), "dummy")
        assert (success, "'dummy'" in message) == (False, True)

    def test_a_restarted_driver_has_the_new_weights(self, engine: Engine, pair: Pair) -> None:
        assert engine.update_weights_from_disk(str(pair.new.folder))[0]
        kill_driver(engine)
        assert tokens(engine) == pair.new.tokens


class TestFromTensors:
    def test_some_of_them_and_all(self, engine: Engine, pair: Pair) -> None:
        state = pair.new.model.state_dict()
        name = "model.layers.0.self_attn.k_proj.weight"
        assert engine.update_weights_from_tensor([(name, state[name])]) == (True, "Success")
        assert engine.get_weights_by_name(name, 3) == state[name][:3].tolist()
        assert tokens(engine) not in (pair.old.tokens, pair.new.tokens)
        assert engine.update_weights_from_tensor(state) == (True, "Success")
        assert tokens(engine) == pair.new.tokens

    def test_what_does_not_fit_changes_nothing(self, engine: Engine, pair: Pair) -> None:
        state = pair.new.model.state_dict()
        name = "model.norm.weight"
        wrong: dict[str, tuple[dict[str, Any], str]] = {
            "shape": ({name: state[name][:-1]}, "(63,), but the model's (64,)"),
            "name": ({"model.norm.wait": state[name]}, "model.norm.wait is not a tensor"),
            "dtype": ({name: state[name].int()}, "another dtype"),
            "nothing": ({}, "no tensors"),
            "type": ({name: [1.0]}, "is a list"),
        }
        for sent, words in wrong.values():
            success, message = engine.update_weights_from_tensor(sent)
            assert (success, words in message) == (False, True), message
        assert tokens(engine) == pair.old.tokens

    def test_a_restarted_driver_does_not_serve_the_former_weights(
        self, engine: Engine, pair: Pair
    ) -> None:
        state = pair.new.model.state_dict()
        assert engine.update_weights_from_tensor(state)[0]
        kill_driver(engine)
        # It waits for the next driver, which is found to have other weights.
        late = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert late["meta_info"]["finish_reason"]["type"] == "abort"
        with pytest.raises(DriverError, match="update all weights"):
            tokens(engine)
        names = list(state)
        part = {name: state[name] for name in names[:5]}
        assert "tensors are still lacking" in engine.update_weights_from_tensor(part)[1]
        with pytest.raises(DriverError, match="update all weights"):
            tokens(engine)
        rest = {name: state[name] for name in names[5:]}
        assert engine.update_weights_from_tensor(rest) == (True, "Success")
        assert tokens(engine) == pair.new.tokens


def test_every_weight_can_be_read(engine: Engine, pair: Pair) -> None:
    for name, tensor in pair.old.model.state_dict().items():
        assert engine.get_weights_by_name(name, 10**6) == tensor.tolist(), name
    with pytest.raises(DriverError, match="no tensor 'x'"):
        engine.get_weights_by_name("x")


class TestSleep:
    def test_memory_is_released_and_answers_are_as_before(
        self, forked_python: str, tmp_path: Path
    ) -> None:
        large = checkpoint(tmp_path / "large", 3, hidden_size=512, intermediate_size=8192)
        with started(forked_python, large.folder, max_total_tokens=65536) as engine:
            assert tokens(engine) == large.tokens
            [pid] = engine.get_server_info()["internal_states"][0]["driver_pids"]
            # The process that was forked has the model.
            family = [psutil.Process(pid), *fork_server.family(pid)]
            driver = max(family, key=lambda process: process.memory_info().rss)
            before = driver.memory_info().rss
            weights = sum(x.numel() * x.itemsize for x in large.model.state_dict().values())
            engine.release_memory_occupation(["weights"])
            assert before - driver.memory_info().rss > 0.9 * weights
            engine.release_memory_occupation(["kv_cache"])
            with pytest.raises(DriverError, match="`kv_cache` and `weights` is released"):
                tokens(engine)
            engine.resume_memory_occupation(["weights"])
            with pytest.raises(DriverError, match="`kv_cache` is released"):
                tokens(engine)
            assert engine.update_weights_from_disk(str(large.folder))[0]
            engine.resume_memory_occupation()
            assert tokens(engine) == large.tokens
            assert driver.memory_info().rss > before - weights // 2

    def test_requests_under_way_end_before(self, engine: Engine, pair: Pair) -> None:
        stream = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, stream=True)
        next(stream)
        sleep = threading.Thread(target=engine.release_memory_occupation)
        sleep.start()
        *_, last = stream
        sleep.join()
        assert last["output_ids"] == pair.old.tokens
        success, message = engine.update_weights_from_disk(str(pair.new.folder))
        assert (success, "`weights` is released" in message) == (False, True)
        engine.resume_memory_occupation()
        assert tokens(engine) == pair.old.tokens

    def test_a_restarted_driver_sleeps_on(self, engine: Engine, pair: Pair) -> None:
        engine.update_weights_from_disk(str(pair.new.folder))
        engine.release_memory_occupation()
        kill_driver(engine)
        with pytest.raises(DriverError, match="released"):
            tokens(engine)
        until = time.monotonic() + 120
        while True:
            try:
                engine.resume_memory_occupation()
                break
            except DriverError as error:
                assert "try again later" in str(error) + getattr(error, "hint", "")
                assert time.monotonic() < until
                time.sleep(0.2)
        assert tokens(engine) == pair.new.tokens

    def test_an_unknown_tag(self, engine: Engine) -> None:
        with pytest.raises(DriverError, match="the tag is 'kv'"):
            engine.release_memory_occupation(["kv"])


def test_two_ranks(pair: Pair, forked_python: str) -> None:
    with started(forked_python, pair.old.folder, tp_size=2) as engine:
        assert tokens(engine) == pair.old.tokens
        assert engine.update_weights_from_disk(str(pair.new.folder))[0]
        assert tokens(engine) == pair.new.tokens
        for name, tensor in pair.new.model.state_dict().items():
            assert engine.get_weights_by_name(name, 10**6) == tensor.tolist(), name
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert tokens(engine) == pair.new.tokens
        assert engine.update_weights_from_tensor(pair.old.model.state_dict())[0]
        assert tokens(engine) == pair.old.tokens
        assert not engine.update_weights_from_disk("/nowhere")[0]
        assert tokens(engine) == pair.old.tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_broadcasts_weights(
    pair: Pair, forked_python: str, tmp_path: Path, ranks: int
) -> None:
    [port] = free_ports(1)
    state = pair.new.model.state_dict()
    described = [list(state), [str(x.dtype) for x in state.values()],
                 [list(x.shape) for x in state.values()]]  # fmt: skip
    trainer = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "support" / "models" / "trainer.py"),
         str(pair.new.folder), str(port), str(1 + ranks)],
        stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with started(forked_python, pair.old.folder, tp_size=ranks) as engine:
            assert not engine.update_weights_from_distributed(*described, "g")[0]
            bucket = (*described, "g", True, "flattened_bucket")
            assert "one by one" in engine.update_weights_from_distributed(*bucket)[1]
            joined = engine.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, "g", "gloo")
            assert joined[0], joined
            wrong = [described[0], described[1], [[1], *described[2][1:]]]
            assert "but the model's" in engine.update_weights_from_distributed(*wrong, "g")[1]
            assert trainer.stdin is not None
            print(json.dumps(described[0]), file=trainer.stdin, flush=True)
            assert engine.update_weights_from_distributed(*described, "g") == (True, "Success")
            assert tokens(engine) == pair.new.tokens
            assert engine.destroy_weights_update_group("g")[0]
            assert not engine.destroy_weights_update_group("g")[0]
        assert trainer.wait(60) == 0
    finally:
        trainer.kill()
        trainer.wait()


def _without(made: Checkpoint, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a checkpoint with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(made.folder, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def _shape(made: Checkpoint, folder: Path) -> tuple[Path, str]:
    def change(tensors: dict[str, Any]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name][:-1].clone()

    return _without(made, folder, change), "up_proj.weight is (95, 64), but the model's (96, 64)"


def _missing(made: Checkpoint, folder: Path) -> tuple[Path, str]:
    name = "model.layers.1.self_attn.q_proj.weight"
    return _without(made, folder, lambda x: x.pop(name)), f"{name} is missing"


def _unknown(made: Checkpoint, folder: Path) -> tuple[Path, str]:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.norm.weight"].clone()

    return _without(made, folder, change), "q_proj.bias is not a tensor of the model"


def _cut(made: Checkpoint, folder: Path) -> tuple[Path, str]:
    shutil.copytree(made.folder, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder, "bytes long"


def _config(made: Checkpoint, folder: Path) -> tuple[Path, str]:
    shutil.copytree(made.folder, folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["rms_norm_eps"] = 0.5
    file.write_text(json.dumps(settings))
    return folder, "`rms_norm_eps`"


DAMAGES: dict[str, Callable[[Checkpoint, Path], tuple[Path, str]]] = {
    "shape": _shape,
    "missing": _missing,
    "unknown": _unknown,
    "cut": _cut,
    "config": _config,
    "folder": lambda _, folder: (folder, "neither a folder"),
}
