"""The versions of SGLang that this package supports, and which one is installed.

Imports nothing of SGLang: its version is read from the metadata of the installed package.
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from pie_driver_sglang.config.installed import installed_version


class SglangVersion(NamedTuple):
    """A version of SGLang, with the versions of torch, FlashInfer and its kernels that it pins."""

    sglang: str
    torch: str
    flashinfer: str
    kernels: str
    """Of `sglang-kernel`, which the CPU does not need."""
    on_gpu: bool
    """Whether the checks of `benches/gpu` have run with it."""

    @property
    def pins(self) -> dict[str, str]:
        """The packages that must have exactly one version, by name."""
        return {
            "sglang": self.sglang,
            "torch": self.torch,
            "flashinfer-python": self.flashinfer,
        }


SUPPORTED: Final = (
    SglangVersion("0.5.17", "2.11.0", "0.6.15.post1", "0.4.5", on_gpu=True),
    SglangVersion("0.5.23", "2.14.1", "0.7.2", "0.4.10", on_gpu=False),
)
"""From the oldest to the newest. Each has a folder of that name in both `compat` packages."""


@functools.cache
def adapter_version() -> SglangVersion:
    """The version whose compat modules this process uses.

    It is the installed one where there are some for it, and else the newest version before it,
    which runs only if the check of versions is overridden. Without SGLang it is the oldest.
    """
    installed = installed_version("sglang")
    return SUPPORTED[0] if installed is None else version_for(installed.partition("+")[0])


def is_0517() -> bool:
    """Whether this process uses the compat modules of SGLang 0.5.17."""
    return adapter_version().sglang == "0.5.17"


def version_for(installed: str) -> SglangVersion:
    """The version whose modules an installed one gets: itself, or the newest before it."""
    before = [x for x in SUPPORTED if _release(x.sglang) <= _release(installed)]
    return before[-1] if before else SUPPORTED[0]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, such as (0, 5, 17)."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
