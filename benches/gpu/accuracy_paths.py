"""Processes of `accuracy_check.py`: engines answer path by path, transformers scores.

What they exchange is in a folder: `work.json`, which is a `Work`; a `WAY.npz` of each engine and a
`reference.npz`, whose arrays are named `PATH/FIELD` and `WAY/PATH/FIELD`. With n sequences of t
scored tokens each, and the k most probable tokens (0 where no log-probabilities were asked for):

- `tokens`, int64 [n, t]: token ids, generated greedily or those of the text;
- `logprob`, float64 [n, t]: their log-probabilities in nats, NaN where none were asked for;
- `top_ids`, int64 [n, t, k], and `top`, float64 [n, t, k]: the engine's most probable tokens;
- of the reference, `logprob` and `top`: its log-probabilities of the same tokens; `best_id`, int64
  [n, t], and `best`, float64 [n, t]: its most probable token.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np

TOP: Final = 16
"""Most probable tokens of each position, of which the KL divergence is computed."""
ROWS: Final = {"one": 1, "several": 16, "many": 256, "prefix": 256, "plain": 256, "prefill": 16}
"""Requests that a path submits together."""
GPU_TOKENS, CPU_TOKENS = 131_072, 32_768
"""Tokens of the KV pool."""
GPU_LOGITS, CPU_LOGITS = 2**30, 2**26
"""Logits that the reference computes at once."""
FLUSH_S: Final = 20.0
"""Until when an engine that has answered must be idle."""
_ADAPTED: Final = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")


class Way(NamedTuple):
    """An engine.

    Attributes:
        options: Arguments of the engine.
        paths: Keys of `ROWS`, in the order in which they run; `prefix` repeats the one before.
        quantized: Whether its weights are.
    """

    options: dict[str, Any]
    paths: tuple[str, ...]
    quantized: bool = False


SGLANG: Final = "sglang"
REFERENCE: Final = "transformers"
WAYS: Final = {
    SGLANG: Way({}, ("one", "several", "many", "prefix", "prefill")),
    "fused": Way({}, ("one", "several", "many", "prefix", "plain", "prefill")),
    "unfused": Way({"fuse_layers": False}, ("many", "prefill")),
    "drafts": Way({"speculative_algorithm": "NGRAM"}, ("several", "many")),
    "lora": Way({}, ("several", "many", "prefill")),
    "fp8": Way({"quantization": "fp8"}, ("one", "several", "many", "prefill"), quantized=True),
    "fp8-unfused": Way(
        {"quantization": "fp8", "fuse_layers": False}, ("several", "many", "prefill"),
        quantized=True,
    ),
}  # fmt: skip
"""Engines by name; the longest runs come first."""


class Work(msgspec.Struct):
    """What every engine is asked.

    Attributes:
        prompts: Token ids of prompts of several lengths.
        windows: Token ids of texts of one length, whose tokens but the first are scored.
        one: How many of the prompts the path `one` takes.
        output: Tokens to generate after each prompt.
    """

    prompts: list[list[int]]
    windows: list[list[int]]
    one: int
    output: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The work of a folder."""
        return msgspec.json.decode((folder / "work.json").read_bytes(), type=cls)

    def write(self, folder: Path) -> None:
        """Puts it into a folder."""
        (folder / "work.json").write_bytes(msgspec.json.encode(self))

    def contexts(self, path: str) -> list[list[int]]:
        """The tokens before the scored ones."""
        if path == "prefill":
            return [window[:1] for window in self.windows]
        return self.prompts[: self.one] if path == "one" else self.prompts


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the device: engines start side by side, and run one after the other."""
    with (folder.parent / "device.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_way(arguments: argparse.Namespace) -> None:
    """Starts an engine, plays its paths, and leaves what it said."""
    name, folder = arguments.way, arguments.work
    work, started = Work.read(folder), time.monotonic()
    found: dict[str, np.ndarray] = {}
    more: dict[str, Any] = {}
    if name == "lora":
        more["lora_path"] = "zero"
    engine = make_engine(arguments)
    print(f"{name}: ready after {time.monotonic() - started:.1f} s", flush=True)
    with alone(folder):
        for path in WAYS[name].paths:
            began = time.monotonic()
            played = play(engine, path, work, more)
            found |= {f"{path}/{field}": values for field, values in played.items()}
            print(f"{name}, {path}: {time.monotonic() - began:.1f} s", flush=True)
    if name == "drafts":
        counts = engine.get_server_info()["internal_states"][0]
        found["accepted"] = np.array(counts["accepted"])
    np.savez(folder / f"{name}.npz", **found)
    engine.shutdown()


def make_engine(arguments: argparse.Namespace) -> Any:
    """The engine of a way, ours or SGLang's."""
    name, on_cpu = arguments.way, arguments.device == "cpu"
    options: dict[str, Any] = {
        "model_path": str(arguments.model),
        "device": "cpu" if on_cpu else "cuda",
        "base_gpu_id": 0 if on_cpu else int(arguments.device.partition(":")[2] or 0),
        "dtype": arguments.dtype,
        "max_total_tokens": CPU_TOKENS if on_cpu else GPU_TOKENS,
        "skip_tokenizer_init": True,
        "log_level": "error",
        **WAYS[name].options,
    }
    if name == "lora":
        options["lora_paths"] = [f"zero={make_adapter(arguments.model, arguments.work / 'zero')}"]
    if name != SGLANG:
        from pie_driver_sglang import Engine

        if not on_cpu:
            options["mem_fraction_static"] = round(0.8 / arguments.parallel, 2)
        return Engine(**options)
    import sglang

    options |= {
        "attention_backend": "torch_native" if on_cpu else arguments.sglang_attention,
        "max_running_requests": ROWS["many"],
        "disable_prefill_cuda_graph": True,
    }
    if not on_cpu:
        # Others may allocate while it starts; the pool is limited by its tokens.
        options |= {"mem_fraction_static": 0.85, "cuda_graph_max_bs_decode": ROWS["many"]}
    return sglang.Engine(**options)


