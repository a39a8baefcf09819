"""Requests whose lists do not fit one frame: steps alternate, neighbours continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang._core import Output, Runtime
from support.models.tiny_models import build_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VOCABULARY = 1 << 16
#: Biases of all tokens take 512 KiB; a frame has 8 MiB.
BIASED = 64


@pytest.fixture(scope="module")
def runtime(forked_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    model: Path = build_llama(tmp_path_factory.mktemp("large") / "llama", VOCABULARY)
    with Runtime(str(model), python=forked_python, devices=["cpu"]) as runtime:
        assert runtime.wait_ready(600.0), runtime.log_lines()
        yield runtime


def collect(runtime: Runtime, count: int) -> dict[int, tuple[list[int], Output]]:
    tokens: dict[int, list[int]] = {}
    ends: dict[int, tuple[list[int], Output]] = {}
    while len(ends) < count:
        for output in runtime.poll(60.0):
            tokens.setdefault(output.request, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request] = tokens[output.request], output
    return ends


def greedy(runtime: Runtime) -> list[int]:
    prompts = ([n + 3, 5 * n + 7, 11] for n in range(8))
    return [runtime.submit(prompt, temperature=0.0, max_new_tokens=16) for prompt in prompts]


def test_biases_of_whole_vocabularies_leave_neighbours_alone(runtime: Runtime) -> None:
    ids = greedy(runtime)
    alone = collect(runtime, len(ids))
    expected = [alone[id][0] for id in ids]

    ids = greedy(runtime)
    biased = {}
    for n in range(BIASED):
        wanted = 100 + 7 * n
        bias = [(token, 100.0 if token == wanted else -1.0) for token in range(VOCABULARY)]
        id = runtime.submit([n + 1, 2], temperature=0.0, max_new_tokens=2, logit_bias=bias)
        biased[id] = wanted
    found = collect(runtime, len(ids) + BIASED)
    assert [found[id][0] for id in ids] == expected
    for id, wanted in biased.items():
        tokens, end = found[id]
        assert (tokens, end.finish_reason) == ([wanted, wanted], "length"), end.error
    assert not any("a step failed" in line for line in runtime.log_lines())
