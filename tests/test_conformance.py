"""SGLang's test kits, clients and tools of others against `pie-sglang serve`.

`make test` runs what takes seconds on the embedded model, `make conformance` all of it. Tests that
need a model with knowledge run where `PIE_CONFORMANCE_MODEL` names one, on the device that
`PIE_CONFORMANCE_DEVICE` names.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from support import REPOSITORY, versions
from support.models.tiny_models import COMMON, POCKET, add_tokenizer, randomize
from support.servers import sglang_server, sglang_test_kits
from support.servers.many_streams import flood
from support.servers.pie_server import running, state, wait_until
from support.servers.sglang_server import Server
from support.servers.sglang_test_kits import KITS, Kit

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    # Of SGLang's own modules.
    pytest.mark.filterwarnings("ignore"),
]

MODEL: Final = Path(os.environ.get("PIE_CONFORMANCE_MODEL", POCKET))
DEVICE: Final = os.environ.get("PIE_CONFORMANCE_DEVICE", "cpu")
ALL: Final = bool(os.environ.get("PIE_CONFORMANCE"))

whole = pytest.mark.skipif(not ALL, reason="`make conformance` runs it")
Served = tuple[Server, subprocess.Popen[bytes]]


def serving(
    folder: Path, *flags: str, python: str = sys.executable
) -> contextlib.AbstractContextManager[Served]:
    named = ("--scheduler", "pie", "--served-model-name", "default", *flags)
    return running(folder, *named, model=MODEL, device=DEVICE, python=python)


@pytest.fixture(scope="module")
def served(forked_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # With pages of one token a hit is as long as SGLang's. The kits ask for more tokens than fit.
    flags = ("--page-size", "1", "--enable-streaming-session", "--allow-auto-truncate")
    # What is forked from a process that has no GPU has none.
    python = forked_python if DEVICE == "cpu" else sys.executable
    with serving(tmp_path_factory.mktemp("conformance"), *flags, python=python) as found:
        yield found


def cases(*, long: bool) -> list[Any]:
    """The tests of all kits, with those that do not run marked."""
    found = []
    for kit in KITS:
        if kit.is_newer and versions.IS_OLDEST:
            continue
        for test in kit.tests:
            marks = []
            if test in kit.needs_knowledge and MODEL == POCKET:
                marks.append(pytest.mark.skip(reason="it needs a model with knowledge"))
            elif test in kit.long and not ALL:
                marks.append(pytest.mark.skip(reason="`make conformance` runs it"))
            if bool(kit.flags) == long:
                found.append(pytest.param(kit, test, id=f"{kit.name}-{test}", marks=marks))
    return found


@pytest.mark.parametrize(("kit", "test"), cases(long=False))
def test_kit(kit: Kit, test: str, served: Served) -> None:
    kit.run(test, sglang_test_kits.attributes(*served, MODEL))


@pytest.mark.parametrize(("kit", "test"), cases(long=True))
def test_kit_with_a_server_of_its_own(
    kit: Kit, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in kit.variables.items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path, *kit.flags) as found:
        kit.run(test, sglang_test_kits.attributes(*found, MODEL))


def with_vocabulary(folder: Path) -> Path:
    """A small random Qwen3 with 30,016 tokens of vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 30_016, "max_position_embeddings": 4096}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3ForCausalLM(Qwen3Config(**{**COMMON, **sizes}))
        randomize(model)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["pie", "sglang"])
