"""Compares what the driver computes of a checkpoint with transformers, on a text.

    python benches/gpu/accuracy_check.py --model PATH [--text FILE] [--dtype bfloat16]
        [--ways fused,unfused,sglang,fp8,fp8-unfused] [--windows 16] [--length 256]
        [--device cuda:0] [--json FILE]

The text is cut into windows of `--length` tokens. The first half of each is a prompt; the others
are decoded one by one, whatever the model would have said. Each way has a process of its own:

- fused: as the driver runs by default, decodes as captured graphs of few kernels;
- unfused: with SGLang's layers (`fuse_layers = false`);
- sglang: with SGLang's attention, too (`--sglang-attention`, triton);
- fp8: the weights quantized while they are loaded (`quantization = "fp8"`);
- fp8-unfused: the same with SGLang's layers;
- transformers: the reference, in the same type.

It prints the perplexity of prompts and of decodes; and how often the best token is transformers',
over all tokens and over those where transformers' best is ahead by more than `--gap`. Ways that
are not quantized must be within 1 % of the reference's perplexity and agree on 999 of 1,000 such
tokens; quantized ones within 5 %, and as close to each other as the first are to the reference.
`--device cpu --dtype float32` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import frame
import numpy as np
import torch
from frame import Report
from processes import Runner
from serving import PAGE, step, write_config

from pie_driver_sglang import _core

WAYS: Final[dict[str, tuple[str, ...]]] = {
    "fused": (),
    "unfused": ("fuse_layers = false",),
    "sglang": ("fuse_layers = false", 'attention_backend = "{attention}"'),
    "fp8": ('quantization = "fp8"',),
    "fp8-unfused": ('quantization = "fp8"', "fuse_layers = false"),
}
"""Options of each way."""
REFERENCE: Final = "transformers"
PERPLEXITY, QUANTIZED_PERPLEXITY = 0.01, 0.05
"""By how much a way may be off the reference's perplexity."""
AGREEMENT: Final = 0.999
"""Share of decided tokens that must be the reference's."""
LIMIT_S: Final = 900.0


class Windows:
    """Windows of a text: token ids, and which of them are decoded."""

    def __init__(self, tokens: Sequence[int], count: int, length: int) -> None:
        if len(tokens) < count * length:
            raise SystemExit(
                f"the text has {len(tokens)} tokens, and {count} windows of {length} need "
                f"{count * length}: give a longer `--text`, or fewer `--windows`"
            )
        self.rows = [list(tokens[at * length : (at + 1) * length]) for at in range(count)]
        self.length = length
        self.prompt = length // 2

    def scored(self, logits: torch.Tensor, window: int, start: int) -> dict[str, np.ndarray]:
        """Scores logits ``[tokens, vocabulary]`` of a window's tokens from `start` on.

        Returns:
            By name: the next token's log-probability, the best token, and by how much it is ahead.
        """
        following = self.rows[window][start + 1 : start + 1 + len(logits)]
        logits = logits[: len(following)].float()
        chances = torch.log_softmax(logits, -1)
        labels = torch.tensor(following, device=logits.device)
        best = logits.topk(2, -1)
        return {
            "logprob": chances.gather(1, labels[:, None])[:, 0].cpu().numpy(),
            "best": best.indices[:, 0].cpu().numpy(),
            "gap": (best.values[:, 0] - best.values[:, 1]).cpu().numpy(),
        }


class Scores:
    """What a way says of every token: ``[windows, length - 1]`` arrays by name."""

    def __init__(self, windows: Windows) -> None:
        size = (len(windows.rows), windows.length - 1)
        self.arrays = {
            "logprob": np.full(size, np.nan),
            "best": np.full(size, -1, np.int64),
            "gap": np.full(size, np.nan),
        }

    def put(self, window: int, start: int, found: dict[str, np.ndarray]) -> None:
        """Keeps what was found of a window's tokens from `start` on."""
        for name, values in found.items():
            self.arrays[name][window, start : start + len(values)] = values


