"""The changed Triton interpreter; see `support/kernels/fast_interpreter.py`."""

from __future__ import annotations

import pytest


@pytest.mark.interpreted("tests/support/kernels/integer_overflow.py")
def test_sums_that_overflow_are_found(interpreted: str) -> None:
    most = 2**31 - 1
    assert interpreted.splitlines() == [
        f"add: {[most - 3, most - 2, most - 1, most]}",
        "add: overflow",
        "sub: overflow",
        f"sub: {[-most + 2, -most + 1, -most, -most - 1]}",
        f"mul: {[most - 7, most - 5, most - 3, most - 1]}",
        "mul: overflow",
        "called: overflow",
    ]


@pytest.mark.interpreted("tests/support/kernels/same_operators.py")
def test_fast_operators_do_what_tritons_do(interpreted: str) -> None:
    assert interpreted == "the same\n"


@pytest.mark.interpreted("tests/support/kernels/scans.py")
def test_a_scan_by_doubling_does_what_tritons_does(interpreted: str) -> None:
    assert interpreted == "the same\n"
