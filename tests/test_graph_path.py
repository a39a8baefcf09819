"""The graph path on the CPU: the same tokens as the Python path, and which batches take it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pie_driver_sglang._core import Request, Sampler
from support.kernels.graph_path_walk import Walk
from support.models.reference import random_tokens
from support.process import runtime_client as rc
from support.process.traced_driver import Traced, start

pytestmark = pytest.mark.engine

PROMPT = [5, 9, 77, 3, 41]
PROBE = Sampler.raw_logits()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def traced(
    request: pytest.FixtureRequest, llama_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Traced]:
    yield from start(tmp_path_factory.mktemp("graph_path"), llama_snapshot, request.param)


def both(traced: Traced, requests: list[Request], probed: list[Request]) -> list[list[int]]:
    """Tokens of a batch that the graph path takes and of one that it leaves; they must agree."""
    before = len(traced.paths())
    fast, general = (traced.client.forward(batch).tokens for batch in (requests, probed))
    assert traced.paths()[before:] == ["graph", "python"]
    assert fast == general
    return fast


def test_random_contexts_get_the_same_tokens(traced: Traced) -> None:
    walk = Walk(traced.client, 400, rc.PAGE, traced.vocab, seed=7)
    before = len(traced.paths())
    walk.run(120)
    assert walk.compared > 1000
    assert walk.differences == []
    taken = traced.paths()[before:]
    assert taken.count("graph") > 60
    # Long prompts are left, and every batch with a probe.
    assert taken.count("python") > 240


@pytest.mark.parametrize(
    "sampler",
    [Sampler.greedy(), Sampler.multinomial(0.9, 1234), Sampler.multinomial(3.0, 77)],
    ids=["greedy", "seeded", "hot"],
)
def test_a_sampler_returns_the_same_token_on_both_paths(traced: Traced, sampler: Sampler) -> None:
    contexts = [rc.Context([*PROMPT[:2], token], [page]) for page, token in enumerate(PROMPT)]
    requests = [context.request(sampler) for context in contexts]
    both(traced, requests, [context.request(sampler, PROBE) for context in contexts])


def test_unseeded_samplers_return_allowed_tokens(traced: Traced) -> None:
    contexts = [rc.Context(PROMPT, [page]) for page in range(4)]
    (logits,) = traced.client.forward([contexts[0].request(PROBE)]).logits
    order = sorted(range(traced.vocab), key=logits[0].__getitem__, reverse=True)
    samplers = [
        Sampler.top_k(5.0, 3),
        Sampler.top_p(5.0, 0.0),
        Sampler.min_p(1.0, 1.0),
        Sampler.top_k_top_p(2.0, 2, 1.0),
    ]
    kept = [3, 1, 1, 2]
    seen: list[set[int]] = [set() for _ in samplers]
    for _ in range(12):
        batch = [c.request(sampler) for c, sampler in zip(contexts, samplers, strict=True)]
        for tokens, (token,) in zip(seen, traced.client.forward(batch).tokens, strict=True):
            tokens.add(token)
    for tokens, count in zip(seen, kept, strict=True):
        assert tokens <= set(order[:count])
    assert len(seen[0]) > 1


def test_masks_hold_on_the_graph_path(traced: Traced) -> None:
    allowed = [[0, 3], [60, 2, 66], [127, 1], [0, traced.vocab]]
    contexts = [rc.Context(PROMPT, [page]) for page in range(4)]
    requests = [
        context.request(logit_mask=runs) for context, runs in zip(contexts, allowed, strict=True)
    ]
    probed = [
        context.request(Sampler.greedy(), PROBE, logit_mask=runs)
        for context, runs in zip(contexts, allowed, strict=True)
    ]
    tokens = both(traced, requests, probed)
    assert tokens[0][0] < 3
    assert tokens[1][0] in (60, 61)
    assert tokens[2] == [127]
    unmasked = both(traced, [contexts[3].request()], [contexts[3].request(Sampler.greedy(), PROBE)])
    assert tokens[3] == unmasked[0]


def test_a_step_has_more_rows_than_a_batch_has_requests(traced: Traced) -> None:
    samplers = [Sampler.greedy(), Sampler.multinomial(0.9, 1234), Sampler.multinomial(3.0, 77)]
    masks = [[0, traced.vocab], [9, 30]]
    requests, probed = [], []
    for page in range(traced.caps["max_forward_requests"] // 3 + 5):
        context = rc.Context([page % 7, page % 11, page], [page], context_id=1 + page)
        sampler, mask = samplers[page % 3], masks[page % 2]
        requests.append(context.request(sampler, logit_mask=mask))
        probes = [] if page else [PROBE]
        probed.append(context.request(sampler, *probes, logit_mask=mask))
    both(traced, requests, probed)


def test_contexts_join_with_long_cached_prefixes(traced: Traced) -> None:
    """Their block-table rows are new: more changes than the step's block has room for."""
    block, context = 512, traced.caps["max_model_len"] // rc.PAGE
    cached = 16
    count = block // (cached + 1) + 1
    assert block < count * (cached + 1) <= block + context
    prompt = random_tokens(traced.vocab, cached * rc.PAGE, "cached")
    traced.client.forward([rc.Context(prompt, list(range(cached)), context_id=99).request()])
    joiners = [
        rc.Context(
            [*prompt, 5 + number],
            [*range(cached), cached + number],
            stored=len(prompt),
            context_id=1000 + number,
        )
        for number in range(count)
    ]
    requests = [joiner.request(logit_mask=[0, traced.vocab]) for joiner in joiners]
    probed = [
        joiner.request(Sampler.greedy(), PROBE, logit_mask=[0, traced.vocab]) for joiner in joiners
    ]
    tokens = both(traced, requests, probed)
    assert len({token for [token] in tokens}) > count // 3


def test_a_bad_request_costs_nobody_else_anything(traced: Traced) -> None:
    good = rc.Context(PROMPT, [2])
    bad = rc.Context(PROMPT, [traced.caps["total_pages"]])
    tokens = both(
        traced,
        [bad.request(), good.request()],
        [bad.request(), good.request(Sampler.greedy(), PROBE)],
    )
    assert tokens[0] == []
    assert len(tokens[1]) == 1


def test_without_graphs_every_batch_takes_the_python_path(
    llama_snapshot: Path, tmp_path: Path
) -> None:
    with contextmanager(start)(tmp_path, llama_snapshot, disable_cuda_graph=True) as eager:
        assert len(eager.client.forward([rc.Context([7], [4]).request()]).tokens) == 1
        assert eager.paths() == ["python"]


@pytest.mark.interpreted("tests/support/kernels/graph_step_kernels.py")
def test_the_gpu_kernels_sample_as_the_exact_ones_do(interpreted: str) -> None:
    """Triton's interpreter runs the kernels of the graph path on the CPU."""
    assert "0 wrong" in interpreted


@pytest.mark.interpreted("tests/support/kernels/penalties.py")
def test_the_gpu_kernels_change_logits_as_plain_torch_does(interpreted: str) -> None:
    assert "adjusted and recorded" in interpreted


@pytest.mark.interpreted("tests/support/kernels/logprob_kernels.py")
def test_the_gpu_kernels_find_log_probabilities_as_float64_does(interpreted: str) -> None:
    assert "positions found" in interpreted
