"""How long new weights take, next to copying their bytes.

    python benches/gpu/weights_check.py [--name 8b] [--folder DIR] [--json FILE]

The shape's weights are random and written into a checkpoint first, in DIR or a temporary folder:
16 GB for the 8B, which the page cache must hold. An engine starts with other weights. Then comes
`update_weights_from_disk` of that folder, the fastest of three, over the time in which safetensors
copies the same tensors to the device; answers change with the first one only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import frame
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shapes_check import SHAPES

from pie_driver_sglang import Engine

PROMPTS: Final = [[5, 6, 7, 8], list(range(10, 200)), [3] * 40]
GREEDY: Final = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
REPEATS: Final = 3
UPDATE_OVER_COPY: Final = 1.3
SHARD_LAYERS: Final = 8
"""Layers in a file."""


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.add_argument("--name", choices=sorted(SHAPES), default="8b")
    made.add_argument("--shapes", **frame.SHAPES)
    made.add_argument("--folder", type=Path, help="for the checkpoint; temporary by default")
    made.add_argument("--mem-fraction-static", type=float, default=0.4)
    return made


def layer_shapes(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a decoder layer of Llama or Qwen3."""
    width, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    begin = f"model.layers.{layer}."
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{begin}self_attn.{name}_proj.weight", (rows, width)
    yield f"{begin}self_attn.o_proj.weight", (width, heads)
    for name in ("gate", "up"):
        yield f"{begin}mlp.{name}_proj.weight", (inner, width)
    yield f"{begin}mlp.down_proj.weight", (width, inner)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{begin}{name}.weight", (width,)
    if config["model_type"].startswith("qwen3"):
        for name in ("q_norm", "k_norm"):
            yield f"{begin}self_attn.{name}.weight", (dim,)


def file_shapes(config: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of a checkpoint, by its files."""
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    table = (config["vocab_size"], width)
    rest = {"model.embed_tokens.weight": table, "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        rest["lm_head.weight"] = table
    parts: list[dict[str, tuple[int, ...]]] = [rest]
    for first in range(0, layers, SHARD_LAYERS):
        last = min(layers, first + SHARD_LAYERS)
        parts.append(dict(x for layer in range(first, last) for x in layer_shapes(config, layer)))
    return parts


def write_checkpoint(folder: Path, config: dict[str, Any], device: str, seed: int = 1) -> int:
    """Writes random weights as safetensors; returns their bytes."""
    parts = file_shapes(config)
    generator = torch.Generator(device).manual_seed(seed)
    index, size = {}, 0
    for number, part in enumerate(parts, 1):
        tensors = {}
        for name, shape in part.items():
            drawn = torch.randn(shape, generator=generator, device=device) * 0.02
            tensors[name] = (drawn + ("norm" in name)).to(torch.bfloat16).cpu()
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config))
    return size


def copy_seconds(folder: Path, device: str) -> float:
    """How long safetensors takes to bring all tensors to the device, one after the other."""
    begin = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device=device) as file:
            for name in list(file.keys()):
                file.get_tensor(name)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def free_bytes(device: str) -> int:
    """Bytes that are free on the device, of all processes; 0 on the CPU."""
    return 0 if device == "cpu" else int(torch.cuda.mem_get_info(torch.device(device))[0])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def check_updates(
    engine: Engine, folder: Path, size: int, report: frame.Report, device: str
) -> None:
    """Times updates from a folder."""
    answers, seconds = [output_ids(engine)], []
    for _ in range(REPEATS):
        took, (success, message) = timed(lambda: engine.update_weights_from_disk(str(folder)))
        if not success:
            raise RuntimeError(message)
        seconds.append(took)
        answers.append(output_ids(engine))
        print(f"update: {took:.2f} s", flush=True)
    copies = [copy_seconds(folder, device) for _ in range(REPEATS)]
    ratio = min(seconds) / min(copies)
    report.put("update", {"bytes": size, "seconds": seconds, "copy_seconds": copies})
    report.hold("answers that change with the first update", answers[0] != answers[1], at_least=1)
    others = sum(answer != answers[1] for answer in answers[2:])
    report.hold("answers that change with later ones", others, at_most=0)
    report.hold("update over the bare copy", ratio, at_most=UPDATE_OVER_COPY)


def output_ids(engine: Engine) -> list[list[int]]:
    """Greedy tokens of a few prompts."""
    return [
        answer["output_ids"]
        for answer in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    ]


def main() -> None:
    """Updates the weights of an engine."""
    arguments = parser().parse_args()
    device: str = arguments.device
    config = dict(SHAPES[arguments.name].config)
    if arguments.shapes:
        config = json.loads((arguments.shapes / "config.json").read_text())
    with frame.Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        took, size = timed(lambda: write_checkpoint(folder, config, device))
        print(f"{size / 1e9:.1f} GB written in {took:.0f} s", flush=True)
        if device != "cpu":
            torch.cuda.empty_cache()
        options: dict[str, Any] = {
            "model_path": str(folder),
            "skip_tokenizer_init": True,
            "device": frame.engine_device(device),
            "load_format": "dummy",
            "mem_fraction_static": arguments.mem_fraction_static,
        }
        start_s, engine = timed(lambda: Engine(**options))
        print(f"started in {start_s:.0f} s", flush=True)
        with engine:
            check_updates(engine, folder, size, report, device)


if __name__ == "__main__":
    main()
