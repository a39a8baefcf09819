"""Sections of `benches/RESULTS.md` whose peers are SGLang's graphs, FlashInfer and vLLM.

`prefill.json` and `step-peers.json` have a record of `prefill_check.py` and `step_check.py` for
each shape, by its name, and `vllm.json` of `vllm_check.py`; `samplers.json` and `sums.json` are
those of one check.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmark_tables import Results, source, table


def ratio(theirs: list[float], ours: float) -> float | str:
    """The best of the peers over ours; nothing without peers."""
    return min(theirs) / ours if theirs else ""


def sources(records: Results) -> list[str]:
    """Where the figures of each shape are from."""
    return [f"{name}: {source(record)}" for name, record in records.items()]


def prefill(results: Results) -> list[str]:
    """Passes of prompts, next to SGLang's layers and its prefill graphs."""
    records = results["prefill"]
    passes = [(name, row) for name, record in records.items() for row in record["rows"]]
    kinds = sorted({kind for _, row in passes for kind in row["graphs"]})
    rows = []
    for name, row in passes:
        ms = row["ms"]
        ours = [ms[way] for way in ("driver", "graph") if way in ms]
        theirs = [ms[way] for way in ("sglang", *kinds) if way in ms]
        shown = [ms.get(way, "") for way in ("driver", "graph", "sglang", *kinds)]
        rows.append([name, row["tokens"], row["prompt"], *shown, ratio(theirs, min(ours))])
    names = ["shape", "tokens", "in prompts of", "driver, ms", "its graph, ms", "SGLang, ms"]
    names += [f"its graphs: `{kind}`, ms" for kind in kinds]
    return [
        "One pass up to the final norm; the driver's graph has LM head and samplers, too. Where a "
        "column is empty, there is no such graph for it.",
        table([*names, "best of SGLang / best of ours"], rows),
        *sources(records),
    ]


def step_peers(results: Results) -> list[str]:
    """Graphs of decode steps, next to SGLang's, without and with torch.compile."""
    records = results["step-peers"]
    rows = list(_steps(records))
    names = ["shape", "tokens", "rows", "driver, µs", "SGLang, µs", "its torch.compile, µs"]
    return [
        "Graphs of decode steps, launched back to back. Ours sample tokens and have copies from "
        "the host; SGLang's end with logits.",
        table([*names, "best of SGLang / driver"], rows),
        *sources(records),
    ]


def _steps(records: Results) -> Iterator[list[object]]:
    """Rows of the table of steps."""
    for name, record in records.items():
        ours = {row["length"]: row["us_by_rows"] for row in record["rows"] if not row["way"]}
        peers = {
            (row["way"]["peer"], row["length"]): row["us_by_rows"]
            for row in record["rows"]
            if "peer" in row["way"]
        }
        for length, times in ours.items():
            for count, us in times.items():
                theirs = [
                    peers.get((peer, length), {}).get(count, "") for peer in ("sglang", "compiled")
                ]
                known = [each for each in theirs if each != ""]
                yield [name, length, int(count), us, *theirs, ratio(known, us)]


def samplers(results: Results) -> list[str]:
    """Kernels that sample, next to SGLang's sampler and FlashInfer's kernels."""
    record = results["samplers"]
    rows = []
    for row in record["rows"]:
        theirs = [row.get(f"{peer}_ms", "") for peer in ("sglang", "flashinfer")]
        if "sorting_ms" in row:
            known = [each for each in theirs if each != ""]
            best = ratio(known, row["kernel_ms"])
            rows.append([row["kind"], row["kernel_ms"], row["sorting_ms"], *theirs, best])
    names = ["samplers", "ours, ms", "sorting in torch, ms", "SGLang's, ms", "FlashInfer's, ms"]
    return [
        "256 rows of 151,936 logits. The baselines' times have the softmax that comes first.",
        table([*names, "best of both / ours"], rows),
        source(record),
    ]


def sums(results: Results) -> list[str]:
    """Sums over ranks with a norm, next to SGLang's, NCCL's and FlashInfer's."""
    record = results["sums"]
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in record["rows"]:
        us = row.get("us", {})
        if row["part"] == "flashinfer":
            ours = min(took for way, took in us.items() if way != "FlashInfer")
            us = {"FlashInfer": us["FlashInfer"], "our best next to it": ours}
        found.setdefault((row["ranks"], row.get("rows", 0)), {}).update(us)
    ways = list(dict.fromkeys(way for us in found.values() for way in us))
    rows = [
        [ranks, count, *(us.get(way, "") for way in ways)]
        for (ranks, count), us in found.items()
        if us
    ]
    return [
        "A GEMM of 128 inputs, the all-reduce over the ranks and the norm, µs. Ours are in one and "
        "two shots by so many warps; *alone* has no other rank. FlashInfer has processes of its "
        "own, with ours next to it.",
        table(["ranks", "rows", *ways], rows),
        source(record),
    ]


def on_vllm(results: Results) -> list[str]:
    """The driver on vLLM, next to vLLM's own engine where both ran in one call."""
    records, rows = results["vllm"], []
    for shape, record in records.items():
        parts = {row["part"]: row["figures"] for row in record["rows"]}
        ours, theirs = parts[f"ours {shape}"], parts.get(f"vllm {shape}", {})
        for key in sorted(ours, key=lambda name: (len(name), name)):
            own = ours[key]
            peer, is_rate = theirs.get(key, ""), key == "tokens_per_s"
            gain = "" if peer == "" else own / peer if is_rate else peer / own
            name = "tokens/s" if is_rate else f"µs of a step of {key.split()[1]} rows"
            rows.append([shape, name, round(own), peer and round(peer), gain])
    return [
        "The standard workload, and what a further token of requests of 512 tokens takes, from "
        "outside. vLLM has its defaults. Where its column is empty, it was not measured.",
        table(["shape", "figure", "driver on vLLM", "vLLM", "gain"], rows),
        *sources(records),
    ]
