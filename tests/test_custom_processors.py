"""What a driver keeps of custom logit processors."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pie_driver_sglang._core import SlotGroup
from pie_driver_sglang.engine import custom_processors
from pie_driver_sglang.engine.custom_processors import CustomProcessors


class Counts:
    """Adds 1 to the logit of as many tokens as it was called for its sequence."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]]) -> Any:
        [params] = custom_param_list
        params["calls"] = params.get("calls", 0) + 1
        logits[:, : params["calls"]] += 1
        return logits


def payload(filler: str = "") -> bytes:
    given = {"callable": "", "params": {"filler": filler}}
    return (1).to_bytes(4, "little") + json.dumps(given).encode()


def calls(processors: CustomProcessors, context: int, given: bytes, output: int = 0) -> int:
    """How often the processor of a context says that it was called, after one more call."""
    logits = torch.zeros(1, 128)
    tokens = bytes(4 * (1 + output))
    group = SimpleNamespace(custom=[(0, context, given, tokens)])
    assert processors.apply(logits, cast("SlotGroup", group)) == ()
    return int(logits.sum())


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> CustomProcessors:
    monkeypatch.setattr(custom_processors, "_class", lambda _: Counts)
    return CustomProcessors(enabled=True)


def test_ended_sequences_are_kept_within_a_number_of_bytes(
    processors: CustomProcessors, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = payload("x" * 1000)
    monkeypatch.setattr(custom_processors, "MAX_BYTES", 4 * len(large))
    assert calls(processors, 1, payload()) == 1
    for context in range(2, 100):
        # The first one still runs.
        assert calls(processors, 1, payload(), context) == context
        assert calls(processors, context, large) == 1
    kept = [each.payload for each in processors._sequences.values()]
    assert sum(map(len, kept)) == processors._bytes <= 4 * len(large)
    assert payload() in kept


def test_one_that_is_larger_than_all_may_be_runs(
    processors: CustomProcessors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_processors, "MAX_BYTES", 10)
    assert [calls(processors, 1, payload(), output) for output in range(3)] == [1, 1, 1]
    assert not processors._sequences
    assert processors._bytes == 0
