"""How long SGLang's own engine holds decodes up when a prompt joins them.

    sglang_mixed.py MODEL BACKEND [--decodes 64] [--prompts 256,512,1024,2048] [--repeats 8]

So many streams run, with prompts of 512 tokens; then one prompt after the other joins them. Prints
the median time between tokens, and for each length of a prompt the median of what the longest gap
at its arrival takes more. Chunks are mixed (`enable_mixed_chunk`) and prefills run as SGLang has
them by default. A MODEL without weights gets random ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

from sglang_engine import settings, vocabulary

CONTEXT = 512
SETTLED_S = 1.0
"""Between two prompts, and before the first one."""


class Streams:
    """Running decodes, and when their tokens came."""

    def __init__(self, engine: Any, vocab: int) -> None:
        self._engine = engine
        self._draw = random.Random(0)
        self._vocab = vocab
        self.times: list[list[float]] = []

    async def _run(self, length: int, output: int, times: list[float] | None) -> None:
        prompt = self._draw.choices(range(self._vocab), k=length)
        params = {"temperature": 0.6, "ignore_eos": True, "max_new_tokens": output}
        answers = await self._engine.async_generate(
            input_ids=prompt, sampling_params=params, stream=True
        )
        async for _ in answers:
            if times is not None:
                times.append(time.perf_counter())

    async def start(self, decodes: int, output: int) -> list[asyncio.Task[None]]:
        """Starts the decodes."""
        self.times = [[] for _ in range(decodes)]
        return [asyncio.create_task(self._run(CONTEXT, output, times)) for times in self.times]

    async def join(self, length: int) -> float:
        """Seconds of the longest gap between two tokens while a prompt joins."""
        before = [len(times) for times in self.times]
        await self._run(length, 2, None)
        await asyncio.sleep(0.1)
        return max(
            later - earlier
            for times, count in zip(self.times, before, strict=True)
            for earlier, later in itertools.pairwise(times[count - 1 :])
        )


async def play(engine: Any, arguments: argparse.Namespace, vocab: int) -> None:
    """All prompts, one after the other."""
    streams = Streams(engine, vocab)
    tasks = await streams.start(arguments.decodes, output=8000)
    await asyncio.sleep(5 * SETTLED_S)
    pairs = (pair for times in streams.times for pair in itertools.pairwise(times[20:]))
    usual = statistics.median(later - earlier for earlier, later in pairs)
    print(f"decodes {arguments.decodes}: {usual * 1e6:.0f} us a token", flush=True)
    for length in arguments.prompts:
        longest = []
        for _ in range(arguments.repeats):
            longest.append(await streams.join(length))
            await asyncio.sleep(SETTLED_S / 4)
        delay = statistics.median(longest) - usual
        print(f"prompt {length}: {delay * 1e6:.0f} us more", flush=True)
    for task in tasks:
        task.cancel()


def main() -> None:
    """Starts the engine and plays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("backend")
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--prompts", default="256,512,1024,2048")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--eager-prefill", action="store_true", help="capture no prefills")
    parser.add_argument("--mem-fraction", type=float, default=0.8)
    arguments = parser.parse_args()
    arguments.prompts = [int(length) for length in arguments.prompts.split(",")]

    import sglang

    vocab = vocabulary(arguments.model)
    chosen = settings(arguments.model, arguments.backend, arguments.mem_fraction, 256)
    chosen |= {
        "enable_mixed_chunk": True,
        "stream_interval": 1,
        "disable_prefill_cuda_graph": arguments.eager_prefill,
    }
    engine = sglang.Engine(**chosen)
    engine.loop.run_until_complete(play(engine, arguments, vocab))
    engine.shutdown()


if __name__ == "__main__":
    main()
