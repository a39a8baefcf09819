"""The table of docs/supported-models.md for the CPU: each cell is found out again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

import pytest

import architectures
import drivers
import model_checks
import tiny_models
from reference import MaskedReference, Pages, Reference

pytestmark = pytest.mark.engine

DOCUMENT: Final = tiny_models.REPOSITORY / "docs" / "supported-models.md"
GPU_TABLES: Final = sorted((tiny_models.REPOSITORY / "benches/gpu/output").glob("*-models.txt"))
TOLERANCE: Final = 1e-4
GAP: Final = 1e-3
PAGE: Final = 16
OPTIONS: Final = {
    "page_size": PAGE,
    "chunked_prefill_size": model_checks.CHUNK,
    "cpu_mem_budget_in_gb": model_checks.SWAP_GIB,
}


def rows(section: str) -> dict[str, list[str]]:
    """The rows of a section's table by their first cell."""
    text = DOCUMENT.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {name: rest for name, *rest in cells}


CPU: Final = rows("On the CPU")


def test_the_table_has_every_architecture() -> None:
    assert list(CPU) == list(architectures.ARCHITECTURES)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_cells(name: str, models_folder: Path, tmp_path: Path) -> None:
    drivers.start_fork_server()
    *cells, reason = CPU[name]
    snapshot = architectures.build(name, models_folder)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    try:
        driver = drivers.fork(config)
    except drivers.StartFailedError as error:
        assert cells == [model_checks.REFUSED, *["—"] * 4], error.stderr
        assert reason in error.stderr
        assert "\nhint: " in error.stderr
        return
    with driver:
        served = model_checks.Served(
            client=driver.client(),
            pages=Pages(driver.caps["total_pages"], PAGE),
            host=Pages(driver.caps["swap_pool_size"], PAGE),
            states=None,
            reference=Reference(snapshot),
            # torch has no experts in float64.
            masked=functools.partial(MaskedReference, snapshot, "float32"),
            equal=nearly_equal,
            gap=GAP,
        )
        found = model_checks.find_out(served)
    assert driver.stop() == 0
    assert found == dict(zip(model_checks.SUBJECTS, cells, strict=False))
    assert reason == ""


def nearly_equal(found: object, expected: object) -> None:
    import torch

    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    error = float((found - expected).abs().max())
    assert error <= TOLERANCE, f"logits off by {error}"


def test_experts_that_sglang_pads_are_refused(tmp_path: Path) -> None:
    """On a CPU it leaves what it adds to them uninitialised."""
    mixtral = architectures.ARCHITECTURES["Mixtral"]
    odd = mixtral._replace(options={**mixtral.options, "intermediate_size": 80})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.ARCHITECTURES, "odd", odd)
        snapshot = architectures.build("odd", tmp_path)
    config = drivers.write_config(tmp_path, snapshot)
    with (
        pytest.raises(drivers.StartFailedError, match="experts are 80 wide"),
        drivers.fork(config),
    ):
        pass


@pytest.mark.skipif(not GPU_TABLES, reason="no run on a GPU is committed")
def test_the_table_of_the_gpu_is_that_of_the_last_run() -> None:
    lines = GPU_TABLES[-1].read_text().splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert table
    assert "\n".join(table[1:]) in DOCUMENT.read_text()
