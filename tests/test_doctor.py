"""`pie-sglang doctor` on good and bad machines, and on this one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.cli import doctor, machine, main
from pie_driver_sglang.cli.doctor import LATENCY_CORES
from pie_driver_sglang.cli.machine import Cache, Machine, Package, RegionFile, Shm
from pie_driver_sglang.cli.report import Finding, exit_status
from pie_driver_sglang.config.server_args import SGLANG_VERSION
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory import gpus
from pie_driver_sglang.memory.gpus import Cuda, Gpu
from pie_driver_sglang.memory.units import GIB
from support.process import drivers

H200 = Gpu(0, "NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0))
GOOD = Machine(
    python=(3, 12),
    executable="/venv/bin/python",
    system="Linux x86_64",
    libc="glibc 2.39",
    packages={"sglang": Package("0.5.17", "0.5.17"), "torch": Package("2.11.0", "2.11.0+cu130")},
    cuda=Cuda("580.65.06", (13, 0), (H200,), has_hardware=True),
    torch_cuda=(13, 0),
    has_fa3=True,
    shm=Shm(64 * GIB, 60 * GIB, "tmpfs"),
    regions=(),
    cores=32,
    load=1.0,
    memory=200 * GIB,
    kernels=frozenset({"sample"}),
    caches=(Cache("Triton", Path("/root/.triton/cache"), 300),),
    compiler="/usr/bin/gcc",
    nvcc="/usr/local/cuda/bin/nvcc",
)
REGION = RegionFile(
    "pie_shmem_g0", 48 << 20, "root", 4711, "python -m pie_driver_sglang", True, 60.0
)


def named(found: list[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in found if finding.name == name]
    return finding


def test_a_good_machine_has_no_problem() -> None:
    found = doctor.examine(GOOD._replace(regions=(REGION,)))
    assert {finding.status for finding in found} == {"ok"}
    assert exit_status(found) == 0
    assert "in use by process 4711 (python -m pie_driver_sglang)" in named(found, REGION.name).text


NO_LIBRARY = Cuda(problem="NVML Shared Library Not Found")
BAD: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    ("python", {"python": (3, 13)}, "Python", "fail", "3.13", "Python 3.12"),
    ("system", {"system": "Darwin arm64"}, "system", "fail", "Darwin", "on Linux"),
    (
        "another SGLang",
        {"packages": {"sglang": Package("0.5.17", "0.5.23")}},
        "sglang",
        "fail",
        "0.5.23, 0.5.17 is needed",
        "pip install sglang==0.5.17",
    ),
    (
        "no SGLang",
        {"packages": {"sglang": Package("0.5.17", None)}},
        "sglang",
        "fail",
        "missing",
        "pip install",
    ),
    ("no GPU", {"cuda": NO_LIBRARY}, "CUDA", "warn", "no NVIDIA GPU", "add `--device cpu`"),
    (
        "no driver for the GPU",
        {"cuda": NO_LIBRARY._replace(has_hardware=True)},
        "CUDA",
        "fail",
        "cannot be used: NVML Shared Library Not Found",
        "--gpus all",
    ),
    (
        "an old driver",
        {"cuda": GOOD.cuda._replace(driver="550.54.14", newest=(12, 4))},
        "CUDA",
        "fail",
        "driver 550.54.14, for CUDA up to 12.4; torch is built for 13.0",
        "580.65.06 or newer",
    ),
    ("torch for the CPU", {"torch_cuda": None}, "CUDA", "fail", "built for the CPU", "pip install"),
    (
        "an old GPU",
        {"cuda": GOOD.cuda._replace(gpus=(H200._replace(name="T4", capability=(7, 5)),))},
        "cuda:0",
        "warn",
        "T4, compute capability 7.5",
        "add `--dtype float16`",
    ),
    ("no FA3", {"has_fa3": False}, "FA3", "warn", "triton computes prefills", "sglang-kernel"),
    ("no compiler", {"compiler": None}, "C compiler", "warn", "none", "gcc"),
    ("no /dev/shm", {"shm": None}, "/dev/shm", "fail", "missing", "mount -t tmpfs"),
    (
        "a small /dev/shm",
        {"shm": Shm(64 << 20, 16 << 20, "tmpfs")},
        "/dev/shm",
        "fail",
        "16.0 MiB of 64.0 MiB free, tmpfs; a driver needs 48.0 MiB",
        "--shm-size",
    ),
    (
        "a disk as /dev/shm",
        {"shm": Shm(GIB, GIB, "ext4")},
        "/dev/shm",
        "warn",
        "ext4: not memory",
        "tmpfs",
    ),
    (
        "a stale region",
        {"regions": (REGION._replace(owner=None, is_live=False, age_s=7200.0),)},
        REGION.name,
        "warn",
        "48.0 MiB of root, 2 hours old, stale",
        "rm /dev/shm/pie_shmem_g0",
    ),
    (
        "another user's region",
        {"regions": (REGION._replace(owner=None, is_live=None, user="eve"),)},
        REGION.name,
        "warn",
        "may not ask",
        "as eve or as root",
    ),
    ("no psutil", {"memory": None}, "memory", "fail", "psutil is missing", "pip install"),
]


@pytest.mark.parametrize(
    ("change", "name", "status", "text", "hint"),
    [row[1:] for row in BAD],
    ids=[row[0] for row in BAD],
)
def test_what_is_bad_is_named_with_a_remedy(
    change: dict[str, Any], name: str, status: str, text: str, hint: str
) -> None:
    found = doctor.examine(GOOD._replace(**change))
    finding = named(found, name)
    assert finding.status == status
    assert text in finding.text
    assert hint in finding.hint
    assert exit_status(found) == int(status == "fail")
    # The rest is as good as before.
    assert {other.status for other in found if other is not finding} == {"ok"}


def test_an_owner_in_another_container_is_no_stale_region() -> None:
    hidden = REGION._replace(owner=None, is_live=True)
    finding = named(doctor.examine(GOOD._replace(regions=(hidden,))), REGION.name)
    assert finding.status == "ok"
    assert "cannot be seen from here" in finding.text


@pytest.mark.parametrize(
    ("change", "name", "text", "hint"),
    [
        ({"kernels": frozenset()}, "kernel cache", "cold (Triton 300", "on a volume"),
        ({"nvcc": None}, "nvcc", "only models without fused layers", "CUDA_HOME"),
        ({"cores": 4}, "cores", "3.0 of 4 are free; only `ipc_profile", ""),
    ],
)
def test_what_a_new_machine_lacks_is_no_warning(
    change: dict[str, Any], name: str, text: str, hint: str
) -> None:
    found = doctor.examine(GOOD._replace(**change))
    assert {finding.status for finding in found} == {"ok"}
    finding = named(found, name)
    assert text in finding.text
    assert hint in finding.hint


def test_enough_cores_are_as_many_as_latency_needs() -> None:
    enough = GOOD._replace(cores=LATENCY_CORES, load=0.0)
    assert "latency" not in named(doctor.examine(enough), "cores").text
    assert "latency" in named(doctor.examine(enough._replace(load=0.1)), "cores").text


class FakeNvml:
    """The functions of `pynvml` that are asked, for two GPUs; `fail` names one that raises."""

    class NVMLError(Exception):
        pass

    def __init__(self, fail: str = "", as_bytes: bool = False, count: int = 2) -> None:
        self.fail = fail
        self.as_bytes = as_bytes
        self.count = count
        self.depth = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == self.fail:
                raise self.NVMLError(f"{name} failed")
            return self._answer(name, *arguments)

        return call

    def _answer(self, name: str, *arguments: Any) -> Any:
        if name == "nvmlInit":
            self.depth += 1
        if name == "nvmlShutdown":
            self.depth -= 1
        if name == "nvmlDeviceGetMemoryInfo":
            return type("Memory", (), {"total": 80 * GIB, "free": 79 * GIB, "used": GIB})
        text = {"nvmlSystemGetDriverVersion": "580.65.06", "nvmlDeviceGetName": "NVIDIA H100"}
        if name in text:
            return text[name].encode() if self.as_bytes else text[name]
        return {
            "nvmlSystemGetCudaDriverVersion": 13020,
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetHandleByIndex": arguments[:1],
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
        }.get(name)


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """A bus with a network card of NVIDIA and an AMD GPU."""
    for name, vendor, kind in (("a", "0x10de", "0x020000"), ("b", "0x1002", "0x030000")):
        folder = tmp_path / "pci" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    return tmp_path / "pci"


class TestCuda:
    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_the_driver_and_its_gpus(self, pci: Path, as_bytes: bool) -> None:
        nvml = FakeNvml(as_bytes=as_bytes)
        found = gpus.query_cuda(nvml, pci)
        assert found.driver == "580.65.06"
        assert found.newest == (13, 2)
        assert [gpu.number for gpu in found.gpus] == [0, 1]
        assert found.gpus[0] == Gpu(0, "NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0))
        assert not found.problem
        assert nvml.depth == 0

    def test_no_library_on_a_machine_without_a_gpu(self, pci: Path) -> None:
        found = gpus.query_cuda(FakeNvml(fail="nvmlInit"), pci)
        assert found == Cuda(problem="nvmlInit failed")

    def test_no_library_on_a_machine_with_a_gpu(self, pci: Path) -> None:
        (pci / "a" / "class").write_text("0x030200\n")
        found = gpus.query_cuda(FakeNvml(fail="nvmlInit"), pci)
        assert found.has_hardware

    @pytest.mark.parametrize("fail", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
    def test_a_gpu_that_is_lost(self, pci: Path, fail: str) -> None:
        nvml = FakeNvml(fail=fail)
        found = gpus.query_cuda(nvml, pci)
        assert found == Cuda(problem=f"{fail} failed", has_hardware=True)
        assert nvml.depth == 0

    @pytest.mark.parametrize(
        ("listed", "count"),
        [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,-1,1", 1), ("GPU-1a-10,0", 2), ("0,1,2", 2)],
    )
    def test_gpus_of_this_process(
        self, listed: str | None, count: int, pci: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert gpus.visible_gpus(gpus.query_cuda(FakeNvml(), pci)) == count

    @pytest.mark.parametrize(
        ("libraries", "count"),
        [((), 0), (("libcuda.so.1",), None), (("libcuda.so.1", "libnvidia-ml.so.1"), 0)],
    )
    def test_a_container_without_nvml(
        self,
        libraries: tuple[str, ...],
        count: int | None,
        pci: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(gpus, "_loads", lambda name: name in libraries)
        assert gpus.visible_gpus(gpus.query_cuda(FakeNvml(fail="nvmlInit"), pci)) == count

    @pytest.mark.parametrize(
        ("listed", "message"),
        [
            ("0,1", "device cuda:3 does not exist: 2 CUDA devices are visible"),
            ("", "no CUDA device is visible (`CUDA_VISIBLE_DEVICES` hides them)"),
        ],
    )
    def test_a_gpu_that_does_not_exist_is_refused(
        self, listed: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        monkeypatch.setattr(gpus, "nvml", FakeNvml)
        gpus.check_gpus(["cpu", "cpu:1"])
        if listed:
            gpus.check_gpus(["cuda:0", "cuda:1"])
        with pytest.raises(StartError) as caught:
            gpus.check_gpus(["cuda:2", "cuda:3"])
        assert message in str(caught.value)
        assert caught.value.hint

    def test_a_driver_without_gpus(self, pci: Path) -> None:
        assert gpus.query_cuda(FakeNvml(count=0), pci).problem == "the driver shows no GPU"

    def test_without_the_package(self, tmp_path: Path) -> None:
        found = gpus.query_cuda(None, tmp_path / "none")
        assert found == Cuda(problem="the package nvidia-ml-py is missing")

    def test_torch_lists_its_compute_capabilities(self, tmp_path: Path) -> None:
        file = tmp_path / "version.py"
        assert machine.torch_cuda(tmp_path) is None
        file.write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
        assert machine.torch_cuda(tmp_path) == (13, 0)
        file.write_text("cuda = None\n")
        assert machine.torch_cuda(tmp_path) is None
        assert machine.torch_cuda(None) is None

    def test_the_installed_torch_is_read(self) -> None:
        torch_cuda = machine.query_machine().torch_cuda
        assert torch_cuda is not None
        assert torch_cuda >= (12, 0)


HOLD = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the region of group 1, as a driver does."""
    path = tmp_path / "pie_shmem_g1"
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


