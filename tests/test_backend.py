"""The engine core over a backend without an inference library."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Sampler
from pie_driver_sglang.config.driver_config import DriverConfig, DriverSection, ModelSection
from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.driver.serving_loop import serve, warm_up
from pie_driver_sglang.memory.plan_types import Device, Plan
from support.process import drivers
from support.process import runtime_client as rc

pytest.importorskip("torch")

from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
from pie_driver_sglang.engine.backend import Hidden, ModelBackend, PassContext
from pie_driver_sglang.engine.build import build_executor
from pie_driver_sglang.engine.invariance_check import check_batch_invariance
from pie_driver_sglang.errors import StartError
from support.models.fake_backend import PAGE, VOCABULARY, FakeBackend

CHUNK = 48
"""Tokens of a pass."""


class Served(NamedTuple):
    """A driver's loop over the fake backend, and a client of it."""

    client: _core.Client
    backend: FakeBackend
    executor: Any
    server: _core.Server


def build(backend: FakeBackend, *, eager: bool) -> tuple[_core.Planner, Any]:
    """A planner and an executor of a backend."""
    options = parse_options(
        {"chunked_prefill_size": CHUNK, "cuda_graph_max_bs": 8, "cpu_mem_budget_in_gb": 1,
         "disable_cuda_graph": eager, "page_size": PAGE}, "cpu",
    )  # fmt: skip
    config = DriverConfig(
        model=ModelSection(snapshot_dir=Path("none"), hf_config={"model_type": "llama"}),
        driver=DriverSection(group_id=0, device=("cpu",), options=options),
    )
    # Held to the protocol by mypy, too.
    typed: ModelBackend = backend
    plan = Plan(Device("cpu", 1 << 30, 1 << 30), 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, PAGE)
    return build_executor(typed, backend.block_table, plan, config)


@pytest.fixture(params=[False, True], ids=["graph path", "eager"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """With the graph path, or without it."""
    backend = FakeBackend()
    planner, executor = build(backend, eager=request.param)
    name = f"/pie_shmem_g{drivers.new_group_id()}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    graph_path = executor.make_graph_path()
    assert (graph_path is None) == request.param
    pages = executor.model_info.host_pages
    block = executor.block.data
    server.serve(planner, block, print, host_pages=pages, graph_path=graph_path)
    warm_up(server, executor)
    thread = threading.Thread(target=serve, args=(server, executor, None), daemon=True)
    thread.start()
    client = _core.Client(name, timeout_s=20.0)
    try:
        yield Served(client, backend, executor, server)
    finally:
        server.stop()
        client.abort()
        thread.join(20.0)
        Path("/dev/shm", name.removeprefix("/")).unlink(missing_ok=True)
    assert not thread.is_alive()


def continued(prompt: list[int], count: int) -> list[int]:
    """What the fake model says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[len(prompt) :]


def test_prompts_in_chunks_and_decodes_of_several_contexts(served: Served) -> None:
    prompts = [[7], list(range(1, 41)), [3] * 70, list(range(200, 300))]
    contexts = [
        rc.Context(list(prompt), list(range(12 * number, 12 * number + 8)), context_id=number + 1)
        for number, prompt in enumerate(prompts)
    ]
    for _ in range(6):
        reply = served.client.forward([context.request() for context in contexts])
        assert reply.status is None
        for context, [token] in zip(contexts, reply.tokens, strict=True):
            context.take(token)
    found = [c.tokens[len(prompt) :] for c, prompt in zip(contexts, prompts, strict=True)]
    assert found == [continued(prompt, 6) for prompt in prompts]
    kinds = set(served.backend.passes)
    assert "extend" in kinds
    decodes = "decode" if served.executor.steps is None else "step"
    assert decodes in kinds


def test_samples_and_distributions(served: Served) -> None:
    context = rc.Context([5, 6], [0])
    sampled = served.client.forward([context.request(Sampler.top_k(1.0, 4))])
    assert sampled.tokens == [[11]]
    reply = served.client.forward([context.request(Sampler.dist(1.0, 3))])
    [[(tokens, probabilities)]] = reply.dists
    assert tokens[0] == 11
    assert probabilities[0] > 0.99


def test_pages_are_copied_with_their_kv(served: Served) -> None:
    first = rc.Context([9, 8, 7], [2])
    first.take(served.client.forward([first.request()]).tokens[0][0])
    for direction, source, target in (("D2H", 2, 5), ("H2D", 5, 30), ("D2D", 30, 31)):
        assert served.client.copy(direction, [source], [target]) == 0
    again = rc.Context(list(first.tokens), [31], stored=first.stored, context_id=2)
    reply = served.client.forward([again.request()])
    assert reply.tokens == [continued(first.tokens, 1)]


def test_no_library_is_imported() -> None:
    code = (
        "import sys, support.models.fake_backend, pie_driver_sglang.engine.build, "
        "pie_driver_sglang.driver.serving_loop; print(*sys.modules)"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    names = found.stdout.split()
    assert "pie_driver_sglang.engine.build" in names
    assert not [n for n in names if n.startswith(("sglang", "pie_driver_sglang.backends"))]


def test_gemms_are_replaced_after_layers_were_fused() -> None:
    """Fused layers are made of the library's own linear layers."""
    backend, calls = FakeBackend(), mock.Mock()
    calls.decoder_weights.side_effect = backend.decoder_weights
    backend.decode_attention = mock.create_autospec(BatchInvariantAttention, instance=True)
    with (
        mock.patch.object(backend, "decoder_weights", calls.decoder_weights),
        mock.patch.object(backend, "replace_gemms", calls.replace_gemms),
    ):
        build(backend, eager=True)
    assert [call[0] for call in calls.mock_calls] == ["decoder_weights", "replace_gemms"]


class TestBatchInvariance:
    """What `check_batch_invariance` finds in a loaded model."""

    def test_of_one_that_is(self) -> None:
        backend = FakeBackend()
        check_batch_invariance(backend, backend.block_table)
        assert backend.passes == ["extend"] * 6
        assert not backend.block_table.slots.any()

    @pytest.mark.parametrize("other", ["rows of a pass", "the last row"])
    def test_of_one_that_is_not(self, other: str) -> None:
        class Dependent(FakeBackend):
            def _run(self, context: PassContext) -> Hidden:
                hidden = super()._run(context)
                rows = len(hidden.states)
                if other == "rows of a pass":
                    return hidden._replace(states=hidden.states * (1 + 2**-23 * (rows > 40)))
                hidden.states[-1] *= 1 + 2**-23
                return hidden

        backend = Dependent()
        with pytest.raises(StartError, match="hidden states of this model depend on its batch"):
            check_batch_invariance(backend, backend.block_table)

    def test_of_one_with_a_short_context(self) -> None:
        backend = FakeBackend()
        backend.info = backend.info._replace(context_length=3, total_pages=1)
        check_batch_invariance(backend, backend.block_table)
