"""Tries options that reach SGLang on a CUDA GPU: dtypes, quantization, backends, page sizes.

    python benches/gpu/options_check.py [--pocket DIR] [--device cuda:0] [--workers 4]
        [--json FILE] [ROW ...]

Each row is a driver of `pocket` in a process and with a time limit of its own. A row that starts
decodes contexts together, masks one and verifies drafts; its greedy tokens must be those of
`transformers` in float32 wherever the reference's two best logits are further apart than the row
allows. A row that must not start prints what it says instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import frame
from frame import Report
from serving import driver

from pie_driver_sglang._core import Request, Sampler

LIMIT_S: Final = 150
"""Of one row."""
TOKENS: Final = 32
PROMPTS: Final = [[(7 * i + 11 * c) % 2000 + 300 for i in range(5 + 30 * c)] for c in range(4)]


class Row(NamedTuple):
    """One configuration."""

    options: dict[str, object]
    gap: float = 0.25
    """Logit gap above which its tokens must be right; pocket's logits reach 30."""
    dtype: str = "bfloat16"


ROWS: Final[dict[str, Row]] = {
    "default": Row({}),
    "triton": Row({"attention_backend": "triton"}),
    "float16": Row({}, dtype="float16"),
    "float32": Row({}, 0.05, "float32"),
    "page size 1": Row({"page_size": 1}),
    "page size 64": Row({"page_size": 64}),
    "flashinfer": Row({"attention_backend": "flashinfer"}),
    "flashinfer, page size 64": Row({"attention_backend": "flashinfer", "page_size": 64}),
    "fa3": Row({"attention_backend": "fa3"}),
    "fa3, page size 64": Row({"attention_backend": "fa3", "page_size": 64}),
    "prefill flashinfer, decode triton": Row(
        {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"}
    ),
    "pie": Row({"attention_backend": "pie"}),
    "pie, page size 1": Row({"attention_backend": "pie", "page_size": 1}),
    "pie, page size 64": Row({"attention_backend": "flashinfer,pie", "page_size": 64}),
    "pie, float32": Row({"attention_backend": "pie"}, 0.05, "float32"),
    "KV fp8_e4m3, pie": Row({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "pie"}, 1.5),
    "KV bf16": Row({"kv_cache_dtype": "bf16"}),
    "KV fp8_e5m2": Row({"kv_cache_dtype": "fp8_e5m2"}, 2.5),
    "KV fp8_e4m3": Row({"kv_cache_dtype": "fp8_e4m3"}, 1.5),
    "KV fp8_e4m3, flashinfer": Row(
        {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"}, 1.5
    ),
    "KV fp8_e4m3, fa3": Row({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "fa3"}, 1.5),
    "KV fp4_mx_block16": Row({"kv_cache_dtype": "fp4_mx_block16"}, 5.0),
    "fp8": Row({"quantization": "fp8"}, 1.5),
    "fp8, KV fp8_e4m3": Row({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}, 2.5),
    "w8a8_int8": Row({"quantization": "w8a8_int8"}, 2.5),
    "awq without a checkpoint": Row({"quantization": "awq"}),
    "gptq without a checkpoint": Row({"quantization": "gptq"}),
    "float32, flashinfer": Row({"attention_backend": "flashinfer"}, 0.05, "float32"),
    "torch_native": Row({"attention_backend": "torch_native"}),
    "flex_attention": Row({"attention_backend": "flex_attention"}),
    "enable_torch_compile": Row({"enable_torch_compile": True}),
    "enable_deterministic_inference": Row({"enable_deterministic_inference": True}),
    "enable_fp32_lm_head": Row({"enable_fp32_lm_head": True}),
}


def check(row: Row, pocket: Path, device: str) -> str:
    """What a row that starts computes; runs in a process of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"page_size": 16, "mem_fraction_static": 0.08, "cuda_graph_max_bs": 16}
    with driver(
        pocket, {**options, **row.options}, device, dtype=row.dtype, spin_budget_us=200
    ) as (client, caps):
        size = caps["kv_page_size"]
        ids = [list(prompt) for prompt in PROMPTS]
        batch = [step(prompt, len(prompt), c, size) for c, prompt in enumerate(ids)]
        for _ in range(TOKENS):
            for context, found in zip(ids, client.forward(batch).tokens, strict=True):
                if len(found) != 1:
                    return f"FAILED: {len(found)} tokens in an answer"
                context.extend(found)
            batch = [step(context, 1, c, size) for c, context in enumerate(ids)]
        blind = [[0, len(ids[0]) - 3, 2, 1]]
        [masked] = client.forward([step(ids[0], 1, 0, size, masks=blind)]).tokens
        plain = ids[1][len(PROMPTS[1]) :]
        context = [*PROMPTS[1], plain[0]]
        [verified] = client.forward([step(context, 1, 1, size, drafts=plain[1:4])]).tokens
    reference = AutoModelForCausalLM.from_pretrained(
        pocket, dtype=torch.float32, attn_implementation="eager"
    )
    clear = wrong = 0
    for prompt, got in zip(PROMPTS, ids, strict=True):
        with torch.no_grad():
            best = reference(torch.tensor([got[:-1]])).logits[0, len(prompt) - 1 :].topk(2)
        decided = best.values[:, 0] - best.values[:, 1] > row.gap
        differs = best.indices[:, 0] != torch.tensor(got[len(prompt) :])
        clear, wrong = clear + int(decided.sum()), wrong + int((decided & differs).sum())
    drafts = "right" if verified[: len(plain)] == plain[1 : 1 + len(verified)] else "differ"
    verdict = "WRONG" if wrong else "right"
    return (
        f"{verdict}: {wrong} of {clear} tokens with a gap > {row.gap} differ, "
        f"masks {'applied' if masked else 'refused'}, {len(verified)} of 4 verified tokens {drafts}"
    )


def step(ids: list[int], count: int, number: int, size: int, **how: Any) -> Request:
    """The last `count` tokens of context `number`, sampled greedily at the last."""
    first, end = number * 256 // size, len(ids) + len(how.get("drafts", ()))
    listed = list(range(first, first + -(-end // size)))
    positions = list(range(len(ids) - count, len(ids)))
    slots = [(count - 1, Sampler.greedy())]
    length = (len(ids) - 1) % size + 1
    return Request(ids[-count:], positions, listed, length, slots, context_id=number + 1, **how)


def tried(name: str, arguments: argparse.Namespace) -> str:
    """The outcome of a row."""
    command = [sys.executable, __file__, "--one", name, "--device", arguments.device]
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "--pocket", str(arguments.pocket)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{name}: FAILED: over {LIMIT_S} s"
    lines = [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
    found = [json.loads(line[6:]) for line in lines if line.startswith("found ")]
    refusals = [n for n, line in enumerate(lines) if line.startswith("pie_driver_sglang: ")]
    if refusals:
        text = " ".join(lines[refusals[-1] : refusals[-1] + 3]).partition(": ")[2]
        found = [f"refused: {text}"]
    outcome = found[-1] if found else f"FAILED: {' / '.join(lines[-3:])}"
    return f"{name}: {outcome[:600]} ({time.monotonic() - started:.0f} s)"


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "device")
    made.add_argument("rows", nargs="*", default=ROWS)
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--one", help=argparse.SUPPRESS)
    return made


def main() -> None:
    """One row, or all of them."""
    arguments = parser().parse_args()
    if arguments.one:
        with contextlib.redirect_stdout(sys.stderr):
            found = check(ROWS[arguments.one], arguments.pocket, arguments.device)
        print(f"found {json.dumps(found)}")
        return
    with Report(__file__, arguments) as report, ThreadPoolExecutor(arguments.workers) as pool:
        lines = pool.map(lambda name: tried(name, arguments), arguments.rows)
        for name, line in zip(arguments.rows, lines, strict=True):
            print(line, flush=True)
            report.add(row=name, outcome=line.removeprefix(f"{name}: "))
            bad = any(word in line for word in ("WRONG:", "FAILED:"))
            report.hold(f"{name}: wrong or failed", bad, at_most=0)


if __name__ == "__main__":
    main()
