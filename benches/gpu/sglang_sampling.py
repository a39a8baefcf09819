"""What SGLang's own sampling takes: penalties, biases, masks, sampler, log-probabilities.

It is timed by itself, on random logits of a step's shape. What it takes longer than a batch that
asks for nothing is what SGLang's step grows by, if the host is never late.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from frame import in_turns
from sampling_peers import sglang_sampler

ROUNDS = 40


def extra_us(rows: int, vocab: int) -> dict[str, float]:
    """Microseconds by case that SGLang takes longer than for rows that ask for nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        made = sglang_sampler()
    device = torch.device("cuda")
    source = torch.randn(rows, vocab, device=device) * 3
    ones = torch.ones(rows, device=device)
    bias = torch.zeros(rows, vocab, device=device)
    bias[:, ::3000] = 1.5
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int32).pin_memory()
    counts = torch.zeros(rows, vocab, device=device)
    counts[:, 300:556] = 1

    def case(penalties: bool, biased: bool, masked: bool, filtered: bool, top: int) -> float:
        info = SamplingBatchInfo(
            temperatures=ones[:, None] * 0.8,
            top_ps=ones * (0.9 if filtered else 1.0),
            top_ks=(ones * (50 if filtered else 1 << 30)).int(),
            min_ps=ones * (0.02 if filtered else 0.0),
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=filtered,
            need_top_k_sampling=filtered,
            need_min_p_sampling=filtered,
            vocab_size=vocab,
            device="cuda",
            logit_bias=bias if biased else None,
        )
        logits = source.clone()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        if penalties:
            # As its penalizers do: of counts that they keep for the whole vocabulary.
            logits.sub_(counts * 0.6)
            logits.sub_((counts > 0) * 0.3)
            scale = torch.where(counts > 0, 1.2, 1.0)
            logits.copy_(torch.where(logits > 0, logits / scale, logits * scale))
        if biased:
            info.apply_logits_bias(logits)
        if masked:
            _apply_mask(logits, bits)
        output = SimpleNamespace(next_token_logits=logits)
        nums = [top] * rows if top else None
        made.forward(output, info, bool(top), nums, [None] * rows, torch.zeros(rows, device=device))
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000

    ways: dict[str, Any] = {
        "plain": functools.partial(case, False, False, False, False, 0),
        "penalties": functools.partial(case, True, False, False, False, 0),
        "bias": functools.partial(case, False, True, False, False, 0),
        "mask": functools.partial(case, False, False, True, False, 0),
        "top-5": functools.partial(case, False, False, False, False, 5),
        "filters": functools.partial(case, False, False, False, True, 0),
        "all": functools.partial(case, True, True, True, True, 5),
    }
    usable = {}
    for name, way in ways.items():
        try:
            way()
            usable[name] = way
        except Exception as error:  # What one case needs may not be installed.
            print(f"    SGLang, {name}: {type(error).__name__}: {error}", flush=True)
    times = in_turns(usable, ROUNDS, warmup=5)
    medians = {name: statistics.median(found) for name, found in times.items()}
    plain = medians.pop("plain", None)
    return {} if plain is None else {name: took - plain for name, took in medians.items()}


def _apply_mask(logits: torch.Tensor, bits: torch.Tensor) -> None:
    """As its backend does: the bits go to the GPU, and xgrammar's kernel applies them."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    moved = bits.to(logits.device, non_blocking=True)
    XGrammarGrammar.apply_vocab_mask(SimpleNamespace(), logits, moved)
