"""Converted models in the cache: which there are, and how they are removed.

`packaged.py` and `gguf_cache.py` make them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pie_driver_sglang.checkpoint.gguf_cache import conversion_name
from pie_driver_sglang.checkpoint.packaged import MANIFEST, MODELS, cache_folder, packaged_name
from pie_driver_sglang.errors import ConfigError, quoted, reason

_PREFIXES: Final = ("gguf-", *(f"{name}-" for name in MODELS))
"""How the names of folders begin."""


class ConvertedModel(NamedTuple):
    """A converted model.

    Attributes:
        folder: Where it is.
        size: Bytes on the disk.
        source: The GGUF file that it was made of; None for a packaged model.
        is_stale: Whether it is of no use: the file or package is gone, or another one by now.
    """

    folder: Path
    size: int
    source: Path | None
    is_stale: bool


def converted_models() -> list[ConvertedModel]:
    """The models in the cache, by the names of their folders.

    Raises:
        ConfigError: The cache cannot be read.
    """
    cache = cache_folder()
    try:
        folders = sorted(path for path in cache.iterdir() if (path / MANIFEST).is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"cannot read the model cache {quoted(cache)}: {reason(error)}",
            "check its permissions",
        ) from error
    return [_described(folder) for folder in folders]


def remove(model: ConvertedModel) -> None:
    """Remove a model from the cache.

    A driver that serves it continues, and cannot be started again.

    Raises:
        ConfigError: It is being converted, or cannot be removed.
    """
    try:
        with _held(model.folder):
            # Without it no process takes the rest for a model.
            (model.folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(model.folder)
    except OSError as error:
        raise ConfigError(
            f"cannot remove {quoted(model.folder)}: {reason(error)}", "check its permissions"
        ) from error


def remove_unfinished() -> int:
    """Remove what conversions have left behind that were killed.

    Returns:
        Its bytes on the disk.

    Raises:
        ConfigError: It cannot be removed.
    """
    size = 0
    cache = cache_folder()
    for path in sorted(cache.glob("*")) if cache.is_dir() else ():
        # While it is made, a folder has a point before its name, and letters after it.
        name = path.name[1:].rpartition(".")[0] if path.name.startswith(".") else path.name
        if not name.startswith(_PREFIXES) or not path.is_dir() or (path / MANIFEST).exists():
            continue
        try:
            with _held(cache / name):
                if path.is_dir() and not (path / MANIFEST).exists():
                    size += sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
                    shutil.rmtree(path)
        except ConfigError:
            continue
        except OSError as error:
            raise ConfigError(
                f"cannot remove {quoted(path)}: {reason(error)}", "check its permissions"
            ) from error
    return size


def _described(folder: Path) -> ConvertedModel:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        source = None if found.get("source") is None else Path(found["source"])
        size = sum(found["files"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        # A damaged one is converted anew, and is of no use until then.
        return ConvertedModel(folder, 0, None, is_stale=True)
    if source is None:
        current = {packaged_name(*each) for each in MODELS.items()}
        return ConvertedModel(folder, size, None, is_stale=folder.name not in current)
    try:
        is_stale = conversion_name(source) != folder.name
    except OSError:
        is_stale = True
    return ConvertedModel(folder, size, source, is_stale)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which a process that converts it has.

    Raises:
        ConfigError: One does.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{quoted(folder)} is being converted", "wait for its end") from None
        yield
