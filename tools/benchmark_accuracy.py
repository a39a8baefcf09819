"""Sections on real checkpoints: accuracy by path, and drafts on real text."""

from __future__ import annotations

from typing import Any, Final

from benchmark_tables import Results, bars, source, table

WAYS: Final = {
    "sglang": "SGLang",
    "fused": "ours",
    "unfused": "ours, `fuse_layers = false`",
    "drafts": "ours, n-gram drafts",
    "lora": "ours, LoRA",
    "fp8": "ours, FP8",
    "fp8-unfused": "ours, FP8, `fuse_layers = false`",
}
PATHS: Final = {
    "one": "1 request",
    "several": "16",
    "many": "256",
    "prefix": "256, cached prompts",
    "plain": "256, no log-probabilities",
    "prefill": "prefill",
}
"""Names of `benches/gpu/accuracy_paths.py` for people."""
KINDS: Final = {
    "summary": "summaries",
    "edit": "code edits",
    "translation": "translations",
    "chat": "free chat",
}
METHOD: Final = (
    "Greedy answers to passages of Python's documentation and chats about it, scored by "
    "transformers in float32 after the same tokens; prefill scores the documentation itself. "
    "Agreement is the share of positions where the most probable token is the reference's. KL is a "
    "lower bound, from the 16 most probable tokens and the rest. Mean, percentiles and maximum are "
    "of the absolute difference of log-probabilities in nats. Perplexities of the reference are in "
    "brackets."
)


def paths(results: Results) -> list[str]:
    """Every path of every model, and the thresholds."""
    record = results["accuracy"]
    rows = [
        [
            row["model"],
            WAYS[row["way"]],
            PATHS[row["path"]],
            row["tokens"],
            *(_figure(row.get(key), ".4f") for key in ("agreement", "kl", "mean")),
            *(_figure(row.get(key), ".4f") for key in ("p99", "p999", "max")),
            _perplexity(row),
        ]
        for row in _measured(record)
    ]
    names = ["model", "engine", "path", "tokens", "agreement", "KL", "mean", "p99", "p99.9", "max"]
    return [METHOD, table([*names, "perplexity"], rows), bars(record["bars"]), source(record)]


def worst_paths(results: Results) -> list[str]:
    """The worst decode path of each engine, its perplexity, and how many thresholds were missed."""
    record = results["accuracy"]
    engines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in _measured(record):
        engines.setdefault((row["model"], row["way"]), []).append(row)
    rows, agreements = [], {}
    for (model, way), found in engines.items():
        decodes = [row for row in found if row["path"] != "prefill"]
        perplexity = "".join(_perplexity(row) for row in found)
        lowest = min((row["agreement"] for row in decodes), default=None)
        agreements[model, way] = lowest
        figures = [_figure(lowest, ".4f")]
        for key in ("kl", "mean", "p999", "max"):
            values = [row[key] for row in decodes if row.get(key) is not None]
            figures.append(_figure(max(values, default=None), ".4f"))
        rows.append([model, WAYS[way], *figures, perplexity])
    missed = sum(not bar["ok"] for bar in record["bars"])
    versions = next(row["figures"] for row in record["rows"] if row.get("part") == "versions")
    names = ["model", "engine", "agreement", "KL", "mean", "p99.9", "max", "perplexity"]
    below = [
        theirs - ours
        for (model, way), ours in agreements.items()
        if ours is not None and (theirs := agreements.get((model, "sglang"))) is not None
    ]
    return [
        "**About as accurate as SGLang's: the share of positions that agree with the float32 "
        f"reference is at most {max(below, default=0.0):.4f} below SGLang's.**",
        f"{METHOD} Each figure is that of the engine's worst decode path: 1, 16 or 256 requests, "
        "cached prompts or not. [All paths](../benches/RESULTS.md#accuracy). "
        f"{missed} of {len(record['bars'])} thresholds were missed. "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        table(names, rows),
        source(record),
    ]


def drafts(results: Results) -> list[str]:
    """What n-gram drafts gain on four kinds of real text."""
    record = results["drafts-real"]
    rows = [
        [
            row["model"],
            KINDS[row["kind"]],
            row["batch"],
            f"{row['accepted_per_step']:.2f}",
            row["plain_tokens_per_s"],
            row["drafts_tokens_per_s"],
            f"{row['ratio']:.2f}x",
        ]
        for row in record["rows"]
    ]
    requests = record["rows"][0]["requests"]
    names = ["model", "text", "at a time", "accepted per step", "tokens/s", "with drafts", "ratio"]
    return [
        f"{requests} requests of each kind, built from Python's documentation and source code, "
        "answered greedily; a request drafts from its own text only.",
        table(names, rows),
        source(record),
    ]


def deterministic(results: Results) -> list[str]:
    """Tokens per second with `enable_deterministic_inference`, of both engines."""
    record = results["deterministic-rates"]
    rates = {row["way"]: row["tokens_per_second"] for row in record["rows"]}
    ours, fixed = rates["ours"], rates["ours, deterministic"]
    peer, peer_fixed = rates["sglang"], rates["sglang, deterministic"]
    rows = [
        [
            int(count),
            ours[count],
            fixed[count],
            f"{fixed[count] / ours[count]:.2f}",
            peer[count],
            peer_fixed[count],
            f"{fixed[count] / peer_fixed[count]:.2f}",
        ]
        for count in ours
    ]
    names = ["requests", "ours", "deterministic", "of ours", "SGLang", "SGLang, deterministic"]
    return [
        "Tokens per second of SmolLM2-135M-Instruct by both offline engines: 64 to 512 random "
        "tokens of prompt, 128 of answer, greedy, all requests submitted together. "
        "[What is promised](../docs/determinism.md).",
        table([*names, "ours / SGLang, both deterministic"], rows),
        source(record),
    ]


def _measured(record: Results) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if "way" in row]


def _perplexity(row: dict[str, Any]) -> str:
    if "perplexity" not in row:
        return ""
    return f"{row['perplexity']:.3f} ({row['reference_perplexity']:.3f})"


def _figure(value: float | None, form: str) -> str:
    """A figure that the record may lack."""
    return "" if value is None else f"{value:{form}}"