def driver_scores(arguments: argparse.Namespace, windows: Windows) -> Scores:
    """By the driver's engine, as it runs passes and graphs."""
    from pie_driver_sglang.backends.sglang import environment
    from pie_driver_sglang.config.config_file import load_config

    options = [line.format(attention=arguments.sglang_attention) for line in WAYS[arguments.way]]
    on_cpu = arguments.device == "cpu"
    options += [f"page_size = {PAGE}", f"cuda_graph_max_bs = {len(windows.rows)}"]
    options += ["cpu_mem_budget_in_gb = 0"] + ([] if on_cpu else ["mem_fraction_static = 0.7"])
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            write_config(
                Path(folder), arguments.model, options, arguments.device,
                group=os.getpid() % 100_000, dtype=arguments.dtype, spin_budget_us=None,
            )
        )  # fmt: skip
        environment.prepare(arguments.device, config.model.hf_config["architectures"], spins=False)
        from pie_driver_sglang.backends.sglang.load import load_engine

        name = f"/pie_shmem_g{config.driver.group_id}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        # The region has no client: only its planner is used.
        server.unlink()
        planner, engine = load_engine(config)
    server.serve(planner, engine.block, print)
    print(f"layers: {type(engine.fused).__name__}", flush=True)
    scores = Scores(windows)
    for first, tokens in frames(windows):
        run(server, engine, windows, scores, first, tokens)
    return scores


def frames(windows: Windows) -> Iterator[tuple[int, int]]:
    """The first token, and how many: prompts, then decodes."""
    yield 0, windows.prompt
    for token in range(windows.prompt, windows.length - 1):
        yield token, 1


