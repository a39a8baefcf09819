"""Every check of this folder: what it proves, by which bar, and how `all_checks.py` runs it.

A row is one run of a script; a script with several parts may have several rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Check(NamedTuple):
    """One run of a script."""

    script: str
    """A file of this folder."""
    proves: str
    bar: str
    """What fails it; `none` for one that only times."""
    minutes: int
    """After so many `all_checks.py` ends it."""
    arguments: str
    """Of the script. `{pocket}`, `{small}`, `{large}` are model folders, `{pie_load}` a binary,
    `{several}` numbers of GPUs, `{limit}` its seconds; `{record}` is a file, `{folder}` a folder.
    """
    gpus: int = 1
    """How many it needs at least."""
    alone: bool = False
    """It times the host, so nothing else may run meanwhile."""
    usual: bool = True
    """`all_checks.py` runs it without being asked for it by name."""


_LOAD: Final = "--out {folder} --shapes {small} --pie-load {pie_load} --budget-s {limit}"

CHECKS: Final[Mapping[str, Check]] = {
    "load": Check(
        "load_check.py", "tokens/s of 256 requests, against SGLang's engine",
        "no process fails", 5,
        _LOAD + " --parts throughput,peers --peer-backends fa3 --option mem_fraction_static=0.8",
        alone=True,
    ),
    "drafts": Check(
        "draft_check.py", "what n-gram drafts gain, and that they cost nothing where they gain "
        "nothing", "0.98 of the speed without drafts where nothing repeats", 5,
        _LOAD + " --pocket {pocket} --patience 2", alone=True,
    ),
    "graph_path": Check(
        "graph_path_check.py", "tokens of both paths agree; the host's part of a step",
        "2 bfloat16 ulps", 5,
        "--pocket {pocket} --steps 200 --shapes {small} --json {record}", alone=True,
    ),
    "steps": Check(
        "load_check.py", "round trips of decode steps", "no process fails", 5,
        _LOAD + " --parts steps", alone=True,
    ),
    "attention": Check(
        "attention_check.py", "decode attention is right; its times against three peers and a copy",
        "errors against float64 of 1e-5 in float32, 4e-3 in float16, 2e-2 in bfloat16", 5,
        "--seconds {limit} --json {record}",
    ),
    "models": Check(
        "models_check.py", "what works with each architecture, against transformers",
        "4 % of the logits' spread in the median row, or what rounding explains", 5,
        "--workers 7 --limit 120 --json {record}",
    ),
    "mixed": Check(
        "mixed_check.py", "what a prompt adds to a step of decodes, against SGLang's mixed chunks",
        "the peer answers", 5, "--shapes {small} --peers fa3 --json {record}",
    ),
    "memory": Check(
        "memory_check.py", "what models take of the memory is what was planned",
        "the largest passes run, and memory is left", 5,
        "--shapes {small} --shapes {large} --json {record}",
    ),
    "dense": Check(
        "dense_check.py", "dense layers are right; their times against SGLang's layers",
        "2e-2 of the largest value", 5,
        "--parity --times --shapes 0.6B,8B,14B --json {record}",
    ),
    "lone": Check(
        "lone_check.py", "attention by clusters and products that quantize their row are right; "
        "times of the products", "2e-2 of the largest number seen, 5e-2 of the largest output", 5,
        "--json {record}",
    ),
    "batch": Check(
        "batch_check.py", "products of 2 to 224 rows are right, and the same each time; their "
        "times compared with cuBLAS", "2e-2 of the largest output", 5, "--json {record}",
    ),
    "batch invariance": Check(
        "batch_invariant_check.py", "rows have the same bits in every company, and so have answers "
        "with `enable_deterministic_inference`",
        "all bits are equal", 6, "--shapes {small} --requests 64 --json {record}",
    ),
    "batch invariance on ranks": Check(
        "batch_invariant_check.py", "the same of a model on two GPUs", "all bits are equal", 6,
        "--parts gemm,engine --ranks 2 --shapes {small} --requests 64 --json {record}", gpus=2,
    ),
    "accuracy": Check(
        "accuracy_check.py", "log-probabilities by every path, against transformers and SGLang's "
        "engine", "mean and p99.9 1.05 of SGLang's; 1 % of the perplexity, 5 % in FP8", 8,
        "--ways fused,unfused,drafts,lora,sglang,fp8,fp8-unfused --json {record}",
    ),
    "prefill": Check(
        "prefill_check.py", "long passes by the driver's layers, against SGLang's, and its graphs",
        "hidden states differ by 3 %", 5, "--shapes {small} --json {record}", alone=True,
    ),
    "adapters": Check(
        "lora_check.py", "LoRA adapters give what merged weights give; what they cost a step",
        "no decided token differs, logits by 0.5", 5,
        "--parts tokens,layers,times --pocket {pocket} --shapes {small} --json {record}",
    ),
    "vllm adapters": Check(
        "lora_check.py", "the same by vLLM's layers", "no decided token differs, logits by 0.5", 4,
        "--backends vllm --pocket {pocket} --shapes {small} --json {record}", usual=False,
    ),
    "probes": Check(
        "probe_check.py", "probes and logit masks are right; what kinds of samplers cost",
        "1e-4, logits in bfloat16 by 0.5", 5, "--pocket {pocket} --shapes {small} --json {record}",
    ),
    "images": Check(
        "image_check.py", "a Qwen3-VL sees images as transformers' does",
        "no decided token differs", 5, "--json {record}",
    ),
    "samplers": Check(
        "sampler_check.py", "the sampling kernel draws the token that float64 draws; its times "
        "against SGLang's sampler and FlashInfer's kernels",
        "no wrong token", 5, "--json {record}",
    ),
    "sampling": Check(
        "sampling_check.py", "penalties, biases and masks give the best token; what they cost a "
        "step of 64 rows", "0.25 of a logit; 1.05 of a plain step with penalties or biases, 1.10 "
        "with masks, 1.25 with all, 1.03 with all in one row", 5,
        "--pocket {pocket} --shapes {small} --json {record}", alone=True,
    ),
    "masks": Check(
        "mask_check.py", "masked attention is right, and a tree is its branches",
        "errors against float64 of 1e-5 in float32, 4e-3 in float16, 3e-2 in bfloat16; no decided "
        "node differs", 5, "--pocket {pocket} --json {record}",
    ),
    "copies": Check(
        "swap_check.py", "pages come back from the host as they were; GB/s against plain copies",
        "every bit, every token", 5, "--pocket {pocket} --json {record}",
    ),
    "sums": Check(
        "sums_check.py", "sums over ranks are right; their times against SGLang's, NCCL's and "
        "FlashInfer's", "2e-2 of a sum, 0.25 after 40 of them; none of two ranks rounded twice", 10,
        "--times --ranks {several} --json {record}", gpus=2,
    ),
    "ranks": Check(
        "ranks_check.py", "decode steps of a model on several GPUs, and the host's part of them",
        "no part fails", 5,
        "--parts steps --ranks {several},1 --shapes {large} --out {folder} --budget-s {limit}",
        gpus=2,
    ),
    "tokens": Check(
        "ranks_check.py", "several GPUs say what transformers says, in both paths, and what one "
        "GPU says", "no decided token differs, 2 bfloat16 ulps, what rounding explains", 5,
        "--parts tokens --ranks {several} --out {folder} --budget-s {limit}", gpus=2,
    ),
    "vllm ranks": Check(
        "vllm_ranks_check.py", "several GPUs say by vLLM's models what transformers says; their "
        "steps", "no decided token differs", 8,
        "--ranks {several} --pocket {pocket} --shapes {small} --out {folder}", gpus=2, usual=False,
    ),
    "serve": Check(
        "serve_check.py", "tokens and steps by attention backend", "no decided token differs", 5,
        "--pocket {pocket} --shapes {small} --json {record}", usual=False,
    ),
    "prefixes": Check(
        "prefix_check.py", "contexts that share pages say the same; what that saves a step",
        "2 % of the tokens", 5, "--pocket {pocket} --shapes {small} --json {record}", usual=False,
    ),
    "options": Check(
        "options_check.py", "types, quantization, backends and page sizes start or say why not",
        "no decided token differs", 10, "--pocket {pocket} --json {record}", usual=False,
    ),
    "plugin": Check(
        "plugin_check.py", "SGLang's engine with our drafter says the same, in fewer steps",
        "1.2 tokens a step, 75 % of the tokens before a difference", 10,
        "--pocket {pocket} --out {folder}", usual=False,
    ),
    "engine": Check(
        "engine_check.py", "tokens/s of the offline engine, and conversations, against SGLang's",
        "0.97 of the ring's tokens/s, 1.35 of SGLang's; 0.6 and 0.75 of SGLang's times", 10,
        "--shapes {small} --pie-load {pie_load} --out {folder} --budget-s {limit}", alone=True,
        usual=False,
    ),
    "vllm": Check(
        "vllm_check.py", "the driver on vLLM says what vLLM says; its steps and tokens/s, against "
        "vLLM's", "1.15 of vLLM's tokens/s on 0.6B, 1.05 on 8B; other tokens only where nearly as "
        "probable", 10, "--model {pocket} --out {folder} --budget-s {limit}", alone=True,
        usual=False,
    ),
    "servers": Check(
        "server_check.py", "the HTTP server against SGLang's, by `sglang.bench_serving`: tokens/s, "
        "times between tokens and to the first, with shared prefixes, too",
        "1.3 of SGLang's tokens/s, 1.25 with shared prefixes; 0.6 and 0.8 of its times between "
        "tokens with 1 and 64 streams, 1.0 of those to the first", 10,
        "--shapes {small} --out {folder} --budget-s {limit}", alone=True, usual=False,
    ),
    "faults": Check(
        "fault_check.py", "faults end a start or the driver with one line; loads stall no decode",
        "no part fails", 10, "--pocket {pocket} --shapes {small} --json {record}", usual=False,
    ),
    "starts": Check(
        "start_check.py", "seconds from a server's start to its first token, with warm and empty "
        "kernel caches; the pause when a driver is killed under 64 streams",
        "6 s for 0.6B, 14 s for 8B, 45 s for a first start of 3B, a pause of 3 s", 6,
        "--small {small} --large {large} --middle {large} --parts warm-0.6b,restart,warm-8b "
        "--budget-s {limit} --json {record}", alone=True, usual=False,
    ),
    "prefix caches": Check(
        "prefix_cache_check.py", "SGLang's engine without a prefix cache, with its tree, with ours",
        "ours is never slower", 5, "--shapes {small} --out {folder}", usual=False,
    ),
    "cuts": Check(
        "step_check.py", "steps by how their kernels are cut", "none", 5,
        "--shapes {small} --json {record}", usual=False,
    ),
    "tune": Check(
        "tune_check.py", "GEMM configs found by measurement are right; steps with them and with "
        "the rule, and the time to move their bytes", "1e-2 of float64's norm; no config of a "
        "batch-invariant GEMM changes a bit", 10, "--out {folder} --total-s {limit}", alone=True,
        usual=False,
    ),
    "shapes": Check(
        "shapes_check.py", "steps of 3B to 14B, 0.6B, 30B-A3B and 8B in FP8 and the time to move "
        "their bytes; tokens/s compared with SGLang's engine", "no process fails", 30,
        "--out {folder} --pie-load {pie_load} --budget-s {limit}", alone=True, usual=False,
    ),
    "embeddings": Check(
        "embedding_check.py", "embeddings/s at 32 and 512 tokens, and the time of one, against "
        "SGLang's engine", "1.15 of SGLang's requests/s, 1 of its time; cosine of 0.99", 5,
        "--seconds {limit} --json {record}", alone=True, usual=False,
    ),
    "weights": Check(
        "weights_check.py", "time of new weights next to copying them",
        "1.3 of the copy", 5,
        "--json {record}", alone=True, usual=False,
    ),
    "eagle": Check(
        "eagle_check.py", "EAGLE heads draft in captured graphs, and change no greedy token",
        "0.75 of the requests have the tokens of an engine without a head", 10,
        "--json {record}", alone=True, usual=False,
    ),
    "sleep": Check(
        "sleep_check.py", "memory that sleep releases by tag; graphs serve on after a wake",
        "2 s of a wake, 0.95 of the weights' bytes, equal answers", 5,
        "--json {record}", alone=True, usual=False,
    ),
}  # fmt: skip
"""By name, in the order in which they run."""


def table() -> str:
    """The checks as a table in Markdown."""
    lines = ["| check | script | proves | bar | minutes | GPUs |", "|---|---|---|---|---|---|"]
    for name, check in CHECKS.items():
        shown = name if check.usual else f"{name} (by name only)"
        gpus = "1" if check.gpus == 1 else f"{check.gpus} or more"
        cells = (shown, f"`{check.script}`", check.proves, check.bar, str(check.minutes), gpus)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
