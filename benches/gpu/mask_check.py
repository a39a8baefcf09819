"""Compares masked attention, Triton's and torch's, with dense attention in float64.

    python benches/gpu/mask_check.py [--device cuda:0] [--pocket DIR] [--backends A,B] [--json FILE]

On a GPU it also serves `pocket` in bfloat16. Every node of a tree in one request, under a mask,
must give the token that its branch gives alone, where the two best logits are more than `MIN_GAP`
apart. Without a GPU the kernel runs in Triton's interpreter: `TRITON_INTERPRET=1`, `--device cpu`.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import frame
import torch
from frame import Report
from serving import PAGE, decided, driver, pages

from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.kernels.attention import masked_reference, masked_triton
from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams, MaskedRequests

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """A layer and a pass."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    shape: tuple[tuple[int, int], ...]
    """Prefix length and rows of each request."""
    cap: float = 0.0
    window: int = -1
    sinks: bool = False


SMALL = ((0, 1), (40, 1), (3, 33), (31, 70))
LARGE = ((0, 300), (5000, 1), (1021, 130), (63, 1), (64, 64))


def cases(large: bool) -> list[Case]:
    """Every kind of layer, small; with `large` also sizes of real models."""
    float32 = torch.float32
    found = [
        Case(float32, 4, 2, 16, 16, SMALL),
        Case(float32, 3, 3, 24, 40, SMALL, cap=5.0, window=20, sinks=True),
        Case(float32, 4, 1, 32, 32, SMALL, window=0),
        Case(float32, 2, 1, 80, 80, SMALL, cap=2.0),
        Case(float32, 2, 2, 16, 16, SMALL, sinks=True),
    ]
    if large:
        for dtype, dim in itertools.product(TOLERANCES, (64, 96, 128, 256)):
            found.append(Case(dtype, 16, 4, dim, dim, LARGE))
            found.append(Case(dtype, 8, 8, dim, dim, LARGE, cap=30.0, window=1023, sinks=True))
    return found


