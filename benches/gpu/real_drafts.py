"""The process of `draft_check.py --parts real`: a real model on real text, without and with drafts.

Two engines of the same model take turns: each answers the requests of a workload greedily, so many
at a time, until the model ends or `--output` tokens. `spec_ngram_capacity` is 0, so that a request
drafts from its own text only, never from the answers of a former turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from processes import hand_over
from real_texts import KINDS, encode_chats, make_requests

from pie_driver_sglang import Engine

ENGINES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "drafts": {"speculative_algorithm": "NGRAM", "spec_ngram_capacity": 0},
}
"""Arguments of each."""
POOL_TOKENS: Final = 65_536


def make_engines(arguments: argparse.Namespace) -> dict[str, Engine]:
    """Both engines, one after the other: the second plans what memory the first has left."""
    on_cpu = arguments.device == "cpu"
    more = {} if on_cpu else {"mem_fraction_static": 0.4}
    return {
        name: Engine(
            model_path=str(arguments.model),
            device="cpu" if on_cpu else "cuda",
            base_gpu_id=0 if on_cpu else int(arguments.device.partition(":")[2] or 0),
            dtype=arguments.dtype,
            max_total_tokens=POOL_TOKENS,
            **more,
            **options,
        )
        for name, options in ENGINES.items()
    }


def play(
    engine: Engine, prompts: Sequence[list[int]], batch: int, output: int
) -> tuple[dict[str, float], list[list[int]]]:
    """Answers all prompts, `batch` at a time.

    Returns:
        Tokens per second, and verified and accepted drafts; and the token ids of the answers.
    """
    engine.flush_cache()
    before = engine.get_server_info()["internal_states"][0]
    params = {"temperature": 0, "max_new_tokens": output}
    answers: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, len(prompts), batch):
        some = list(prompts[first : first + batch])
        found = engine.generate(input_ids=some, sampling_params=params)
        answers += [each["output_ids"] for each in found]
    seconds = time.perf_counter() - began
    after = engine.get_server_info()["internal_states"][0]
    figures = {name: after[name] - before[name] for name in ("drafted", "accepted")}
    return {**figures, "tokens_per_s": sum(map(len, answers)) / seconds}, answers


def compare(
    engines: dict[str, Engine], prompts: Sequence[list[int]], batch: int, output: int
) -> dict[str, Any]:
    """The figures of a workload and a batch size."""
    found, answers = {}, {}
    for name, engine in engines.items():
        found[name], answers[name] = play(engine, prompts, batch, output)
    drafts = found["drafts"]
    tokens = sum(map(len, answers["drafts"]))
    pairs = zip(answers["plain"], answers["drafts"], strict=True)
    return {
        "batch": batch,
        "requests": len(prompts),
        "tokens": tokens,
        "plain_tokens_per_s": found["plain"]["tokens_per_s"],
        "drafts_tokens_per_s": drafts["tokens_per_s"],
        "ratio": drafts["tokens_per_s"] / found["plain"]["tokens_per_s"],
        # A sequence gets one token and its accepted drafts a step.
        "accepted_per_step": drafts["accepted"] / (tokens - drafts["accepted"]),
        "acceptance": drafts["accepted"] / drafts["drafted"] if drafts["drafted"] else None,
        "equal_answers": sum(one == other for one, other in pairs),
    }


def main() -> None:
    """Plays all workloads and hands their figures over."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--batches", default="1,16,64", help="with comma")
    made.add_argument("--prompts", type=int, default=64, help="requests of each workload")
    made.add_argument("--output", type=int, default=256, help="most tokens of an answer")
    arguments = made.parse_args()
    engines = make_engines(arguments)
    tokenizer = engines["plain"].tokenizer
    assert tokenizer is not None
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for engine in engines.values():
        warm = encode_chats(tokenizer, make_requests("chat", max(batches)))
        engine.generate(input_ids=warm, sampling_params={"max_new_tokens": 8})
    rows = []
    for kind in KINDS:
        prompts = encode_chats(tokenizer, make_requests(kind, arguments.prompts))
        for batch in batches:
            row = {"kind": kind, **compare(engines, prompts, batch, arguments.output)}
            rows.append(row)
            print(
                f"{kind:<12}{batch:>3} at a time: {row['accepted_per_step']:.2f} accepted a step, "
                f"{row['ratio']:.2f} of the speed without drafts "
                f"({row['drafts_tokens_per_s']:.0f} / {row['plain_tokens_per_s']:.0f} tokens/s), "
                f"{row['equal_answers']} of {row['requests']} answers equal",
                flush=True,
            )
    hand_over(rows)
    for engine in engines.values():
        engine.shutdown()


if __name__ == "__main__":
    main()
