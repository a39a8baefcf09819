"""Which SGLang the tests run with, where a test is of one version."""

from __future__ import annotations

from typing import Final

import pytest

from pie_driver_sglang.config.sglang_versions import SUPPORTED, adapter_version

OLDEST: Final = SUPPORTED[0].sglang
IS_OLDEST: Final = adapter_version().sglang == OLDEST

#: Routes of SGLang that one of the supported versions does not have.
NEWER_ROUTES: Final = {
    "/begin_weight_update",
    "/end_weight_update",
    "/get_hicache_l3_cache_layout",
    "/pd_role_switch",
    "/ready",
    "/v1/decisions",
    "/v1/systemone",
}
OLDER_ROUTES: Final = {
    "/clear_hicache_storage_backend",
    "/get_load",
    "/get_weight_version",
    "/weight_version",
}
MISSING_ROUTES: Final = NEWER_ROUTES if IS_OLDEST else OLDER_ROUTES


def of_the_oldest(reason: str) -> pytest.MarkDecorator:
    """Skips a test with newer versions, for a stated difference of SGLang."""
    return pytest.mark.skipif(not IS_OLDEST, reason=f"SGLang after {OLDEST}: {reason}")


def of_the_newest(reason: str) -> pytest.MarkDecorator:
    """Skips a test with the oldest version, for a stated difference of SGLang."""
    return pytest.mark.skipif(IS_OLDEST, reason=f"SGLang {OLDEST}: {reason}")
