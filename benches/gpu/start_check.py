"""Measures starts on a GPU: process start to first token over HTTP, and the pause of a restart.

    python benches/gpu/start_check.py --small CONFIG_DIR --large CONFIG_DIR --middle CONFIG_DIR
        [--parts warm-0.6b,restart,rank,replicas,first-3b,warm-8b,ahead-3b] [--peer]
        [--budget-s 360] [--results benches/results/start.json]

Each CONFIG_DIR has the `config.json` of a model: about 0.6B, 8B and 3B. Checkpoints of that shape
with random bfloat16 weights are written to a temporary folder, and so are in the page cache, with a
tokenizer that has a text for every token.

1. `warm-0.6b`, `warm-8b`: kernel caches of an earlier start, which is not counted.
2. `first-3b`: with empty caches of Triton and NVRTC.
3. `ahead-3b`: three starts with empty caches: kernels are compiled in parallel processes, by
   `pie-sglang warm` before, and by the driver alone.
4. `restart`: the driver of the 0.6B is killed under 64 streams: the longest pause of one.
5. `rank`: the same on two GPUs, where the second rank is killed.
6. `replicas`: a start of two replicas of the 0.6B on two GPUs, with warm caches.

Forks are checked by the time until the first replica's scheduler runs: one that imports SGLang
takes seconds. A server that cannot fork says why.

With `--peer` SGLang's own server starts once beside each. What does not fit into the budget is left
out. The figures so far are written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import frame
import numpy as np
import psutil
import texts
from frame import Report

from pie_driver_sglang.backends.sglang.compile_ahead import COMPILE_AHEAD
from pie_driver_sglang.cli.bench_start import (
    OURS,
    PEER,
    empty_caches,
    server_command,
    started_server,
)
from pie_driver_sglang.fork_server.starter import ENABLED

PORT: Final = 31655
STREAMS: Final = 64
PROMPT: Final = "Hello"
OUTPUT: Final = 8000
"""Tokens of a stream: more than come until the end of the measurement. A step takes 1 ms at least,
and all streams fit into the pool."""
RUN_S: Final = 2.0
"""How long streams decode before the driver is killed, and after the pause."""
PAUSE_LIMIT_S: Final = 60.0
SHARD: Final = 2 << 30
BLOCK: Final = 1 << 24
"""Random values that are repeated."""
BARS: Final = {
    "warm-0.6b": 6.0,
    "warm-8b": 14.0,
    "first-3b": 45.0,
    "ahead-3b": 0.6,
    "restart": 3.0,
    "rank": 6.0,
    "replicas": 12.0,
}
FORK_S: Final = 2.0
"""How long a forked scheduler takes to run."""


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a dense Llama or Qwen3 checkpoint, by name."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


def write_checkpoint(shapes: Path, folder: Path) -> Path:
    """A folder with a config, a tokenizer and random weights in files of about 2 GiB."""
    folder.mkdir(parents=True)
    shutil.copy(shapes / "config.json", folder)
    config = json.loads((folder / "config.json").read_text())
    texts.make_tokenizer(folder, config["vocab_size"])
    # Normal values of 0.02 as bfloat16, which is the upper half of float32.
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    ones = np.full(1 << 16, 0x3F80, np.uint16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in tensor_shapes(config).items():
        if size > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard, block, ones)
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def _write_shard(
    path: Path, shard: dict[str, tuple[int, ...]], block: np.ndarray, ones: np.ndarray
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shard.values():
            # Norms have one dimension.
            source, left = (ones if len(shape) == 1 else block), math.prod(shape)
            while left:
                part = source[:left]
                file.write(part.data)
                left -= len(part)


class Starts:
    """The parts, and what they have found."""

    def __init__(self, arguments: argparse.Namespace, report: Report, folder: Path) -> None:
        """Nothing is measured yet."""
        self.found: dict[str, Any] = {}
        self._arguments, self._report, self._folder = arguments, report, folder
        self._end = time.monotonic() + arguments.budget_s
        self._models: dict[str, Path] = {}

    def left_s(self) -> float:
        """Of the budget."""
        return self._end - time.monotonic()

    def warm(self, size: str, shapes: Path) -> float:
        """Seconds of a start with warm caches, the median of two; one more fills the caches."""
        model = self._model(size, shapes)
        self._fill(size, model)
        seconds = [self._start(OURS, f"{size}, warm", model) for _ in range(2)]
        self._put(size, {"warm_s": statistics.median(seconds)})
        self._put(size, self._peer(size, model, {}))
        with contextlib.suppress(Exception):
            # Every process imports by itself, one after the other.
            alone = self._start(OURS, f"{size}, without forks", model, {ENABLED: "0"})
            self._put(size, {"without_forks_s": alone})
        return float(statistics.median(seconds))

    def first(self, size: str, shapes: Path) -> float:
        """Seconds of a start with empty kernel caches."""
        model = self._model(size, shapes)
        with tempfile.TemporaryDirectory(dir=self._folder) as caches:
            variables = empty_caches(Path(caches))
            seconds = self._start(OURS, f"{size}, first", model, variables)
            self._put(size, {"first_s": seconds})
            again = self._start(OURS, f"{size}, second", model, variables)
        self._put(size, {"second_s": again})
        with tempfile.TemporaryDirectory(dir=self._folder) as caches:
            self._put(size, self._peer(size, model, empty_caches(Path(caches))))
        return seconds

    def ahead(self, size: str, shapes: Path) -> float:
        """Seconds of a start with empty caches, over those of one that compiles by itself.

        What fails is shown, and the others are tried. A start that is cut off by the budget counts
        as long as it was: it would have taken longer.
        """
        model = self._model(size, shapes)
        seconds: dict[str, float] = {}
        for name, value in (("ahead_s", "1"), ("warmed_s", "1"), ("alone_s", "0")):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(dir=self._folder) as caches:
                variables = {**empty_caches(Path(caches)), COMPILE_AHEAD: value}
                try:
                    if name == "warmed_s":
                        self._warm_kernels(model, variables)
                    seconds[name] = self._start(OURS, f"{size}, {name}", model, variables)
                except Exception as error:
                    print(f"    {name} failed: {error}", flush=True)
                    seconds[f"{name}_failed_after"] = time.monotonic() - began
                self._put(f"{size}-ahead", seconds)
        return seconds["ahead_s"] / (seconds.get("alone_s") or seconds["alone_s_failed_after"])

    def _warm_kernels(self, model: Path, variables: dict[str, str]) -> None:
        """Runs `pie-sglang warm` with caches of its own."""
        began = time.monotonic()
        command = [sys.executable, "-m", "pie_driver_sglang", "warm", str(model)]
        command += self._arguments.flag
        environment = {**os.environ, **variables}
        limit = max(10.0, self.left_s())
        done = subprocess.run(
            command, env=environment, timeout=limit, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        self._report.add(part="warm", seconds=seconds, status=done.returncode, text=done.stdout)
        print(f"    warm: {seconds:.1f} s: {done.stdout}{done.stderr[-500:]}", flush=True)

    def restart(self, size: str, shapes: Path) -> float:
        """The longest pause of 64 streams whose driver is killed."""
        return self._pause(size, shapes, "restart_pause_s", kill_driver)

    def rank(self, size: str, shapes: Path) -> float:
        """The same on two GPUs, where the second rank is killed."""
        return self._pause(size, shapes, "rank_pause_s", kill_rank, ["--tp-size", "2"])

    def replicas(self, size: str, shapes: Path) -> float:
        """Seconds of a start of two replicas on two GPUs."""
        model = self._model(size, shapes)
        self._fill(size, model)
        flags = ["--dp-size", "2"]
        seconds = self._start(OURS, f"{size}, two replicas", model, flags=flags)
        self._put(size, {"replicas_s": seconds})
        return seconds

    def _pause(
        self,
        size: str,
        shapes: Path,
        key: str,
        kill: Callable[[int], float],
        flags: Sequence[str] = (),
    ) -> float:
        model = self._model(size, shapes)
        command = server_command(OURS, str(model), PORT, self._arguments.device, flags)
        environment = {**os.environ, ENABLED: "1"}
        with started_server(command, PORT, environment, max(10.0, self.left_s())):
            streams = killed_streams(PORT, kill)
        for error in {str(stream.error) for stream in streams if stream.error}:
            print(f"    {error}", flush=True)
        pauses = [stream.longest_gap_s for stream in streams]
        worst = max(pauses)
        self._report.add(part=key, pauses_s=pauses)
        wrong = sum(stream.wrong for stream in streams)
        self._report.hold(f"{key}: events that do not continue their stream", wrong, at_most=0)
        print(f"    longest pause {worst:.2f} s, median {statistics.median(pauses):.2f}")
        self._put(key, {size: round(worst, 3)})
        return worst

    def _model(self, size: str, shapes: Path) -> Path:
        if size not in self._models:
            begun = time.monotonic()
            self._models[size] = write_checkpoint(shapes, self._folder / size)
            print(f"    wrote {size} in {time.monotonic() - begun:.1f} s", flush=True)
        return self._models[size]

    def _start(
        self,
        side: str,
        what: str,
        model: Path,
        variables: dict[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> float:
        words = [*self._arguments.flag, *flags]
        command = server_command(side, str(model), PORT, self._arguments.device, words)
        environment = {**os.environ, ENABLED: "1", **(variables or {})}
        with started_server(command, PORT, environment, max(10.0, self.left_s())) as found:
            pass
        seconds = float(found["first_token_s"])
        self._report.add(part="start", side=side, what=what, **found)
        print(f"    {side} {what}: port {found['port_open_s']:.2f} s, token {seconds:.2f} s")
        for line in found["notices"]:
            print(f"        {line}")
        schedulers = [
            float(each["seconds"])
            for each in found["spans"]
            if (each["process"], each["name"]) == ("scheduler", "process")
        ]
        if schedulers and environment[ENABLED] == "1":
            self._report.hold(f"{what}: until a scheduler runs", max(schedulers), at_most=FORK_S)
        compiled = [each for each in found["spans"] if each["name"].startswith("compile ")]
        total = sum(each["seconds"] for each in compiled)
        print(f"        {len(compiled)} kernels compiled at their launch, {total:.1f} s")
        for each in found["spans"]:
            if each["seconds"] >= 0.1:
                line = f"{each['begin_s']:8.2f} {each['seconds']:7.2f}  {each['process']}"
                print(f"        {line}: {each['name']}")
        sys.stdout.flush()
        return seconds

    def _fill(self, size: str, model: Path) -> None:
        """One start that fills the caches; one that fails is shown, and the others are tried."""
        try:
            self._start(OURS, f"{size}, fills caches", model)
        except Exception as error:
            print(f"    failed: {error}", flush=True)

    def _peer(self, size: str, model: Path, variables: dict[str, str]) -> dict[str, float]:
        if not self._arguments.peer:
            return {}
        try:
            return {"sglang_s": self._start(PEER, size, model, variables)}
        except Exception as error:
            print(f"    sglang: {error}", flush=True)
            return {}

    def _put(self, key: str, figures: dict[str, float]) -> None:
        self.found.setdefault(key, {}).update(figures)
        self._report.put("found", self.found)
        if self._arguments.results is not None:
            text = json.dumps(self.found, indent=2) + "\n"
            self._arguments.results.write_text(text)


class Stream:
    """What one client sees of its stream."""

    def __init__(self) -> None:
        """Nothing has come."""
        self.last = math.inf
        self.longest_gap_s = 0.0
        self.wrong, self.error = 0, None
        self._text, self._tokens = "", 0

    def take(self, line: bytes) -> None:
        """Takes an event, which has the whole text so far; one that takes text back is wrong."""
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last)
        self.last = now
        found = json.loads(line.removeprefix(b"data: "))
        if "error" in found:
            self.error = found["error"]
        text, meta = found.get("text", ""), found.get("meta_info", {})
        tokens = meta.get("completion_tokens", 0)
        goes_on = text.startswith(self._text) and tokens > self._tokens
        self.wrong += not goes_on or meta.get("finish_reason") is not None
        self._text, self._tokens = text, tokens


def killed_streams(port: int, kill: Callable[[int], float]) -> list[Stream]:
    """64 streams, during which a process of the driver is killed."""
    streams = [Stream() for _ in range(STREAMS)]
    over = threading.Event()

    def follow(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PAUSE_LIMIT_S)
        sampling = {"max_new_tokens": OUTPUT, "ignore_eos": True, "temperature": 0.8}
        body = {"text": f"{PROMPT} {number}", "sampling_params": sampling, "stream": True}
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        while not over.is_set() and (line := answer.readline()):
            if line.startswith(b"data: {"):
                streams[number].take(line)
        connection.close()

    threads = [threading.Thread(target=follow, args=(n,), daemon=True) for n in range(STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(RUN_S)
    assert all(math.isfinite(stream.last) for stream in streams), "not all streams have begun"
    killed = kill(port)
    until = time.monotonic() + PAUSE_LIMIT_S
    while min(stream.last for stream in streams) < killed + 0.2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(RUN_S / 3)
    over.set()
    for stream in streams:
        # One that has not gone on has paused until now.
        stream.longest_gap_s = max(stream.longest_gap_s, time.monotonic() - stream.last)
    return streams


def kill_driver(port: int) -> float:
    """Kills the processes of the driver; returns when."""
    leader = leader_of(port)
    now = time.monotonic()
    # The driver, and what stands for it.
    os.killpg(leader, signal.SIGKILL)
    return now


def kill_rank(port: int) -> float:
    """Kills the process of the second rank; returns when."""
    group = leader_of(port)
    ranks = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "pie_driver_sglang.ranks.worker" in (process.info["cmdline"] or ())
        and os.getpgid(process.pid) == group
    ]
    now = time.monotonic()
    # The first one only stands for the second, where processes are forked.
    ranks[-1].kill()
    return now


def leader_of(port: int) -> int:
    """The process of the driver's first rank."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PAUSE_LIMIT_S)
    connection.request("GET", "/server_info")
    state = json.loads(connection.getresponse().read())["internal_states"][0]
    [leader] = state["driver_pids"]
    return int(leader)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    made.set_defaults(device="cuda")
    for name in ("small", "large", "middle"):
        made.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    made.add_argument("--parts", default="warm-0.6b,restart,first-3b,warm-8b")
    made.add_argument("--peer", action="store_true", help="SGLang's own server as well")
    made.add_argument("--budget-s", type=float, default=360.0)
    made.add_argument("--results", type=Path, help="the figures alone")
    made.add_argument("--flag", action="append", default=[], help="of both servers")
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    failed = 0
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        starts = Starts(arguments, report, Path(folder))
        parts: dict[str, Callable[[], float]] = {
            "warm-0.6b": lambda: starts.warm("0.6b", arguments.small),
            "warm-8b": lambda: starts.warm("8b", arguments.large),
            "first-3b": lambda: starts.first("3b", arguments.middle),
            "ahead-3b": lambda: starts.ahead("3b", arguments.middle),
            "restart": lambda: starts.restart("0.6b", arguments.small),
            "rank": lambda: starts.rank("0.6b", arguments.small),
            "replicas": lambda: starts.replicas("0.6b", arguments.small),
        }
        for name in arguments.parts.split(","):
            print(f"{name}: {starts.left_s():.0f} s left", flush=True)
            try:
                report.hold(name, parts[name](), at_most=BARS[name])
            except Exception as error:
                failed += 1
                report.add(part=name, error=f"{type(error).__name__}: {error}")
                print(f"    failed: {type(error).__name__}: {error}", flush=True)
        report.hold("parts that failed", failed, at_most=0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
