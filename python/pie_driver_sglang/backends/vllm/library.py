"""vLLM, as the driver's start-up sequence needs it. Does not import it."""

from __future__ import annotations

from typing import Final

from pie_driver_sglang.backends.vllm.start import load_vllm
from pie_driver_sglang.backends.vllm.version import check_vllm
from pie_driver_sglang.config.vllm_models import VLLM_RULES
from pie_driver_sglang.config.vllm_options import VLLM_NAMES
from pie_driver_sglang.driver.library import Library
from pie_driver_sglang.errors import OTHER_SETTINGS

LIBRARY: Final = Library(
    "vLLM",
    "pie_driver_vllm",
    __name__,
    VLLM_RULES,
    check_vllm,
    load_vllm,
    VLLM_NAMES,
    {OTHER_SETTINGS: "use another `activation_dtype` or model"},
)
