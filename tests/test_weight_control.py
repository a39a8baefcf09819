"""Updates of weights in one process: what an update does when it fails, and folded norms."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pie_driver_sglang.checkpoint.replacement import ServedCheckpoint
from pie_driver_sglang.checkpoint.tensors import CheckpointModel, Tensor
from pie_driver_sglang.driver.control_channel import control_channel
from pie_driver_sglang.engine.backend_features import WeightBackend, WeightPart
from pie_driver_sglang.engine.control_commands import (
    CheckWeights,
    DiskUpdate,
    GroupUpdate,
    ReadWeight,
    ReleaseMemory,
    ResumeMemory,
    TensorUpdate,
    command_message,
    read_command,
)
from pie_driver_sglang.engine.folded_norms import FoldedNorms
from pie_driver_sglang.engine.memory_saver import CudaMemory
from pie_driver_sglang.engine.sleep import HostMemory, TaggedTensors
from pie_driver_sglang.engine.update_groups import UpdateGroups
from pie_driver_sglang.engine.weight_control import WeightControl
from pie_driver_sglang.errors import LostWeightsError, StartError, WeightsError
from pie_driver_sglang.frontends.common.control_socket import ControlSocket
from support.models.fake_saver import FakeSaver

NORM, MATRIX = "layers.0.norm.weight", "layers.0.proj.weight"
INDEX = "model.safetensors.index.json"
NAMES = {NORM: (4,), MATRIX: (3, 4)}


class Weights:
    """Implements `WeightBackend` by two tensors."""

    device = torch.device("cpu")
    update_refusal: str | None = None
    fails_after: int | None = None
    """Tensors after which a load fails, once."""

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros(shape) for name, shape in NAMES.items()}

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()

    named_tensors = named_parameters

    def name_of(self, tensor: Any) -> str:
        return next(name for name, own in self.tensors.items() if own is tensor)

    def read_folder(self, folder: Path) -> Iterator[tuple[str, Any]]:
        yield from load_file(folder / "model.safetensors").items()

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        for count, (name, tensor) in enumerate(tensors):
            if self.fails_after == count:
                self.fails_after = None
                raise OSError("the disk is gone")
            self.tensors[name].copy_(tensor)

    def read_part(self, name: str, stored: Callable[[Any], Any]) -> Any:
        return WeightPart(stored(self.tensors[name]), 0)

    def joined(self, parts: Any) -> Any:
        return torch.cat([part.values for part in parts])

    def new_group(self, backend: str, command: Any, timeout_s: float) -> Any:
        raise AssertionError


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
        generator = torch.Generator().manual_seed(number)
        tensors = {name: torch.rand(shape, generator=generator) for name, shape in NAMES.items()}
        save_file(tensors, folder / "model.safetensors")
        found.append(folder)
    return found


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def controlled(
    folder: Path, *, folds: bool, saver: FakeSaver | None = None
) -> tuple[Weights, WeightControl]:
    with saver.region("weights", enable_cpu_backup=True) if saver else nullcontext():
        weights = Weights()
    typed: WeightBackend = weights
    typed.load(weights.read_folder(folder))
    folded = FoldedNorms([(weights.tensors[NORM], weights.tensors[MATRIX])]) if folds else None
    tensors: TaggedTensors = {"weights": weights.tensors.values, "kv_cache": list}
    memory = CudaMemory(tensors, saver) if saver else HostMemory(tensors)
    return weights, WeightControl(typed, folder, folded, memory, 0)


def expected(folder: Path, *, folds: bool) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    if folds:
        tensors[MATRIX] *= tensors[NORM]
        tensors[NORM] = torch.ones(4)
    return tensors


def assert_equal(weights: Weights, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(weights.tensors[name], tensor), name


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("fails_after", [0, 1])
def test_a_load_that_fails_is_undone(folders: list[Path], *, folds: bool, fails_after: int) -> None:
    weights, control = controlled(folders[0], folds=folds)
    weights.fails_after = fails_after
    with pytest.raises(WeightsError, match="the disk is gone"):
        control.run(DiskUpdate(str(folders[1])))
    assert_equal(weights, expected(folders[0], folds=folds))
    control.run(DiskUpdate(str(folders[1])))
    assert_equal(weights, expected(folders[1], folds=folds))


def test_weights_that_cannot_be_restored_end_the_driver(folders: list[Path]) -> None:
    weights, control = controlled(folders[0], folds=False)
    file = str(folders[1] / "model.safetensors")
    assert control.run(TensorUpdate(file)) == {"lacking": 0}
    weights.fails_after = 1
    with pytest.raises(LostWeightsError, match="came from tensors"):
        control.run(DiskUpdate(str(folders[0])))


def test_folded_norms_follow_tensors(folders: list[Path], tmp_path: Path) -> None:
    weights, control = controlled(folders[0], folds=True)
    new = load_file(folders[1] / "model.safetensors")
    part = tmp_path / "part.safetensors"
    save_file({MATRIX: new[MATRIX]}, part)
    with pytest.raises(WeightsError, match="must be updated in the same call"):
        control.run(TensorUpdate(str(part)))
    assert_equal(weights, expected(folders[0], folds=True))
    control.run(TensorUpdate(str(folders[1] / "model.safetensors")))
    assert_equal(weights, expected(folders[1], folds=True))
    assert control.run(ReadWeight(NORM, 4))["rows"] == new[NORM].tolist()
    with pytest.raises(WeightsError, match="the norm before it"):
        control.run(ReadWeight(MATRIX, 4))


def test_a_library_that_moves_weights_is_noticed(folders: list[Path]) -> None:
    weights, control = controlled(folders[0], folds=False)

    def load(tensors: Iterable[tuple[str, Any]]) -> None:
        weights.tensors.update({name: tensor.clone() for name, tensor in tensors})

    weights.load = load  # type: ignore[method-assign]
    # The rollback moves them again.
    with pytest.raises(LostWeightsError, match="has moved weights"):
        control.run(DiskUpdate(str(folders[1])))


def test_weights_that_the_library_has_packed_are_not_updated(folders: list[Path]) -> None:
    weights, control = controlled(folders[0], folds=False)
    weights.update_refusal = "they are quantized"
    with pytest.raises(WeightsError, match="they are quantized"):
        control.run(DiskUpdate(str(folders[1])))
    assert_equal(weights, expected(folders[0], folds=False))


def test_released_weights_are_as_before(folders: list[Path]) -> None:
    weights, control = controlled(folders[0], folds=False)
    control.run(CheckWeights("snapshot"))
    for _ in range(2):
        control.run(ReleaseMemory(["weights"]))
    assert not any(x.untyped_storage().nbytes() for x in weights.tensors.values())
    for command in (ReadWeight(NORM, 1), CheckWeights("checksum"), DiskUpdate(str(folders[1]))):
        with pytest.raises(WeightsError, match="is released"):
            control.run(command)
    control.run(ResumeMemory(["weights", "kv_cache"]))
    control.run(CheckWeights("compare"))
    assert_equal(weights, expected(folders[0], folds=False))


def test_commands_travel_as_json() -> None:
    for command in (DiskUpdate("/x"), ReadWeight("a", 3), ReleaseMemory(["weights"])):
        assert read_command(json.loads(json.dumps(command_message(command)))) == command


def test_a_driver_that_ends_is_no_answer_and_its_successor_is_told() -> None:
    from multiprocessing.connection import Client

    before = threading.enumerate()
    socket = ControlSocket()
    [accepts] = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name == "control-accept"
    ]
    restarts: list[int] = []
    failures: list[str] = []
    catch_up = [{"command": "x"}]
    socket.on_restart(lambda: catch_up, lambda: restarts.append(1), failures.append)
    name = socket.runtime({"options": {}})["options"]["control_socket"]

    def connect() -> Any:
        driver = Client("\0" + name[1:], "AF_UNIX")
        driver.send_bytes(b"{}")
        assert json.loads(driver.recv_bytes()) == catch_up
        driver.send_bytes(b'{"success": true}')
        return driver

    def call(command: str) -> list[dict[str, Any]]:
        # After a driver that is catching up.
        with socket.steady():
            return socket.call({"command": command})

    with pytest.raises(WeightsError, match="no driver serves"):
        socket.call({})
    first = connect()
    end = threading.Timer(0.2, first.close)
    end.start()
    [answer] = call("y")
    assert (answer["success"], "the driver ended" in answer["message"]) == (False, True)
    end.join()
    assert restarts == []
    second = connect()
    assert restarts == [1]
    second.send_bytes(b'{"success": true}')
    assert call("z") == [{"success": True}]
    assert failures == []
    second.close()
    socket.close()
    accepts.join(10)
    assert not accepts.is_alive()


@pytest.mark.parametrize(
    ("command", "words", "lost"),
    [
        (
            DiskUpdate("/x"),
            "the weights of the last update cannot be loaded again: ",
            ["out of memory"],
        ),
        (ReleaseMemory(["weights"]), "memory that was released cannot be released again: ", []),
    ],
)
def test_only_a_restart_without_the_new_weights_has_lost_them(
    command: DiskUpdate | ReleaseMemory, words: str, lost: list[str]
) -> None:
    class Full:
        def control(self, command: Any) -> Any:
            raise WeightsError("out of memory", "free some")

    before = threading.enumerate()
    socket = ControlSocket()
    accepts = [thread for thread in threading.enumerate() if thread not in before]
    failures: list[str] = []
    socket.on_restart(lambda: [command_message(command)], lambda: None, failures.append)
    name = socket.runtime({"options": {}})["options"]["control_socket"]
    engine: Any = Full()
    with (
        pytest.raises(StartError, match=f"{words}out of memory"),
        control_channel(name, engine, lambda: None, 0),
    ):
        pass
    socket.close()
    for thread in accepts:
        thread.join(10)
    assert failures == lost


@pytest.mark.parametrize("saver", [None, FakeSaver()], ids=["cpu", "gpu"])
def test_memory_that_some_ranks_release_is_taken_again(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, saver: FakeSaver | None
) -> None:
    weights, control = controlled(folders[0], folds=False, saver=saver)
    reasons: list[Any] = [[None, ("the disk of rank 1 is full", "")]]

    def gathered(value: Any) -> list[Any]:
        return reasons.pop() if reasons else [value]

    monkeypatch.setattr("pie_driver_sglang.engine.process_groups.gathered", gathered)
    with pytest.raises(WeightsError, match="the disk of rank 1 is full"):
        control.run(ReleaseMemory(["weights", "cuda_graph"]))
    # Reading a tensor without memory would end the process.
    assert all(x.untyped_storage().nbytes() for x in weights.tensors.values())
    assert_equal(weights, expected(folders[0], folds=False))
    assert saver is None or ("pause", "weights") in saver.calls


def test_weights_that_cannot_be_updated_are_not_made_random(folders: list[Path]) -> None:
    weights, control = controlled(folders[0], folds=False)
    weights.update_refusal = "they are quantized"
    with pytest.raises(WeightsError, match="they are quantized"):
        control.run(CheckWeights("reset_tensors"))
    assert_equal(weights, expected(folders[0], folds=False))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
@pytest.mark.timeout(60)
def test_pipes_and_devices_are_not_read(folders: list[Path], name: str) -> None:
    _, control = controlled(folders[0], folds=False)
    file = folders[1] / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(WeightsError, match="is no file"):
        control.run(DiskUpdate(str(folders[1])))


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": [1]}}'])
def test_an_index_that_lists_no_tensors(folders: list[Path], text: str) -> None:
    _, control = controlled(folders[0], folds=False)
    (folders[1] / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=f"{INDEX} lists no tensors"):
        control.run(DiskUpdate(str(folders[1])))


def test_norms_are_folded_into_the_merged_matrices_of_a_checkpoint() -> None:
    """As Phi-3's, which has no `q_proj`."""
    norm, matrix = torch.full((4,), 2.0), torch.ones(3, 4)
    names = {id(norm): "input_layernorm.weight", id(matrix): "self_attn.qkv_proj.weight"}
    stored = list(names.values())

    def name(tensor: Any) -> str:
        return names[id(tensor)]

    folded = FoldedNorms([(norm, matrix)])
    with pytest.raises(WeightsError, match=r"input_layernorm\.weight must be updated"):
        folded.check(name, [stored[1]], stored)
    folded.check(name, stored, stored)
    norm.fill_(3.0)
    matrix.fill_(1.0)
    folded.fold_again(name, [stored[1]])
    assert torch.equal(matrix, torch.full((3, 4), 3.0))
    with pytest.raises(WeightsError, match="other names"):
        folded.check(name, stored, ["a.weight"])


