"""Checks LoRA adapters on a CUDA GPU against merged weights, and times decode steps with them.

    python benches/gpu/lora_check.py [--pocket DIR] [--shapes CONFIG_DIR] [--backends A,B]
        [--parts tokens,layers,times] [--contexts 1,16,64] [--summary FILE]
        [--device cuda:0] [--json FILE]

`layers` checks and times LoRA in fused layers without a model (`lora_layers.py`), in about three
minutes. The others are for each LoRA backend: `pie`, which are fused layers, one of SGLang's, or
`vllm`, which is the driver on vLLM:

1. `tokens`: `pocket` in bfloat16 under adapters of several ranks and layers, one with an LM
   head. A batch mixes all of them and none; a prompt comes in one pass and in chunks. Logits are
   compared with `transformers` (float32, CPU) on weights merged by hand. Greedy tokens must agree
   wherever the reference's two best logits are more than `MIN_GAP` apart. More adapters are loaded
   than a pass holds.
2. `times`: decode steps of some numbers of contexts, and batches of prompts, as the client sees
   them (round trip, p50): adapters off, on but unused, one for all requests, eight for as many
   requests each. With `pocket`, or with random weights in the shape of CONFIG_DIR. FILE gets what
   steps of 64 contexts take over those without adapters, with the first backend.

`--device cpu --backends torch_native,vllm` tries the script out. A case that fails does not
keep the others from running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import frame
import lora_layers
from frame import Report
from serving import MIN_GAP, PAGE, decided, driver, load_reference, round_trip_us, step

from pie_driver_sglang._core import Client, Request, Sampler, encode_forward

LOGITS_TOLERANCE = 0.5
"""Of bfloat16 against float32; pocket's logits reach 30."""
STRENGTH = 0.2
"""Norm of an adapter's product, as a share of the weight's."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "all, rank 16": (16, ATTENTION + MLP),
    "all, rank 5": (5, ATTENTION + MLP),
    "q and v, rank 8": (8, ("q_proj", "v_proj")),
    "up, rank 1": (1, ("up_proj",)),
    "attention, rank 32": (32, ATTENTION),
    "head, rank 8": (8, ("lm_head", "down_proj")),
}
VLLM = "vllm"
OFF, NONE = "adapters off", "0"
SLOTS = 4
TIMED = 9
"""Adapters of a timed pass, none being one of them."""
OVER_PLAIN = 64
"""Contexts of the summary."""
CONTEXT = 512
STEPS = 50
PROMPTS_AT_ONCE = 4
"""Prompts of the timed contexts in a pass: as many tokens as the graph path takes."""
PROMPTS = ((1, 128), (8, 1024))
"""Prompts of a batch, and tokens of each."""


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every layer that an adapter may change, by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    sizes = {f"self_attn.{name}": (size * groups, hidden) for name in ("k_proj", "v_proj")}
    sizes |= {
        "self_attn.q_proj": (size * heads, hidden),
        "self_attn.o_proj": (hidden, size * heads),
    }
    sizes |= {f"mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
    sizes["mlp.down_proj"] = (hidden, inner)
    layers = range(config["num_hidden_layers"])
    named = {f"model.layers.{n}.{name}": shape for n in layers for name, shape in sizes.items()}
    return {**named, "lm_head": (config["vocab_size"], hidden)}


def make_adapter(
    folder: Path, config: dict[str, Any], rank: int, targets: Sequence[str], norms: dict[str, float]
) -> dict[str, tuple[Any, Any]]:
    """Writes a random adapter; returns the factors of what it adds to each weight."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(rank)
    folder.mkdir()
    tensors, factors = {}, {}
    for name, (outputs, inputs) in linears(config).items():
        if name.rpartition(".")[2] not in targets:
            continue
        down = torch.randn(rank, inputs, dtype=torch.float32).bfloat16()
        up = torch.randn(outputs, rank, dtype=torch.float32)
        wanted = STRENGTH * norms.get(name, 1.0)
        # The norm of the product, from products of its small sides.
        norm = ((up.T @ up) * (down.float() @ down.float().T)).sum().sqrt()
        up = (up * (wanted / norm)).bfloat16()
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        factors[name] = (2 * up.float(), down.float())
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    text = json.dumps({**settings, "target_modules": list(targets)})
    (folder / "adapter_config.json").write_text(text)
    return factors