def run_sglang_on_cpu() -> None:
    """In SGLang's processes: without a GPU two of its modules would ask for CUDA kernels."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = logits_processor._is_cpu = True


def make_adapter(model: Path, folder: Path) -> Path:
    """Writes a LoRA adapter of rank 8 for every projection; B is zero, so it changes nothing."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in filter(_ADAPTED.search, file.keys()):
                rows, columns = file.get_slice(name).get_shape()
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                weights[f"{prefix}.lora_A.weight"] = torch.full((8, columns), 0.01)
                weights[f"{prefix}.lora_B.weight"] = torch.zeros(rows, 8)
    modules = sorted({name.split(".")[-3] for name in weights})
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def play(engine: Any, path: str, work: Work, more: dict[str, Any]) -> dict[str, np.ndarray]:
    """What an engine says by a path: the arrays of the module's docstring."""
    prefill, scored = path == "prefill", path != "plain"
    contexts = work.windows if prefill else work.contexts(path)
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1 if prefill else work.output}
    if scored:
        more = {**more, "return_logprob": True, "top_logprobs_num": TOP}
    if prefill:
        more["logprob_start_len"] = 0
    if path != "prefix":
        flush(engine)
    answers: list[dict[str, Any]] = []
    for first in range(0, len(contexts), ROWS[path]):
        some = contexts[first : first + ROWS[path]]
        answers += engine.generate(input_ids=some, sampling_params=params, **more)
    kind = "input" if prefill else "output"
    # A text's first token has no log-probability.
    skipped = 1 if prefill else 0
    infos = [answer["meta_info"] for answer in answers]
    said = [row[1:] for row in contexts] if prefill else [each["output_ids"] for each in answers]
    tokens = np.array(said, np.int64)
    found = {"tokens": tokens, "cached": np.array([info["cached_tokens"] for info in infos])}
    if not scored:
        nothing = np.empty((*tokens.shape, 0))
        none = np.full(tokens.shape, np.nan)
        return {**found, "logprob": none, "top": nothing, "top_ids": nothing.astype(np.int64)}
    logprobs = [info[f"{kind}_token_logprobs"][skipped:] for info in infos]
    top = [info[f"{kind}_top_logprobs"][skipped:] for info in infos]
    return {
        **found,
        "logprob": np.array([[entry[0] for entry in row] for row in logprobs]),
        "top": np.array([[[entry[0] for entry in each] for each in row] for row in top]),
        "top_ids": np.array([[[entry[1] for entry in each] for each in row] for row in top]),
    }


