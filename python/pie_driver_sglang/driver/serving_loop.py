"""The serving loop: batches, copies and adapter loads that need the model."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pie_driver_sglang import _core
from pie_driver_sglang._core import WARM_UP_ADAPTER, Request, Sampler
from pie_driver_sglang.driver.adapter_loads import STATUS_FAILED, STATUS_OK, AdapterLoads
from pie_driver_sglang.driver.failures import log_or_raise

if TYPE_CHECKING:
    from pie_driver_sglang.driver.control_channel import ControlChannel
    from pie_driver_sglang.driver.trace import Trace
    from pie_driver_sglang.engine.executor import ModelExecutor, ModelInfo

logger = logging.getLogger(__name__)


def serve(
    server: _core.Server,
    engine: ModelExecutor,
    trace: Trace | None,
    control: ControlChannel | None = None,
) -> None:
    """Serve until the server is stopped; failed requests are aborted.

    Raises:
        LostError: The device is lost.
        LostWeightsError: An update of the weights failed, and so did its rollback.
    """
    with contextlib.closing(AdapterLoads(engine, server.wake)) as loads:
        for work in server:
            if isinstance(work, _core.Copy):
                _serve_copy(work, engine)
            elif isinstance(work, _core.Load):
                loads.begin(work)
            elif isinstance(work, _core.Wake):
                loads.process_finished()
                if control is not None:
                    control.process()
            elif isinstance(work, _core.Batch):
                _serve_batch(work, engine, trace)
            elif trace is not None:
                _trace_step(work, trace)
            if engine.model_info.adapter_slots:
                server.set_adapter_slots(engine.graph_adapter_slots())


def warm_up(server: _core.Server, engine: ModelExecutor) -> None:
    """Run every kind of pass, sampler and copy once, so that no request waits for first use.

    They write to the first pages of the pools, which are free.
    """
    for direction in ("D2D", "D2H", "H2D", "H2H") if engine.model_info.host_pages else ("D2D",):
        engine.copy_pages(direction, [0], [0])
    if engine.model_info.state_slots:
        engine.copy_states([0], [0])
    _warm_up_paths(server, engine, None)
    if engine.model_info.adapter_slots:
        engine.load_warm_up_adapter()
        _warm_up_paths(server, engine, WARM_UP_ADAPTER)
        engine.drop_warm_up_adapter()
    if engine.model_info.embedding_size:
        # No graph runs it.
        return
    for sampler in (Sampler.greedy(), Sampler.top_k_top_p(0.8, 20, 0.9)):
        server.warm_up_graph_path(_core.encode_forward([Request([0], [0], [0], 1, [(0, sampler)])]))


class BatchTimes(NamedTuple):
    """Host times of a batch, in nanoseconds; the GPU runs asynchronously."""

    forward_ns: int
    """Issuing the forward passes."""
    sample_ns: int
    """Sampling, up to the tokens."""
    h2d_ns: int
    """Of both: host-to-device copies."""
    sync_ns: int
    """Of both: waiting for the device."""


def run_batch(batch: _core.Batch, engine: ModelExecutor) -> BatchTimes:
    """Run every pass of a batch, and sample its slots."""
    # Discard the times of a failed batch or of the warm-up.
    engine.take_waits()
    forward_ns = sample_ns = 0
    while True:
        if adapter_ids := batch.next_adapters():
            for adapter_id, reason in engine.fetch_adapters(adapter_ids).items():
                batch.drop_adapter(adapter_id, reason)
        if (staged := batch.stage()) is None:
            break
        started = time.perf_counter_ns()
        engine.forward(staged)
        forward_ns += time.perf_counter_ns() - started
        batch.prepare_drafts()
        while (group := batch.stage_slots()) is not None:
            started = time.perf_counter_ns()
            outputs = engine.sample(group)
            sample_ns += time.perf_counter_ns() - started
            for slot, reason in outputs.failures:
                batch.fail_slot(slot, reason)
            batch.put_outputs(
                outputs.tokens.numpy().data,
                *(None if part is None else part.numpy().data for part in outputs[1:-1]),
            )
    return BatchTimes(forward_ns, sample_ns, *engine.take_waits())


def _serve_batch(batch: _core.Batch, engine: ModelExecutor, trace: Trace | None) -> None:
    # First, because an answered batch has no counts.
    requests, tokens = batch.requests, batch.tokens
    try:
        times = run_batch(batch, engine)
        launch_ns = max(0, times.forward_ns + times.sample_ns - times.h2d_ns - times.sync_ns)
        batch.commit(
            h2d_us=_micros(times.h2d_ns),
            launch_us=_micros(launch_ns),
            sync_us=_micros(times.sync_ns),
        )
    except Exception as error:
        batch.fail()
        text = "a batch of %d requests and %d tokens failed and was answered by an abort"
        log_or_raise(engine, error, "forward", text, requests, tokens)
        return
    if trace is not None:
        phases = {
            "parse": batch.parse_ns,
            "plan": batch.plan_ns,
            "forward": times.forward_ns,
            "sample": times.sample_ns,
            "respond": batch.respond_ns,
        }
        trace.step(batch.received_ns, phases, requests=requests, tokens=tokens)


def _trace_step(step: _core.Step, trace: Trace) -> None:
    phases = {
        "parse": step.parse_ns,
        "plan": step.plan_ns,
        "launch": step.launch_ns,
        "wait": step.wait_ns,
        "respond": step.respond_ns,
    }
    counts = {"requests": step.requests, "tokens": step.tokens}
    trace.step(step.received_ns, phases, **counts, path="graph path")


def _serve_copy(copy: _core.Copy, engine: ModelExecutor) -> None:
    try:
        for sources, targets in copy.groups():
            if copy.states:
                engine.copy_states(sources, targets)
            else:
                engine.copy_pages(copy.direction, sources, targets)
    except Exception as error:
        what = (copy.direction, len(copy), "states" if copy.states else "pages")
        copy.commit(STATUS_FAILED)
        log_or_raise(engine, error, "copy", "a %s copy of %d %s failed", *what)
    else:
        copy.commit(STATUS_OK)


def _warm_up_paths(server: _core.Server, engine: ModelExecutor, adapter_id: int | None) -> None:
    info = engine.model_info
    for requests in _warm_up_batches(info, adapter_id):
        batch = server.warm_up(_core.encode_forward(requests))
        run_batch(batch, engine)
        batch.commit()


def _micros(nanoseconds: int) -> int:
    return min((nanoseconds + 500) // 1000, 2**32 - 1)


def _warm_up_batches(info: ModelInfo, adapter_id: int | None) -> list[list[Request]]:
    """Decodes, a prefill of one page, a mixed batch, and a prefill with an attention mask.

    Each with every class of sampler; with an adapter, every other request uses it.
    """
    page_size, has_state = info.page_size, info.state_slots > 0
    count = min(info.total_pages, info.state_slots or 8, 8)
    samplers = [Sampler.greedy(), Sampler.multinomial(1.0), Sampler.top_k_top_p(0.8, 20, 0.9)]
    samplers += [Sampler.min_p(0.8, 0.1), Sampler.dist(1.0, 4), Sampler.raw_logits()]
    samplers += [Sampler.logprobs([0, 1]), Sampler.entropy()]
    if info.embedding_size:
        samplers = [Sampler.embedding()]

    def request(page: int, tokens: int, masks: list[list[int]] | None = None) -> Request:
        pages: Sequence[int] = [page]
        row = tokens - 1
        slots = [(row, sampler) for sampler in samplers]
        mask = [0, 2] if page % 2 else None
        positions = list(range(tokens))
        adapter = adapter_id if adapter_id is not None and page % 2 == 0 else -1
        return Request(
            [0] * tokens,
            positions,
            pages,
            tokens,
            slots,
            masks=masks,
            logit_mask=mask,
            adapter_id=adapter,
            state_slot=page if has_state else None,
            state_reset=has_state,
        )

    decode = [request(page, 1) for page in range(count)]
    prefill = [request(0, page_size)]
    masked = [request(0, page_size, masks=[[1]] * page_size)]
    return [decode[:1], decode, prefill, decode[1:] + prefill, masked]