def test_a_tensor_twice_in_an_update_of_a_group() -> None:
    weights: WeightBackend = Weights()
    groups = UpdateGroups(weights, 0)
    groups._groups["g"] = None
    command = GroupUpdate([NORM, NORM], ["float32"] * 2, [[5], [4]], "g")
    with pytest.raises(WeightsError, match="a tensor twice"):
        groups.listed(command)


@pytest.mark.parametrize("shape", [[-4], ["4"], [2.0], [True]])
def test_shapes_of_an_update_of_a_group_are_integers(shape: list[Any]) -> None:
    weights: WeightBackend = Weights()
    groups = UpdateGroups(weights, 0)
    groups._groups["g"] = None
    with pytest.raises(WeightsError, match=f"the shape of '{NORM}' is"):
        groups.listed(GroupUpdate([NORM], ["float32"], [shape], "g"))


def test_a_group_sends_no_tensor_larger_than_the_models(folders: list[Path]) -> None:
    """One that the model does not read is received, and needs memory, all the same."""
    _, control = controlled(folders[0], folds=False)
    control._groups._groups["g"] = None
    harmless = "layers.0.rotary_emb.inv_freq"
    command = GroupUpdate([NORM, harmless], ["float32"] * 2, [[4], [10**6, 10**6]], "g")
    with pytest.raises(WeightsError, match=rf"{harmless} is .1000000, .*, but .* 12 values"):
        control.run(command)


