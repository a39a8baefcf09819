"""Dense layers of a decode step as few kernels, without a GPU."""

from __future__ import annotations

import pytest

import scripts

pytestmark = pytest.mark.timeout(120)


def test_the_kernels_compute_what_float64_does() -> None:
    assert "all close" in scripts.run("tests/dense_kernels.py", interpreted=True, limit_s=100.0)
