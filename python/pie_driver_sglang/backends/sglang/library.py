"""SGLang, as the driver's start-up sequence needs it. Does not import it."""

from __future__ import annotations

from typing import Final

from pie_driver_sglang.backends.sglang.start import load_rank
from pie_driver_sglang.backends.sglang.version import check_versions
from pie_driver_sglang.config.config_file import SGLANG_RULES
from pie_driver_sglang.driver.library import Library

LIBRARY: Final = Library(
    "SGLang", "pie_driver_sglang", __name__, SGLANG_RULES, check_versions, load_rank
)
