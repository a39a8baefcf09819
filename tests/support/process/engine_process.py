"""An engine without a ring, in a process of its own, for state that replies do not show."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pie_driver_sglang.driver.serving_loop import run_batch
from support.process import drivers


def serve_logits(config_path: str, connection: Connection, stderr: str) -> None:
    """Receives a list of encoded frames and sends the logits of all rows of each.

    Args:
        config_path: `driver.toml`.
        connection: Receives `list[bytes]`, sends for each frame one array per pass:
            ``[rows, vocabulary]`` float32.
        stderr: Where to log.
    """
    server, engine = _start(config_path, stderr)
    with connection:
        connection.send([_logits(server, engine, frame) for frame in connection.recv()])


def count_images(config_path: str, connection: Connection, stderr: str) -> None:
    """Receives a list of encoded frames and sends how many images were encoded for each.

    Args:
        config_path: `driver.toml` of a model that takes images.
        connection: Receives `list[bytes]`, sends for each frame the images of each call of the
            encoder.
        stderr: Where to log.
    """
    server, engine = _start(config_path, stderr)
    model = engine.backend.runner.model
    encode = model.get_image_feature
    calls: list[int] = []

    def counted(items: list[Any]) -> Any:
        calls.append(len(items))
        return encode(items)

    model.get_image_feature = counted
    with connection:
        counts = []
        for frame in connection.recv():
            calls.clear()
            _logits(server, engine, frame)
            counts.append(list(calls))
        connection.send(counts)


def record_waits(config_path: str, connection: Connection, stderr: str) -> None:
    """Receives a list of encoded frames and sends what a GPU would be asked to do for each.

    Args:
        config_path: `driver.toml` of a model on the CPU.
        connection: Receives `list[bytes]`, sends for each frame its calls in order: ``graph``,
            and ``record`` and ``synchronize`` of the event after each copy.
        stderr: Where to log.
    """
    server, engine = _start(config_path, stderr)
    calls: list[str] = []
    # Memory of the host stands in for the device's; copies go to where they come from.
    engine._copied = SimpleNamespace(
        record=lambda: calls.append("record"), synchronize=lambda: calls.append("synchronize")
    )
    decode = engine.steps.decode

    def recorded(*arguments: Any, **named: Any) -> Any:
        calls.append("graph")
        return decode(*arguments, **named)

    engine.steps.decode = recorded
    with connection:
        found = []
        for frame in connection.recv():
            calls.clear()
            batch = server.warm_up(frame)
            run_batch(batch, engine)
            found.append(list(calls))
            batch.commit()
        connection.send(found)


def stage_graphs(config_path: str, connection: Connection, stderr: str) -> None:
    """Stages the smallest graph, then the largest, and asks each time for which a block is staged.

    Args:
        config_path: `driver.toml` of a model on the CPU.
        connection: Sends for each of both the refusals, by rows of the graph that is asked for.
        stderr: Where to log.
    """
    from pie_driver_sglang.engine import graph_runner

    _, engine = _start(config_path, stderr)
    small, large = (
        engine.steps._plain(rows) for rows in (8, engine.steps.padded(200, with_lora=False))
    )

    def refusal(graph: Any) -> str:
        try:
            engine.steps.require_staged(graph)
        except ValueError as error:
            return str(error)
        return ""

    found = []
    for staged in (small, large):
        graph_runner.stage_blank(staged)
        found.append({graph.rows: refusal(graph) for graph in (small, large)})
    with connection:
        connection.send(found)


def _start(config_path: str, stderr: str) -> tuple[Any, Any]:
    """A server without a region, and its engine."""
    from pie_driver_sglang import _core
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.config.config_file import load_config

    drivers.redirect_output(stderr)
    config = load_config(Path(config_path))
    # The region has no client: only its planner is used.
    name = f"/pie_shmem_g{config.driver.group_id}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    server.unlink()
    planner, engine = load_engine(config)
    server.serve(planner, engine.block, print)
    return server, engine


def _logits(server: Any, engine: Any, frame: bytes) -> list[Any]:
    import torch

    batch = server.warm_up(frame)
    parts = []
    while (staged := batch.stage()) is not None:
        engine.forward(staged)
        with torch.inference_mode():
            parts.append(engine.logits(torch.arange(staged.tokens)).numpy())
        while (group := batch.stage_slots()) is not None:
            batch.put_outputs(engine.sample(group).tokens.numpy())
    batch.commit()
    return parts