def test_only_the_rows_that_are_read_go_to_other_ranks(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, control = controlled(folders[0], folds=False)
    sent: list[int] = []

    def gathered(value: Any) -> list[Any]:
        if isinstance(value, WeightPart):
            sent.append(value.values.untyped_storage().nbytes())
            return [value, value]
        return [value]

    monkeypatch.setattr("pie_driver_sglang.engine.process_groups.gathered", gathered)
    matrix = weights.tensors[MATRIX].tolist()
    assert control.run(ReadWeight(MATRIX, 1)) == {"rows": matrix[:1]}
    # More than the three rows of a rank.
    assert control.run(ReadWeight(MATRIX, 5)) == {"rows": (matrix + matrix)[:5]}
    assert control.run(ReadWeight(MATRIX, -1)) == {"rows": []}
    assert sent == [16, 48, 0]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(3, 4), (4,)], None),
        ([(13,)], "the model's largest tensor has 12 values"),
        ([(3, 4), (5,)], "2 tensors that the model has not have 17 values, and the model has 16"),
        ([(4,)] * 5, "5 tensors that the model has not have 20 values, and the model has 16"),
    ],
)
def test_a_broadcast_takes_no_more_memory_than_the_model(
    shapes: list[tuple[int, ...]], words: str | None
) -> None:
    own = {name: Tensor(name, shape, 4, floating=True) for name, shape in NAMES.items()}
    served = ServedCheckpoint(own, {}, CheckpointModel(layers=1, tied=False))
    sent = [Tensor("other", shape, 4, floating=True) for shape in shapes]
    if words is None:
        served.check_sizes(sent)
        # A whole state dict of a model with tied embeddings has the head, too.
        served.check_sizes([*own.values(), *sent])
        return
    with pytest.raises(WeightsError, match=words):
        served.check_sizes(sent)
