"""`tools/check_compat.py`: what it lists of sources in which something has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from support.tools import load_tool


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return load_tool("check_compat")


COMPAT_MODULE: Final = """
from unittest import mock
from sglang.gone import Gone
from sglang.kept import Kept, Moved, module_of
from sglang import kept
from sglang.kept import Made

WORKER = "sglang.kept.Worker"

def reach(made: Made, kind: type[Made]):
    kept._is_cpu = True
    made.own.method(1)
    made.inner.first
    made.inner.second
    made.third
    with mock.patch.object(kept, "patched", None), mock.patch.object(kept, "not_patched", None):
        Kept(1, two=2, three=3)
    register(f"{WORKER}.run", f"{WORKER}.walk")
    Made(1, 2, 3)
    Made()

class Mine(Made):
    def run(self):
        super().method(1, named=2)
        super().no_method()
"""
OTHER: Final = """
from pie_driver_sglang.backends.sglang.compat.model import Made

class Kept:
    def __init__(self, made: Made) -> None:
        self._made = made

    def read(self):
        return self._made.inner, self._made.outer
"""
SGLANG: Final = {
    "__init__.py": "",
    "kept/__init__.py": "from .inner import *\nfrom sglang.base import Base as Worker\npatched = 1",
    "kept/inner.py": """
from dataclasses import dataclass
from typing import Optional
from sglang.base import Base

_is_cuda = False

def module_of(): ...

@dataclass
class Kept:
    one: int
    two: int = 0

class Made(Base):
    own: Optional["Made"] = None

    def __init__(self, first: int, second=None) -> None:
        self.inner: Kept = Kept(first)

    def method(self, number: int) -> None: ...
""",
    "base.py": "class Base:\n    def run(self): ...\n    first = 1",
}


def test_all_that_a_version_lacks_is_listed_at_once(checker: ModuleType, tmp_path: Path) -> None:
    for name, text in SGLANG.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "pie_driver_sglang" / "backends" / "sglang"
    (folder / "compat").mkdir(parents=True)
    (folder / "compat" / "model.py").write_text(COMPAT_MODULE)
    (folder / "model_backend.py").write_text(OTHER)
    found = checker.find_missing(tmp_path / "sglang", tmp_path)
    where = "pie_driver_sglang/backends/sglang/compat/model.py"
    assert found == [
        f"{where}:3: no module sglang.gone",
        f"{where}:4: no Moved in sglang.kept",
        f"{where}:11: no kept._is_cpu",
        f"{where}:13: no Kept.first",
        f"{where}:14: no Kept.second",
        f"{where}:15: no Made.third",
        f"{where}:16: no kept.not_patched",
        f"{where}:17: Kept() takes no three",
        f"{where}:18: no sglang.kept.Worker.walk",
        f"{where}:19: Made() is given 3 arguments by position: name all but the first",
        f"{where}:19: Made() takes 2 arguments",
        f"{where}:20: Made() wants first",
        f"{where}:24: method() takes no named",
        f"{where}:25: no Made.no_method",
        "pie_driver_sglang/backends/sglang/model_backend.py:9: no Made.outer",
    ]


ORDERED: Final = """
from typing import Final

POSITIONAL: Final = {"sglang.kept.serve": ("first", "second"), "sglang.kept.gone": ("first",)}
"""


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("first, second", []),
        ("second, first", ["4: serve() takes (second, first) in this order"]),
        ("first, rank, second", ["4: serve() takes (first, rank, second) in this order"]),
    ],
)
def test_the_order_of_positional_parameters_is_compared(
    checker: ModuleType, tmp_path: Path, parameters: str, found: list[str]
) -> None:
    _write(tmp_path / "sglang", {"__init__.py": "", "kept.py": f"def serve({parameters}): ..."})
    folder = "pie_driver_sglang/frontends/sglang_server/compat"
    _write(tmp_path / folder, {"scheduler.py": ORDERED})
    gone = "4: no gone in sglang.kept"
    assert checker.find_missing(tmp_path / "sglang", tmp_path) == [
        f"{folder}/scheduler.py:{line}" for line in sorted([gone, *found])
    ]


REPLACED: Final = """
from unittest import mock
from sglang.kept import Made

def run(first, second): ...

def replace(made: Made):
    def walk(first, **others): ...
    def stroll(self, first, **others): ...
    made.run = run
    made.walk = walk
    Made.walk = stroll
    with mock.patch.object(made, "run", run): ...

class Mine(Made):
    def run(self, one, second=None): ...
    async def walk(self, *everything): ...
    def other(self): ...
"""
ORIGINAL: Final = """
class Made:
    def run(self, first, second=None, *, out=None): ...
    async def walk(self, first, second): ...
