"""GGUF files as models: converted once into the cache of converted models.

The folder of a conversion is named by the file's path, size and time of change, so another file of
the same name is converted anew.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from pie_driver_sglang.checkpoint.packaged import (
    cache_folder,
    is_whole,
    locked,
    remove_leftovers,
    write_manifest,
)
from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError, quoted, reason
from pie_driver_sglang.memory.units import GIB

LOAD_FORMAT: Final = "gguf"
"""SGLang's name of the format."""
_CONVERSION: Final = 2
"""Part of the folders' names; increment when `gguf.py` writes other files of the same source."""
_NOTE: Final = "note: "
"""Begins a line of the converter's stderr that the user sees."""
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]")
"""Replaced in the names of folders, which are shorter than those of files may be."""
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)


def gguf_source(path: Path, load_format: str = "auto") -> Path | None:
    """The GGUF file that a path names: the file, or that of a folder without a `config.json`.

    Args:
        path: What exists of the user's model.
        load_format: As the option; with `gguf` the folder's `config.json` is not read.

    Raises:
        ConfigError: The folder has several, or none with `load_format` gguf, or the file is a part.
    """
    if path.is_file():
        found = [path] if path.suffix.lower() == ".gguf" else []
    elif load_format != LOAD_FORMAT and (path / "config.json").exists():
        found = []
    else:
        found = sorted(each for each in path.glob("*.[gG][gG][uU][fF]") if each.is_file())
    if not found:
        if load_format == LOAD_FORMAT:
            raise ConfigError(
                f"`load_format` is 'gguf', and {quoted(path)} is no GGUF file and has none",
                "name the .gguf file, or remove `load_format`",
            )
        return None
    part = _PART.search(found[0].name)
    if part is not None and int(part[2]) > 1:
        raise ConfigError(
            f"{quoted(found[0])} is part {int(part[1])} of {int(part[2])} of a GGUF file",
            "merge the parts by `llama-gguf-split --merge`, and name the merged file",
        )
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:8])
        raise ConfigError(
            f"{quoted(path)} has {len(found)} GGUF files: {names}", "name one of them"
        )
    return found[0]


def converted_folder(source: Path) -> Path:
    """The snapshot of a GGUF file, converted if it is not in the cache.

    Concurrent processes wait for the first one, and an interrupted conversion leaves none.

    Raises:
        ConfigError: It cannot be converted, or the cache cannot be written.
    """
    cache = cache_folder()
    try:
        name, source = quoted(source.name), source.absolute()
        folder, length = cache / conversion_name(source), source.stat().st_size
        if is_whole(folder):
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{folder.name}.lock", name) as lock:
            if not is_whole(folder):
                remove_leftovers(cache, folder)
                size = f"{length / GIB:.2f} GiB"
                print_notice(
                    f"converting {name} ({size}) to bfloat16, once; `pie-sglang models` lists and "
                    "removes converted files"
                )
                _convert(source, folder, length, lock)
    except OSError as error:
        raise ConfigError(
            f"cannot convert {quoted(source)} into the model cache {quoted(cache)}: "
            f"{reason(error)}",
            "free disk space there, or set XDG_CACHE_HOME to another folder",
        ) from error
    return folder


def present_conversion(source: Path) -> Path | None:
    """The snapshot of a GGUF file, if it is in the cache already."""
    try:
        folder = cache_folder() / conversion_name(source)
    except OSError:
        return None
    return folder if is_whole(folder) else None


def conversion_name(source: Path) -> str:
    """The name of the folder of a GGUF file's conversion.

    Raises:
        OSError: The file cannot be looked at.
    """
    # Not resolved: in the hub's cache a link has the model's name, and its target a hash.
    source = source.absolute()
    status = source.stat()
    key = f"\0{status.st_size}\0{status.st_mtime_ns}\0{_CONVERSION}".encode()
    digest = hashlib.sha256(os.fsencode(source) + key).hexdigest()[:16]
    return f"gguf-{_NOT_PLAIN.sub('_', source.stem)[:80]}-{digest}"


def _convert(source: Path, folder: Path, size: int, lock: int) -> None:
    """Convert a file in a process of its own, and move the result into place."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        made = Path(temporary, "model")
        made.mkdir(mode=0o755)
        done = subprocess.run(
            [sys.executable, "-m", "pie_driver_sglang.checkpoint.gguf", str(source), str(made)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            # If it outlives this process, others wait for it.
            pass_fds=[lock],
        )
        if done.returncode != 0:
            raise _failure(source, done.stderr, done.returncode)
        for line in done.stderr.splitlines():
            if line.startswith(_NOTE):
                print_notice(line.removeprefix(_NOTE))
        write_manifest(made, {"title": source.name, "source": str(source), "bytes": size})
        made.rename(folder)


def _failure(source: Path, output: str, status: int) -> ConfigError:
    """The error of a conversion that ended with a status other than 0."""
    subject = f"cannot convert {quoted(source)}"
    if status < 0:
        return ConfigError(
            f"{subject}: the converter was killed by {signal.Signals(-status).name}",
            "it needs about six bytes of host memory for each parameter; `dmesg` names processes "
            "that the kernel killed because memory ran out",
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else f"exit status {status}"
    return ConfigError(
        f"{subject}: {said[:500]}",
        "use a Hugging Face snapshot of the model, or `--scheduler sglang`",
    )