class TestRegions:
    def test_live_and_stale_ones(self, holder: subprocess.Popen[str], tmp_path: Path) -> None:
        stale = tmp_path / "pie_shmem_g0"
        stale.write_bytes(bytes(4096))
        (tmp_path / "other").write_bytes(bytes(4096))
        found = machine.query_regions(tmp_path)
        assert [region.name for region in found] == ["pie_shmem_g0", "pie_shmem_g1"]
        assert found[0].is_live is False
        assert found[0].bytes == 4096
        assert found[1].is_live is True
        assert found[1].owner == holder.pid
        assert HOLD.splitlines()[1] in found[1].command
        # The look has left no lock over.
        with stale.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_killed_owner_leaves_a_stale_one(
        self, holder: subprocess.Popen[str], tmp_path: Path
    ) -> None:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        (found,) = machine.query_regions(tmp_path)
        assert found.is_live is False
        assert found.owner is None

    def test_an_owner_that_is_not_listed(
        self, holder: subprocess.Popen[str], tmp_path: Path
    ) -> None:
        (tmp_path / "proc").mkdir()
        (found,) = machine.query_regions(tmp_path, tmp_path / "proc")
        assert found.is_live is True
        assert found.owner is None

    def test_what_is_no_file_is_not_opened(self, tmp_path: Path) -> None:
        (tmp_path / "pie_shmem_g2").symlink_to(tmp_path / "other")
        os.mkfifo(tmp_path / "pie_shmem_g3")
        found = machine.query_regions(tmp_path)
        assert [region.is_live for region in found] == [None, False]

    def test_without_a_folder_there_are_none(self, tmp_path: Path) -> None:
        assert machine.query_regions(tmp_path / "none") == []
        assert machine.query_shm(tmp_path / "none") is None

    def test_locks_of_files_are_found_by_device_and_inode(self) -> None:
        locks = (
            "1: POSIX  ADVISORY  WRITE 11 00:1a:567 0 EOF\n"
            "2: FLOCK  ADVISORY  WRITE 12 00:1a:568 0 EOF\n"
            "2: -> FLOCK  ADVISORY  WRITE 14 00:1a:567 0 EOF\n"
            "3: FLOCK  ADVISORY  WRITE 0 00:1a:569 0 EOF\n"
            "4: FLOCK  ADVISORY  WRITE 13 08:02:99 0 EOF\n"
            "garbage\n"
        )
        owners = machine.lock_owners(locks)
        assert owners == {(os.makedev(0, 0x1A), 568): 12, (os.makedev(8, 2), 99): 13}

    def test_a_drivers_own_region_is_seen(self) -> None:
        name = f"{machine.REGION_PREFIX}{drivers.new_group_id()}"
        guard_and_server = (
            "import sys, time; from pie_driver_sglang import _core; guard = _core.ExitGuard();"
            f" server = _core.Server('/{name}', guard, spin_budget_us=0);"
            " print('made', flush=True); time.sleep(600)"
        )
        command = [sys.executable, "-c", guard_and_server]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            found = {region.name: region for region in machine.query_regions(Path("/dev/shm"))}
            process.terminate()
        assert found[name].owner == process.pid
        assert found[name].bytes >= _core.region_bytes() - 4096


