"""SGLang's `ModelRunner` with its own CUDA graphs, driven by Python: decode steps in microseconds.

    sglang_runner.py MODEL BACKEND [--batches 1,8,64,256] [--contexts 512,2048] [--steps 200]
        [--page-size 16] [--compile] [--device cuda]

A step is what a caller without a scheduler has to do: write the step's numbers, build the
`ForwardBatch`, have the runner replay its graph, take the arg-max and fetch the tokens. These are
the next step's input, and stay on the device. Prints the p50 of each batch and context, and what
its graph alone takes, launched back to back. Then comes what a step must read by then: weights (an
embedding only where it is the LM head, too), and keys and values of a token. A MODEL without
weights gets random ones. `--compile` is SGLang's `enable_torch_compile`, which is for decodes only
and takes minutes. `--device cpu` tries the script out; SGLang has no graphs there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

WARM_STEPS = 10
REPLAYS, ROUNDS = 20, 3
"""Launches of a graph that are timed together, and how often; the shortest time counts."""
PORT = 29517


def boot(
    model: Path, settings: Mapping[str, Any], prepare: Callable[[Any], None] | None = None
) -> Any:
    """A runner with its pools and graphs.

    Args:
        model: Its folder; without weights in it they are random.
        settings: Fields of SGLang's `ServerArgs`.
        prepare: Called with the runner before its graphs are captured.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.layers.rotary_embedding import base as rotary_base
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    if settings["device"] == "cpu":
        # Otherwise these two ask for kernels of GPUs.
        rotary_base._is_cpu = logits_processor._is_cpu = True
    args = ServerArgs(
        model_path=str(model), dtype="bfloat16", skip_tokenizer_init=True, log_level="error",
        disable_radix_cache=True,
        load_format="auto" if any(model.glob("*.safetensors")) else "dummy", **settings,
    )  # fmt: skip
    publish(args, role="scheduler")
    # What SGLang's scheduler does before it makes a runner.
    initialize_moe_config(args)
    initialize_bf16_gemm_config(args)
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(args), gpu_id=0, ps=ParallelState.trivial(),
        mem_fraction_static=args.mem_fraction_static, nccl_port=PORT, server_args=args,
    )  # fmt: skip
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    if prepare is not None:
        prepare(runner)
    runner.init_cuda_graphs()
    return runner


def decode_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of a runner for decodes of these batches."""
    most = max(arguments.batches)
    compiled = {"enable_torch_compile": True, "torch_compile_max_bs": most}
    return {
        "device": arguments.device, "attention_backend": arguments.backend,
        "page_size": arguments.page_size, "mem_fraction_static": arguments.mem_fraction,
        "max_running_requests": most, "cuda_graph_bs_decode": sorted(arguments.batches),
        "disable_prefill_cuda_graph": True, **(compiled if arguments.compile else {}),
    }  # fmt: skip


class Decode:
    """Contexts of one length, each of which gets a token in every step."""

    def __init__(self, runner: Any, batch: int, context: int, steps: int, page_size: int) -> None:
        pages = -(-(context + steps) // page_size)
        wanted = (batch * pages + 1) * page_size
        if wanted > runner.max_total_num_tokens:
            raise MemoryError(f"{wanted} slots of KV, {runner.max_total_num_tokens} at hand")
        self._runner, self._batch = runner, batch
        device = runner.device
        # Page 0 is SGLang's padding.
        order = 1 + torch.randperm(batch * pages).view(batch, pages, 1)
        self._slots = (order * page_size + torch.arange(page_size)).flatten(1)
        table = runner.req_to_token_pool.req_to_token
        table[:batch, : pages * page_size] = self._slots.to(table)
        self._rows = torch.arange(batch, device=device)
        self._tokens = torch.full((batch,), 7, device=device)
        self._length = context

    def step(self) -> list[int]:
        """Computes the next token of every context."""
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        batch, device = self._batch, self._rows.device
        slots = self._slots[:, self._length].to(device, non_blocking=True)
        self._length += 1
        lengths = torch.full((batch,), self._length)
        lens = lengths.to(device, non_blocking=True)
        forward = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=batch, input_ids=self._tokens,
            req_pool_indices=self._rows, seq_lens=lens, out_cache_loc=slots,
            seq_lens_sum=batch * self._length, seq_lens_cpu=lengths, positions=lens - 1,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip
        logits = self._runner.forward(forward).logits_output.next_token_logits
        self._tokens = logits.argmax(-1)
        tokens: list[int] = self._tokens.tolist()
        return tokens

    def graph_us(self) -> float | None:
        """Microseconds of the graph of one more step, launched back to back; None without one.

        The rows have random tokens: those of the same text would take the same experts.
        """
        graphs = self._runner.decode_cuda_graph_runner
        if not hasattr(graphs, "backend"):
            return None
        self._tokens = torch.randint_like(self._tokens, self._runner.model_config.vocab_size)
        self.step()
        times = []
        with graphs.backend.replay_session():
            for _ in range(ROUNDS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(REPLAYS):
                    graphs.backend.replay(graphs._replay_graph_key, None)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1000 / REPLAYS)
        return min(times)


def times_us(decode: Decode, steps: int) -> list[float]:
    """Of steps that are timed one by one."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        decode.step()
        times.append((time.perf_counter() - started) * 1e6)
    return times


def weight_bytes(model: torch.nn.Module) -> int:
    """Of what a decode step reads whole: each weight once, and no embedding but as the LM head."""
    head = getattr(model, "lm_head", None)
    head_places = {weight.data_ptr() for weight in head.parameters()} if head is not None else set()
    sizes = {}
    for name, weight in model.named_parameters():
        if "embed_tokens" not in name or weight.data_ptr() in head_places:
            sizes[weight.data_ptr()] = weight.nbytes
    return sum(sizes.values())


def token_bytes(runner: Any) -> int:
    """Of a token's keys and values in all layers."""
    pool = runner.token_to_kv_pool
    stored = (*pool.k_buffer, *pool.v_buffer)
    return sum(layer[0].nbytes for layer in stored)


def main() -> None:
    """Every batch and context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("backend")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--contexts", default="512,2048")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--mem-fraction", type=float, default=0.8)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for name in ("batches", "contexts"):
        setattr(arguments, name, [int(part) for part in getattr(arguments, name).split(",")])
    runner = boot(arguments.model, decode_settings(arguments))
    steps = WARM_STEPS + arguments.steps
    with torch.inference_mode():
        for context in arguments.contexts:
            for batch in arguments.batches:
                try:
                    # One more for the graph alone.
                    decode = Decode(runner, batch, context, steps + 1, arguments.page_size)
                except MemoryError as error:
                    print(f"runner {arguments.backend} {batch}x{context}: {error}", flush=True)
                    continue
                p50 = statistics.median(times_us(decode, steps)[WARM_STEPS:])
                graph = decode.graph_us()
                alone = "" if graph is None else f", {graph:.0f} us of its graph"
                print(
                    f"runner {arguments.backend} {batch}x{context}: {p50:.0f} us{alone}", flush=True
                )
    read = f"weights {weight_bytes(runner.model)}, a token {token_bytes(runner)}"
    print(f"runner bytes: {read}", flush=True)


if __name__ == "__main__":
    main()
