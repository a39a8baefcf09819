"""The compat modules of the installed version of SGLang, chosen once in a process.

Each function imports one module, when it is first called: some import SGLang.
"""

from __future__ import annotations

import functools

from pie_driver_sglang.backends.sglang.compat.protocols import (
    LayersCompat,
    LoraCompat,
    PassesCompat,
    RanksCompat,
    SettingsCompat,
)
from pie_driver_sglang.config.sglang_versions import is_0517


@functools.cache
def settings() -> SettingsCompat:
    """`ServerArgs`."""
    if is_0517():
        from pie_driver_sglang.backends.sglang.compat.v0517 import settings as of_0517

        return of_0517
    from pie_driver_sglang.backends.sglang.compat.v0523 import settings as of_0523

    return of_0523


@functools.cache
def ranks() -> RanksCompat:
    """Ranks of runners."""
    if is_0517():
        from pie_driver_sglang.backends.sglang.compat.v0517 import ranks as of_0517

        return of_0517
    from pie_driver_sglang.backends.sglang.compat.v0523 import ranks as of_0523

    return of_0523


@functools.cache
def layers() -> LayersCompat:
    """Layers of models."""
    if is_0517():
        from pie_driver_sglang.backends.sglang.compat.v0517 import layers as of_0517

        return of_0517
    from pie_driver_sglang.backends.sglang.compat.v0523 import layers as of_0523

    return of_0523


@functools.cache
def passes() -> PassesCompat:
    """Passes."""
    if is_0517():
        from pie_driver_sglang.backends.sglang.compat.v0517 import passes as of_0517

        return of_0517
    from pie_driver_sglang.backends.sglang.compat.v0523 import passes as of_0523

    return of_0523


@functools.cache
def lora() -> LoraCompat:
    """The LoRA manager."""
    if is_0517():
        from pie_driver_sglang.backends.sglang.compat.v0517 import lora as of_0517

        return of_0517
    from pie_driver_sglang.backends.sglang.compat.v0523 import lora as of_0523

    return of_0523
