"""Device failures: out of memory at the start, and a lost device."""

from __future__ import annotations

import functools
import multiprocessing
import re
from pathlib import Path

import pytest
import torch

from pie_driver_sglang._core import Request, Sampler, encode_forward
from pie_driver_sglang.engine.device import find_loss
from support.process import drivers, engine_process
from support.process import runtime_client as rc
from support.process.inspection import error_line

ILLEGAL_ACCESS = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call."""
LOST_TOKEN = 11
"""A prompt of it is one on which the device is lost."""
REFUSED_TOKEN = 12
"""A prompt of it is one that fails, while the device works."""


class TestFindLoss:
    """Asking a device."""

    def test_a_host_is_never_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", _illegal_access)
        assert find_loss("cpu") is None

    def test_a_gpu_that_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requested: list[int] = []
        monkeypatch.setattr(torch.cuda, "synchronize", requested.append)
        assert find_loss("cuda:3") is None
        assert requested == [3]

    def test_a_gpu_that_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", _illegal_access)
        text = "CUDA error: an illegal memory access was encountered"
        assert find_loss("cuda:3") == f"cuda:3 can run nothing any more: {text}"


def _illegal_access(_device: int | None = None) -> None:
    raise torch.AcceleratorError(ILLEGAL_ACCESS)


def drive_to_a_loss(config: str, handshake: str, stdout: str, stderr: str) -> None:
    """Runs in a fork: a driver on the CPU whose device answers as a GPU that may be lost."""
    from pie_driver_sglang.engine import backend_executor, device

    forward = backend_executor.BackendExecutor.forward
    lost = False

    def fail(self: backend_executor.BackendExecutor, batch: object) -> None:
        nonlocal lost
        first = int(self._host["input_ids"][0])
        lost = lost or first == LOST_TOKEN
        if lost:
            _illegal_access()
        if first == REFUSED_TOKEN:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        forward(self, batch)  # type: ignore[arg-type]

    def synchronize(_device: int) -> None:
        if lost:
            _illegal_access()

    backend_executor.BackendExecutor.forward = fail  # type: ignore[method-assign, assignment]
    torch.cuda.synchronize = synchronize
    backend_executor.find_loss = lambda _name: device.find_loss("cuda:0")
    rc.drive(config, handshake, stdout, stderr)


@pytest.mark.engine
def test_a_lost_device_ends_the_driver_in_one_line(llama_snapshot: Path, tmp_path: Path) -> None:
    config = drivers.write_config(tmp_path, llama_snapshot)
    with rc.forked(config, runs=drive_to_a_loss) as start:
        start.wait_until_ready()
        client = start.client()
        assert client.forward([_prompt(5)]).tokens
        # Memory that runs out costs its batch alone.
        assert client.forward([_prompt(REFUSED_TOKEN)]).aborted
        assert client.forward([_prompt(5)]).tokens
        served = len(start.log())
        assert client.forward([_prompt(LOST_TOKEN)]).aborted
        assert start.process.wait(10.0) == 1
        words = start.log()[served:]
        assert "cuda:0 can run nothing any more: CUDA error: an illegal memory" in error_line(words)
        [line, _, hint] = words.strip().splitlines()[-3:]
        assert hint.startswith("hint: start the driver again")
        # The refused batch is logged with its traceback, which may come late; the loss has none.
        assert "AcceleratorError" not in words
        assert words.count(line) == 1
        assert not start.region.exists()


def drive_without_memory(where: str, *arguments: str) -> None:
    """Runs in a fork: a driver that has no memory for its graphs, or for its warm-up."""
    from pie_driver_sglang.engine import backend_executor, build

    def fail(*_arguments: object, **_named: object) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        finally:
            raise RuntimeError("the capture is invalid")

    if where == "graphs":
        build.CpuGraphRunner = fail  # type: ignore[assignment, misc]
    else:
        backend_executor.BackendExecutor.forward = fail  # type: ignore[method-assign]
    rc.drive(*arguments)


@pytest.mark.engine
@pytest.mark.parametrize("where", ["graphs", "warm-up"])
def test_no_memory_for_graphs_or_warm_up_names_a_smaller_share(
    llama_snapshot: Path, tmp_path: Path, where: str
) -> None:
    config = drivers.write_config(tmp_path, llama_snapshot)
    with rc.forked(config, runs=functools.partial(drive_without_memory, where)) as start:
        assert start.process.wait(60.0) == 1
        text = "less memory than was planned with: CUDA out of memory. Tried to allocate 2.00 GiB."
        assert text in error_line(start.log())
        assert re.search(r"hint: set `mem_fraction_static = 0\.\d+` in the options", start.log())
        assert not start.region.exists()


@pytest.mark.engine
def test_a_group_without_outputs_is_waited_for(llama_snapshot: Path, tmp_path: Path) -> None:
    """The next step is staged where the graph of this one reads."""
    config, log = drivers.write_config(tmp_path, llama_snapshot), tmp_path / "stderr"
    samplers = [[Sampler.logprobs([])], [Sampler.logprobs([]), Sampler.entropy()], []]
    frames = []
    for wanted in samplers:
        slots = [(0, sampler) for sampler in wanted]
        frames.append(encode_forward([Request([5], [0], [0], 1, slots)]))
    frames.insert(0, encode_forward([_prompt(5)]))
    ours, theirs = multiprocessing.Pipe()
    arguments = (str(config), theirs, str(log))
    process = drivers.fork_call(engine_process.record_waits, arguments)
    theirs.close()
    with ours:
        ours.send(frames)
        found: list[list[str]] = ours.recv()
    assert process.wait(drivers.STOP_TIMEOUT_S) == 0
    for calls in found:
        assert calls.count("graph") == 1
        # An event after the graph is recorded, and then waited for.
        behind = calls[calls.index("graph") :]
        assert "synchronize" in behind[behind.index("record") :], calls


@pytest.mark.engine
def test_a_block_is_not_taken_for_another_graphs(llama_snapshot: Path, tmp_path: Path) -> None:
    """A GPU would read an illegal address, and crash in the launches after it."""
    config, log = drivers.write_config(tmp_path, llama_snapshot), tmp_path / "stderr"
    ours, theirs = multiprocessing.Pipe()
    arguments = (str(config), theirs, str(log))
    process = drivers.fork_call(engine_process.stage_graphs, arguments)
    theirs.close()
    with ours:
        small, large = ours.recv()
    assert process.wait(drivers.STOP_TIMEOUT_S) == 0
    few, many = sorted(small)
    assert small[few] == large[many] == ""
    text = (
        rf"the block is not staged for the graph of {many} rows: \w+ has -\d+, outside 0 to \d+; .+"
    )
    assert re.fullmatch(text, small[many])


def capture_on_a_host(enabled: bool) -> None:
    """Runs in a fork: makes graphs of nothing, and looks at the garbage collector meanwhile."""
    import gc
    from types import SimpleNamespace
    from typing import Any

    from pie_driver_sglang.engine import cuda_graphs, graph_runner
    from pie_driver_sglang.memory.graphs import plain_specs

    seen: list[bool] = []

    def begin(self: Any, *_arguments: object) -> None:
        self._device, self._mask_words = torch.device("cpu"), torch.zeros(1)

    def capture(self: Any, _bind: object) -> None:
        seen.append(gc.isenabled())
        raise RuntimeError("no capture")

    graph_runner.GraphRunner.__init__ = begin  # type: ignore[method-assign, assignment]
    cuda_graphs.CudaGraphRunner._capture_all = capture  # type: ignore[method-assign]
    torch.cuda.current_stream = lambda _device: None
    emptied: list[bool] = []
    torch.cuda.empty_cache = lambda: emptied.append(gc.isenabled())
    engine: Any = SimpleNamespace()
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(RuntimeError, match="no capture"):
        cuda_graphs.CudaGraphRunner(engine, plain_specs([1]), 1)
    assert (seen, emptied, gc.isenabled()) == ([False], [enabled], enabled)


@pytest.mark.engine
@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_graphs_are_captured(enabled: bool) -> None:
    process = drivers.fork_call(capture_on_a_host, (enabled,))
    assert process.wait(60.0) == 0


def _prompt(token: int) -> Request:
    """A prompt that asks for a probe, so that it runs through Python."""
    return Request([token], [0], [0], 1, [(0, Sampler.raw_logits())])
