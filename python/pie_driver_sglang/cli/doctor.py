"""`pie-sglang doctor`: checks this machine for the driver's requirements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pie_driver_sglang import _core
from pie_driver_sglang.cli.machine import Machine, RegionFile, query_machine
from pie_driver_sglang.cli.report import Finding, Status, print_findings
from pie_driver_sglang.cli.version import version_line
from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import install_command
from pie_driver_sglang.memory.plan import size_text

PYTHONS: Final = ((3, 11), (3, 12))
"""Supported versions of Python."""
REGION_BYTES: Final = _core.region_bytes()
"""Default size of a region."""
LATENCY_CORES: Final = 4
"""Free cores that `ipc_profile = "latency"` of Pie needs: two spinning processes and threads."""
_DRIVERS: Final = {12: "525.60.13", 13: "580.65.06"}
"""The first NVIDIA driver for each major version of CUDA, from NVIDIA's release notes."""
_HALF: Final = (8, 0)
"""The first compute capability with bfloat16."""
_HOPPER: Final = 9
"""The major compute capability of FA3."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 1 if a driver could not start here."""
    parser = CommandParser(
        prog="pie-sglang doctor",
        description="Looks at what a driver needs of this machine. The exit status is 1 if "
        "something would end its start. Nothing is changed.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    return print_findings([_build(), *examine(query_machine())], options.json)


def examine(machine: Machine) -> list[Finding]:
    """The findings on a machine, in the order of the report."""
    return [
        finding
        for check in (_system, _packages, _driver, _gpus, _compilers, _shm, _regions, _host)
        for finding in check(machine)
    ]


def _build() -> Finding:
    build = _core.build_info()
    if build["profile"] == "debug":
        hint = "run `make wheel` in the clone, and install the wheel in `target/wheels`"
        return Finding("driver", "warn", f"{version_line()}: slow", hint, build)
    return Finding("driver", "ok", version_line(), values=build)


def _system(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    text = f"{version} in {machine.executable}"
    values = {"version": version, "executable": machine.executable}
    if machine.python in PYTHONS:
        yield Finding("Python", "ok", text, values=values)
    else:
        yield Finding("Python", "fail", text, "make the environment with Python 3.12", values)
    system = f"{machine.system}, {machine.libc or 'unknown C library'}"
    status: Status = "ok" if machine.system.startswith("Linux ") else "fail"
    hint = "" if status == "ok" else "run the driver on Linux: it needs futexes and /dev/shm"
    yield Finding("system", status, system, hint, {"system": machine.system, "libc": machine.libc})


def _packages(machine: Machine) -> Iterator[Finding]:
    for name, package in machine.packages.items():
        values = package._asdict()
        if package.installed is None:
            text = f"missing, {package.wanted} is needed"
            hint = f"run `{install_command(f'{name}=={package.wanted}')}`"
            yield Finding(name, "fail", text, hint, values)
        elif package.installed.partition("+")[0] != package.wanted:
            text = f"{package.installed}, {package.wanted} is needed: its internals differ"
            hint = f"run `{install_command(f'{name}=={package.wanted}')}`"
            yield Finding(name, "fail", text, hint, values)
        else:
            yield Finding(name, "ok", package.installed, values=values)


def _driver(machine: Machine) -> Iterator[Finding]:
    cuda, built = machine.cuda, machine.torch_cuda
    values = {"driver": cuda.driver, "newest_cuda": cuda.newest, "torch_cuda": built}
    if cuda.problem and not cuda.has_hardware:
        text = f"no NVIDIA GPU ({cuda.problem}): most models run on the CPU"
        hint = 'add `--device cpu`; in Pie\'s configuration set `device = ["cpu"]`'
        yield Finding("CUDA", "warn", text, hint, values)
        return
    if cuda.problem:
        hint = (
            "load or reinstall the NVIDIA driver, and restart after an update; start a container "
            "with `--gpus all`"
        )
        yield Finding("CUDA", "fail", f"the GPU cannot be used: {cuda.problem}", hint, values)
        return
    text = f"driver {cuda.driver}, for CUDA up to {_dotted(cuda.newest)}"
    if built is None:
        text = f"{text}; torch is built for the CPU"
        pinned = machine.packages.get("torch")
        wanted = "torch" if pinned is None else f"torch=={pinned.wanted}"
        hint = f"run `{install_command(wanted, again=True)}`"
        yield Finding("CUDA", "fail", text, hint, values)
    elif cuda.newest[0] < built[0]:
        needed = _DRIVERS.get(built[0], "a newer one")
        hint = f"update the NVIDIA driver to {needed} or newer"
        text = f"{text}; torch is built for {_dotted(built)}"
        yield Finding("CUDA", "fail", text, hint, values)
    else:
        text = f"{text}; torch is built for {_dotted(built)}"
        yield Finding("CUDA", "ok", text, values=values)


def _gpus(machine: Machine) -> Iterator[Finding]:
    for gpu in machine.cuda.gpus:
        text = (
            f"{gpu.name}, compute capability {_dotted(gpu.capability)}, "
            f"{size_text(gpu.free)} of {size_text(gpu.total)} free"
        )
        name = f"cuda:{gpu.number}"
        if gpu.capability < _HALF:
            hint = (
                "it has no bfloat16: add `--dtype float16`; in Pie's configuration set "
                '`activation_dtype = "float16"`'
            )
            yield Finding(name, "warn", text, hint, gpu._asdict())
        else:
            yield Finding(name, "ok", text, values=gpu._asdict())
    if any(gpu.capability[0] == _HOPPER for gpu in machine.cuda.gpus):
        yield _fa3(machine.has_fa3)


def _fa3(is_there: bool) -> Finding:
    values = {"installed": is_there}
    if is_there:
        return Finding("FA3", "ok", "FlashAttention-3 computes prefills", values=values)
    text = "SGLang's FlashAttention-3 is missing: triton computes prefills, which takes longer"
    library = f"sglang-kernel=={adapter_version().kernels}"
    return Finding("FA3", "warn", text, f"run `{install_command(library)}`", values)


def _compilers(machine: Machine) -> Iterator[Finding]:
    """Compilers and kernel caches of a GPU machine."""
    if not machine.cuda.gpus:
        return
    listed = ", ".join(f"{cache.name} {cache.files} files" for cache in machine.caches)
    values = {
        "own_kernels": sorted(machine.kernels),
        **{cache.name: {"path": str(cache.path), "files": cache.files} for cache in machine.caches},
    }
    if machine.kernels:
        yield Finding("kernel cache", "ok", f"warm: {listed}", values=values)
    else:
        text = f"cold ({listed}): the first start compiles kernels, which takes minutes"
        hint = "nothing needs to be done; in a container keep ~/.triton and ~/.cache on a volume"
        yield Finding("kernel cache", "ok", text, hint, values)
    if machine.compiler is None:
        text = "none: Triton needs one for kernels that are not in its cache"
        yield Finding("C compiler", "warn", text, "install gcc, or set CC")
    else:
        yield Finding("C compiler", "ok", machine.compiler)
    if machine.nvcc is None:
        text = "none: only models without fused layers may need it"
        hint = "SGLang compiles some of their kernels: install the CUDA toolkit, or set CUDA_HOME"
        yield Finding("nvcc", "ok", text, hint)
    else:
        yield Finding("nvcc", "ok", machine.nvcc)


def _shm(machine: Machine) -> Iterator[Finding]:
    shm = machine.shm
    if shm is None:
        hint = "mount a tmpfs there: `mount -t tmpfs tmpfs /dev/shm`"
        yield Finding("/dev/shm", "fail", "missing", hint)
        return
    total = size_text(shm.total) if shm.total else "unlimited"
    text = f"{size_text(shm.free)} of {total} free, {shm.kind or 'unknown file system'}"
    values = shm._asdict()
    if shm.total and shm.free < REGION_BYTES:
        text = f"{text}; a driver needs {size_text(REGION_BYTES)}"
        hint = (
            "remove stale regions, or enlarge it; in a container with `--shm-size` or `--ipc=host`"
        )
        yield Finding("/dev/shm", "fail", text, hint, values)
    elif shm.kind not in ("tmpfs", ""):
        hint = "mount a tmpfs there: `mount -t tmpfs tmpfs /dev/shm`"
        yield Finding("/dev/shm", "warn", f"{text}: not memory", hint, values)
    else:
        yield Finding("/dev/shm", "ok", text, values=values)


def _regions(machine: Machine) -> Iterator[Finding]:
    for region in machine.regions:
        values = region._asdict()
        text = f"{size_text(region.bytes)} of {region.user}, {_age(region.age_s)} old"
        if region.is_live:
            yield Finding(region.name, "ok", f"{text}, in use{_owner(region)}", values=values)
        elif region.is_live is None:
            text = f"{text}; this user may not ask whether it is in use"
            yield Finding(region.name, "warn", text, f"ask as {region.user} or as root", values)
        else:
            hint = f"run `rm /dev/shm/{region.name}`; the next driver of this group removes it, too"
            text = f"{text}, stale: its driver has ended"
            yield Finding(region.name, "warn", text, hint, values)


def _owner(region: RegionFile) -> str:
    if region.owner is None:
        return " by a process that cannot be seen from here"
    command = f" ({region.command})" if region.command else ""
    return f" by process {region.owner}{command}"


def _host(machine: Machine) -> Iterator[Finding]:
    free = max(0.0, machine.cores - machine.load)
    text = f"{free:.1f} of {machine.cores} are free"
    values = {"cores": machine.cores, "load": machine.load}
    if free < LATENCY_CORES:
        text = f'{text}; only `ipc_profile = "latency"` of Pie needs {LATENCY_CORES}'
    yield Finding("cores", "ok", text, values=values)
    if machine.memory is None:
        yield Finding(
            "memory", "fail", "psutil is missing", f"run `{install_command('psutil>=6')}`"
        )
    else:
        values = {"available": machine.memory}
        yield Finding("memory", "ok", f"{size_text(machine.memory)} available", values=values)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
