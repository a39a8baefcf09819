"""The prefix index as a plugin of SGLang: registers it as a radix-cache backend.

SGLang loads entry points of ``sglang.srt.plugins``; this one does nothing unless it is named::

    SGLANG_PLUGINS=pie_radix python -m sglang.launch_server --radix-cache-backend pie ...

The variable disables plugins that it does not name, so add this one to others that are needed.

With ``PIE_RADIX_MIN_HIT=N`` prefixes of fewer than N tokens are not used.
"""

from __future__ import annotations

import os
from typing import Any

NAME = "pie_radix"
"""The plugin's name, in ``SGLANG_PLUGINS`` and among the entry points."""
BACKEND = "pie"
"""The backend's name, for ``--radix-cache-backend``."""
MIN_HIT = "PIE_RADIX_MIN_HIT"
"""The environment variable with the minimum tokens of a prefix hit."""

REFUSED_SETTINGS = {
    "disable_radix_cache": "it is a radix cache",
    "enable_hierarchical_cache": "it keeps no KV in host memory here",
    "hicache_storage_backend": "it keeps no KV in storage",
    "enable_lmcache": "LMCache is another cache",
    "enable_flexkv": "FlexKV is another cache",
    "enable_hisparse": "it keeps no KV in host memory here",
    "enable_unified_cache_external_linker": "it keeps no KV in storage",
    "enable_session_radix_cache": "only SGLang's unified cache has sessions of its own",
}
"""Unsupported settings of SGLang, with the reason."""


def check_settings(settings: Any) -> None:
    """Reject unsupported settings of SGLang, if the backend is selected.

    Args:
        settings: SGLang's ``ServerArgs``.

    Raises:
        ValueError: One line, with the flag to drop.
    """
    if settings.radix_cache_backend != BACKEND:
        return
    for setting, reason in REFUSED_SETTINGS.items():
        # Some are of one version alone.
        if getattr(settings, setting, None):
            _refuse(f"--{setting.replace('_', '-')}", reason)
    if settings.disaggregation_mode != "null":
        flag = f"--disaggregation-mode {settings.disaggregation_mode}"
        _refuse(flag, "it was not tried with prefill and decode on different servers")


def _refuse(flag: str, reason: str) -> None:
    backend = f"--radix-cache-backend {BACKEND}"
    raise ValueError(f"{backend} does not take {flag}: {reason}; drop {flag} or {backend}")


def make(context: Any) -> Any:
    """Create the cache for SGLang's scheduler.

    Args:
        context: SGLang's ``TreeCacheBuildContext``.

    Raises:
        ValueError: The model or a setting does not fit; one line, with the flag to drop.
    """
    check_settings(context.server_args)
    drop = f"drop --radix-cache-backend {BACKEND}"
    if context.is_hybrid_swa:
        raise ValueError(
            "the model keeps KV of sliding windows apart, which the prefix index does not know; "
            f"{drop}, or add --disable-hybrid-swa-memory"
        )
    if context.is_hybrid_ssm:
        raise ValueError(
            f"the model has recurrent state, which the prefix index does not know; {drop}"
        )
    if context.disable_radix_cache:
        raise ValueError(f"SGLang takes no prefix cache for this model; {drop}")
    from pie_driver_sglang.backends.sglang.compat import hooks

    if hooks.has_tree_cores():
        from pie_driver_sglang.sglang_plugins.tree_core import make_cache

        return make_cache(context, BACKEND, min_hit())
    from pie_driver_sglang.sglang_plugins.radix_cache import RadixCache

    return RadixCache(context.params, min_hit=min_hit())


def min_hit() -> int:
    """The minimum tokens of a prefix hit, from the environment; 1 by default.

    Raises:
        ValueError: It is not a number from 1.
    """
    text = os.environ.get(MIN_HIT, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{MIN_HIT} is {text!r}, not a number of tokens; set it from 1, or unset it"
        )
    return int(text)


def _check_server_args(_: None, settings: Any) -> None:
    check_settings(settings)


def register() -> None:
    """Register the backend, if ``SGLANG_PLUGINS`` names it; SGLang calls this in each process.

    Raises:
        SystemExit: This version of SGLang is not one that the hooks are for.
    """
    from pie_driver_sglang.backends.sglang.compat import hooks

    if hooks.is_named(NAME):
        hooks.register_prefix_cache(BACKEND, make, _check_server_args)
