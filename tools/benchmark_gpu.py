"""The sections of `benches/RESULTS.md` whose figures come from a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmark_tables import Results, bars, picture, source, table


def throughput(results: Results) -> list[str]:
    """Tokens per second of the standard workload."""
    whole = results["h200"]
    speeds = whole["tokens_per_s"]
    record = {"commit": whole["commit"], "script": whole["script"][1]}
    rows = [
        ["this driver, through the ring", speeds["ours"], ""],
        *(
            [f"SGLang `Engine`, {name}", speed, speeds["ours"] / speed]
            for name, speed in speeds["sglang"].items()
        ),
    ]
    peer = results.get("mini-sglang")
    others = [] if peer is None else ["Mini-SGLang on the same workload:", *one_call(peer)]
    if (later := results.get("throughput-h100")) is not None:
        others += ["On an H100, and a decode step of one context of 512 tokens:", *on_h100(later)]
    return [
        "256 requests at once, prompts and outputs of 100 to 1,024 tokens, 133,966 output tokens, "
        "temperature 0.6, shape of Qwen3-0.6B.",
        table(["engine", "output tokens/s", "ours / theirs"], rows),
        picture("load", "Output tokens per second"),
        source(record, whole),
        *others,
    ]


def on_h100(record: Results) -> list[str]:
    """Both engines and steps of one context in one call."""
    speeds, where = one_call(record)
    steps = record["step_us"]
    ours, *_ = steps.values()
    times = [[name, us, "" if us == ours else us / ours] for name, us in steps.items()]
    return [speeds, table(["step", "µs", "theirs / ours"], times), where]


def one_call(record: Results) -> list[str]:
    """Engines on one machine in one call: the table, and where it is from."""
    ours = record["tokens_per_s"]["this driver"]
    rows = [
        [name, speed, "" if speed == ours else ours / speed]
        for name, speed in record["tokens_per_s"].items()
    ]
    return [table(["engine", "output tokens/s", "ours / theirs"], rows), source(record)]


def shapes(results: Results) -> list[str]:
    """Steps and throughput of shapes that people deploy."""
    known = {
        name: each
        for name, each in results["shapes"].items()
        if isinstance(each, dict) and "step_us" in each
    }
    steps = []
    for name, each in known.items():
        for rows, us in each["step_us"].items():
            limit = each.get("bytes_us", {}).get(rows)
            # A step that is faster moved fewer bytes; see the shape's note.
            share = limit / us if limit and limit <= us else ""
            steps.append([name, rows, us, limit or "", share, gpu_of(each, "step_us")])
    speeds = []
    for name, each in known.items():
        found = each.get("tokens_per_s", {})
        for backend, speed in found.get("sglang", {}).items():
            ours, limit = found["ours"], found.get("limit")
            shares = [limit, ours / limit] if limit else ["", ""]
            gpu = gpu_of(each, "tokens_per_s")
            speeds.append([name, ours, backend, speed, ours / speed, *shares, gpu])
    parts = ["Decode steps, and the time that moving their bytes takes at the memory's bandwidth:"]
    parts.append(table(["shape", "rows", "step, µs", "bytes, µs", "bytes / step", "GPU"], steps))
    if speeds:
        names = ["shape", "ours, tokens/s", "SGLang with", "its tokens/s", "ours / theirs"]
        names += ["limit, tokens/s", "ours / limit", "GPU"]
        parts += [
            "Throughput of the standard workload. *Limit* is what a driver without any loss would "
            "make. It multiplies at the 700 TFLOP/s that cuBLAS reaches, in FP8 at twice as many, "
            "and reads weights and KV as fast as a copy.",
            table(names, speeds),
        ]
    parts += [f"{name}: {each['note']}." for name, each in known.items() if each.get("note")]
    return [*parts, *shape_sources(known)]


def one_row(results: Results) -> list[str]:
    """Steps of one row with and without the kernels in CUDA C++."""
    record = results["one-row"]
    found = record["step_us"]
    rows = [
        [shape, int(tokens), each["before_us"], each["us"], each["before_us"] / each["us"]]
        for shape, lengths in found.items()
        for tokens, each in lengths.items()
    ]
    names = ["shape", "tokens", "without, µs", "with, µs", "without / with"]
    parts = [
        "Decode steps of one row with the kernels in CUDA C++ (attention by clusters; of FP8 "
        "matrices, GEMMs that quantize their row) and without them:",
        table(names, rows),
    ]
    if "8b" in found and "8b-fp8" in found:
        ratio = found["8b"]["700"]["us"] / found["8b-fp8"]["700"]["us"]
        parts.append(f"At 700 tokens the 8B is {ratio:.2f} times as fast in FP8 (bar: 1.6).")
    return [*parts, source(record)]


def batch_steps(results: Results) -> list[str]:
    """Steps of several rows with and without the kernel of their products."""
    record = results["batch-steps"]
    rows = [
        [shape, int(count), each["before_us"], each["us"], each["before_us"] / each["us"]]
        for shape, counts in record["step_us"].items()
        for count, each in counts.items()
    ]
    return [
        "Decode steps of several rows, with the kernel of their GEMMs in CUDA C++ and without.",
        "The experts of 30b-a3b are chosen anew each time, which makes up to 3 % of difference.",
        table(["shape", "rows", "without, µs", "with, µs", "without / with"], rows),
        source(record),
    ]


def batch_products(results: Results) -> list[str]:
    """The same kernel alone."""
    record = results["batch-products"]
    rows = [
        [shape, int(count), each["library_us"], each["us"], each["bytes_us"],
         each["bytes_us"] / each["us"]]
        for shape, counts in record["product_us"].items()
        for count, each in counts.items()
    ]  # fmt: skip
    return [
        "The four GEMMs of a layer, one after the other. *bytes* is the time to read their "
        "weights at 3.0 TB/s, as fast as a copy.",
        "cuBLAS leaves sums and gates of FP8 to other kernels.",
        table(["shape", "rows", "cuBLAS, µs", "ours, µs", "bytes, µs", "bytes / ours"], rows),
        source(record),
    ]


def gpu_of(shape: Results, figure: str) -> str:
    """The name of the GPU of a shape's figure."""
    device = shape.get("sources", {}).get(figure, {}).get("device", "")
    return str(device).removeprefix("1 x ").removeprefix("NVIDIA ").partition(" ")[0]


