"""Whether the installed SGLang is a supported version. Does not import it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Final

from pie_driver_sglang.config.installed import installed_version
from pie_driver_sglang.config.sglang_versions import SUPPORTED, adapter_version
from pie_driver_sglang.errors import StartError, install_command, quoted

logger = logging.getLogger(__name__)

OVERRIDE: Final = "PIE_DRIVER_ALLOW_SGLANG"
"""Environment variable: at 1, other versions are a warning."""


def pins() -> dict[str, str]:
    """The packages that must have exactly one version, by name: SGLang's choice of the others."""
    return adapter_version().pins


def check_versions(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses unsupported versions of SGLang, and of torch and FlashInfer beside a supported one.

    SGLang's internals change with every release, often without an error: a different version can
    compute wrong tokens. Every process that imports SGLang calls this before.

    Args:
        environment: Where the override is looked up.

    Raises:
        StartError: A package is missing, or has another version and the override is not set.
    """
    pinned = pins()
    missing = [name for name in pinned if installed_version(name) is None]
    if missing:
        raise StartError(
            f"{', '.join(missing)} cannot be found in {sys.prefix}", hint=_remedy(pinned)
        )
    others = [
        f"{name} is {installed} in {sys.prefix}, {_expected(name, wanted)}"
        for name, wanted in pinned.items()
        # A build of torch names its CUDA version after the plus sign.
        if (installed := installed_version(name)) is not None
        and installed.partition("+")[0] != wanted
    ]
    if not others:
        return
    if environment.get(OVERRIDE) == "1":
        logger.warning("%s; %s = 1 allows it", "; ".join(others), OVERRIDE)
        return
    override = environment.get(OVERRIDE)
    ignored = f" ({OVERRIDE} is {quoted(override)}, which has no effect)" if override else ""
    raise StartError(
        f"{'; '.join(others)}{ignored}",
        hint=f"{_remedy(pinned)}, or set {OVERRIDE}=1 to try these versions",
    )


def warn_untried(device: str) -> None:
    """Logs that the installed SGLang has not run on a GPU with this package, if that is so."""
    version = adapter_version()
    if device != "cpu" and not version.on_gpu:
        tried = ", ".join(each.sglang for each in SUPPORTED if each.on_gpu)
        text = "SGLang %s has run on the CPU only with this package: on a GPU, %s has been tried"
        logger.warning(text, version.sglang, tried)


def _expected(name: str, wanted: str) -> str:
    """What is supported of a package."""
    if name == "sglang":
        return f"supported: {', '.join(x.sglang for x in SUPPORTED)}"
    return f"expected {wanted}"


def _remedy(pinned: Mapping[str, str]) -> str:
    wanted = (f"{name}=={version}" for name, version in pinned.items())
    return f"run `{install_command(*wanted)}`"
