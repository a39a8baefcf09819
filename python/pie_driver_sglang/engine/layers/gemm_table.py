"""Measured GEMM configs: those that the package ships for common shapes, and those found here.

A file has the configs of one GPU model, as JSON::

    {"gpu": "NVIDIA H200", "kernels": "4f0c...", "configs": {
        "store 16 6144x4096 2": {"kernel": "wgmma", "block_m": 16, ..., "gain_us": 1.2}}}

The key has the epilogue, the largest number of rows, the shape of the weight and the bytes of a
number. Files in the cache folder, ``$XDG_CACHE_HOME/pie-sglang/gemm``, belong to one version of the
kernels.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang import kernels
from pie_driver_sglang.kernels.gemm.search_space import GemmConfig, GemmProblem
from pie_driver_sglang.kernels.gemm.types import Epilogue, TileConfig
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

logger = logging.getLogger(__name__)

_SHIPPED: Final = "gemm/tuned"
"""The folder of the shipped tables, in the package of the kernels."""
_SOURCES: Final = ("cuda/halves.cuh", "cuda/wgmma_gemm.cu", "gemm/small_m.py", "gemm/tiled.py")
"""Whose content makes measurements outdated."""
_CUBLAS: Final = "cublas"
_INVARIANT: Final = "invariant"
"""Ends the keys of batch-invariant GEMMs."""


class TunedGemm(NamedTuple):
    """What a search found for a GEMM."""

    config: GemmConfig | None
    """None for cuBLAS."""
    gain_us: float
    """Microseconds that it saves over the config without a search."""


class GemmTable:
    """The configs of one GPU model."""

    def __init__(self, gpu: str, path: Path | None = None) -> None:
        """Begins empty.

        Args:
            gpu: Name of the GPU model.
            path: Where :meth:`save` writes; None for nowhere.
        """
        self.gpu = gpu
        self.path = path
        self._entries: dict[GemmProblem, TunedGemm] = {}

    @classmethod
    def load(cls, gpu: str) -> GemmTable:
        """The shipped table of a GPU model, and above it what was found on this machine."""
        table = cls(gpu, _cache_folder() / f"{_file_name(gpu)}-{kernels_version()}.json")
        shipped = resources.files(kernels).joinpath(_SHIPPED, f"{_file_name(gpu)}.json")
        if shipped.is_file():
            table.update(shipped.read_text(encoding="utf-8"))
        assert table.path is not None
        try:
            table.update(table.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not readable and is left out: %s", table.path, error)
        return table

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[GemmProblem, TunedGemm]]:
        return iter(self._entries.items())

    def get(self, problem: GemmProblem) -> TunedGemm | None:
        """What was found for a GEMM, if it was searched."""
        return self._entries.get(problem)

    def put(self, problem: GemmProblem, found: TunedGemm) -> None:
        """Adds what a search found."""
        self._entries[problem] = found

    def remove(self, problem: GemmProblem) -> None:
        """Forgets what was found for a GEMM, if anything."""
        self._entries.pop(problem, None)

    def update(self, text: str) -> None:
        """Adds the configs of a file.

        Raises:
            KeyError: Something is missing.
            TypeError: A config has an unknown field.
            ValueError: A key is malformed, or it is not JSON.
        """
        entries = json.loads(text)["configs"]
        self._entries |= {_problem(key): _tuned(value) for key, value in entries.items()}

    def as_text(self) -> str:
        """The content of a file."""
        lines = (
            f"  {json.dumps(_key(problem))}: {json.dumps(_values(found))}"
            for problem, found in sorted(self._entries.items())
        )
        head = f'"gpu": {json.dumps(self.gpu)}, "kernels": {json.dumps(kernels_version())}'
        return f'{{{head}, "configs": {{\n' + ",\n".join(lines) + "\n}}\n"

    def save(self) -> None:
        """Writes the file at once, so that readers never see a part; logs why if it cannot."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, delete=False, encoding="utf-8"
            ) as file:
                file.write(self.as_text())
            Path(file.name).replace(self.path)
        except OSError as error:
            logger.warning("GEMM configs are not kept: %s", error)


@functools.cache
def kernels_version() -> str:
    """A hash of the kernels' sources."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(resources.files(kernels).joinpath(name).read_bytes())
    return digest.hexdigest()[:12]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pie-sglang" / "gemm"


def _file_name(gpu: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in gpu)


def _key(problem: GemmProblem) -> str:
    epilogue, rows, height, inputs, itemsize, invariant = problem
    kind = f" {_INVARIANT}" if invariant else ""
    return f"{epilogue.name.lower()} {rows} {height}x{inputs} {itemsize}{kind}"


def _problem(key: str) -> GemmProblem:
    epilogue, rows, shape, itemsize, *kind = key.split()
    height, inputs = shape.split("x")
    if kind not in ([], [_INVARIANT]):
        raise ValueError(f"a GEMM of kind {kind}")
    return GemmProblem(
        Epilogue[epilogue.upper()], int(rows), int(height), int(inputs), int(itemsize), bool(kind)
    )


def _values(found: TunedGemm) -> dict[str, Any]:
    config, gain = found.config, round(found.gain_us, 2)
    if config is None:
        return {"kernel": _CUBLAS, "gain_us": gain}
    kernel = "wgmma"
    if isinstance(config, TileConfig):
        kernel = "tiled" if config.tma else "small_m"
    own = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.default is MISSING or getattr(config, field.name) != field.default
    }
    own.pop("tma", None)
    return {"kernel": kernel, **own, "gain_us": gain}


def _tuned(values: Mapping[str, Any]) -> TunedGemm:
    own = dict(values)
    kernel, gain = own.pop("kernel"), own.pop("gain_us")
    if kernel == _CUBLAS:
        return TunedGemm(None, gain)
    if kernel == "wgmma":
        return TunedGemm(WgmmaConfig(**own), gain)
    return TunedGemm(TileConfig(**own, tma=kernel == "tiled"), gain)
