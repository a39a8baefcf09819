"""Queries the machine: versions, GPUs, `/dev/shm`, caches. Imports neither torch nor SGLang.

Functions have their sources (NVML, a folder, an environment) as arguments, for tests.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import pwd
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

from pie_driver_sglang.backends.sglang.compat.process import KERNELS
from pie_driver_sglang.memory.gpus import Cuda, nvml, query_cuda

REGION_PREFIX: Final = "pie_shmem_g"
"""Prefix of the drivers' regions in `/dev/shm`."""

_KERNEL: Final = re.compile(r"^@triton\.jit\b.*\n(?:@.*\n)*def (\w+)", re.MULTILINE)


class RegionFile(NamedTuple):
    """A driver's region in `/dev/shm`."""

    name: str
    bytes: int
    """Allocated bytes."""
    user: str
    owner: int | None
    """The process that holds its lock; None if unknown or none."""
    command: str
    """Command line of the owner."""
    is_live: bool | None
    """False for a leftover of a killed driver; None if this user may not check."""
    age_s: float
    """Seconds since its creation."""


class Shm(NamedTuple):
    """`/dev/shm`: sizes in bytes; a `total` of 0 is no limit."""

    total: int
    free: int
    kind: str
    """File system type."""


class Cache(NamedTuple):
    """A folder of compiled kernels."""

    name: str
    path: Path
    files: int


class Package(NamedTuple):
    """A Python package: the required and the installed version."""

    wanted: str
    installed: str | None


class Machine(NamedTuple):
    """The state of a machine."""

    python: tuple[int, int]
    executable: str
    system: str
    """Operating system and architecture, e.g. `Linux x86_64`."""
    libc: str
    packages: Mapping[str, Package]
    cuda: Cuda
    torch_cuda: tuple[int, int] | None
    """The CUDA version that torch was built for; None for a CPU build or without torch."""
    has_fa3: bool
    """Whether SGLang's FlashAttention-3 kernels are installed."""
    shm: Shm | None
    """None where `/dev/shm` is missing."""
    regions: tuple[RegionFile, ...]
    cores: int
    """Cores that this process may use."""
    load: float
    """Cores in use in the last minute."""
    memory: int | None
    """Available host memory in bytes; None without psutil."""
    kernels: frozenset[str]
    """The driver's own GPU kernels in Triton's cache."""
    caches: tuple[Cache, ...]
    compiler: str | None
    """The C compiler that Triton would use."""
    nvcc: str | None


def query_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """Query this machine."""
    from pie_driver_sglang.backends.sglang.version import pins

    caches = query_caches(environment)
    return Machine(
        python=sys.version_info[:2],
        executable=sys.executable,
        system=f"{platform.system()} {platform.machine()}",
        libc=" ".join(filter(None, platform.libc_ver())),
        packages={name: Package(wanted, installed(name)) for name, wanted in pins().items()},
        cuda=query_cuda(nvml()),
        torch_cuda=torch_cuda(_folder_of("torch")),
        has_fa3=_has_fa3(_folder_of(KERNELS)),
        shm=query_shm(Path("/dev/shm")),
        regions=tuple(query_regions(Path("/dev/shm"))),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        memory=_memory(),
        kernels=cached_kernels(caches[0].path, own_kernels()),
        caches=caches,
        compiler=find_compiler(environment),
        nvcc=find_nvcc(environment),
    )


