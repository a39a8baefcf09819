"""Embeddings per second of `Engine`, next to SGLang's, and the time of one request.

    python benches/gpu/embedding_check.py [--names 0.6b,8b] [--lengths 32,512] [--seconds 240] \
        [--json FILE]

Each shape has random weights, and each engine a process of its own, one after the other. A round
submits prompts of 131,072 random tokens in all at once; the fastest of three rounds after one that
warms up counts. One request is the median of 30 that follow each other. Prompts share no prefix.
Embeddings of both engines are compared first: their weights are the same.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import frame
from processes import find, hand_over
from shapes_check import SHAPES, names

ROUND_TOKENS: Final = 1 << 17
REPEATS, SINGLES, COMPARED = 3, 30, 8
GAIN: Final = 1.15
"""Of requests per second over SGLang's."""
ALIKE: Final = 0.99
"""Cosine of two embeddings of one prompt."""
WAYS: Final = ("ours", "sglang")

Prompts = list[list[int]]


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("--names", type=names, default="0.6b,8b", help="shapes, with comma")
    made.add_argument("--shapes", **frame.SHAPES, action="append")
    made.add_argument("--lengths", default="32,512", help="tokens of a prompt, with comma")
    made.add_argument("--round-tokens", type=int, default=ROUND_TOKENS)
    made.add_argument("--seconds", type=float, default=240.0, help="for all processes")
    made.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return made


def make_encode(way: str, model: Path, device: str) -> Callable[[Prompts], list[list[float]]]:
    """Starts an engine; returns what embeds prompts of tokens."""
    options: dict[str, Any] = {
        "model_path": str(model),
        "device": frame.engine_device(device),
        "is_embedding": True,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
    }
    if way == "ours":
        from pie_driver_sglang import Engine

        ours = Engine(**options)
        return lambda prompts: [answer["embedding"] for answer in ours.encode(input_ids=prompts)]
    import sglang
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    theirs = sglang.Engine(**options, log_level="error")

    def encode(prompts: Prompts) -> list[list[float]]:
        # Its `encode` takes texts.
        request = EmbeddingReqInput(input_ids=prompts)
        answers = theirs.tokenizer_manager.generate_request(request, None)
        found = theirs.loop.run_until_complete(answers.__anext__())
        return [answer["embedding"] for answer in found]

    return encode


def draw(vocabulary: int, count: int, length: int, *seed: object) -> Prompts:
    """Random prompts of one length."""
    source = random.Random(repr((count, length, *seed)))
    return [source.choices(range(vocabulary), k=length) for _ in range(count)]


def seconds_of(encode: Callable[[Prompts], object], prompts: Prompts) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    encode(prompts)
    return time.perf_counter() - begin


def measure(way: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Requests per second, milliseconds of one, and some embeddings, by the length of a prompt."""
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    encode, found = make_encode(way, model, arguments.device), {}
    for length in lengths_of(arguments.lengths):
        count = max(1, arguments.round_tokens // length)
        compared = encode(draw(vocabulary, COMPARED, length, "compared"))
        rounds = [
            seconds_of(encode, draw(vocabulary, count, length, repeat))
            for repeat in range(REPEATS + 1)
        ]
        singles = [
            seconds_of(encode, draw(vocabulary, 1, length, "one", repeat))
            for repeat in range(SINGLES)
        ]
        found[str(length)] = {
            "requests_per_s": round(count / min(rounds[1:]), 1),
            "one_ms": round(1e3 * statistics.median(singles), 3),
            "embeddings": [[round(value, 5) for value in row] for row in compared],
        }
    return found


def lengths_of(text: str) -> list[int]:
    """Numbers with comma."""
    return [int(length) for length in text.split(",")]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two embeddings."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (math.hypot(*one) * math.hypot(*other))


def compare(name: str, found: dict[str, Any], report: frame.Report) -> None:
    """Records the figures of both ways and their ratios."""
    for length in found["ours"]:
        ours, theirs = (found[way][length] for way in WAYS)
        pairs = zip(ours.pop("embeddings"), theirs.pop("embeddings"), strict=True)
        alike = min(cosine(*pair) for pair in pairs)
        ratio = ours["requests_per_s"] / theirs["requests_per_s"]
        report.add(shape=name, tokens=int(length), ours=ours, sglang=theirs, ratio=round(ratio, 3))
        shown = f"{ours['requests_per_s']:,} requests/s, SGLang {theirs['requests_per_s']:,}"
        print(f"{name} {length} tokens: {shown}; one {ours['one_ms']}, {theirs['one_ms']} ms")
        what = f"{name}, {length} tokens"
        report.hold(f"{what}: smallest cosine", alike, at_least=ALIKE)
        report.hold(f"{what}: requests/s over SGLang's", ratio, at_least=GAIN)
        one = ours["one_ms"] / theirs["one_ms"]
        report.hold(f"{what}: time of one over SGLang's", one, at_most=1.0)


def check(name: str, model: Path, end: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs both ways of a shape; those that fail are printed and left out."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--shapes", model, "--way", way]
        command += ["--device", arguments.device, "--lengths", arguments.lengths]
        command += ["--round-tokens", arguments.round_tokens]
        print(f"{name}: {way} …", flush=True)
        begin = time.monotonic()
        ended = find(command, max(1.0, end - begin))
        if ended.value is None:
            print(f"{name}: {way}: {ended.status}\n{ended.output[-2000:]}", flush=True)
            continue
        print(f"{name}: {way}: {time.monotonic() - begin:.0f} s", flush=True)
        found[way] = ended.value
    return found


def main() -> None:
    """Compares the engines shape by shape."""
    arguments = parser().parse_args()
    if arguments.way:
        [model] = arguments.shapes
        hand_over(measure(arguments.way, model, arguments))
        return
    end, failed = time.monotonic() + arguments.seconds, 0
    with frame.Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        models = {path.name: path for path in arguments.shapes or ()}
        for name in () if models else arguments.names.split(","):
            models[name] = Path(folder, name)
            models[name].mkdir()
            config = json.dumps(SHAPES[name].config)
            (models[name] / "config.json").write_text(config)
        for name, model in models.items():
            found = check(name, model, end, arguments)
            failed += len(WAYS) - len(found)
            if len(found) == len(WAYS):
                compare(name, found, report)
            elif found:
                [(way, figures)] = found.items()
                for length, row in figures.items():
                    row.pop("embeddings")
                    report.add(shape=name, tokens=int(length), **{way: row})
        report.hold("failed processes", failed, at_most=0)


if __name__ == "__main__":
    main()
