"""What the tests of batches share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang.frontends.batches.batch_store import BatchStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    found = BatchStore(tmp_path / "store")
    yield found
    found.close()