def request(
    tokens: list[int], start: int, first_page: int, context: int, adapter: int, probe: bool
) -> Request:
    """Tokens at positions `start..`, with the logits of the last one or its greedy token."""
    samplers = [Sampler.raw_logits()] if probe else None
    return step(tokens, start, first_page, context, samplers, adapter_id=adapter or -1)


class Models:
    """The reference, with the weights of one adapter at a time."""

    def __init__(self, path: Path) -> None:
        import torch

        self.model = load_reference(path)
        self.model.requires_grad_(False)
        # An adapter of the head does not change tied embeddings.
        head = self.model.lm_head.weight.clone()
        self.model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
        self.weights = {
            name.removesuffix(".weight"): weight
            for name, weight in self.model.named_parameters()
            if name.endswith(".weight")
        }

    def logits(self, tokens: list[int], deltas: dict[str, Any]) -> Any:
        """Logits of all rows, with an adapter merged."""
        import torch

        former = {name: self.weights[name].clone() for name in deltas}
        with torch.no_grad():
            for name, delta in deltas.items():
                self.weights[name].add_(delta)
            logits = self.model(torch.tensor([tokens])).logits[0]
            for name, weight in former.items():
                self.weights[name].copy_(weight)
        return logits


def on(backend: str, slots: int, rank: int) -> tuple[str, dict[str, object]]:
    """The package of a driver, and its options for adapters; a pass has `slots` - 1, and none."""
    common: dict[str, object] = {"enable_lora": True, "max_lora_rank": rank}
    if backend == VLLM:
        return "pie_driver_vllm", {**common, "max_loras": slots - 1, "block_size": PAGE}
    own = {"lora_backend": backend, "max_loras_per_batch": slots, "page_size": PAGE}
    return "pie_driver_sglang", {**common, **own}


def check_pocket(
    path: Path, backend: str, device: str, report: Report, new_tokens: int = 24
) -> None:
    """Logits and greedy tokens of all adapters together."""
    import torch

    models = Models(path)
    config = json.loads((path / "config.json").read_text())
    norms = {name: float(weight.norm()) for name, weight in models.weights.items()}
    folder = Path(tempfile.mkdtemp())
    deltas: list[dict[str, Any]] = [{}]
    for number, (rank, targets) in enumerate(ADAPTERS.values(), 1):
        factors = make_adapter(folder / str(number), config, rank, targets, norms)
        deltas.append({name: up @ down for name, (up, down) in factors.items()})
    package, options = on(backend, SLOTS, 32)
    loaded, chunk = (
        ("max_cpu_loras", "max_num_batched_tokens")
        if backend == VLLM
        else ("max_loaded_loras", "chunked_prefill_size")
    )
    options |= {loaded: SLOTS, chunk: 96}
    numbers = [*range(len(deltas)), 0, 1]
    worst, least, clear, wrong = 0.0, float("inf"), 0, 0
    with driver(path, options, device, package=package) as (client, _):
        for number in range(1, len(deltas)):
            assert client.adapter("Load", number, str(folder / str(number))) == 0, number
        for length in (1, 17, 90, 250):
            prompt = [(7 * i + 131 * length) % 2000 + 300 for i in range(length)]
            batch = [request(prompt, 0, 40 * c, c + 1, n, True) for c, n in enumerate(numbers)]
            expected = [models.logits(prompt, delta)[-1] for delta in deltas]
            least = min(least, *(float((e - expected[0]).abs().max()) for e in expected[1:]))
            for number, [row] in zip(numbers, client.forward(batch).logits, strict=True):
                worst = max(worst, float((torch.tensor(row) - expected[number]).abs().max()))
        ids = [
            [(5 * i + 11 * c) % 2000 + 300 for i in range(9 + 7 * c)] for c in range(len(numbers))
        ]
        starts = [len(tokens) for tokens in ids]
        stored = [0] * len(ids)
        for _ in range(new_tokens):
            batch = [
                request(ids[c][stored[c] :], stored[c], 40 * c, c + 1, n, False)
                for c, n in enumerate(numbers)
            ]
            for c, [token] in enumerate(client.forward(batch).tokens):
                stored[c] = len(ids[c])
                ids[c].append(token)
    for number, start, tokens in zip(numbers, starts, ids, strict=True):
        logits = models.logits(tokens[:-1], deltas[number])[start - 1 :]
        counts = decided(logits, tokens[start:])
        clear, wrong = clear + counts[0], wrong + counts[1]
    print(
        f"    logits: largest difference {worst:.2e}; adapters change them by {least:.2e} or more"
    )
    count = new_tokens * len(numbers)
    print(f"    {count} tokens, {clear} with a gap > {MIN_GAP}, {wrong} of those differ")
    report.add(backend=backend, tokens=count, decided_tokens=clear, least_change=least)
    right = report.hold(f"{backend}: wrong tokens", wrong, at_most=0)
    near = report.hold(f"{backend}: difference of logits", worst, at_most=LOGITS_TOLERANCE)
    if not (right and near):
        raise SystemExit("adapters differ from the reference")


