"""The parts of `vllm_check.py`, each of which is a process: `vllm_parts.py PART [SHAPE]`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import vllm_kernels
from vllm_report import find, tried

os.environ.setdefault("VLLM_PLUGINS", "")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LENGTHS: Final = Path(__file__).resolve().parents[1] / "pie_load" / "lengths.json"
PROMPTS: Final = 16
STEPS: Final = 32
ROWS: Final = (1, 16, 64, 256)
CONTEXT: Final = 512
MORE: Final = 64
"""Tokens by which the longer of two answers is longer."""
PAGE: Final = 16
POOL_TOKENS: Final = 245_000
"""Of either side: they share the GPU with processes that wait. The workload has 169,000 at once."""
GRAPH_TOKENS: Final = 140_000
"""Of the pool whose pages the steps of `graphs` are scattered over."""
EXPECTED_S: Final = 170.0
"""How long :func:`agree` waits for :func:`expected`."""
REPEATS: Final = 2
TEXTS: Final = (
    "The capital of France is Paris, and the river that runs through it is the Seine.",
    "Water boils at 100 degrees at sea level; on a mountain it boils at less, because the air "
    "presses less on it.",
    "A program that reads a file should close it again, also where something fails meanwhile.",
    "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat.",
    "A page of a book has two sides, and a page of memory has none; both are turned to be read.",
)
WAYS: Final[dict[str, dict[str, Any]]] = {
    "captured, fused": {},
    "eager, fused prefills": {"enforce_eager": True},
    "captured, vLLM's layers": {"fuse_layers": False},
    "eager, vLLM's layers": {"fuse_layers": False, "enforce_eager": True},
    "FLASH_ATTN": {"attention_backend": "FLASH_ATTN"},
    "TRITON_ATTN": {"attention_backend": "TRITON_ATTN"},
}


def wait_for_turn() -> None:
    """Says that this process is ready, and waits until the others have measured."""
    print("ready", flush=True)
    sys.stdin.readline()


def prompts_of(model: Path) -> list[list[int]]:
    """Beginnings of texts, of several lengths, in a model's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = [tokenizer.encode(" ".join((TEXTS * 6)[number:])).ids for number in range(len(TEXTS))]
    return [encoded[row % len(TEXTS)][: 5 + 13 * row] for row in range(PROMPTS)]


def shape_folder(name: str, folder: str) -> Path:
    """A folder with a shape's `config.json`."""
    from shapes_check import SHAPES

    Path(folder, "config.json").write_text(json.dumps(SHAPES[name].config))
    return Path(folder)


