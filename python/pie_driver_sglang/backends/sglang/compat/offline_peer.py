"""SGLang's own offline engine, to be measured against."""

from __future__ import annotations

from typing import Any

import sglang


def peer_engine(
    model: str, device: str | None, *, tp_size: int, keeps_prefixes: bool, requests: int
) -> Any:
    """SGLang's `Engine` with its own defaults, except what the comparison fixes.

    Args:
        model: A folder, or a repository in the cache.
        device: `cuda`, `cpu` or None for SGLang's choice.
        tp_size: GPUs that share the model.
        keeps_prefixes: Whether the radix cache is on; off it is no work where no prefix repeats.
        requests: How many may run at once.
    """
    chosen = {} if device is None else {"device": device}
    return sglang.Engine(
        model_path=model,
        tp_size=tp_size,
        skip_tokenizer_init=True,
        disable_radix_cache=not keeps_prefixes,
        max_running_requests=requests,
        log_level="error",
        **chosen,
    )
