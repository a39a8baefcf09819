"""Benchmark peers, without a GPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang._core import Request, Sampler, encode_forward
from support import REPOSITORY
from support.models.tiny_models import POCKET

PEERS = REPOSITORY / "benches" / "peers"
CONFIG = """
from dataclasses import dataclass

@dataclass(frozen=True)
class SchedulerConfig:
    model_path: str
    attention_backend: str = "auto"
    max_running_req: int = 4
    cuda_graph_max_bs: int | None = None
    max_extend_tokens: int = 8192
    max_seq_len_override: int | None = None
    memory_ratio: float = 0.9
    use_dummy_weight: bool = False
    page_size: int = 1
"""
"""Fields of Mini-SGLang's configuration."""
ENGINE = """
from minisgl.scheduler import SchedulerConfig

class LLM:
    def __init__(self, model_path, **settings):
        SchedulerConfig(model_path, **settings)

    def generate(self, prompts, params):
        counts = [each.max_tokens - 1 for each in params]
        return [{"token_ids": [7] * count} for _, count in zip(prompts, counts)]
"""
PARAMS = """
from dataclasses import dataclass

@dataclass
class SamplingParams:
    temperature: float = 0.0
    ignore_eos: bool = False
    max_tokens: int = 1024
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A package with the interface that is called, in the place of a clone."""
    package = tmp_path / "mini" / "python" / "minisgl"
    package.mkdir(parents=True)
    for name, text in (("scheduler", CONFIG), ("llm", ENGINE), ("core", PARAMS), ("__init__", "")):
        (package / f"{name}.py").write_text(text)
    return package.parents[1]


@pytest.fixture(scope="module")
def peers() -> Iterator[None]:
    sys.path.insert(0, str(PEERS))
    yield
    sys.path.remove(str(PEERS))


def play(checkout: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    lengths = folder / "lengths.json"
    lengths.write_text(json.dumps({"prompts": [3, 5], "outputs": [4, 2]}))
    command = [sys.executable, PEERS / "mini_sglang.py", checkout, POCKET, "fi", *more]
    command += ["--lengths", lengths, "--repeats", "2"]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


def test_mini_sglang_plays_the_workload(checkout: Path, tmp_path: Path) -> None:
    found = play(checkout, tmp_path, "--page-size", "256")
    assert found.returncode == 0, found.stderr
    sys.path.insert(0, str(REPOSITORY / "benches" / "gpu"))
    try:
        check = importlib.import_module("load_check")
    finally:
        sys.path.pop(0)
    assert len(check.peer_figures(found.stdout)) == 2
    assert "6 tokens in" in found.stdout
    (line,) = [line for line in found.stdout.splitlines() if "{" in line]
    for word in ("'page_size': 256", "'max_seq_len_override': 8", "'use_dummy_weight': False"):
        assert word in line
    assert check._MINI_LINE.findall(found.stdout) == ["unknown"]


def test_another_mini_sglang_is_refused_by_name(checkout: Path, tmp_path: Path) -> None:
    path = checkout / "python" / "minisgl" / "scheduler.py"
    path.write_text(CONFIG.replace("    use_dummy_weight: bool = False\n", ""))
    found = play(checkout, tmp_path)
    assert found.returncode == 1
    assert found.stderr == "this version of Mini-SGLang has no use_dummy_weight\n"
    found = play(tmp_path, tmp_path)
    assert found.stderr.endswith("has no python/minisgl: not a clone of Mini-SGLang\n")


def test_an_answer_of_another_length_is_no_measurement(peers: None) -> None:
    count = importlib.import_module("mini_sglang").count
    assert count([{"token_ids": [1, 2]}, {"token_ids": [1]}], [2, 2]) == 4
    with pytest.raises(SystemExit, match="answer 1 has 0 tokens, 2 were asked for"):
        count([{"token_ids": [1, 2]}, {"token_ids": []}], [2, 2])


def test_all_host_paths_in_numpy_make_the_same(peers: None) -> None:
    """The bench holds them to the planner's arrays as well."""
    import numpy as np

    plan = importlib.import_module("numpy_plan")
    case: dict[str, Any] = {
        "chunk_tokens": 64, "max_requests": 8, "page_size": 16, "row_pages": 8, "vocab_size": 1000,
        "max_positions": 128, "total_pages": 100,
    }  # fmt: skip
    paths = {name: variant(case) for name, variant in plan.VARIANTS.items()}
    for step in range(20):
        requests = [
            Request(
                [5 + c], [30 + step], [7 * c + n for n in range((30 + step) // 16 + 1)],
                (30 + step) % 16 + 1, [(0, Sampler.greedy())], context_id=c + 1,
            )
            for c in range(5)
        ]  # fmt: skip
        frame = np.frombuffer(encode_forward(requests), np.uint8)
        tokens = np.arange(8, dtype=np.int64) + step
        replies = {name: path.run(frame, tokens).copy() for name, path in paths.items()}
        first = paths["numpy_full_table"]
        for name, path in paths.items():
            np.testing.assert_array_equal(replies[name], replies["numpy_full_table"], name)
            for field, array in path.staged.items():
                np.testing.assert_array_equal(array, first.staged[field], f"{name} {field}")
            pages = (30 + step) // 16 + 1
            np.testing.assert_array_equal(path.table[:5, :pages], first.table[:5, :pages], name)