def with_words(
    request: pytest.FixtureRequest, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """30,000 tokens of vocabulary, on our scheduler or on SGLang's with our prefix index."""
    model = with_vocabulary(tmp_path_factory.mktemp("words"))
    flags = ("--skip-tokenizer-init", "--page-size", "1", "--max-total-tokens", "40000")
    if request.param == "pie":
        named = ("--scheduler", "pie", *flags)
        folder = tmp_path_factory.mktemp("server")
        with running(folder, *named, model=model, python=forked_python) as (server, _):
            yield server
        return
    device = ("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native")
    named = ("--model-path", str(model), *device, "--radix-cache-backend", "pie")
    with sglang_server.serve(*named, "--skip-server-warmup", *flags) as server:
        yield server


@whole
@versions.of_the_newest("its kit expects the KV of a last token that is not computed")
@pytest.mark.parametrize("test", sglang_test_kits.PREFIXES.tests)
def test_kit_of_prefix_caches(test: str, with_words: Server) -> None:
    numbers = random.Random(1)
    prompts = [[numbers.randint(1, 30_000) for _ in range(600)] for _ in range(4)]
    served = {"base_url": with_words.url, "model": "default", "input_ids": prompts}
    sglang_test_kits.PREFIXES.run(test, served)


def test_every_kit_of_the_wheel_has_a_row() -> None:
    kits = [kit for kit in KITS if not (kit.is_newer and versions.IS_OLDEST)]
    rows = {kit.module for kit in kits}
    assert not rows & sglang_test_kits.NOT_RUN.keys()
    others = sglang_test_kits.NEWER if versions.IS_OLDEST else sglang_test_kits.OLDER
    not_run = sglang_test_kits.NOT_RUN.keys() - others
    assert rows | not_run == sglang_test_kits.installed_modules()
    for kit in kits:
        assert set(kit.tests) == kit.found(), kit.name


def test_a_conversation_reuses_all_of_its_prefix(served: Served, tmp_path: Path) -> None:
    """Every round has the pages of all rounds before: SGLang's own expectation."""
    from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test

    numbers = random.Random(1)
    said = [" ".join(f"{numbers.random():.6f}" for _ in range(60)) for _ in range(64)]
    turns = [{"conversations": [{"value": text}, {"value": text}]} for text in said]
    dataset = tmp_path / "sharegpt.json"
    dataset.write_text(json.dumps(turns))
    sizes: dict[str, int] = {"num_clients": 8, "num_rounds": 5} if ALL else {"num_clients": 4}
    found = run_multiturn_cache_hit_test(
        served[0].url,
        str(MODEL),
        request_length=96,
        output_length=16,
        dataset_path=str(dataset),
        **sizes,
    )
    assert found["overall"]["cache_hit_rate"] > 0.5


@whole
@pytest.mark.parametrize("version", ["openai>=1.60,<2", "openai>=2,<3"])
def test_clients_of_two_majors(served: Served, version: str) -> None:
    done = _tool(["python", "tests/support/servers/openai_client.py", served[0].url], version)
    assert done.stdout.splitlines()[-1:] == ["all is as it should be"], done.stderr


@whole
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_bench_serving(served: Served, backend: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend]
    command += ["--base-url", served[0].url, "--model", "default", "--tokenizer", str(MODEL)]
    command += ["--dataset-name", "random-ids", "--num-prompts", "24", "--random-input-len", "64"]
    command += ["--random-output-len", "16", "--random-range-ratio", "1", "--request-rate", "20"]
    command += ["--output-file", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = record.read_text().splitlines()
    found = json.loads(line)
    assert found["completed"] == 24
    assert found["total_output_tokens"] == 24 * 16


@whole
def test_the_openapi_document_is_kept(served: Served, tmp_path: Path) -> None:
    """What the document allows is answered, and never by a failure of the server."""
    paths = "^/(generate|v1/completions|v1/chat/completions|v1/models|tokenize|detokenize|health)$"
    command = ["schemathesis", "run", f"{served[0].url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--include-path-regex", paths]
    command += ["--max-examples", "40", "--request-timeout", "60", "--seed", "1"]
    done = _tool(command, "schemathesis>=4,<5", folder=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    assert served[1].poll() is None


def test_many_streams_some_of_which_are_given_up(served: Served) -> None:
    streams, share = (1000, 0.1) if ALL else (100, 0.3)
    ends = flood(served[0], streams, share)
    # The others had all of their tokens before their clients went.
    assert ends["left"] + ends["abort"] > streams // 20


def test_nothing_is_left(served: Served) -> None:
    """After all of this: no request, no page, and the same process."""
    server, process = served
    wait_until(lambda: state(server)["running"] == 0, 60, "nothing runs")
    server.flush()
    left = state(server)
    assert left["pages_free"] == left["pages_total"]
    assert left["restarts"] == 0
    assert process.poll() is None


def _tool(
    command: list[str], package: str, folder: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Runs a program with a package that is not in this environment."""
    uv = Path(sys.executable).with_name("uv")
    with_package = [str(uv), "run", "--no-project", "--with", package, *command]
    return subprocess.run(with_package, capture_output=True, text=True, timeout=900, cwd=folder)