"""


def test_arguments_that_a_replacement_lacks_are_listed(checker: ModuleType, tmp_path: Path) -> None:
    """Callers pass them, by position or by name."""
    _write(tmp_path / "sglang", {"__init__.py": "", "kept.py": ORIGINAL})
    folder = "pie_driver_sglang/backends/sglang/compat"
    _write(tmp_path / folder, {"model.py": REPLACED})
    assert checker.find_missing(tmp_path / "sglang", tmp_path) == [
        f"{folder}/model.py:5: run() takes no out, as run() does",
        f"{folder}/model.py:16: run() takes no out, as run() does",
    ]


CHANGED: Final = """
from enum import IntEnum
from typing import NamedTuple

class Mode(IntEnum):
    DECODE = 1

class Loc(NamedTuple):
    slots: int

class Pool:
    def write(self, layer, loc, key, value): ...
    def copy(self, sources, targets): ...
    def walk(self, second, first): ...
"""
USER: Final = """
from sglang.kept import Loc, Mode, Pool

POSITIONAL: Final = {"sglang.kept.Pool.write": ("self", "layer", "loc", "key", "value")}

class Mine(Pool):
    def copy(self, sources, targets):
        Pool.copy(self, sources, targets=targets)

def run(pool: Pool, loc: Loc):
    pool.write(1, 2, 3, 4)
    pool.copy(1, targets=2)
"""


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ("    Mode.DECODE, loc.slots", []),
        ("    Mode.EXTEND", ["no Mode.EXTEND"]),
        ("    loc.rows", ["no Loc.rows"]),
        (
            "    pool.copy(1, 2)",
            ["copy() is given 2 arguments by position: name all but the first"],
        ),
        ("    pool.copy(1, sinks=2)", ["copy() takes no sinks", "copy() wants targets"]),
        ("    pool.copy(1, sources=2)", ["copy() wants targets"]),
        (
            "class Other(Pool):\n    def walk(self, first, second): ...",
            [f"walk() takes {x} in another place than walk()" for x in ("first", "second")],
        ),
        (
            'POSITIONAL: Final = {"sglang.kept.Pool.copy": ("self", "targets", "sources")}',
            ["copy() takes (self, sources, targets) in this order"],
        ),
    ],
)
def test_renames_and_orders_are_listed(
    checker: ModuleType, tmp_path: Path, added: str, found: list[str]
) -> None:
    _write(tmp_path / "sglang", {"__init__.py": "", "kept.py": CHANGED})
    folder = "pie_driver_sglang/backends/sglang/compat"
    text = f"{USER}{added}\n"
    _write(tmp_path / folder, {"model.py": text})
    last = len(text.splitlines())
    assert checker.find_missing(tmp_path / "sglang", tmp_path) == [
        f"{folder}/model.py:{last}: {each}" for each in found
    ]


@pytest.mark.parametrize(
    ("version", "read"),
    [("0.5.17", "v0517"), ("0.5.20", "v0517"), ("0.5.23", "v0523"), ("0.5.25.post1", "v0523")],
)
def test_files_of_another_version_are_left_out(
    version: str, read: str, checker: ModuleType, tmp_path: Path
) -> None:
    kept = "from sglang.kept import Gone"
    _write(
        tmp_path / "sglang",
        {"__init__.py": "", "_version.py": f"version = '{version}'", "kept.py": ""},
    )
    folder = "pie_driver_sglang/backends/sglang/compat"
    other = {"v0517": "v0523", "v0523": "v0517"}[read]
    used = f"from {folder.replace('/', '.')}.{other}.model import Gone\n{kept}"
    _write(
        tmp_path / folder,
        {"v0517/model.py": kept, "v0523/model.py": kept, "user.py": used},
    )
    assert checker.find_missing(tmp_path / "sglang", tmp_path) == [
        f"{folder}/{read}/model.py:1: no Gone in sglang.kept"
    ]


def test_fields_of_a_package_are_those_of_the_settings(checker: ModuleType, tmp_path: Path) -> None:
    """Where `ServerArgs` is made of classes that each have some of its fields."""
    _write(
        tmp_path / "sglang" / "srt",
        {
            "__init__.py": "",
            "server_args.py": "class ServerArgs:\n    def resolve(self): ...",
            "arg_groups/__init__.py": "",
            "arg_groups/fields/__init__.py": "",
            "arg_groups/fields/device.py": "class Device:\n    device: str = ''",
        },
    )
    (tmp_path / "sglang" / "__init__.py").write_text("")
    folder = "pie_driver_sglang/backends/sglang/compat"
    user = "from sglang.srt.server_args import ServerArgs\n\ndef read(args: ServerArgs):\n"
    _write(tmp_path / folder, {"settings.py": f"{user}    args.device\n    args.seed\n"})
    assert checker.find_missing(tmp_path / "sglang", tmp_path) == [
        f"{folder}/settings.py:5: no ServerArgs.seed"
    ]


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
