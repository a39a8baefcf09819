"""Checks LoRA adapters on a CUDA GPU against merged weights, and times decode steps with them.

    python benches/gpu/lora_check.py [--pocket DIR] [--shapes CONFIG_DIR] [--backends A,B]
        [--parts tokens,times] [--device cuda:0] [--json FILE]

For each of SGLang's LoRA backends:

1. `tokens`: `pocket` in bfloat16 under adapters of several ranks and layers, one with an LM
   head. A batch mixes all of them and none; a prompt comes in one pass and in chunks. Logits are
   compared with `transformers` (float32, CPU) on weights merged by hand. Greedy tokens must agree
   wherever the reference's two best logits are more than `MIN_GAP` apart. More adapters are loaded
   than a pass holds.
2. `times`: decode steps of 61 contexts, and batches of prompts, as the client sees them (round
   trip, p50): adapters off, on but unused, one for all requests, eight for as many requests each.
   With `pocket`, or with random weights in the shape of CONFIG_DIR.

`--device cpu --backends torch_native` tries the script out.
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
SLOTS = 4
SIZE = 61
"""Contexts of a decode, which is padded."""
CONTEXT = 512
STEPS = 50
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
    options = {"page_size": PAGE, "enable_lora": True, "lora_backend": backend, "max_lora_rank": 32}
    options |= {"max_loras_per_batch": SLOTS, "max_loaded_loras": SLOTS, "chunked_prefill_size": 96}
    numbers = [*range(len(deltas)), 0, 1]
    worst, least, clear, wrong = 0.0, float("inf"), 0, 0
    with driver(path, options, device) as (client, _):
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


def time_steps(path: Path, options: dict[str, object], device: str, report: Report) -> None:
    """Decode steps without and with adapters."""
    config = json.loads((path / "config.json").read_text())
    folder = Path(tempfile.mkdtemp())
    cases: dict[str, list[int]] = {"no adapter": [0], "one": [1], "eight": [*range(1, 9)]}
    if not options["enable_lora"]:
        cases = {"adapters off": [0]}
    with driver(path, {"page_size": PAGE, **options}, device) as (client, _):
        for number in range(1, 9) if options["enable_lora"] else ():
            make_adapter(folder / str(number), config, 16, ATTENTION + MLP, {})
            started = time.perf_counter()
            assert client.adapter("Load", number, str(folder / str(number))) == 0
            if number == 1:
                print(f"    load: {(time.perf_counter() - started) * 1000:.1f} ms")
        for name, numbers in cases.items():
            decode = _step_us(client, numbers)
            times = {
                f"{count} x {length}": _prompts_us(client, numbers, count, length)
                for count, length in PROMPTS
            }
            prompts = ", ".join(f"{prompt} {us:7.0f} us" for prompt, us in times.items())
            print(f"    {name:12} step p50 {decode:7.0f} us, prompts {prompts}")
            backend = options.get("lora_backend")
            report.add(backend=backend, adapters=name, step_us=decode, prompts_us=times)


def _step_us(client: Client, numbers: Sequence[int]) -> float:
    stride = 2 * CONTEXT // PAGE
    prompt = [3 + i % 1000 for i in range(CONTEXT)]
    bound = [numbers[c % len(numbers)] for c in range(SIZE)]
    for c in range(SIZE):
        client.forward([request(prompt, 0, c * stride, c + 1, bound[c], False)])
    return _median_us(
        client,
        [
            [request([5], CONTEXT + n, c * stride, c + 1, bound[c], False) for c in range(SIZE)]
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
    made.add_argument("--backends", default="triton,csgmv")
    made.add_argument("--parts", default="tokens,times")
    return made


def main() -> None:
    """Checks, then times, every backend."""
    arguments = parser().parse_args()
    pocket, device = arguments.pocket, arguments.device
    timed = arguments.shapes or pocket
    dummy: dict[str, object] = {"load_format": "dummy"} if arguments.shapes else {}
    with Report(__file__, arguments) as report:
        parts = arguments.parts.split(",")
        for backend in arguments.backends.split(",") if "tokens" in parts else ():
            print(f"pocket, bfloat16, {backend}")
            check_pocket(pocket, backend, device, report)
        if "times" not in parts:
            return
        print(f"{timed.name}, {SIZE} contexts of {CONTEXT}, adapters of rank 16 in all layers")
        time_steps(timed, {**dummy, "enable_lora": False}, device, report)
        for backend in arguments.backends.split(","):
            print(f"  {backend}")
            lora: dict[str, object] = {"lora_backend": backend, "max_lora_rank": 16}
            time_steps(timed, {**dummy, "enable_lora": True, **lora}, device, report)


if __name__ == "__main__":
    main()
