"""Loads a model without the driver's corrections of SGLang; prints its state as JSON.

python tests/support/sglang_scripts/compat_probes.py CONFIG
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.layers import logits_processor
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.rotary_embedding import base as rotary_base

from pie_driver_sglang.backends.sglang import boot
from pie_driver_sglang.backends.sglang.compat import corrections
from pie_driver_sglang.backends.sglang.compat.attention import attention_layers
from pie_driver_sglang.backends.sglang.load import load_engine
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.sglang_versions import SUPPORTED, adapter_version


def main(path: str) -> None:
    """Loads the model of a `driver.toml`."""
    cpu_known = [module._is_cpu for module in (rotary_base, logits_processor)]

    def nothing(*_: Any) -> None:
        """In the place of a correction."""

    with (
        mock.patch.object(corrections, "correct_rope", nothing),
        mock.patch.object(corrections, "correct_windows", nothing),
        mock.patch.object(boot, "unpadded", contextlib.nullcontext),
        # It refuses a model that SGLang has padded.
        mock.patch.object(boot.load_check, "watched", contextlib.nullcontext),
    ):
        _, engine = load_engine(load_config(Path(path)))
    runner = engine.backend.runner
    config = runner.model_config.hf_text_config
    layers = attention_layers(runner)
    rotary = [each for each in runner.model.modules() if isinstance(each, RotaryEmbedding)]
    found = {
        "windows": sorted({layer.sliding_window_size for layer in layers}),
        "bases": sorted({each.base for each in rotary}),
        "intermediate_size": getattr(config, "intermediate_size", None),
        "cpu_known": cpu_known,
        "reads_block_table": _reads_block_table(runner),
    }
    print(json.dumps(found))


def _reads_block_table(runner: Any) -> bool:
    """Whether attention backends of SGLang read the driver's table, and not the one it replaced."""
    if adapter_version() == SUPPORTED[0]:
        return True
    table = runner.req_to_token_pool.req_to_token
    return bool(runner.kv_index_translator.req_to_token is table)


if __name__ == "__main__":
    main(sys.argv[1])