class TestCaches:
    def test_folders_follow_the_environment(self, tmp_path: Path) -> None:
        environment = {"HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "t")}
        (tmp_path / "t" / "abc").mkdir(parents=True)
        (tmp_path / "t" / "abc" / "sample.cubin").touch()
        triton, flashinfer, tvm = machine.query_caches(environment)
        assert triton == Cache("Triton", tmp_path / "t", 1)
        assert flashinfer.path == tmp_path / ".cache" / "flashinfer"
        assert tvm == Cache("TVM FFI", tmp_path / ".cache" / "tvm-ffi", 0)

    def test_the_drivers_own_kernels_are_known(self, tmp_path: Path) -> None:
        kernels = machine.own_kernels()
        assert len(kernels) > 10
        one = sorted(kernels)[0]
        for name in (one, "others"):
            (tmp_path / name).mkdir()
            (tmp_path / name / f"{name}.cubin").touch()
        assert machine.cached_kernels(tmp_path, kernels) == {one}

    def test_compilers(self, tmp_path: Path) -> None:
        nvcc = tmp_path / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
        environment = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
        assert machine.find_nvcc(environment) == str(nvcc)
        assert machine.find_compiler(environment) is None
        (tmp_path / "gcc").write_text("#!/bin/sh\n")
        (tmp_path / "gcc").chmod(0o755)
        assert machine.find_compiler(environment) == str(tmp_path / "gcc")
        assert machine.find_compiler({**environment, "CC": "mycc"}) == "mycc"


def test_this_machine_is_reported_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (status == 0)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert {"driver", "Python", "sglang", "CUDA", "/dev/shm", "cores", "memory"} <= found.keys()
    assert found["sglang"]["values"]["wanted"] == SGLANG_VERSION


def test_colour_is_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["doctor"])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.splitlines()[-1].endswith(
        ("found", "warning", "warnings", "problem", "problems")
    )