def installed(name: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def torch_cuda(folder: Path | None) -> tuple[int, int] | None:
    """The CUDA version in torch's `version.py`, without importing it."""
    match = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", _read(folder, "version.py"), re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else None


def _has_fa3(folder: Path | None) -> bool:
    return folder is not None and any(folder.glob("flash_ops*.so"))


def query_shm(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> Shm | None:
    """The file system of the regions; None where the folder is missing."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return None
    fields = (line.split() for line in _read(mounts).splitlines())
    kinds = {words[1]: words[2] for words in fields if len(words) > 2}
    unit = space.f_frsize
    return Shm(space.f_blocks * unit, space.f_bavail * unit, kinds.get(str(folder), ""))


def query_regions(folder: Path, proc: Path = Path("/proc")) -> list[RegionFile]:
    """The regions of all drivers of all users, by name."""
    owners = lock_owners(_read(proc / "locks"))
    try:
        paths = sorted(folder.glob(f"{REGION_PREFIX}*"))
    except OSError:
        return []
    regions = (_query_region(path, owners, proc) for path in paths)
    return [region for region in regions if region is not None]


def _query_region(
    path: Path, owners: Mapping[tuple[int, int], int], proc: Path
) -> RegionFile | None:
    try:
        status = path.lstat()
    except OSError:
        # It was removed meanwhile.
        return None
    owner = owners.get((status.st_dev, status.st_ino))
    words = _read(proc / str(owner), "cmdline").split("\0") if owner else []
    return RegionFile(
        name=path.name,
        bytes=status.st_blocks * 512,
        user=_user(status.st_uid),
        owner=owner,
        command=" ".join(filter(None, words))[:200],
        is_live=True if owner else _is_locked(path),
        age_s=max(0.0, time.time() - status.st_ctime),
    )


def lock_owners(locks: str) -> dict[tuple[int, int], int]:
    """Owners of `flock`s by device and inode, from `/proc/locks`.

    Lines look like `1: FLOCK  ADVISORY  WRITE 4711 00:1a:567 0 EOF`, with the device in hex.
    Processes of other containers are missing, or 0.
    """
    owners = {}
    for line in locks.splitlines():
        match = re.match(r"\d+: FLOCK +\w+ +\w+ (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", line)
        if match and int(match[1]):
            device = os.makedev(int(match[2], 16), int(match[3], 16))
            owners[device, int(match[4])] = int(match[1])
    return owners


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds the region's lock; None if this user may not check."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # Released at once: a driver that starts now retries after 20 ms.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def query_caches(environment: Mapping[str, str]) -> tuple[Cache, ...]:
    """The folders of compiled kernels; Triton's is the first."""
    home = Path(environment.get("HOME", "~")).expanduser()
    triton = Path(environment.get("TRITON_HOME", home)) / ".triton" / "cache"
    flashinfer = Path(environment.get("FLASHINFER_WORKSPACE_BASE", home)) / ".cache" / "flashinfer"
    folders = {
        "Triton": Path(environment.get("TRITON_CACHE_DIR", triton)),
        "FlashInfer": flashinfer,
        "TVM FFI": Path(environment.get("TVM_FFI_CACHE_DIR", home / ".cache" / "tvm-ffi")),
    }
    return tuple(Cache(name, path, _count_files(path)) for name, path in folders.items())


def _count_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def own_kernels() -> frozenset[str]:
    """The names of the driver's own Triton functions."""
    folder = Path(__file__).parents[1] / "kernels"
    texts = (_read(path) for path in folder.rglob("*.py"))
    return frozenset(name for text in texts for name in _KERNEL.findall(text))


def cached_kernels(cache: Path, names: Iterable[str]) -> frozenset[str]:
    """The kernels that are in Triton's cache, by file name."""
    wanted = frozenset(names)
    return frozenset(path.stem for path in cache.glob("*/*.cubin")) & wanted


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """The C compiler that Triton would use."""
    path = environment.get("PATH")
    named = environment.get("CC")
    if named:
        return named
    return next(
        (found for name in ("gcc", "clang") if (found := shutil.which(name, path=path))), None
    )


def find_nvcc(environment: Mapping[str, str]) -> str | None:
    """NVIDIA's compiler."""
    homes = [environment.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    paths = [str(Path(home) / "bin") for home in (*homes, "/usr/local/cuda") if home]
    return shutil.which("nvcc", path=os.pathsep.join([environment.get("PATH", ""), *paths]))


def _memory() -> int | None:
    from pie_driver_sglang.memory.host import available_bytes

    try:
        return available_bytes()
    except ImportError:
        return None


def _folder_of(package: str) -> Path | None:
    """Where a package is, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _read(path: Path | None, *names: str) -> str:
    """A small text file; empty if it cannot be read."""
    if path is None:
        return ""
    try:
        return path.joinpath(*names).read_text(errors="replace").strip()
    except OSError:
        return ""