def shape_sources(known: Mapping[str, Results]) -> list[str]:
    """Where the figures of shapes come from: those of one command together."""
    labels = {"step_us": "steps", "tokens_per_s": "throughput"}
    sources: dict[str, list[str]] = {}
    for name, each in known.items():
        for figure, about in each.get("sources", {}).items():
            if figure in labels:
                sources.setdefault(source(about), []).append(f"{name} {labels[figure]}")
    return [f"{', '.join(figures)}: {text}" for text, figures in sources.items()]


def steps(results: Results) -> list[str]:
    """Decode steps against SGLang's runner."""
    whole = results["h200"]
    record = whole["runner"]
    rows = []
    for name, ours in record["ours_us"].items():
        peers = {peer: times[name] for peer, times in record["sglang_runner_us"].items()}
        best = min(peers, key=peers.__getitem__)
        limit = record["roofline_us"][name]
        rows.append([name.replace("x", " x "), ours, peers[best], best, peers[best] / ours, limit])
    names = ["sequences x tokens", "ours, µs", "SGLang, µs", "by", "SGLang / ours", "bytes, µs"]
    return [
        "A decode step, shape of Qwen3-0.6B. Ours is a round trip through the ring, so it has the "
        "host's work. SGLang's is a step of its "
        "`ModelRunner` with its best backend. *bytes* is the time that moving weights and KV takes"
        " at 4.3 TB/s.",
        table(names, rows),
        picture("runner", "Decode steps, compared with SGLang's"),
        source(record, whole),
    ]


