"""Shapes that people run: steps, compared with the time to move their bytes, and tokens per second.

    python benches/gpu/shapes_check.py --out DIR --pie-load BINARY [--names 8b,14b] \
        [--parts steps,throughput] [--peer-backends fa3,flashinfer] [--repeats N] [--results FILE]

Every shape has random weights, and processes of its own: `step_check.py` for the parts of `steps`,
`load_check.py` for those of `throughput`. FILE, `benches/results/shapes.json` unless it is named,
keeps what an earlier run found of other shapes and parts. Of each shape it has:

- `step_us`: microseconds of a decode step by rows, at 700 tokens a row (0.6b: 512);
- `bytes_us`: how long memory takes to move the weights and KV of such a step, as fast as a copy:
  4.3 TB/s on an H200, 3.0 on an H100; a row takes experts at random;
- `tokens_per_s`: of the standard workload, `ours`, `sglang` by backend, and the `limit` of
  :func:`least_s`, which a driver without any loss would make;
- `sources`: the device, date, commit and command of each of these.

The status is 1 when a process failed. A shape's steps take 1 to 2 minutes; its load and a backend
of SGLang's 1 to 2 minutes each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import frame
from frame import Report
from processes import Runner

FOLDER: Final = Path(__file__).parent
RESULTS: Final = frame.REPOSITORY / "benches" / "results" / "shapes.json"
ROWS: Final = (1, 16, 64)
BYTES_PER_S: Final = 4.3e12
"""Of a copy on an H200, bytes read and written."""
OTHER_BYTES_PER_S: Final = {"NVIDIA H100": 3.0e12}
"""The same on other GPUs, by a part of their names."""
FLOPS: Final = 7.0e14
"""Floating-point operations per second that cuBLAS reaches in bfloat16 on either GPU, at its power
limit (benches/notebook/gpu.md); in FP8 twice as many."""
LENGTHS: Final = frame.REPOSITORY / "benches" / "pie_load" / "lengths.json"
"""Prompts and outputs of the standard workload, in tokens."""
STEPS_S, LOAD_S = 240.0, 420.0
"""The longest that a process of each part may take."""

_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": 128009,
}  # fmt: skip
_QWEN: Final = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def _quantized(method: str, **how: Any) -> Mapping[str, Any]:
    """The 8B with weights of 4 bits, in groups of 128."""
    config = {"quant_method": method, "bits": 4, "group_size": 128, **how}
    return {**_LLAMA, "quantization_config": config}


class Shape(NamedTuple):
    """A model that people run."""

    config: Mapping[str, Any]
    """Its `config.json`."""
    context: int = 700
    """Tokens of each row of its steps."""
    options: tuple[str, ...] = ()
    """Lines of [driver.options]."""
    weight_bytes: float = 2.0
    """Of a number of a layer's matrices, scales and zeros of its group included."""


SHAPES: Final[Mapping[str, Shape]] = {
    "8b": Shape(_LLAMA),
    "14b": Shape({
        **_QWEN, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
        "num_attention_heads": 40,
    }),
    "0.6b": Shape(
        {
            **_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "tie_word_embeddings": True,
        },
        context=512,
    ),
    "3b": Shape({
        **_LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "tie_word_embeddings": True,
    }),
    "qwen2.5-7b": Shape({
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    }),
    "qwen3-4b": Shape({
        **_QWEN, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    }),
    "mistral-7b": Shape({
        **_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "vocab_size": 32768, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "sliding_window": None,
    }),
    "phi-4": Shape({
        **_LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
        "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "max_position_embeddings": 16384, "rope_theta": 250000.0, "bos_token_id": 100257,
        "eos_token_id": 100265, "pad_token_id": 100349, "original_max_position_embeddings": 16384,
        "rope_scaling": None,
    }),
    "30b-a3b": Shape({
        **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }),
    "8b-fp8": Shape(_LLAMA, options=('quantization = "fp8"',), weight_bytes=1.0),
    "8b-gptq": Shape(
        _quantized("gptq", desc_act=False, sym=True), weight_bytes=(4 + 16 / 128) / 8
    ),
    "8b-awq": Shape(
        _quantized("awq", zero_point=True, version="gemm"), weight_bytes=(4 + 20 / 128) / 8
    ),
}  # fmt: skip
"""By name."""