def time_steps(
    path: Path,
    backend: str,
    more: dict[str, object],
    arguments: argparse.Namespace,
    report: Report,
    *,
    lora: bool,
) -> dict[tuple[str, int], float]:
    """Microseconds of decode steps without and with adapters, by case and contexts."""
    config = json.loads((path / "config.json").read_text())
    folder = Path(tempfile.mkdtemp())
    package, options = on(backend, TIMED, 16)
    if not lora:
        options = {name: value for name, value in options.items() if name.endswith("_size")}
    cases: dict[str, list[int]] = {NONE: [0], "1": [1], "8": [*range(1, TIMED)]}
    if not lora:
        cases = {OFF: [0]}
    sizes = [int(size) for size in arguments.contexts.split(",")]
    # Few graphs, so that the start is short.
    graphs: dict[str, object] = {"cuda_graph_max_bs": max(sizes), "cuda_graph_bs_decode": sizes}
    if backend != VLLM and arguments.device != "cpu":
        options |= graphs
    found = {}
    with driver(path, {**more, **options}, arguments.device, package=package) as (client, _):
        for number in range(1, TIMED) if lora else ():
            make_adapter(folder / str(number), config, 16, ATTENTION + MLP, {})
            started = time.perf_counter()
            assert client.adapter("Load", number, str(folder / str(number))) == 0
            print(f"    load {number}: {_ms_since(started):.1f} ms", flush=True)
            # What is compiled or fetched at the first use of an adapter shows here.
            started = time.perf_counter()
            client.forward([request([3] * CONTEXT, 0, 0, 1, number, False)])
            print(f"    first prompt {number}: {_ms_since(started):.1f} ms", flush=True)
        for name, numbers in cases.items():
            steps = {size: _step_us(client, numbers, size) for size in sizes}
            found |= {(name, size): us for size, us in steps.items()}
            shown = ", ".join(f"{size}: {us:.0f}" for size, us in steps.items())
            print(f"    {name:12} step p50 us of {shown}", flush=True)
            report.add(backend=backend, adapters=name, step_us=steps)
            times = {
                f"{count} x {length}": _prompts_us(client, numbers, count, length)
                for count, length in PROMPTS
            }
            prompts = ", ".join(f"{prompt} {us:7.0f} us" for prompt, us in times.items())
            print(f"    {name:12} prompts {prompts}", flush=True)
            report.add(backend=backend, adapters=name, prompts_us=times)
    return found


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _step_us(client: Client, numbers: Sequence[int], size: int) -> float:
    stride = 2 * CONTEXT // PAGE
    prompt = [3 + i % 1000 for i in range(CONTEXT)]
    bound = [numbers[c % len(numbers)] for c in range(size)]
    started = time.perf_counter()
    for first in range(0, size, PROMPTS_AT_ONCE):
        several = range(first, min(first + PROMPTS_AT_ONCE, size))
        client.forward([request(prompt, 0, c * stride, c + 1, bound[c], False) for c in several])
    print(f"    {size} contexts: {_ms_since(started):.1f} ms", flush=True)
    return _median_us(
        client,
        [
            [request([5], CONTEXT + n, c * stride, c + 1, bound[c], False) for c in range(size)]
            for n in range(STEPS)
        ],
    )


