"""Every script of `examples` runs, on a published model where it can be fetched."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang.checkpoint.packaged import UnavailableError, packaged_folder
from support.examples import EXAMPLES, run_example
from support.models.tiny_models import POCKET
from support.servers.pie_server import running
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

#: Those that have a test elsewhere.
ELSEWHERE = {
    "embeddings.py": "test_serve_embeddings.py",
    "programs.py": "serve/test_serve_language.py",
    "vision_chat.py": "test_serve_images.py",
}


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return packaged_folder("smollm2")
    except UnavailableError:
        return POCKET


@pytest.fixture(scope="module")
def server(
    model: Path, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--tool-call-parser", "qwen25"]
    flags += ["--constrained-json-disable-any-whitespace", "--enable-lora"]
    flags += ["--max-lora-rank", "8", "--lora-target-modules", "all"]
    folder = tmp_path_factory.mktemp("examples")
    with running(folder, *flags, model=model, python=forked_python) as (found, _):
        yield found


def test_a_chat(server: Server, model: Path) -> None:
    out = run_example("openai_chat.py", "--url", server.url)
    assert re.search(r"^answer: \S", out, re.MULTILINE)
    assert re.search(r"^stream: \S", out, re.MULTILINE)
    assert len(re.findall(r"^token .*: .*%, .*%, .*%$", out, re.MULTILINE)) >= 1
    if model != POCKET:
        assert "Paris" in out


def test_langchain(server: Server, model: Path) -> None:
    out = run_example("langchain_chat.py", "--url", server.url)
    assert re.search(r"^stream: \S", out, re.MULTILINE)
    assert re.search(r"^call: get_weather \{'city': .*\} -> 21 degrees in .+$", out, re.MULTILINE)
    assert re.search(r"^answer: \S", out, re.MULTILINE)
    assert re.search(r"^city: City\(name=.*, population=\d+\)$", out, re.MULTILINE)
    if model != POCKET:
        assert "Paris" in out


def test_structured_output(server: Server) -> None:
    out = run_example("structured_output.py", "--url", server.url)
    assert re.search(r"^city: .* \d+$", out, re.MULTILINE)
    assert re.search(r'^call: get_weather \{"city": ?".*"\} -> \{.*21\}$', out, re.MULTILINE)
    assert "\nanswer:" in out


def test_an_adapter(server: Server, model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "mine"
    make_adapter(model, adapter)
    out = run_example("lora_adapter.py", "--url", server.url, "--adapter", str(adapter))
    alone = re.search(r"^the model: (.*)$", out, re.MULTILINE)
    adapted = re.search(r"^with mine: (.*)$", out, re.MULTILINE)
    assert alone is not None
    assert adapted is not None
    assert alone[1] != adapted[1]
    assert out.endswith("unloaded: True\n")


def make_adapter(model: Path, folder: Path) -> None:
    """A random adapter that changes answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        config = peft.LoraConfig(
            r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        torch.manual_seed(0)
        peft.get_peft_model(base, config).save_pretrained(folder)


def test_an_engine(model: Path, forked_python: str) -> None:
    words = ["--model", str(model), "--device", "cpu"]
    out = run_example("offline_engine.py", *words, python=forked_python)
    lines = out.splitlines()
    assert lines[0].startswith("'The capital of France is' -> ")
    (cached,) = re.findall(r"^(\d+) tokens of the prompt were in the cache$", out, re.MULTILINE)
    assert int(cached) >= 16
    assert sum(line.startswith("sample ") for line in lines) == 3


def test_several_hosts(forked_python: str) -> None:
    """On the embedded model, which loads faster."""
    pytest.importorskip("smg")
    out = run_example("several_hosts.py", "--model", str(POCKET), python=forked_python)
    two, one = re.fullmatch(r"two workers: (.+)\none worker: (.+)\n", out).groups()  # type: ignore[union-attr]
    assert two == one


def test_every_example_is_run_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        place = Path(__file__).parent / ELSEWHERE.get(path.name, Path(__file__).name)
        assert path.name in place.read_text(), path
        assert f"]({path.name})" in listed
