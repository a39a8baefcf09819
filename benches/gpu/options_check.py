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
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import frame
from frame import Report
from processes import find, hand_over
from serving import CONTEXT_TOKENS, PROMPTS, compare_greedy, decode_greedily, driver, step

LIMIT_S: Final = 150
"""Of one row."""
TOKENS: Final = 32


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
    options = {"page_size": 16, "mem_fraction_static": 0.08, "cuda_graph_max_bs": 16}
    with driver(
        pocket, {**options, **row.options}, device, dtype=row.dtype, spin_budget_us=200
    ) as (client, caps):
        size = caps["kv_page_size"]
        ids = decode_greedily(client, TOKENS, size)

        def again(tokens: list[int], number: int, **how: Any) -> list[int]:
            """The tokens after the last one of a context."""
            first = number * CONTEXT_TOKENS // size
            start = len(tokens) - 1
            last = step(tokens[-1:], start, first, number + 1, page_size=size, **how)
            [found] = client.forward([last]).tokens
            return found

        masked = again(ids[0], 0, masks=[[0, len(ids[0]) - 3, 2, 1]])
        plain = ids[1][len(PROMPTS[1]) :]
        verified = again([*PROMPTS[1], plain[0]], 1, drafts=plain[1:4])
    clear, wrong = compare_greedy(pocket, ids, row.gap)
    drafts = "right" if verified[: len(plain)] == plain[1 : 1 + len(verified)] else "differ"
    verdict = "WRONG" if wrong else "right"
    return (
        f"{verdict}: {wrong} of {clear} tokens with a gap > {row.gap} differ, "
        f"masks {'applied' if masked else 'refused'}, {len(verified)} of 4 verified tokens {drafts}"
    )


def tried(name: str, arguments: argparse.Namespace) -> str:
    """The outcome of a row."""
    command = [sys.executable, __file__, "--one", name, "--device", arguments.device]
    started = time.monotonic()
    found = find([*command, "--pocket", arguments.pocket], LIMIT_S)
    outcome = f"refused: {found.refusal}" if found.refusal else found.value
    outcome = outcome or f"FAILED: {found.status}: {' / '.join(found.output.splitlines()[-3:])}"
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
        hand_over(found)
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