class Vllm:
    """Scheduler and runner of vLLM, as its `LLM` runs them; that class wants a newer `openai`."""

    def __init__(self, model: Path, **settings: Any) -> None:
        """Loads a model."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        begin = time.perf_counter()
        common = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enable_prefix_caching": False}
        self._engine = LLMEngine.from_engine_args(EngineArgs(str(model), **common, **settings))
        self._requests = 0
        print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)

    def answers(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """The answer of each prompt, all at once."""
        names = [str(self._requests + number) for number in range(len(prompts))]
        self._requests += len(prompts)
        for name, prompt, asked in zip(names, prompts, params, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, asked)
        found = {}
        while self._engine.has_unfinished_requests():
            for answer in self._engine.step():
                if answer.finished:
                    found[answer.request_id.partition("-")[0]] = answer.outputs[0]
        return [found[name] for name in names]


def expected(failed: list[str], model: Path, out: Path) -> None:
    """Greedy tokens and their log-probabilities by vLLM itself, for :func:`agree`."""
    with tried("vLLM", failed):
        from vllm import SamplingParams

        vllm = Vllm(
            model, enforce_eager=True, max_model_len=2048, gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=1 << 30,
        )  # fmt: skip
        prompts = prompts_of(model)
        sampling = SamplingParams(
            temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=0, detokenize=False
        )
        answers = vllm.answers(prompts, [sampling] * len(prompts))
        tokens = [list(answer.token_ids) for answer in answers]
        logprobs = [
            [step[token].logprob for step, token in zip(a.logprobs, a.token_ids, strict=True)]
            for a in answers
        ]
        whole = json.dumps({"tokens": tokens, "logprobs": logprobs})
        # At once, because `agree` waits for it.
        (out / "expected.new").write_text(whole)
        (out / "expected.new").rename(out / "expected.json")
        print("first tokens", tokens[0][:8], "of the longest", tokens[-1][:8], flush=True)
        find(prompts=len(tokens))


class Driver:
    """The driver's planner and executor in this process, without a client."""

    def __init__(self, model: Path, folder: Path, options: dict[str, Any], tokens: int) -> None:
        """Loads a model, with so many tokens of KV."""
        import msgspec
        from serving import write_config

        from pie_driver_sglang import _core
        from pie_driver_sglang.backends.vllm.library import LIBRARY
        from pie_driver_sglang.config.config_file import load_config
        from pie_driver_sglang.ranks.types import ALONE

        lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        path = write_config(folder, model, lines, spin_budget_us=None, group=os.getpid() % 100_000)
        config = load_config(path, LIBRARY.rules)
        limited = msgspec.structs.replace(config.driver, max_pages=tokens // PAGE)
        config = msgspec.structs.replace(config, driver=limited)
        name = f"/pie_shmem_g{config.driver.group_id}"
        self.server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        # The region has no client: only its planner is used.
        self.server.unlink()
        planner, self.executor = LIBRARY.load_rank(config, ALONE)
        self.server.serve(planner, self.executor.block.data, print, host_pages=0)
        print("active:", json.dumps(self.executor.active), flush=True)

    def greedy(self, prompts: Sequence[Sequence[int]], steps: int) -> Any:
        """Greedy tokens of prompts that are decoded together, and ``[vocabulary]`` for each."""
        import torch

        from pie_driver_sglang import _core
        from pie_driver_sglang._core import Request, Sampler

        texts: list[list[int]] = [list(prompt) for prompt in prompts]
        kept: list[list[Any]] = [[] for _ in prompts]
        pages, first = [], 0
        for prompt in prompts:
            count = -(-(len(prompt) + steps) // PAGE)
            pages.append(list(range(first, first + count)))
            first += count
        for step in range(steps):
            requests = []
            for text, own in zip(texts, pages, strict=True):
                start = 0 if step == 0 else len(text) - 1
                end = len(text)
                sampler = [(end - start - 1, Sampler.greedy())]
                requests.append(
                    Request(
                        text[start:end], list(range(start, end)), own[: -(-end // PAGE)],
                        (end - 1) % PAGE + 1, sampler,
                    )
                )  # fmt: skip
            batch = self.server.warm_up(_core.encode_forward(requests))
            chosen: list[Any] = []
            while (staged := batch.stage()) is not None:
                self.executor.forward(staged)
                while (group := batch.stage_slots()) is not None:
                    logits = self.executor.slot_logits(group)
                    chosen.append(logits.log_softmax(-1).cpu())
                    batch.put_outputs(self.executor.sample(group).tokens.numpy())
            batch.commit()
            rows = torch.cat(chosen)
            for text, own_rows, row in zip(texts, kept, rows, strict=True):
                text.append(int(row.argmax()))
                own_rows.append(row)
        news = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
        return news, kept

    def close(self) -> None:
        """Frees the GPU's memory, as far as vLLM lets go of it."""
        import torch

        del self.executor, self.server
        gc.collect()
        torch.cuda.empty_cache()


def _compared(own: Any, tokens: Any, logprobs: Any) -> dict[str, float]:
    """How near other tokens are, of which `logprobs` are theirs.

    Returns:
        The share of equal prompts, the largest and the mean difference of log-probabilities as far
        as tokens are equal, and by how much the first other token is less probable here: a tie
        in bfloat16 if it is little.
    """
    apart, ties, equal = [], [0.0], 0
    for mine, rows, theirs, of_theirs in zip(*own, tokens, logprobs, strict=True):
        pairs = zip(mine, theirs, strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(mine))
        apart += [abs(float(rows[n][mine[n]]) - of_theirs[n]) for n in range(same)]
        if same == len(mine):
            equal += 1
        else:
            ties.append(float(rows[same][mine[same]] - rows[same][theirs[same]]))
    return {
        "equal": equal / len(tokens),
        "logprobs_apart": max(apart, default=float("nan")),
        "mean_apart": statistics.mean(apart) if apart else float("nan"),
        "widest_tie": max(ties),
    }


def _chosen(found: Any) -> tuple[Any, Any]:
    """Tokens, and the log-probability of each."""
    tokens, rows = found
    pairs = zip(tokens, rows, strict=True)
    return tokens, [[float(row[n]) for row, n in zip(r, t, strict=True)] for t, r in pairs]


def agree(failed: list[str], model: Path, out: Path) -> None:
    """Every way of the driver against the others, and against vLLM."""
    prompts = prompts_of(model)
    answers: dict[str, Any] = {}
    for way, options in WAYS.items():
        with tried(way, failed), tempfile.TemporaryDirectory() as folder:
            common = {"max_model_len": 2048, "max_num_seqs": 32}
            driver = Driver(model, Path(folder), {**common, **options}, 40_000)
            answers[way] = found = driver.greedy(prompts, STEPS)
            print(f"{way}: first tokens {found[0][0][:8]}, of the longest {found[0][-1][:8]}")
            for other, given in answers.items():
                figures = _compared(found, *_chosen(given))
                print(f"{way}, against {other}: {figures}", flush=True)
            driver.close()
            del driver
    path, begin = out / "expected.json", time.monotonic()
    while not path.exists() and time.monotonic() - begin < EXPECTED_S:
        time.sleep(0.5)
    theirs = json.loads(path.read_text())
    for way, found in answers.items():
        figures = _compared(found, theirs["tokens"], theirs["logprobs"])
        print(f"{way}, against vLLM: {figures}", flush=True)
        find(**{way: figures})


def experts(failed: list[str]) -> None:
    """Four layers of 30B-A3B with random weights: every way of the driver against the others.

    A pass of 16 prompts comes first, and decodes are captured before and after larger ones.
    """
    import torch
    from shapes_check import SHAPES

    answers: dict[str, Any] = {}
    for way in ("captured, fused", "captured, vLLM's layers", "eager, vLLM's layers"):
        with tried(way, failed), tempfile.TemporaryDirectory() as folder:
            shape = {**SHAPES["30b-a3b"].config, "num_hidden_layers": 4, "vocab_size": 4096}
            Path(folder, "config.json").write_text(json.dumps(shape))
            options = {"load_format": "dummy", "max_num_seqs": 32, "max_model_len": 2048}
            driver = Driver(Path(folder), Path(folder), {**options, **WAYS[way]}, 40_000)
            draw = torch.Generator(device="cuda").manual_seed(1)
            for name, weight in driver.executor.backend._model.named_parameters():
                # Folded norms are ones.
                if "norm" in name:
                    weight.data.fill_(1.0)
                else:
                    weight.data.normal_(std=0.04, generator=draw)
            prompts = [
                [(31 * row + 7 * n) % 4000 for n in range(3 + 90 * row)] for row in range(16)
            ]
            answers[way] = found = driver.greedy(prompts, STEPS)
            for other, given in answers.items():
                figures = _compared(found, *_chosen(given))
                print(f"experts {way}, against {other}: {figures}", flush=True)
                find(**{f"{way} / {other}": figures})
            driver.close()
            del driver


def graphs(failed: list[str], shape: str) -> None:
    """Microseconds of a step's graph, launched back to back, by rows."""
    import torch

    from pie_driver_sglang.engine.cuda_graphs import CudaGraphRunner
    from pie_driver_sglang.memory.graphs import plain_specs

    with tried(f"graphs of {shape}", failed), tempfile.TemporaryDirectory() as folder:
        options = {"load_format": "dummy", "max_num_seqs": 256, "max_model_len": 2048,
                   "enforce_eager": True}  # fmt: skip
        driver = Driver(shape_folder(shape, folder), Path(folder), options, GRAPH_TOKENS)
        executor = driver.executor
        for stored in executor.backend.kv_pages():
            stored.normal_(std=0.05)
        steps = CudaGraphRunner(executor, plain_specs(ROWS), max(ROWS))
        pages = -(-CONTEXT // PAGE)
        own = torch.randperm(executor.model_info.total_pages - 1, device="cuda") + 1
        slots = own[: 256 * pages].view(256, pages, 1) * PAGE + torch.arange(PAGE, device="cuda")
        executor.block_table.slots[1:257, : pages * PAGE] = slots.flatten(1).int()
        wait_for_turn()
        for rows in ROWS:
            with tried(f"{rows} rows", failed):
                fields = next(graph.host for graph in steps._graphs if graph.rows == rows)
                for field in fields.values():
                    field.zero_()
                fields["seq_lens"].fill_(CONTEXT)
                fields["positions"].fill_(CONTEXT - 1)
                fields["req_pool_indices"][:] = torch.arange(1, rows + 1)
                fields["out_cache_loc"][:] = slots.flatten(1)[:rows, CONTEXT - 1].cpu()
                fields["input_ids"][:] = torch.randint(executor.model_info.vocab_size, (rows,))
                torch.cuda.synchronize()
                us = min(steps.time(rows, 20) for _ in range(3))
                print(f"graph of {rows} rows: {us:.0f} us", flush=True)
                find(**{f"graph_us {rows}": us})


Generate = Callable[[list[list[int]], list[int]], int]
"""Prompts and the tokens to answer each with -> the tokens that were answered."""


def measure(failed: list[str], vocabulary: int, generate: Generate) -> None:
    """Steps by rows, and the standard workload."""
    draw = random.Random(0)

    def seconds(rows: int, count: int) -> float:
        prompts = [draw.choices(range(vocabulary), k=CONTEXT) for _ in range(rows)]
        begin = time.perf_counter()
        assert generate(prompts, [count] * rows) == rows * count
        return time.perf_counter() - begin

    wait_for_turn()
    for rows in ROWS:
        with tried(f"steps of {rows} rows", failed):
            seconds(rows, 4)
            took = [seconds(rows, MORE + 1) - seconds(rows, 1) for _ in range(2)]
            us = min(took) / MORE * 1e6
            print(f"step of {rows} rows: {us:.0f} us", flush=True)
            find(**{f"step_us {rows}": us})
    lengths = json.loads(LENGTHS.read_text())
    for repeat in range(REPEATS):
        with tried(f"standard workload {repeat}", failed):
            prompts = [draw.choices(range(vocabulary), k=n) for n in lengths["prompts"]]
            begin = time.perf_counter()
            said = generate(prompts, lengths["outputs"])
            rate = said / (time.perf_counter() - begin)
            print(f"repeat {repeat}: {said} tokens, {rate:.0f} tokens/s", flush=True)
            find(tokens_per_s=rate)


def ours(failed: list[str], shape: str) -> None:
    """The driver on vLLM, by `Engine`."""
    from pie_driver_sglang import Engine

    with tempfile.TemporaryDirectory() as folder, tried(f"ours, {shape}", failed):
        path = shape_folder(shape, folder)
        begin = time.perf_counter()
        engine = Engine(
            model_path=str(path), engine="vllm", device="cuda", load_format="dummy",
            dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=256,
            max_total_tokens=POOL_TOKENS,
        )  # fmt: skip
        print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
        print("info:", engine.get_server_info().get("active"), flush=True)
        vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]

        def generate(prompts: list[list[int]], counts: list[int]) -> int:
            sampling = [
                {"temperature": 0.6, "ignore_eos": True, "max_new_tokens": n} for n in counts
            ]
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            return sum(len(answer["output_ids"]) for answer in answers)

        with engine:
            measure(failed, vocabulary, generate)


def vllm_alone(failed: list[str], shape: str, *, compiles: bool) -> None:
    """VLLM itself, with its defaults but for its memory, which it shares here."""
    with tempfile.TemporaryDirectory() as folder, tried(f"vLLM, {shape}", failed):
        from shapes_check import SHAPES, token_bytes
        from vllm import SamplingParams

        path = shape_folder(shape, folder)
        vllm = Vllm(
            path, load_format="dummy", max_num_seqs=256, gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=int(POOL_TOKENS * token_bytes(SHAPES[shape])),
            enforce_eager=not compiles,
        )  # fmt: skip
        vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]

        def generate(prompts: list[list[int]], counts: list[int]) -> int:
            sampling = [
                SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False)
                for n in counts
            ]
            return sum(len(answer.token_ids) for answer in vllm.answers(prompts, sampling))

        measure(failed, vocabulary, generate)


def main() -> None:
    """One part."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("part")
    made.add_argument("shape", nargs="?", default="")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--no-compile", action="store_true")
    arguments = made.parse_args()
    failed: list[str] = []
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: vllm_kernels.check(failed),
        "expected": lambda: expected(failed, arguments.model, arguments.out),
        "agree": lambda: agree(failed, arguments.model, arguments.out),
        "experts": lambda: experts(failed),
        "graphs": lambda: graphs(failed, arguments.shape),
        "ours": lambda: ours(failed, arguments.shape),
        "vllm": lambda: vllm_alone(failed, arguments.shape, compiles=not arguments.no_compile),
    }
    with tried(arguments.part, failed):
        parts[arguments.part]()
    sys.stdout.flush()
    # The interpreter's end would wait for vLLM's threads and processes.
    os._exit(bool(failed))


if __name__ == "__main__":
    main()