def layer_weights(shape: Shape, rows: float) -> float:
    """Numbers in the matrices of all layers that a step of so many rows reads.

    A row of a mixture of experts takes any of them with equal chances.
    """
    config = shape.config
    width, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    queries, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = width * dim * 2 * (queries + kv_heads)
    if "num_experts" in config:
        total, chosen = config["num_experts"], config["num_experts_per_tok"]
        taken = total * (1 - (1 - chosen / total) ** rows)
        mlp = 3 * width * config["moe_intermediate_size"] * taken + width * total
    else:
        mlp = 3 * width * config["intermediate_size"]
    return float(layers * (attention + mlp))


def weight_bytes(shape: Shape, rows: int) -> float:
    """Bytes of the weights that a step of so many rows reads, the LM head included."""
    head = 2 * shape.config["hidden_size"] * shape.config["vocab_size"]
    return layer_weights(shape, rows) * shape.weight_bytes + head


def token_bytes(shape: Shape) -> float:
    """Bytes of the KV of a token."""
    config = shape.config
    numbers = 2 * config["num_key_value_heads"] * config["head_dim"]
    return float(2 * numbers * config["num_hidden_layers"])


def moved_bytes(shape: Shape, rows: int) -> float:
    """Bytes that a decode step must move: weights once, and the KV of each row."""
    return weight_bytes(shape, rows) + rows * shape.context * token_bytes(shape)


def bytes_per_s(device: str) -> float:
    """What a copy moves. `device` is count and name of GPUs, as in a record."""
    others = (rate for name, rate in OTHER_BYTES_PER_S.items() if name in device)
    return next(others, BYTES_PER_S)


def bytes_us(shape: Shape, device: str) -> dict[str, float]:
    """How long memory takes to move the bytes of a step, in µs, by rows."""
    rate = bytes_per_s(device)
    return {str(rows): moved_bytes(shape, rows) / rate * 1e6 for rows in ROWS}


def least_s(shape: Shape, device: str, prompts: Sequence[int], outputs: Sequence[int]) -> float:
    """Seconds that requests take at least which all come at once, in tokens of each.

    First the products and the attention of all prompts, at :data:`FLOPS`. Then as many steps as the
    longest output has: weights are read while rows are multiplied, whichever takes longer, and
    the KV is read after that.
    """
    config, rate = shape.config, bytes_per_s(device)
    flops = FLOPS * (2 if shape.weight_bytes == 1 else 1)
    numbers = layer_weights(shape, 1)
    head = config["hidden_size"] * config["vocab_size"]
    scores = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    took = sum(2 * numbers * tokens + 2 * scores * tokens**2 for tokens in prompts) / flops
    for step in range(1, max(outputs)):
        seen = [tokens + step for tokens, last in zip(prompts, outputs, strict=True) if last > step]
        multiplied = 2 * (numbers + head) * len(seen) / flops
        took += max(weight_bytes(shape, len(seen)) / rate, multiplied)
        took += sum(seen) * token_bytes(shape) / rate
    return took


def limit_tokens_per_s(shape: Shape, device: str) -> float:
    """Tokens per second of the standard workload in the least time."""
    lengths = json.loads(LENGTHS.read_text())
    took = least_s(shape, device, lengths["prompts"], lengths["outputs"])
    return float(sum(lengths["outputs"])) / took


def step_us(record: frame.Record) -> dict[str, float]:
    """Microseconds of a step by rows: the mean of the record's runs of the usual way."""
    runs = [row["us_by_rows"] for row in record.rows if not row["way"]]
    return {str(rows): statistics.mean(run[str(rows)] for run in runs) for rows in ROWS}


def tokens_per_s(record: frame.Record) -> dict[str, Any]:
    """Tokens per second, `ours` and `sglang` by backend."""
    figures = {row["part"]: row["figures"] for row in record.rows}
    found: dict[str, Any] = figures["tokens_per_s"]
    return found


