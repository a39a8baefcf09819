"""The `rope_theta` that SGLang's model classes read from a configuration, as JSON.

python tests/support/sglang_scripts/rope_theta.py SNAPSHOT...
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

from pie_driver_sglang.backends.sglang.compat import corrections


def corrected(snapshot: str) -> Any:
    """Of a snapshot's configuration, as the driver loads it."""
    config = AutoConfig.from_pretrained(snapshot)
    corrections.correct_rope(SimpleNamespace(hf_config=config, hf_text_config=config))  # type: ignore[arg-type]
    return getattr(config, "rope_theta", None)


if __name__ == "__main__":
    print(json.dumps([corrected(snapshot) for snapshot in sys.argv[1:]]))
