"""Checks the token sampler of a GPU against exact distributions, and times it.

    python benches/gpu/sampler_check.py [--device cuda:0] [--json FILE]

1. Rows and filters of every kind, common and hostile. Each token must be one that the filter keeps,
   and the one that the uniform number selects, by a float64 reference that sorts the row.
2. A batch of 256 slots over 151,936 logits: each kind of sampler alone, all of them mixed, and the
   same through the implementation in torch, which sorts. Next to them SGLang's sampler and
   FlashInfer's kernels, with the softmax that these need; a peer that is missing has no column.

With `TRITON_INTERPRET=1 ... --device cpu` the first part runs anywhere, on fewer cases.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import flashinfer_kernels
import frame
import sampling_peers
import torch
from frame import Report

from pie_driver_sglang._core import SlotGroup
from pie_driver_sglang.kernels.sampling import reference, sampler
from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows
from pie_driver_sglang.kernels.sampling.reference import SlotParams

SLOTS = 256
VOCABULARY = 151_936
RUNS = 20
MASS_TOLERANCE = 4e-6
"""Of a cumulative probability, and of the mass at the edge of top-p: sums of float32."""
RATIO_TOLERANCE = 2e-5
"""Of a probability as a share of the largest: a float32 exponential."""


class Filter(NamedTuple):
    """Parameters of one sampler."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = [
    Filter(),
    Filter(0.7, top_k=40),
    Filter(0.7, top_p=0.9),
    Filter(0.7, min_p=0.05),
    Filter(1.3, top_k=50, top_p=0.8, min_p=0.01),
    Filter(0.3, top_k=1),
    Filter(3.0, top_p=0.0),
    Filter(top_p=0.5),
    Filter(20.0, top_p=0.9999),
    Filter(2.0, min_p=1.0),
    Filter(1e-4, top_p=0.99),
    Filter(1e30, top_k=7),
    Filter(top_k=1000, top_p=0.3),
]