class Check:
    """The shapes and what was found of them."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        """Begins with what an earlier run has found."""
        self._arguments = arguments
        self._report = report
        self._out: Path = arguments.out
        self._runner = Runner(self._out / "shapes_check.log", arguments.budget_s)
        path: Path = arguments.results
        self._results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def play(self) -> None:
        """Plays the parts of every shape; a part that fails costs the others nothing."""
        parts = self._arguments.parts.split(",")
        for name in self._arguments.names.split(","):
            with tempfile.TemporaryDirectory() as folder:
                shape = SHAPES[name]
                Path(folder, "config.json").write_text(json.dumps(shape.config))
                if "steps" in parts:
                    self._steps(name, shape, folder)
                if "throughput" in parts:
                    self._throughput(name, shape, folder)
        self._report.hold("failed processes", len(self._runner.failed), at_most=0)
        self._runner.close()

    def _steps(self, name: str, shape: Shape, folder: str) -> None:
        path = self._out / f"{name}.steps.json"
        command: list[object] = [sys.executable, FOLDER / "step_check.py", "--shapes", folder]
        command += ["--rows", ",".join(map(str, ROWS)), "--lengths", shape.context]
        record = self._record(f"{name} steps", [*command, "--json", path], path, shape, STEPS_S)
        if record is not None:
            self._keep(name, step_us=step_us(record), bytes_us=bytes_us(shape, record.device))

    def _throughput(self, name: str, shape: Shape, folder: str) -> None:
        out = self._out / name
        out.mkdir(exist_ok=True)
        command: list[object] = [sys.executable, FOLDER / "load_check.py", "--shapes", folder]
        command += ["--parts", "throughput,peers"]
        command += ["--peer-backends", self._arguments.peer_backends]
        command += ["--repeats", self._arguments.repeats]
        command += ["--pie-load", self._arguments.pie_load, "--out", out]
        path = out / "load_check.json"
        record = self._record(f"{name} throughput", command, path, shape, LOAD_S)
        if record is not None:
            limit = limit_tokens_per_s(shape, record.device)
            self._keep(name, tokens_per_s={**tokens_per_s(record), "limit": limit})

    def _record(
        self, what: str, command: list[object], path: Path, shape: Shape, limit_s: float
    ) -> frame.Record | None:
        """Runs a check and reads its record; None, and a failed process, without one."""
        path.unlink(missing_ok=True)
        options = [word for line in shape.options for word in ("--option", line)]
        self._runner.run(what, [*command, *options], limit_s)
        if what in self._runner.failed or not path.exists():
            self._runner.failed += [] if what in self._runner.failed else [what]
            return None
        return frame.read(path)

    def _keep(self, name: str, **figures: Any) -> None:
        """Adds what was found of a shape to the record and to the results."""
        record = self._report.record
        self._report.add(name=name, **figures)
        row = self._results.setdefault(name, {})
        kinds = ("device", "date", "commit", "command")
        about = {kind: getattr(record, kind) for kind in kinds}
        row.update(figures)
        row.setdefault("sources", {}).update(dict.fromkeys(figures, about))
        text = json.dumps(self._results, indent=1, sort_keys=True)
        self._arguments.results.write_text(text + "\n")
        self._runner.say(f"{name}: {json.dumps(figures)}")


def names(text: str) -> str:
    """Names of shapes, with comma."""
    unknown = [name for name in text.split(",") if name not in SHAPES]
    if unknown:
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(f"no shape {', '.join(unknown)}; there are {known}")
    return text


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "pie-load")
    made.add_argument("--names", type=names, default=",".join(SHAPES))
    made.add_argument("--parts", default="steps,throughput")
    made.add_argument("--peer-backends", default="fa3,flashinfer")
    made.add_argument("--repeats", type=int, default=3, help="of the load; the last one counts")
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--budget-s", type=float, default=1800.0, help="seconds for all shapes")
    return made


def main() -> None:
    """Plays the shapes."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        Check(arguments, report).play()


if __name__ == "__main__":
    main()
