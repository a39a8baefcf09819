"""Mini-SGLang on the standard workload: output tokens per second.

    mini_sglang.py CHECKOUT MODEL BACKEND [--page-size N] [--repeats N] [--lengths FILE]
        [--mem-fraction F]

CHECKOUT is a clone of https://github.com/sgl-project/mini-sglang, of which nothing is in this
repository; its `python` folder is put in front of the import path. BACKEND is its
`attention_backend`, `auto` for its own choice; its FlashAttention-3 wants `--page-size 256`.
The workload is that of `sglang_engine.py`, and so are the lines that are printed. A MODEL without
weights gets random ones. MODEL needs a tokenizer, because its `LLM` turns every answer into text;
that is part of the time, as it is for everyone who calls it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_engine import LENGTHS, vocabulary

MAX_EXTEND_TOKENS = 16384
"""Of a prefill, as its own offline benchmark has it."""


def arguments_for(
    known: Iterable[str],
    model: Path,
    backend: str,
    page_size: int,
    mem_fraction: float,
    lengths: Any,
) -> dict[str, Any]:
    """Arguments of its `LLM`: those of `known`, the fields of its configuration.

    Raises:
        SystemExit: This version lacks one without which the workload would be another.
    """
    names = set(known)
    longest = max(p + o for p, o in zip(lengths["prompts"], lengths["outputs"], strict=True))
    needed = {
        "attention_backend": backend,
        "max_running_req": len(lengths["prompts"]),
        "cuda_graph_max_bs": len(lengths["prompts"]),
        "max_extend_tokens": MAX_EXTEND_TOKENS,
        "max_seq_len_override": longest + 1,
        "memory_ratio": mem_fraction,
        "use_dummy_weight": not any(model.glob("*.safetensors")),
    }
    lacking = sorted(set(needed) - names)
    if page_size > 1 and "page_size" not in names:
        lacking.append("page_size")
    if lacking:
        raise SystemExit(f"this version of Mini-SGLang has no {', '.join(lacking)}")
    paged = {"page_size": page_size} if page_size > 1 else {}
    # Prefixes are all different, so that a radix cache is only work.
    plain = {"cache_type": "naive"} if "cache_type" in names else {}
    return {**needed, **paged, **plain}


def version(checkout: Path) -> str:
    """Commit and date of the checkout; `unknown` without its history."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def count(answers: Iterable[dict[str, Any]], outputs: list[int]) -> int:
    """Tokens of the answers. Some versions leave the last one of an answer out.

    Raises:
        SystemExit: An answer has another length than was asked for.
    """
    for number, (answer, asked) in enumerate(zip(answers, outputs, strict=True)):
        said = len(answer["token_ids"])
        if said not in (asked, asked - 1):
            raise SystemExit(f"answer {number} has {said} tokens, {asked} were asked for")
    return sum(outputs)


def main() -> None:
    """Starts the engine and plays the repeats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("backend", nargs="?", default="auto")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=Path, default=LENGTHS)
    parser.add_argument("--mem-fraction", type=float, default=0.85)
    arguments = parser.parse_args()
    folder = arguments.checkout / "python"
    if not (folder / "minisgl").is_dir():
        raise SystemExit(f"{arguments.checkout} has no python/minisgl: not a clone of Mini-SGLang")
    sys.path.insert(0, str(folder))

    from minisgl.core import SamplingParams
    from minisgl.llm import LLM
    from minisgl.scheduler import SchedulerConfig

    lengths = json.loads(arguments.lengths.read_text())
    vocab, draw = vocabulary(arguments.model), random.Random(0)
    sampling = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens)
        for tokens in lengths["outputs"]
    ]
    chosen = arguments_for(
        (field.name for field in dataclasses.fields(SchedulerConfig)),
        arguments.model,
        arguments.backend,
        arguments.page_size,
        arguments.mem_fraction,
        lengths,
    )
    print(f"mini-sglang {version(arguments.checkout)}: {chosen}", flush=True)
    engine = LLM(str(arguments.model), **chosen)
    for repeat in range(arguments.repeats):
        prompts = [draw.choices(range(vocab), k=tokens) for tokens in lengths["prompts"]]
        begin = time.perf_counter()
        answers = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - begin
        said = count(answers, lengths["outputs"])
        speed = f"{said} tokens in {seconds:.2f} s = {said / seconds:.0f} tok/s"
        print(f"mini-sglang {arguments.backend} repeat {repeat}: {speed}", flush=True)


if __name__ == "__main__":
    main()
