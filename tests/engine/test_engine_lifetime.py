"""What becomes of the processes of an `Engine` that is not shut down."""

from __future__ import annotations

import gc
import sys
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang import Engine
from support.models.tiny_models import POCKET
from support.process.inspection import is_running
from support.servers.pie_server import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CELL = """
engine = Engine(model_path=MODEL, device="cpu")
answers = engine.as_completed(["a", "b"], {"max_new_tokens": 4, "ignore_eos": True})
first = next(answers)
[pid] = engine.get_server_info()["internal_states"][0]["driver_pids"]
"""
"""A notebook's cell, which leaves an iterator that has not ended."""


def test_a_cell_that_is_run_again_ends_the_engine_before(forked_python: str) -> None:
    names: dict[str, Any] = {"Engine": Engine, "MODEL": str(POCKET)}
    with mock.patch.object(sys, "executable", forked_python):
        exec(CELL, names)
        before = names["pid"]
        assert is_running(before)
        exec(CELL, names)
    gc.collect()
    wait_until(lambda: not is_running(before), 60, "the first driver has ended")
    assert names["engine"].generate("a", {"max_new_tokens": 2})["output_ids"]
    last = names["pid"]
    names.clear()
    gc.collect()
    wait_until(lambda: not is_running(last), 60, "the second driver has ended")