class Pass(NamedTuple):
    """Random inputs of a case."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: list[torch.Tensor]
    """Storage slot of each KV index, by request."""
    visible: list[torch.Tensor]
    """``[rows, kv_len]`` bool, by request."""
    sinks: torch.Tensor | None


def make_pass(case: Case, generator: torch.Generator) -> Pass:
    """Scattered pages; each request has a mask of another kind, some rows see nothing."""
    counts = [-(-(prefix + rows) // PAGE) for prefix, rows in case.shape]
    order = torch.randperm(sum(counts) + 3, generator=generator)[3:]
    tokens = sum(rows for _, rows in case.shape)
    slots, visible = [], []
    for request, (prefix, rows) in enumerate(case.shape):
        own, order = order[: counts[request]], order[counts[request] :]
        all_slots = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()
        slots.append(all_slots[: prefix + rows])
        density = (0.5, 0.02, 0.9)[request % 3]
        mask = torch.rand(rows, prefix + rows, generator=generator) < density
        mask[torch.rand(rows, generator=generator) < 0.1] = False
        if request % 2:
            mask[:, : prefix // 2] = False
        visible.append(mask)
    storage = (sum(counts) + 3) * PAGE

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    return Pass(
        random(tokens, case.heads, case.dim),
        random(storage, case.kv_heads, case.dim),
        random(storage, case.kv_heads, case.value_dim),
        slots,
        visible,
        random(case.heads) if case.sinks else None,
    )


def dense(case: Case, inputs: Pass, scale: float) -> torch.Tensor:
    """What the kernel must compute, in float64."""
    out = []
    start = 0
    group = case.heads // case.kv_heads
    for (prefix, rows), slots, visible in zip(
        case.shape, inputs.slots, inputs.visible, strict=True
    ):
        queries = inputs.queries[start : start + rows].double().transpose(0, 1)
        keys = inputs.keys[slots].double().transpose(0, 1).repeat_interleave(group, 0)
        values = inputs.values[slots].double().transpose(0, 1).repeat_interleave(group, 0)
        scores = queries @ keys.transpose(1, 2) * scale
        if case.cap:
            scores = case.cap * torch.tanh(scores / case.cap)
        weights = scores.exp() * visible
        if case.window >= 0:
            index = torch.arange(prefix + rows)
            weights = weights * (index >= index[prefix:, None] - case.window)
        total = weights.sum(-1, keepdim=True)
        if inputs.sinks is not None:
            total = total + inputs.sinks.double().exp()[:, None, None]
        out.append((weights @ values / total.clamp(min=1e-300)).transpose(0, 1))
        start += rows
    return torch.cat(out)


def pack(visible: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """First words of the requests, and words, as `Pass.mask` has them."""
    offsets, words = [0], []
    for mask in visible:
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32)).unflatten(1, (-1, 32))
        packed = (padded.long() << torch.arange(32)).sum(-1)
        words.append(torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).flatten())
        offsets.append(offsets[-1] + len(words[-1]))
    return torch.tensor(offsets[:-1]), torch.cat(words)


def requests_of(case: Case, inputs: Pass) -> MaskedRequests:
    """The pass, as both implementations get it."""
    longest = max(len(slots) for slots in inputs.slots)
    # Unused rows of the table, and entries after a request's own, name no slot at all.
    table = torch.full((len(case.shape) + 2, longest + 7), 2**31 - 1, dtype=torch.int32)
    table_rows = torch.arange(len(case.shape)).flip(0) + 1
    for row, slots in zip(table_rows, inputs.slots, strict=True):
        table[row, : len(slots)] = slots.to(torch.int32)
    counts = torch.tensor([rows for _, rows in case.shape], dtype=torch.int32)
    starts = counts.cumsum(0, dtype=torch.int32) - counts
    kv_lens = torch.tensor([len(slots) for slots in inputs.slots])
    return MaskedRequests(table, table_rows, kv_lens, counts, starts, *pack(inputs.visible))


def run(case: Case, inputs: Pass, scale: float, device: str) -> dict[str, torch.Tensor]:
    """What both implementations compute: torch's on the CPU, Triton's on the device."""
    requests = requests_of(case, inputs)
    rule = AttentionParams(scale, case.cap, case.window, inputs.sinks)
    out = inputs.queries.new_full((len(inputs.queries), case.heads, case.value_dim), torch.nan)
    masked_reference.masked_attention_torch(
        inputs.queries, inputs.keys, inputs.values, out, requests, rule
    )
    tensors = (inputs.queries, inputs.keys, inputs.values, torch.full_like(out, torch.nan))
    queries, keys, values, kernel_out = (tensor.to(device) for tensor in tensors)
    requests = MaskedRequests(*(part.to(device) for part in requests))
    if rule.sinks is not None:
        rule = rule._replace(sinks=rule.sinks.to(device))
    longest = max(rows for _, rows in case.shape)
    masked_triton.masked_attention(queries, keys, values, kernel_out, requests, rule, longest)
    return {"torch": out, "triton": kernel_out.cpu()}


def check_tree(model: Path, backend: str) -> int:
    """Serves a tree and its branches; returns how many decided nodes differ."""
    root = [3 + 7 * index % 900 for index in range(45)]
    parents = [-1, -1, 0, 0, 1, 2, 2, 5, 7, 7, 4]
    nodes = [500 + 13 * index for index in range(len(parents))]

    def branch(node: int) -> list[int]:
        return [] if node < 0 else [*branch(parents[node]), node]

    def request(
        tokens: list[int], positions: list[int], first: int, rows: int, **how: Any
    ) -> Request:
        # A response has no room for the logits of every row.
        last_rows = range(len(tokens) - rows, len(tokens))
        slots = [(row, Sampler.raw_logits()) for row in last_rows]
        last = (len(tokens) - 1) % PAGE + 1
        return Request(tokens, positions, pages(first, len(tokens)), last, slots, **how)

    paths = [branch(node) for node in range(len(parents))]
    positions = [*range(len(root)), *(len(root) + len(path) - 1 for path in paths)]
    masks = [[0, row + 1] for row in range(len(root))]
    for path in paths:
        bits = "1" * len(root) + "".join("01"[key in path] for key in range(len(parents)))
        masks.append([0, *(len(list(run)) for _, run in itertools.groupby(bits))])
    tree = request([*root, *nodes], positions, 0, len(nodes), masks=masks)
    alone = []
    for number, path in enumerate(paths):
        tokens = [*root, *(nodes[node] for node in path)]
        alone.append(request(tokens, list(range(len(tokens))), 16 * (number + 1), 1))
    with driver(model, {"page_size": PAGE, "attention_backend": backend}) as (client, _):
        [found, *expected] = client.forward([tree, *alone]).logits
    branches = torch.tensor([rows[-1] for rows in expected])
    clear, differ = decided(branches, torch.tensor(found).argmax(-1).tolist())
    print(f"{backend}: of {len(nodes)} nodes {clear} are decided, {differ} of them differ")
    return differ if clear else 1


def check_cases(device: str, report: Report) -> int:
    """Prints the largest error of each case; returns how many are wrong."""
    failed = 0
    for number, case in enumerate(cases(large=device != "cpu")):
        inputs = make_pass(case, torch.Generator().manual_seed(number))
        scale = case.dim**-0.5
        expected = dense(case, inputs, scale)
        blind = expected.abs().amax(dim=(1, 2)) == 0
        assert blind.any() and not blind.all()
        for name, found in run(case, inputs, scale, device).items():
            error = float((found.double() - expected).abs().amax().nan_to_num(torch.inf))
            right = error <= TOLERANCES[case.dtype] and bool((found[blind] == 0).all())
            failed += not right
            print(f"{'ok' if right else 'WRONG'}  {name}: error {error:.1e}  {case}", flush=True)
            report.add(case=str(case), way=name, error=error, ok=right)
    return failed


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device", "pocket")
    made.add_argument("--backends", default="triton,flashinfer")
    return made


def main() -> None:
    """Checks every case, and on a GPU the tree."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        report.hold("wrong cases", check_cases(arguments.device, report), at_most=0)
        for backend in arguments.backends.split(",") if arguments.device != "cpu" else ():
            differ = check_tree(arguments.pocket, backend)
            report.hold(f"{backend}: wrong nodes of a tree", differ, at_most=0)


if __name__ == "__main__":
    main()
