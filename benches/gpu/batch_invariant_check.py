"""Batch-invariant kernels and the deterministic engine on a GPU: bits, accuracy and price.

    python benches/gpu/batch_invariant_check.py [--parts gemm,attention,engine] [--shapes DIR]
        [--requests 256] [--tokens 64] [--ranks 1] [--repeats 1] [--isolate]
        [--times] [--json FILE]

gemm: matrices of the 0.6B and the 8B with every epilogue; rows of steps of 1 to 4,096 rows have the
    bits that they have alone, and the accuracy of float64. With `--times` microseconds beside the
    default config of few rows, and beside cuBLAS.
attention: rows of random contexts have the same bits by both kernels and in any company. With
    `--times` microseconds beside `attend_paged`.
engine: an `Engine` of `--shapes` (a checkpoint, or random weights without one) with
    `enable_deterministic_inference`: answers and log-probabilities of requests that run together,
    again with their prompts cached, in other company, alone, and with other chunks and drafts are
    equal bit for bit; without log-probabilities and where requests are retracted, too. With
    `--ranks 2` the model is on two GPUs, and `gemm` has the matrices of one of them. What differs
    now and then takes `--repeats` of the last run, and `--isolate`, which makes each of its changes
    by itself, too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import frame
import torch
from frame import Report
from graph_times import time_graph
from real_texts import KINDS, documentation, encode_chats, make_requests

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

LAYERS = {
    "smollm2-135m": (576, 960, 576, 1536),
    "0.6b": (1024, 4096, 2048, 3072),
    "8b": (4096, 6144, 4096, 14336),
}
"""By model: width, outputs of the QKV projection, attention heads' width, intermediate size."""
VOCABULARIES = {"smollm2-135m": 49152, "0.6b": 151936, "8b": 128256}
ROWS = (2, 7, 16, 33, 64, 130, 224, 256, 300, 1000, 4096)
TIMED = (1, 2, 16, 64, 256, 1024, 4096)
EPSILON, TOLERANCE = 1e-6, 0.02


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    made.add_argument("--parts", default="gemm,attention,engine")
    made.add_argument("--shapes", default="", help="folder of a model, for `engine`")
    made.add_argument("--requests", type=int, default=256)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--ranks", type=int, default=1, help="GPUs that share the model")
    made.add_argument("--repeats", type=int, default=1, help="of the last run")
    made.add_argument("--isolate", action="store_true", help="each change alone")
    made.add_argument("--times", action="store_true")
    return made


class Product:
    """A weight with its epilogue, and rows for it."""

    def __init__(self, epilogue: Any, height: int, inputs: int, rows: int) -> None:
        from pie_driver_sglang.kernels.gemm.wgmma import WgmmaGemm

        self.epilogue = epilogue
        self.weight = torch.randn(height, inputs, device="cuda").bfloat16() / math.sqrt(inputs)
        self.rows = torch.randn(rows, inputs, device="cuda").bfloat16()
        self.residual = torch.randn(rows, height, device="cuda").bfloat16()
        self.gemm = WgmmaGemm(torch.bfloat16, torch.device("cuda"))

    def run(self, rows: torch.Tensor, residual: torch.Tensor, config: Any) -> torch.Tensor:
        """The outputs, with sums of squares after those of `ADD_RESIDUAL`."""
        from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, LinearWeights, Residual

        weight = LinearWeights(self.weight)
        if self.epilogue == ADD_RESIDUAL:
            parts = len(self.weight) // config.square_outputs
            out = Residual(residual.clone(), torch.empty(len(rows), parts, device="cuda"))
            self.gemm.multiply(rows, weight, config, self.epilogue, residual=out)
            return torch.cat([out.rows.float(), out.sum_squares], 1)
        # In an order of additions that does not depend on the number of rows.
        squares = (rows.double() ** 2).sum(1, keepdim=True).float()
        return self.gemm.multiply(
            rows, weight, config, self.epilogue, sum_squares=squares, epsilon=EPSILON
        )

    def config(self, rows: int, *, default: bool = False) -> Any:
        """The kernel's config; None where it does not run so many rows."""
        from pie_driver_sglang.kernels.gemm import wgmma

        find = wgmma.find_wgmma_config if default else wgmma.find_batch_invariant_config
        return find(rows, *self.weight.shape, 2, self.epilogue)

    def expected(self) -> torch.Tensor:
        """Outputs of the first rows in float64."""
        from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, SWIGLU

        rows = self.rows[:8].double()
        out = rows @ self.weight.double().T
        if self.epilogue == ADD_RESIDUAL:
            return out + self.residual[:8].double()
        out /= (rows.square().mean(1, keepdim=True) + EPSILON).sqrt()
        if self.epilogue == SWIGLU:
            gate, up = out.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up
        return out