def host_share(results: Results) -> list[str]:
    """The host's part of a step."""
    whole = results["h200"]
    lane = whole["lane"]
    rows = [
        [
            f"{batch} x {context}",
            row["p50_us"],
            row["p90_us"],
            row["gpu_us"],
            round(row["overhead_us"]),
        ]
        for context, batches in lane.items()
        if context.isdigit()
        for batch, row in batches.items()
    ]
    names = ["sequences x tokens", "round trip p50, µs", "p90", "GPU, µs", "host, µs"]
    record = {"commit": lane["commit"], "script": whole["script"][0].partition(", and the")[0]}
    return [
        "The host's work is the difference of a round trip and the same graph launched back to "
        "back.",
        table(names, rows),
        picture("steps", "Decode steps: GPU and host"),
        source(record, whole),
    ]


def attention(results: Results) -> list[str]:
    """Decode attention against three peers."""
    whole = results["h200"]
    record = whole["attention"]
    batches = (256, 128, 64, 16, 4, 1)
    parts = ["The best baseline's time over ours, for a layer; above 1 ours is faster."]
    for shape in ("0.6B", "14B"):
        times = {row["work"]: row for row in record["times"] if row["shape"] == shape}
        lengths = sorted({name.partition(" x ")[2] for name in times}, key=by_number)
        rows = [
            [
                batch,
                *(times.get(f"{batch} x {length}", {}).get("best_peer", "") for length in lengths),
            ]
            for batch in batches
        ]
        parts += [table([f"sequences, {shape}", *lengths], rows)]
        parts += [picture(f"attention-{shape}", f"Decode attention, {shape} shape")]
    missed = sum(row["best_peer"] < 0.97 for row in record["times"])
    parts.append(
        f"Peers: SGLang's triton, flashinfer and fa3 kernels. {missed} of {len(record['times'])} "
        "steps are more than 3 % slower than the best of them."
    )
    return [*parts, source(record, whole)]


def by_number(name: str) -> tuple[bool, int]:
    """Orders numbers before words."""
    return not name.isdigit(), int(name) if name.isdigit() else 0


def prefixes(results: Results) -> list[str]:
    """Contexts that begin alike."""
    whole = results["h200"]
    record = whole["prefixes"]
    alone = {row["batch"]: row["p50_us"] for row in record["steps"] if not row["common"]}
    rows = [
        [row["batch"], row["common"], row["p50_us"], alone[row["batch"]] / row["p50_us"]]
        for row in sorted(record["steps"], key=lambda row: (row["batch"], row["common"]))
    ]
    names = ["sequences", "tokens in common", "step p50, µs", "nothing in common / this"]
    return [
        "Decode steps of sequences of 2,048 tokens, shape of Qwen3-0.6B.",
        table(names, rows),
        picture("prefixes", "Contexts with a common prefix"),
        source(record, whole),
    ]


DRAFTED: Final = {
    "text": "text of the embedded model",
    "cycles": "greedy cycles",
    "random": "no repetition",
}
"""Parts of `draft_check.py`, as tables name them."""


def drafts(results: Results) -> list[str]:
    """The n-gram drafter on a GPU."""
    whole = results["h200"]
    record = whole["drafts"]
    rows = [
        [name, row["batch"], row["tokens_per_s_without"], row["tokens_per_s_with"], row["ratio"]]
        for kind, name in DRAFTED.items()
        for row in record[kind]
    ]
    names = ["text", "sequences", "tokens/s without", "tokens/s with", "ratio"]
    return [
        "Up to four drafts for each context.",
        table(names, rows),
        picture("drafts", "Tokens per second with drafts over those without"),
        source(record, whole),
    ]


def drafts_8b(results: Results) -> list[str]:
    """The same on the 8B shape, with what a step costs."""
    record = results["drafts-8b"]
    rows = [
        [
            DRAFTED[row["text"]], row["batch"], row["tokens_per_s_without"],
            row["tokens_per_s_with"], row["ratio"], row["step_us_without"], row["step_us_with"],
            row["accepted_per_step"],
        ]
        for row in record["rows"]
    ]  # fmt: skip
    return [
        "Random weights of the 8B shape, up to four drafts for each context. A step that verifies "
        "drafts has up to five rows for each.",
        table(
            ["text", "sequences", "tokens/s without", "tokens/s with", "ratio", "step without, µs",
             "with, µs", "accepted a step"],
            rows,
        ),
        bars(record["bars"]),
        source(record),
    ]  # fmt: skip