def _prompts_us(client: Client, numbers: Sequence[int], count: int, length: int) -> float:
    prompt = [3 + i % 1000 for i in range(length)]
    stride = length // PAGE
    batch = [
        request(prompt, 0, c * stride, c + 1, numbers[c % len(numbers)], False)
        for c in range(count)
    ]
    return _median_us(client, [batch] * (STEPS // 5))


def _median_us(client: Client, batches: Sequence[list[Request]]) -> float:
    return statistics.median(round_trip_us(client, encode_forward(batch)) for batch in batches)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "shapes", "device")
    made.add_argument("--backends", default="pie,triton,csgmv")
    made.add_argument("--parts", default="tokens,times", help="of tokens, layers and times")
    made.add_argument("--contexts", default="1,16,64", help="of steps that are timed")
    made.add_argument("--summary", type=Path, help="where to write what steps take over plain ones")
    return made


def main() -> None:
    """Checks, then times, every backend."""
    arguments = parser().parse_args()
    pocket, device = arguments.pocket, arguments.device
    timed = arguments.shapes or pocket
    dummy: dict[str, object] = {"load_format": "dummy"} if arguments.shapes else {}
    backends, parts, failed = arguments.backends.split(","), arguments.parts.split(","), []
    cases = [("tokens", backend, True) for backend in backends]
    for index, backend in enumerate(backends):
        # Without adapters SGLang's backends are one.
        if index == 0 or backend == VLLM:
            cases.append(("times", backend, False))
        cases.append(("times", backend, True))
    found: dict[tuple[str, int], float] = {}
    with Report(__file__, arguments) as report:
        if "layers" in parts:
            lora_layers.check(report, device)
        for part, backend, lora in cases:
            if part not in parts:
                continue
            try:
                if part == "tokens":
                    print(f"pocket, bfloat16, {backend}", flush=True)
                    check_pocket(pocket, backend, device, report)
                else:
                    print(f"{timed.name}, contexts of {CONTEXT}, {backend}", flush=True)
                    steps = time_steps(timed, backend, dummy, arguments, report, lora=lora)
                    # Of several backends the first.
                    found = {**steps, **found}
            except (Exception, SystemExit) as error:
                failed.append(f"{part} of {backend}: {type(error).__name__}: {error}")
                print(failed[-1], flush=True)
        _write_summary(found, arguments.summary, report)
        if failed:
            raise SystemExit("\n".join(failed))


def _write_summary(found: dict[tuple[str, int], float], path: Path | None, report: Report) -> None:
    """What steps with one adapter and with eight take over those without LoRA."""
    over = {
        (name, size): us / found[OFF, size]
        for (name, size), us in found.items()
        if name != OFF and (OFF, size) in found
    }
    for (name, size), ratio in over.items():
        report.add(adapters=name, contexts=size, over_plain=ratio)
        print(f"  {size} contexts, adapters: {name}: {ratio:.3f} of adapters off", flush=True)
    if path is not None and over:
        wanted = [(name, ratio) for (name, size), ratio in over.items() if size == OVER_PLAIN]
        summary = {name: ratio for name, ratio in wanted if name != NONE}
        path.write_text(json.dumps({"over_plain": summary}, indent=1) + "\n")


if __name__ == "__main__":
    main()