def check_gemm(report: Report, *, times: bool, ranks: int) -> None:
    """Bits, accuracy and times of the GEMMs."""
    from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, STORE, SWIGLU

    # Several ranks add to the residual after their all-reduce.
    added = ADD_RESIDUAL if ranks == 1 else STORE
    for model, (width, *divided) in LAYERS.items():
        divided.append(VOCABULARIES[model])
        if any(size % (64 * ranks) for size in divided):
            continue
        qkv, heads, intermediate, vocabulary = (size // ranks for size in divided)
        for epilogue, height, inputs in (
            (STORE, qkv, width),
            (added, width, heads),
            (SWIGLU, 2 * intermediate, width),
            (added, width, intermediate),
            (STORE, vocabulary, width),
        ):
            product = Product(epilogue, height, inputs, ROWS[-1])
            own = product.config(1)
            alone = torch.cat(
                [
                    product.run(product.rows[i : i + 1], product.residual[i : i + 1], own)
                    for i in range(8)
                ]
            )
            differing = []
            for rows in ROWS:
                shift = rows - min(rows, 8)
                order = torch.arange(rows - 1, -1, -1, device="cuda")
                given, residual = product.rows[:rows][order], product.residual[:rows][order]
                found = product.run(given, residual, product.config(rows)).flip(0)
                if not torch.equal(found[: rows - shift], alone[: rows - shift]):
                    differing.append(rows)
            name = f"{model} {epilogue.name} {height}x{inputs}"
            expected = product.expected()
            error = (alone[:, : expected.shape[1]].double() - expected).abs().max()
            error /= expected.abs().max()
            report.hold(f"{name}: steps whose bits differ {differing}", len(differing), at_most=0)
            report.hold(f"{name}: error", float(error), at_most=TOLERANCE)
            if times:
                time_gemm(name, product, report)
            del product


def time_gemm(name: str, product: Product, report: Report) -> None:
    """Microseconds by rows, and of what runs by default."""
    copies = max(1, (200 << 20) // product.weight.nbytes)
    weights = [product.weight.clone() for _ in range(copies)]
    for rows in TIMED:
        given, residual = product.rows[:rows].contiguous(), product.residual[:rows].contiguous()
        times = {}
        for way, config in (
            ("own", product.config(rows)),
            ("default", product.config(rows, default=True)),
        ):
            if config is None:
                continue

            run = functools.partial(_multiply, product, weights, given, residual, config)
            times[way] = time_graph(run, copies)

        times["cublas"] = time_graph(functools.partial(_cublas, given, weights), copies)
        shown = "  ".join(f"{way} {us:.1f}" for way, us in times.items())
        print(f"{name} {rows} rows: {shown}", flush=True)
        report.add(part="gemm", name=name, rows=rows, us=times)


def _multiply(
    product: Product, weights: list[torch.Tensor], rows: torch.Tensor, residual: Any, config: Any
) -> None:
    """Products as a step has them, with sums of squares as `ADD_RESIDUAL` leaves them."""
    from pie_driver_sglang.kernels.gemm.types import ADD_RESIDUAL, LinearWeights, Residual

    squares = torch.ones(len(rows), rows.shape[1] // 64, device="cuda")
    for weight in weights:
        if product.epilogue == ADD_RESIDUAL:
            parts = len(weight) // config.square_outputs
            named: Any = {
                "residual": Residual(residual, torch.empty(len(rows), parts, device="cuda"))
            }
        else:
            named = {"sum_squares": squares, "epsilon": 1.0}
        product.gemm.multiply(rows, LinearWeights(weight), config, product.epilogue, **named)


def _cublas(rows: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(rows, weight)


class Attention:
    """KV of random contexts in pages at random places."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, dim: int, window: int = -1
    ) -> None:
        self.page, self.lengths, self.window = 16, lengths, window
        self.sizes = (heads, kv_heads, dim)
        pages = [-(-length // self.page) for length in lengths]
        order = torch.randperm(sum(pages), device="cuda") + 1
        slots = (sum(pages) + 1) * self.page
        self.table = torch.zeros(
            len(lengths) + 1, max(pages) * self.page, dtype=torch.int32, device="cuda"
        )
        begin = 0
        for row, count in enumerate(pages, 1):
            own = order[begin : begin + count, None] * self.page
            own = own + torch.arange(self.page, device="cuda")
            self.table[row, : count * self.page] = own.flatten().int()
            begin += count
        self.keys, self.values = (
            torch.randn(slots, kv_heads, dim, device="cuda").bfloat16() for _ in "kv"
        )

    def rows(self, rows: list[tuple[int, int]]) -> Any:
        """Rows of (context, KV length)."""
        from pie_driver_sglang.kernels.attention.split_plan import DecodeRows

        contexts, lengths = torch.tensor(rows, device="cuda").unbind(1)
        return DecodeRows(self.table, contexts.contiguous(), lengths.contiguous())

    def attend(self, queries: torch.Tensor, rows: Any, *, tiles: bool) -> torch.Tensor:
        """Attention by one of the two kernels."""
        from pie_driver_sglang.kernels.attention import batch_invariant, fixed_splits

        out = torch.empty_like(queries)
        args = (queries, self.keys, self.values, out, rows)
        scale = 1 / math.sqrt(self.sizes[2])
        if tiles:
            batch_invariant.attend_row_tiles(*args, scale, self.page, self.window)
        else:
            splits = fixed_splits.plan_fixed_splits(rows, self.sizes[1], len(queries))
            batch_invariant.attend_split_rows(*args, splits, scale, self.page, 132, self.window)
        return out


def check_attention(report: Report, *, times: bool) -> None:
    """Bits and times of attention."""
    for heads, kv_heads, dim, window in (
        (16, 8, 128, -1),
        (32, 8, 128, -1),
        (9, 3, 64, -1),
        (28, 4, 128, 4095),
        (4, 1, 256, -1),
        (4, 1, 256, 511),
        (8, 1, 256, 100),
    ):
        case = Attention([9000, 4200, 700, 300, 40], heads, kv_heads, dim, window)
        rows = [(1, 9000), (2, 4097), (2, 4096), (4, 1), (4, 256), (4, 257), (3, 700)]
        rows += [(1, length) for length in range(3900, 4200)] + [(5, n) for n in range(1, 41)]
        queries = torch.randn(len(rows), heads, dim, device="cuda").bfloat16()
        split = case.attend(queries, case.rows(rows), tiles=False)
        tiled = case.attend(queries, case.rows(rows), tiles=True)
        differing = (split != tiled).flatten(1).any(1).sum()
        name = f"heads {heads}/{kv_heads} x {dim}, window {window}"
        report.hold(f"{name}: rows that differ between kernels", float(differing), at_most=0)
        wrong = 0
        for seed in range(4):
            some = random.Random(seed).sample(range(len(rows)), [1, 5, 60, len(rows)][seed])
            for tiles in (False, True):
                found = case.attend(queries[some], case.rows([rows[i] for i in some]), tiles=tiles)
                wrong += int((found != split[some]).flatten(1).any(1).sum())
        report.hold(f"{name}: rows that differ in other company", wrong, at_most=0)
        report.hold(f"{name}: error", _attention_error(case, rows, queries, split), at_most=0.02)
    for heads, kv_heads, dim in ((16, 8, 128), (32, 8, 128)) if times else ():
        time_attention(report, heads, kv_heads, dim)


def _attention_error(
    case: Attention, rows: list[tuple[int, int]], queries: torch.Tensor, out: torch.Tensor
) -> float:
    """The largest difference from float64 in units of the largest value."""
    heads, kv_heads, dim = case.sizes
    worst = 0.0
    for index in range(0, len(rows), 37):
        context, length = rows[index]
        begin = max(0, length - 1 - case.window) if case.window >= 0 else 0
        slots = case.table[context, begin:length].long()
        keys, values = (
            stored[slots].double().repeat_interleave(heads // kv_heads, 1)
            for stored in (case.keys, case.values)
        )
        scores = torch.einsum("hd,lhd->hl", queries[index].double(), keys) / math.sqrt(dim)
        exact = torch.einsum("hl,lhd->hd", torch.softmax(scores, -1), values)
        worst = max(worst, float((out[index].double() - exact).abs().max() / exact.abs().max()))
    return worst


def time_attention(report: Report, heads: int, kv_heads: int, dim: int) -> None:
    """Microseconds of a layer's attention, beside the default kernel's; KV of several layers."""
    from pie_driver_sglang.kernels.attention import (
        batch_invariant,
        fixed_splits,
        paged_decode,
        split_plan,
    )
    from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams

    for count, length in ((1, 700), (1, 8000), (16, 700), (64, 700), (256, 700), (16, 8000)):
        case = Attention([length] * count, heads, kv_heads, dim)
        rows = case.rows([(row, length) for row in range(1, count + 1)])
        queries = torch.randn(count, heads, dim, device="cuda").bfloat16()
        out, scale = torch.empty_like(queries), 1 / math.sqrt(dim)
        args = (queries, case.keys, case.values, out, rows)
        splits = fixed_splits.plan_fixed_splits(rows, kv_heads, count)
        tuning = split_plan.split_tuning(dim, heads // kv_heads, 2, count)
        plan = split_plan.plan_splits(
            rows, split_plan.SplitPlan(tuning, kv_heads, heads // kv_heads, -1), 132
        )
        rule = AttentionParams(scale, 0.0, sinks=None)

        own = functools.partial(
            batch_invariant.attend_split_rows, *args, splits, scale, case.page, 132
        )
        default = functools.partial(paged_decode.attend_paged, *args, plan, rule, case.page, 1.0)
        times = {"own": time_graph(_repeat(own), 20), "default": time_graph(_repeat(default), 20)}
        shown = "  ".join(f"{way} {us:.1f}" for way, us in times.items())
        print(f"attention {heads}/{kv_heads} {count} x {length}: {shown}", flush=True)
        report.add(part="attention", heads=heads, rows=count, length=length, us=times)
    for tokens in (1024, 8192):
        case = Attention([tokens], heads, kv_heads, dim)
        rows = case.rows([(1, length) for length in range(1, tokens + 1)])
        queries = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
        us = time_graph(functools.partial(case.attend, queries, rows, tiles=True), 1)
        teraflops = 2 * tokens * tokens * heads * dim / us / 1e6
        print(
            f"prefill {heads}/{kv_heads} {tokens}: {us:.0f} us, {teraflops:.0f} TFLOP/s", flush=True
        )
        report.add(part="prefill", heads=heads, tokens=tokens, us=us)


def _repeat(run: Callable[[], None]) -> Callable[[], None]:
    """Twenty layers."""

    def runs() -> None:
        for _ in range(20):
            run()

    return runs


Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and their log-probabilities."""
CHANGES: Final[dict[str, dict[str, Any]]] = {
    "chunks of 512": {"chunked_prefill_size": 512},
    "48 at once in 16,384 tokens": {
        "max_running_requests": 48,
        "max_total_tokens": 16_384,
        "schedule_conservativeness": 0.0,
    },
    "drafts": {"speculative_algorithm": "NGRAM"},
}
"""Options of another engine, whose answers must be the same."""


def make_prompts(model: Path, count: int, rng: random.Random) -> list[list[int]]:
    """Chats, a third of them behind long passages; random tokens if there is no tokenizer."""
    try:
        tokenizer = ModelTokenizer(model)
    except ConfigError:
        return [
            [rng.randrange(1000, 30000) for _ in range(rng.randint(3, 1200))] for _ in range(count)
        ]
    requests = [request for kind in KINDS for request in make_requests(kind, -(-count // 4))]
    prompts = encode_chats(tokenizer, requests)[:count]
    passages = itertools.cycle(documentation())
    for i in range(0, count, 3):
        passage = tokenizer.encode_plain(next(passages)[:8000])
        prompts[i] = passage[: rng.randint(1, 1500)] + prompts[i]
    return prompts


def sampling_params(number: int, tokens: int) -> dict[str, Any]:
    """Greedy, or sampled with a seed: plainly, from the most probable tokens, with penalties."""
    kinds: tuple[dict[str, float], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.7, "min_p": 0.02, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    )
    return {
        "max_new_tokens": tokens,
        "ignore_eos": True,
        "sampling_seed": number,
        **kinds[number % 4],
    }


class Asked:
    """Requests, of which an engine may answer some."""

    def __init__(self, prompts: list[list[int]], tokens: int) -> None:
        self.prompts, self.tokens = prompts, tokens

    def answer(
        self, engine: Any, chosen: Sequence[int] | None = None, *, logprobs: bool = True
    ) -> dict[int, Answer]:
        """Tokens of answers, and their log-probabilities, in the order of `chosen`."""
        chosen = range(len(self.prompts)) if chosen is None else chosen
        found = engine.generate(
            input_ids=[self.prompts[i] for i in chosen],
            sampling_params=[sampling_params(i, self.tokens) for i in chosen],
            return_logprob=logprobs,
        )
        return {
            i: (
                tuple(one["output_ids"]),
                tuple(entry[0] for entry in one["meta_info"].get("output_token_logprobs", ())),
            )
            for i, one in zip(chosen, found, strict=True)
        }


def keep_active(report: Report, engine: Any) -> int:
    """Prints and keeps what computes; returns how many requests were retracted so far."""
    info = engine.get_server_info()
    active = {name: info["active"][name] for name in ("attention", "layers", "steps")}
    retractions = int(info["internal_states"][0]["retractions"])
    print(f"active: {active}; {retractions} retractions", flush=True)
    report.add(part="engine", active=active, retractions=retractions)
    return retractions


def check_engine(report: Report, arguments: argparse.Namespace) -> None:
    """The same answers in every company."""
    from pie_driver_sglang import Engine

    rng, model = random.Random(0), Path(arguments.shapes)
    asked = Asked(make_prompts(model, arguments.requests, rng), arguments.tokens)
    common: dict[str, Any] = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        # Another engine may be on the GPU.
        "mem_fraction_static": 0.4,
        "enable_deterministic_inference": True,
        "tp_size": arguments.ranks,
    }
    if not any(model.glob("*.safetensors")):
        common["load_format"] = "dummy"
    order = rng.sample(range(arguments.requests), arguments.requests)
    with Engine(**common) as engine:
        keep_active(report, engine)
        first = asked.answer(engine)
        runs = {"again, prompts cached": asked.answer(engine)}
        engine.flush_cache()
        runs["after a flush, in another order"] = asked.answer(engine, order)
        engine.flush_cache()
        runs["in other company"] = asked.answer(engine, order[:40])
        engine.flush_cache()
        runs["alone"] = {}
        for i in order[:16]:
            runs["alone"] |= asked.answer(engine, [i])
        engine.flush_cache()
        plain = asked.answer(engine, order, logprobs=False)
        runs["without log-probabilities"] = {i: (plain[i][0], first[i][1]) for i in plain}
    combined = ", ".join(CHANGES)
    changes = {combined: functools.reduce(operator.or_, CHANGES.values())}
    # Which of them it is.
    changes |= CHANGES if arguments.isolate else {}
    for name, change in changes.items():
        with Engine(**common, **change) as engine:
            for repeat in range(arguments.repeats):
                engine.flush_cache()
                runs[f"{name}, run {repeat + 1}"] = asked.answer(engine)
            retractions = keep_active(report, engine)
        if name == combined:
            report.hold("retractions", retractions, at_least=1)
    for name, run in runs.items():
        report.hold(f"{name}: answers that differ", show_differing(name, run, first), at_most=0)


def count_differing(run: dict[int, Answer], first: dict[int, Answer]) -> int:
    """How many answers are not as they were."""
    return sum(answer != first[i] for i, answer in run.items())


def show_differing(name: str, run: dict[int, Answer], first: dict[int, Answer]) -> int:
    """Prints how many answers are as they were, and where others begin to differ; their number."""
    differing = count_differing(run, first)
    print(f"{name}: {len(run) - differing} of {len(run)} equal", flush=True)
    for i, answer in run.items():
        pairs = [list(zip(*one, strict=False)) for one in (answer, first[i])]
        at = next((k for k, (a, b) in enumerate(zip(*pairs, strict=False)) if a != b), None)
        if at is not None:
            print(f"  request {i}, token {at}: {pairs[0][at]} for {pairs[1][at]}", flush=True)
    return differing


def main() -> None:
    """Runs the check."""
    arguments = parser().parse_args()
    with frame.Report(__file__, arguments) as report:
        torch.manual_seed(0)
        parts = arguments.parts.split(",")
        if "gemm" in parts:
            check_gemm(report, times=arguments.times, ranks=arguments.ranks)
        if "attention" in parts:
            check_attention(report, times=arguments.times)
        if "engine" in parts:
            check_engine(report, arguments)


if __name__ == "__main__":
    main()
