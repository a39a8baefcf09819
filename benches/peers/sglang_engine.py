"""SGLang's own engine on the standard workload: output tokens per second.

    sglang_engine.py MODEL BACKEND [--repeats N] [--lengths FILE] [--mem-fraction F]
        [--quantization METHOD]

256 requests, handed over all at once: prompt and output lengths uniform in 100..1024, as
`pie_load/lengths.json` has them, random prompts, temperature 0.6, no end before the asked length.
Prompts are drawn anew for each repeat. BACKEND is SGLang's `attention_backend`. A MODEL without
weights gets random ones. Prints a line for each repeat; the first one pays for what is compiled on
the way.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

LENGTHS = Path(__file__).parents[1] / "pie_load" / "lengths.json"


def settings(
    model: Path, backend: str, mem_fraction: float, requests: int, quantization: str | None = None
) -> dict[str, Any]:
    """The engine's arguments. Prefixes are all different, so that a radix cache is only work."""
    weights = any(model.glob("*.safetensors"))
    return {
        "model_path": str(model),
        "attention_backend": backend,
        "load_format": "auto" if weights else "dummy",
        "quantization": quantization,
        "mem_fraction_static": mem_fraction,
        "max_running_requests": requests,
        "cuda_graph_max_bs_decode": requests,
        "disable_prefill_cuda_graph": True,
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "log_level": "error",
    }


def vocabulary(model: Path) -> int:
    """Number of tokens, as the model's config says."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def main() -> None:
    """Starts the engine and plays the repeats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("backend")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=Path, default=LENGTHS)
    parser.add_argument("--mem-fraction", type=float, default=0.85)
    parser.add_argument("--quantization", help="of a model that is loaded as it is otherwise")
    arguments = parser.parse_args()

    import sglang

    lengths = json.loads(arguments.lengths.read_text())
    vocab, draw = vocabulary(arguments.model), random.Random(0)
    sampling = [
        {"temperature": 0.6, "ignore_eos": True, "max_new_tokens": count}
        for count in lengths["outputs"]
    ]
    asked = sum(lengths["outputs"])
    chosen = settings(
        arguments.model, arguments.backend, arguments.mem_fraction, len(sampling),
        arguments.quantization,
    )  # fmt: skip
    engine = sglang.Engine(**chosen)
    for repeat in range(arguments.repeats):
        prompts = [draw.choices(range(vocab), k=count) for count in lengths["prompts"]]
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - begin
        said = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        assert said == asked, f"{asked} tokens were asked for, {said} came"
        speed = f"{said} tokens in {seconds:.2f} s = {said / seconds:.0f} tok/s"
        print(f"sglang {arguments.backend} repeat {repeat}: {speed}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
