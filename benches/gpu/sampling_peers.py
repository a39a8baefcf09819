"""Peers of the sampling kernel: FlashInfer's kernels, and SGLang's sampler, which calls them.

Both draw from probabilities, so a softmax with the temperatures comes first and counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

from pie_driver_sglang.kernels.sampling.reference import SlotParams

WHOLE: Final = 1 << 30
"""The top-k that keeps every token, as SGLang has it."""


class Way(NamedTuple):
    """One way to draw the tokens of a batch."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None
    """What each run needs that does not count."""


def as_sglang(params: SlotParams, vocabulary: int) -> SlotParams:
    """The same samplers as SGLang states them: a greedy one is a top-k of 1."""
    greedy = params.temperatures == 0
    top_k = torch.where(params.top_ks >= vocabulary, WHOLE, params.top_ks)
    return params._replace(
        temperatures=torch.where(greedy, 1.0, params.temperatures),
        top_ks=torch.where(greedy, 1, top_k).int(),
    )


def flashinfer_ways(kind: str, logits: torch.Tensor, asked: SlotParams) -> list[Way]:
    """FlashInfer's ways to draw a kind, of which the fastest counts; none of what it lacks.

    Args:
        kind: As the check names it.
        logits: ``[rows, vocabulary]`` float32.
        asked: As :func:`as_sglang` gives it.
    """
    from flashinfer import sampling

    def drawn(draw: Callable[..., Any], *limits: Any, **named: Any) -> Way:
        def run() -> Any:
            return draw(sampling.softmax(logits, asked.temperatures), *limits, **named)

        return Way(run)

    def mixed() -> Any:
        probs = sampling.softmax(logits, asked.temperatures)
        probs = sampling.top_k_renorm_probs(probs, asked.top_ks)
        probs = sampling.top_p_renorm_probs(probs, asked.top_ps)
        return sampling.min_p_sampling_from_probs(probs, asked.min_ps)

    both = functools.partial(sampling.top_k_top_p_sampling_from_probs, filter_apply_order="joint")
    ways = {
        "multinomial": [
            drawn(sampling.sampling_from_probs),
            Way(lambda: sampling.sampling_from_logits(logits / asked.temperatures[:, None])),
        ],
        "top-k": [drawn(sampling.top_k_sampling_from_probs, asked.top_ks)],
        "top-p": [drawn(sampling.top_p_sampling_from_probs, asked.top_ps)],
        "min-p": [drawn(sampling.min_p_sampling_from_probs, asked.min_ps)],
        "top-k, top-p": [drawn(both, asked.top_ks, asked.top_ps)],
        "all kinds": [Way(mixed)],
    }
    return ways.get(kind, [])


@functools.cache
def sglang_sampler() -> Any:
    """SGLang's sampler without its groups of ranks; it filters by FlashInfer's kernels."""
    from sglang.srt.layers import logprob_processor, sampler
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    # Its sampler reads there how it filters; of a model so named nothing is read.
    publish(ServerArgs(model_path="dummy", sampling_backend="flashinfer"), role="test")
    made = sampler.Sampler.__new__(sampler.Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target = None
    made.use_log_softmax_logprob = made.enable_deterministic = made.use_ascend_backend = False
    made.output_logprob_processor = logprob_processor.OutputLogprobProcessor()
    made._sync_token_ids_across_tp = lambda *_: None
    return made


def sglang_ways(kind: str, logits: torch.Tensor, asked: SlotParams) -> list[Way]:
    """SGLang's sampler as its engine calls it; it overwrites the logits, so each run has a copy.

    The arguments are those of :func:`flashinfer_ways`.
    """
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    rows, vocabulary = logits.shape
    info = SamplingBatchInfo(
        temperatures=asked.temperatures[:, None],
        top_ps=asked.top_ps,
        top_ks=asked.top_ks,
        min_ps=asked.min_ps,
        is_all_greedy=kind == "greedy",
        is_any_greedy=kind in ("greedy", "all kinds"),
        need_top_p_sampling=bool((asked.top_ps < 1).any()),
        need_top_k_sampling=bool((asked.top_ks < WHOLE).any()),
        need_min_p_sampling=bool((asked.min_ps > 0).any()),
        vocab_size=vocabulary,
        device="cuda",
    )
    scratch, sampler = logits.clone(), sglang_sampler()
    output = SimpleNamespace(next_token_logits=scratch)
    nothing = (False, None, [None] * rows, torch.zeros(rows, device=logits.device))
    return [Way(lambda: sampler.forward(output, info, *nothing), lambda: scratch.copy_(logits))]


PEERS: Final = {"sglang": sglang_ways, "flashinfer": flashinfer_ways}
"""What makes the ways of each."""