def gpus(results: Results) -> list[str]:
    """Tensor parallelism."""
    whole = results["h200"]
    record = whole["tp"]
    rows = [
        [
            name.replace("x", " x "),
            *(record[count][name]["round_trip_us"] for count in ("1", "2", "4")),
            *(record["speedup"][count][name] for count in ("2", "4")),
        ]
        for name in record["1"]
    ]
    names = ["sequences x tokens", "1 GPU, µs", "2 GPUs", "4 GPUs", "1 / 2", "1 / 4"]
    return [
        "Decode steps, shape of Qwen3-14B, GPUs joined by NVLink.",
        table(names, rows),
        picture("ranks", "Speed-up over one GPU"),
        source({**record, "device": f"4 x {whole['device']}"}, whole),
    ]


def prompts(results: Results) -> list[str]:
    """A prompt among decodes."""
    whole = results["h200"]
    record = whole["mixed"]
    ours, peer = record["graph"], record["sglang_fa3"]
    rows = [
        ["the step without it" if name == "decode" else f"{name} tokens", ours[name], peer[name]]
        for name in ours
    ]
    return [
        "64 decodes at 512 tokens, and how much longer the step takes when a prompt joins; shape "
        "of Qwen3-0.6B.",
        table(["prompt", "ours, µs", "SGLang with mixed chunks, fa3"], rows),
        picture("mixed", "A prompt that joins 64 decodes"),
        source(record, whole),
    ]


def samplers(results: Results) -> list[str]:
    """Kinds of samplers, probes and masks."""
    whole = results["h200"]
    record = whole["samplers"]
    rows = [[name, ms, ms / record["ms"]["greedy"]] for name, ms in record["ms"].items()]
    return [
        "A step of 256 sequences of 512 tokens, one sampler each, and what a probe or a logit mask "
        "adds.",
        table(["samplers", "ms", "over greedy"], rows),
        source(record, whole),
    ]


def adapters(results: Results) -> list[str]:
    """LoRA adapters."""
    whole = results["h200"]
    record = whole["adapters"]
    base = record["step_us"]["off"]
    rows = [
        [name, us, us / base, record["csgmv_step_us"].get(name, "")]
        for name, us in record["step_us"].items()
    ]
    return [
        "A step of 64 sequences, by the number of adapters that it uses.",
        table(["adapters", "`triton`, µs", "over off", "`csgmv`, µs"], rows),
        source(record, whole),
    ]


def memory(results: Results) -> list[str]:
    """Memory: planned and taken."""
    whole = results["h200"]
    record = whole["memory"]
    rows = [
        [name, part, *each[part]]
        for name, each in record["models"].items()
        for part in ("weights", "graphs", "kv", "activations", "left")
    ]
    return [
        "GiB on an H200, as planned and as taken; *left* is the reserve, and the least that stayed"
        " free.",
        table(["shape", "part", "planned", "taken"], rows),
        source(record, whole),
    ]


def prefix_cache(results: Results) -> list[str]:
    """The prefix index in SGLang's engine."""
    record = results["prefix-cache"]
    speeds: dict[int, dict[str, float]] = {}
    for row in record["rows"]:
        speeds.setdefault(row["at_once"], {})[row["engine"]] = row["tokens_per_s"]
    rows = [
        [
            count,
            *(of[name] for name in ("off", "sglang", "pie")),
            of["pie"] / of["sglang"],
            of["pie"] / of["off"],
        ]
        for count, of in speeds.items()
    ]
    names = ["requests at once", "no prefix cache", "its tree", "our index", "ours / its", "/ none"]
    return [
        "SGLang's engine with fa3, output tokens/s. Groups of eight requests share 200 to 600 "
        "tokens; medians of turns.",
        table(names, rows),
        source(record),
    ]
