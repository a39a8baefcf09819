"""What SGLang reads of a process while it is imported. Imports nothing of it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

KERNELS: Final = "sgl_kernel"
"""The package of SGLang's kernels. FlashAttention-3 is a library in it, `flash_ops`."""
SERVING_BENCHMARK: Final = "sglang.bench_serving"
"""The module that measures servers."""


def skip_model_modules(architectures: Iterable[str]) -> None:
    """Sets ``SGLANG_DISABLED_MODEL_ARCHS``; without it a start imports 200 models more.

    Args:
        architectures: Class names from the model's ``config.json``.
    """
    disabled = other_model_modules(frozenset(architectures))
    if disabled:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(disabled))


def prepare_ranks(ranks: int) -> None:
    """Sets what SGLang reads of its ranks' environment; without it a start on the CPU fails."""
    # SGLang's own broadcast, which is not used here, keeps a named region.
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "0")
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    # It must be there. SGLang binds threads by it only where it brings kernels for the CPU.
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound)


def other_model_modules(architectures: frozenset[str]) -> list[str]:
    """SGLang's model modules that define none of ``architectures``; empty if no module does.

    Reads the ``EntryClass`` of each file in ``srt/models``: SGLang imports more than 200 modules to
    find one class, and naming the others saves seconds.
    """
    root = _package_folder("sglang")
    if root is None:
        return []
    wanted = re.compile(
        "|".join(rf"\b{re.escape(name)}\b" for name in sorted(architectures)) or r"(?!)"
    )
    entries = _entries(root / "srt" / "models")
    needed = {name for name, text in entries.items() if wanted.search(text)}
    return sorted(entries.keys() - needed - {"__init__"}) if needed else []


@functools.cache
def _entries(folder: Path) -> Mapping[str, str]:
    """Of each module in a folder, the text of its ``EntryClass``: 200 files, read once."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    return {name: _entry_classes(text) for name, text in texts.items()}


def _entry_classes(source: str) -> str:
    """The text of a module's ``EntryClass`` assignment, or nothing."""
    match = re.search(r"^EntryClass\s*=\s*(\[[^\]]*\]|.*)$", source, flags=re.MULTILINE)
    return match.group(1) if match else ""


def _package_folder(name: str) -> Path | None:
    # The top-level package is located, not imported: importing it takes seconds.
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None
