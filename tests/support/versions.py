"""Which SGLang the tests run with, where a test is of one version."""

from __future__ import annotations

from typing import Final

import pytest

from pie_driver_sglang.config.sglang_versions import SUPPORTED, adapter_version

OLDEST: Final = SUPPORTED[0].sglang
IS_OLDEST: Final = adapter_version().sglang == OLDEST


def of_the_oldest(reason: str) -> pytest.MarkDecorator:
    """Skips a test with newer versions, for a stated difference of SGLang."""
    return pytest.mark.skipif(not IS_OLDEST, reason=f"SGLang after {OLDEST}: {reason}")