def run(
    server: Any, engine: Any, windows: Windows, scores: Scores, first: int, tokens: int
) -> None:
    """A frame of all windows."""
    width = -(-windows.length // PAGE)
    requests = [
        step(row[first : first + tokens], first, number * width, number)
        for number, row in enumerate(windows.rows)
    ]
    batch = server.warm_up(_core.encode_forward(requests))
    done = 0
    while (staged := batch.stage()) is not None:
        engine.forward(staged)
        with torch.inference_mode():
            logits = engine.logits(torch.arange(staged.tokens, device=engine.hidden.states.device))
        for at, row in enumerate(logits.split(1)):
            number, token = divmod(done + at, tokens)
            scores.put(number, first + token, windows.scored(row, number, first + token))
        done += staged.tokens
        while (group := batch.stage_slots()) is not None:
            batch.put_outputs(engine.sample(group).tokens.numpy())
    batch.commit()


def reference_scores(arguments: argparse.Namespace, windows: Windows) -> Scores:
    """By transformers, one window at a time."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=arguments.dtype, attn_implementation="eager"
    )
    model = model.eval().to(arguments.device)
    scores = Scores(windows)
    with torch.inference_mode():
        for number, row in enumerate(windows.rows):
            logits = model(torch.tensor([row], device=arguments.device)).logits[0]
            scores.put(number, 0, windows.scored(logits, number, 0))
    return scores


def perplexity(logprobs: np.ndarray) -> float:
    """Of a text, from the log-probabilities of its tokens."""
    return float(np.exp(-np.nanmean(logprobs)))


class Comparison:
    """The ways and the reference, side by side."""

    def __init__(self, windows: Windows, gap: float, report: Report) -> None:
        self._windows = windows
        self._gap = gap
        self._report = report
        self._found: dict[str, dict[str, np.ndarray]] = {}

    def add(self, way: str, arrays: dict[str, np.ndarray]) -> None:
        """Prints and keeps what a way has found; the reference comes first."""
        if np.isnan(arrays["logprob"]).any():
            raise ValueError(f"{way} has said nothing of some tokens")
        self._found[way] = arrays
        start = self._windows.prompt
        figures: dict[str, float] = {
            "prompts": perplexity(arrays["logprob"][:, :start]),
            "decodes": perplexity(arrays["logprob"][:, start:]),
        }
        if way == REFERENCE:
            print(f"{way}: perplexity {figures['prompts']:.4f} {figures['decodes']:.4f}")
            self._report.add(way=way, perplexity=figures)
            return
        quantized = way.startswith("fp8")
        unfused = f"{way.partition('-')[0]}-unfused"
        peer = REFERENCE
        if quantized and way != unfused and unfused in self._found:
            # What quantization changes is not what the kernels change.
            peer = unfused
        agreement = self._agreement(arrays, peer)
        print(
            f"{way}: perplexity {figures['prompts']:.4f} {figures['decodes']:.4f}; the best token "
            f"is that of {peer} in {agreement['all']:.2%}, where it is ahead by {self._gap:g} in "
            f"{agreement['decided']:.3%} of {agreement['count']:.0f}",
            flush=True,
        )
        self._report.add(way=way, perplexity=figures, peer=peer, agreement=agreement)
        limit = QUANTIZED_PERPLEXITY if quantized else PERPLEXITY
        for part, value in figures.items():
            own = slice(None, start) if part == "prompts" else slice(start, None)
            expected = perplexity(self._found[REFERENCE]["logprob"][:, own])
            self._report.hold(f"{way}, {part}", abs(value / expected - 1), at_most=limit)
        if not quantized or peer != REFERENCE:
            self._report.hold(f"{way} agrees", agreement["decided"], at_least=AGREEMENT)

    def _agreement(self, arrays: dict[str, np.ndarray], peer: str) -> dict[str, float]:
        other = self._found[peer]
        equal, decided = arrays["best"] == other["best"], other["gap"] > self._gap
        share = float(equal[decided].mean()) if decided.any() else math.nan
        return {"all": float(equal.mean()), "decided": share, "count": float(decided.sum())}


def read_windows(arguments: argparse.Namespace) -> Windows:
    """The windows of the text, by the model's tokenizer."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    text = arguments.text.read_text(encoding="utf-8")
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Windows(tokens, arguments.windows, arguments.length)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("--model", type=Path, default=frame.POCKET, help="a checkpoint's folder")
    made.add_argument(
        "--text", type=Path, default=frame.REPOSITORY / "docs" / "decisions.md",
        help="a file of text in UTF-8",
    )  # fmt: skip
    made.add_argument("--dtype", default="bfloat16", help="of all ways")
    made.add_argument("--ways", default="fused,unfused,sglang", help="with comma")
    made.add_argument("--sglang-attention", default="triton", help="of the way sglang")
    made.add_argument("--windows", type=int, default=16, help="rows of a decode")
    made.add_argument("--length", type=int, default=256, help="tokens of a window")
    made.add_argument("--gap", type=float, default=0.5, help="of logits, above which one is ahead")
    made.add_argument("--way", choices=[REFERENCE, *WAYS], help="run this one in this process")
    made.add_argument("--scores", type=Path, help="where it leaves what it found")
    return made


def main() -> None:
    """Every way in a process of its own."""
    arguments = parser().parse_args()
    arguments.model = arguments.model.resolve()
    windows = read_windows(arguments)
    if arguments.way is not None:
        find = reference_scores if arguments.way == REFERENCE else driver_scores
        np.savez(arguments.scores, **find(arguments, windows).arrays)
        # The interpreter's end would wait for SGLang's threads.
        os._exit(0)
    ways = [REFERENCE, *sorted(arguments.ways.split(","), key=lambda way: "unfused" not in way)]
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(windows, arguments.gap, report)
        runner = Runner(Path(folder) / "accuracy_check.log", LIMIT_S * len(ways))
        for way in ways:
            path = Path(folder, f"{way}.npz")
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--scores", path]
            runner.run(way, command, LIMIT_S)
            if path.exists():
                comparison.add(way, dict(np.load(path)))
        report.hold("failed processes", len(runner.failed), at_most=0)
        runner.close()
        report.put("command", json.dumps(sys.argv[1:]))


if __name__ == "__main__":
    main()