def rows_of(vocabulary: int) -> dict[str, torch.Tensor]:
    """Logits, common and hostile."""
    generator = torch.Generator().manual_seed(vocabulary)
    normal = 3 * torch.randn(vocabulary, generator=generator)
    numbers = torch.arange(vocabulary)
    infinity = math.inf
    largest = torch.finfo(torch.float32).max
    peaked = normal.clone()
    peaked[vocabulary // 2] = 60.0
    masked = torch.where(numbers % 11 == 3, normal, -infinity)
    steps = (numbers * 7919 % vocabulary) * 8 // vocabulary
    powers = torch.ldexp(torch.tensor(1.0), (numbers * 31) % 200 - 150)
    return {
        "normal": normal,
        "bfloat16, many ties": normal.bfloat16().float(),
        "few values": steps.float(),
        "flat": torch.zeros(vocabulary),
        "two zeros": torch.where(numbers % 2 == 0, 0.0, -0.0),
        "peaked": peaked,
        "masked": masked,
        "one possible": torch.where(numbers == vocabulary - 2, -1e30, -infinity),
        "magnitudes": torch.where(numbers % 3 == 0, powers, -powers),
        "the largest floats": torch.where(numbers % 5 == 1, largest, -largest),
        "ascending": numbers / 50,
        "not a number": torch.where(numbers == vocabulary - 1, math.nan, normal),
        "nothing possible": torch.full((vocabulary,), -infinity),
        "plus infinity": torch.where(numbers == 1, infinity, normal),
    }


def weights_of(row: torch.Tensor, item: Filter, slack: float) -> torch.Tensor:
    """Kept probabilities in float64, of a filter that is wider by `slack` (negative: narrower)."""
    vocabulary = len(row)
    ids = row.sort(descending=True, stable=True).indices
    ordered = row.double()[ids]
    weights = ((ordered - ordered[0]) / item.temperature).exp()
    weights[min(item.top_k or vocabulary, vocabulary) :] = 0
    weights = weights / weights.sum()
    before = weights.cumsum(0) - weights
    outside = weights < item.min_p * (1 - math.copysign(RATIO_TOLERANCE, slack)) * weights[0]
    if item.top_p < 1:
        outside |= before >= item.top_p + slack
    outside[0] = False
    weights[outside] = 0
    return torch.zeros_like(weights).scatter(0, ids, weights / weights.sum())


def wrong(row: torch.Tensor, item: Filter, uniforms: torch.Tensor, tokens: torch.Tensor) -> int:
    """How many of the tokens the filter and the uniforms do not allow."""
    if not bool(row.max().isfinite()):
        return int((tokens != len(row)).sum())
    legal = (tokens >= 0) & (tokens < len(row))
    tokens = tokens.clamp(0, len(row) - 1)
    wide, narrow = (weights_of(row, item, slack) for slack in (MASS_TOLERANCE, -MASS_TOLERANCE))
    # Between the narrower filter's cumulative mass and the wider one's lies the kernel's.
    bounds = torch.stack([wide.cumsum(0), narrow.cumsum(0)])
    below = (bounds - torch.stack([wide, narrow]))[:, tokens].amin(0)
    upto = bounds[:, tokens].amax(0)
    tolerance = 2 * MASS_TOLERANCE + float((wide - narrow).abs().sum())
    fits = (below - tolerance <= uniforms) & (uniforms <= upto + tolerance)
    return int((~(legal & fits & (wide[tokens] > 0))).sum())


def params_of(item: Filter, uniforms: torch.Tensor, vocabulary: int) -> SlotParams:
    """One filter for every uniform number."""
    like = torch.ones_like(uniforms)
    top_k = min(item.top_k or vocabulary, vocabulary)
    temperature, top_p, min_p = (like * v for v in (item.temperature, item.top_p, item.min_p))
    return SlotParams(temperature, like.int() * top_k, top_p, min_p, uniforms)


def check(vocabulary: int, draws: int, device: str) -> int:
    """Every row under every filter; returns how many tokens were wrong."""
    failed = 0
    generator = torch.Generator().manual_seed(5)
    for number, (name, row) in enumerate(rows_of(vocabulary).items()):
        failures = {}
        # The interpreter is slow.
        for item in FILTERS[number % 3 :: 3] if device == "cpu" else FILTERS:
            uniforms = torch.rand(draws, generator=generator)
            uniforms[0] = 0.0
            uniforms[-1] = 1 - 2**-24
            params = params_of(item, uniforms.to(device), vocabulary)
            logits = row.to(device).expand(draws, -1)
            for way, run in (
                ("kernel", sampler.sample),
                ("torch", reference.sample_filtered),
            ):
                count = wrong(row, item, uniforms, run(logits, params).cpu())
                if count:
                    failures[f"{way}, {item}"] = count
        failed += sum(failures.values())
        print(f"{'WRONG' if failures else 'ok'}  {vocabulary} {name} {failures or ''}", flush=True)
    return failed


def check_exact(device: str) -> int:
    """Equal logits: sums are exact, and so is the token."""
    uniforms = torch.arange(8) / 8
    wrong_tokens = 0
    for item, kept in ((Filter(), 4096), (Filter(top_k=64), 64), (Filter(top_p=0.25), 1024)):
        params = params_of(item, uniforms.to(device), 4096)
        tokens = sampler.sample(torch.zeros(8, 4096, device=device), params).cpu()
        wrong_tokens += int((tokens != torch.arange(8) * kept // 8).sum())
    print(f"{'WRONG' if wrong_tokens else 'ok'}  exact sums")
    return wrong_tokens


def check_masks(device: str) -> int:
    """Masks as edges and as bits."""
    vocabulary, generator = 9001, torch.Generator().manual_seed(1)
    entries, words, allowed = [], [], []
    for number in range(12):
        share = (0.5, 0.01, 0.9, 0.0002)[number % 4]
        edges = (torch.rand(vocabulary, generator=generator) < share).nonzero()[:, 0].tolist()
        edges = edges[: len(edges) // 2 * 2] or [0, 1]
        flips = torch.zeros(vocabulary, dtype=torch.int64)
        flips[edges] = 1
        inside = flips.cumsum(0) % 2 == 1
        bits = torch.nn.functional.pad(inside, (0, -vocabulary % 32)).view(-1, 32).long()
        packed = (bits << torch.arange(32)).sum(-1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).tolist()
        for kind, content in ((len(edges), edges), (-1, packed), (0, [])):
            entries.append([len(words), kind])
            words += content
            allowed.append(inside if kind else torch.ones_like(inside))
    logits = torch.randn(len(entries), vocabulary, generator=generator)
    expected = logits.masked_fill(~torch.stack(allowed), -math.inf)
    spans, data = (
        torch.tensor(values, dtype=torch.int32).to(device) for values in (entries, words)
    )
    found = logits.clone().to(device)
    sampler.mask_logits(LogitRows(found), spans, data)
    reference.apply_masks(logits, *(part.cpu() for part in (spans, data)))
    failed = int((found.cpu() != expected).sum()) + int((logits != expected).sum())
    print(f"{'WRONG' if failed else 'ok'}  logit masks")
    return failed


def check_company(device: str) -> int:
    """A slot's token must be the same alone and in a batch."""
    logits, params, group = batch("all kinds", device)
    together = reference.sample_group(logits, group, params)
    differ = 0
    for slot in range(group.greedy, SLOTS, 5):
        alone = sampler.sample(logits[slot : slot + 1], params.rows(slot, slot + 1))
        differ += int(alone != together[slot])
    print(f"{'WRONG' if differ else 'ok'}  tokens alone and in a batch: {differ} differ")
    return differ


KINDS = {
    "greedy": Filter(0.0),
    "multinomial": Filter(),
    "top-k": Filter(1.0, top_k=40),
    "top-p": Filter(1.0, top_p=0.9),
    "min-p": Filter(1.0, min_p=0.05),
    "top-k, top-p": Filter(1.0, top_k=40, top_p=0.9),
}


def batch(kind: str, device: str) -> tuple[torch.Tensor, SlotParams, SlotGroup]:
    """A batch of one kind, or of all of them, ordered as the plan orders it."""
    generator = torch.Generator().manual_seed(7)
    logits = (3 * torch.randn(SLOTS, VOCABULARY, generator=generator)).bfloat16().float()
    kinds = list(KINDS) if kind == "all kinds" else [kind]
    items = sorted(itertools.islice(itertools.cycle(kinds), SLOTS), key=list(KINDS).index)
    plain = items.count("multinomial")
    greedy = items.count("greedy")
    one = torch.ones(SLOTS)
    filters = [KINDS[item] for item in items]
    params = SlotParams(
        torch.tensor([item.temperature for item in filters]),
        torch.tensor([item.top_k or VOCABULARY for item in filters], dtype=torch.int32),
        torch.tensor([item.top_p for item in filters]),
        torch.tensor([item.min_p for item in filters]),
        torch.rand(one.shape, generator=generator),
    )
    params = SlotParams(*(field.to(device) for field in params))
    return logits.to(device), params, SlotGroup(greedy, plain, SLOTS - greedy - plain)


def sample_by_sorting(logits: torch.Tensor, group: SlotGroup, params: SlotParams) -> None:
    """The same batch through torch."""
    plain_end = group.greedy + group.plain
    if group.greedy:
        reference.sample_greedy(logits[: group.greedy])
    if group.plain:
        reference.sample_plain(
            logits[group.greedy : plain_end], params.rows(group.greedy, plain_end)
        )
    if group.filtered:
        reference.sample_filtered(logits[plain_end:], params.rows(plain_end, SLOTS))


def milliseconds(run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """The median time on the device, of calls that the device is not waiting for.

    Args:
        run: What is timed.
        before: Called before each run, outside of its time.
    """
    times = []
    for _ in range(RUNS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if before is not None:
            before()
        # Holds the device until the host has issued everything.
        torch.cuda._sleep(2_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


class Peers:
    """SGLang's sampler and FlashInfer's kernels, as far as they can be had."""

    def __init__(self, limit_s: float) -> None:
        """Has FlashInfer's kernels built, within so many seconds."""
        missing = flashinfer_kernels.unavailable_reason("sampling", limit_s)
        if missing is not None:
            print(f"    without FlashInfer's kernels: {missing}", flush=True)
        self.names = [] if missing is not None else list(sampling_peers.PEERS)

    def times(self, kind: str, logits: torch.Tensor, params: SlotParams) -> dict[str, float]:
        """Milliseconds of a batch, by peer; one that fails is left out from then on."""
        asked = sampling_peers.as_sglang(params, VOCABULARY)
        found = {}
        for name in list(self.names):
            try:
                ways = sampling_peers.PEERS[name](kind, logits, asked)
                times = [milliseconds(way.run, way.before) for way in ways]
            except Exception as error:
                print(f"    without {name}: {type(error).__name__}: {error}", flush=True)
                self.names.remove(name)
                continue
            if times:
                found[name] = min(times)
        return found


def time_kinds(device: str, report: Report, peers: Peers) -> None:
    """One kind after the other, then all."""
    print(f"{SLOTS} slots x {VOCABULARY} logits, ms on the device")
    names = list(peers.names)
    print(f"    {'':14} kernel  sorting  {'  '.join(f'{name:>10}' for name in names)}")
    times = {}
    for kind in [*KINDS, "all kinds"]:
        logits, params, group = batch(kind, device)
        times[kind] = milliseconds(lambda: reference.sample_group(logits, group, params))  # noqa: B023
        before = milliseconds(lambda: sample_by_sorting(logits, group, params))  # noqa: B023
        theirs = peers.times(kind, logits, params)
        columns = (f"{theirs[name]:10.3f}" if name in theirs else " " * 10 for name in names)
        print(f"    {kind:14} {times[kind]:6.3f}  {before:7.3f}  {'  '.join(columns)}", flush=True)
        others = {f"{name}_ms": took for name, took in theirs.items()}
        report.add(kind=kind, kernel_ms=times[kind], sorting_ms=before, **others)
    words = torch.arange(SLOTS * 40, dtype=torch.int32, device=device) % 40 * 3000 + 500
    entries = torch.arange(SLOTS, dtype=torch.int32, device=device) * 40
    entries = torch.stack([entries, torch.full_like(entries, 40)], dim=1)
    masks = milliseconds(lambda: reference.apply_masks(logits, entries, words))
    print(f"    a logit mask of 20 ranges each: {masks:.3f} ms")
    read = milliseconds(lambda: logits.amax(dim=-1))
    print(f"    one read of the logits (amax): {read:.3f} ms")
    report.add(kind="a logit mask of 20 ranges", kernel_ms=masks)
    report.add(kind="one read of the logits", kernel_ms=read)
    dearest = max(times[kind] for kind in KINDS)
    print(
        f"    all kinds: {times['all kinds'] / dearest:.2f} of the slowest kind, "
        f"{times['all kinds'] - times['greedy']:+.3f} ms against greedy alone"
    )


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument(
        "--build-limit", type=float, default=180.0, help="seconds to build FlashInfer's kernels"
    )
    return made


def main() -> None:
    """Checks, then times."""
    arguments = parser().parse_args()
    device = arguments.device
    with Report(__file__, arguments) as report:
        report.hold("wrong tokens of exact sums", check_exact(device), at_most=0)
        report.hold("wrong logit masks", check_masks(device), at_most=0)
        for vocabulary in (2500,) if device == "cpu" else (1000, 32_001, VOCABULARY):
            wrong = check(vocabulary, 2 if device == "cpu" else 64, device)
            report.hold(f"wrong tokens of {vocabulary}", wrong, at_most=0)
        if device != "cpu":
            differ = check_company(device)
            report.hold("tokens that depend on the batch", differ, at_most=0)
            time_kinds(device, report, Peers(arguments.build_limit))


if __name__ == "__main__":
    main()