def flush(engine: Any) -> None:
    """Empties an engine's prefix cache. SGLang's is idle a little after its last answer."""
    end = time.monotonic() + FLUSH_S
    while True:
        done = engine.flush_cache()
        if getattr(done, "success", done):
            return
        if time.monotonic() > end:
            raise TimeoutError("the engine is not idle")
        time.sleep(0.05)


class _Wanted(NamedTuple):
    """Where scores of a sequence belong: a way's path, the row, and the tokens before."""

    name: str
    row: int
    context: int


def run_reference(arguments: argparse.Namespace) -> None:
    """Scores what all engines said, by transformers in float32; equal sequences once."""
    import torch
    import transformers

    work, folder = Work.read(arguments.work), arguments.work
    said, wanted = _read_said(work, folder)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval().to(arguments.device)
    found: dict[str, np.ndarray] = {}
    for name, fields in said.items():
        shape = fields["tokens"].shape
        found |= {f"{name}/{field}": np.empty(shape) for field in ("logprob", "best")}
        found[f"{name}/best_id"] = np.empty(shape, np.int64)
        found[f"{name}/top"] = np.empty(fields["top_ids"].shape)
    limit = CPU_LOGITS if arguments.device == "cpu" else GPU_LOGITS
    vocabulary = model.get_output_embeddings().weight.shape[0]
    with alone(folder), torch.inference_mode():
        for batch in _batches(sorted(wanted, key=len), limit // vocabulary):
            # The padding comes after what is scored, and causal attention does not see it.
            rows = [[*row, *[0] * (len(batch[-1]) - len(row))] for row in batch]
            logits = model(torch.tensor(rows, device=arguments.device), use_cache=False).logits
            for sequence, row in zip(batch, logits.float(), strict=True):
                scores = row.log_softmax(-1)
                for one in wanted[sequence]:
                    _score(scores, one, said[one.name], found)
    np.savez(folder / f"{REFERENCE}.npz", **found)


def _read_said(
    work: Work, folder: Path
) -> tuple[dict[str, dict[str, np.ndarray]], dict[tuple[int, ...], list[_Wanted]]]:
    """Tokens of each `WAY/PATH`, and where the scores of each different sequence belong."""
    said: dict[str, dict[str, np.ndarray]] = {}
    wanted: dict[tuple[int, ...], list[_Wanted]] = {}
    for way in filter(lambda way: (folder / f"{way}.npz").exists(), WAYS):
        with np.load(folder / f"{way}.npz") as arrays:
            for path in WAYS[way].paths:
                fields = {name: arrays[f"{path}/{name}"] for name in ("tokens", "top_ids")}
                said[f"{way}/{path}"] = fields
                contexts = zip(work.contexts(path), fields["tokens"].tolist(), strict=True)
                for row, (context, tokens) in enumerate(contexts):
                    place = _Wanted(f"{way}/{path}", row, len(context))
                    wanted.setdefault((*context, *tokens), []).append(place)
    return said, wanted


def _batches(sequences: Sequence[tuple[int, ...]], limit: int) -> Iterator[list[tuple[int, ...]]]:
    """Sequences of rising length, as many at once as have no more than `limit` tokens padded."""
    batch: list[tuple[int, ...]] = []
    for sequence in sequences:
        if batch and (len(batch) + 1) * len(sequence) > limit:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def _score(
    scores: Any, one: _Wanted, said: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> None:
    """Puts the reference's log-probabilities ``[tokens, vocabulary]`` where they belong."""
    import torch

    tokens, top_ids = (said[name][one.row] for name in ("tokens", "top_ids"))
    scores = scores[one.context - 1 : one.context - 1 + len(tokens)]
    best = scores.max(-1)
    ids = torch.as_tensor(np.column_stack([tokens, top_ids]), device=scores.device)
    gathered = scores.gather(1, ids).cpu().numpy()
    found[f"{one.name}/best"][one.row] = best.values.cpu().numpy()
    found[f"{one.name}/best_id"][one.row] = best.indices.cpu().numpy()
    found[f"{one.name}/logprob"][one.row] = gathered[:, 0]
    found[f"{one.name}/top"][one.row] = gathered[:, 1:]


def run(arguments: argparse.Namespace) -> None:
    """Runs a way, or the reference, in this process."""
    if arguments.way == REFERENCE:
        run_reference(arguments)
    else:
        run_way(arguments)
    # The interpreter's end would wait for SGLang's threads.
    os._exit(0)
