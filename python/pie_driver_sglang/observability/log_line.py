"""The statistics that a driver logs while it serves."""

from __future__ import annotations

from typing import Any

from pie_driver_sglang._core import Counts
from pie_driver_sglang.observability.served_model import ServedModel


def log_fields(counts: Counts, seconds: float, model: ServedModel) -> dict[str, Any]:
    """The statistics of an interval, as fields of a JSON log.

    Args:
        counts: The counts of the interval.
        seconds: Its length.
        model: The served model.

    Returns:
        Counts as integers; `seconds` and rates per second as numbers; times in microseconds, None
        where there are none.
    """
    seconds = max(seconds, 1e-9)
    copied = counts.copied_pages
    return {
        "seconds": round(seconds, 3),
        "steps": counts.steps,
        "graph_steps": counts.graph_steps,
        "steps_per_s": round(counts.steps / seconds, 3),
        "requests": counts.requests,
        "batch": round(counts.requests / max(1, counts.steps), 2),
        "generated_tokens": counts.generated_tokens,
        "generated_tokens_per_s": round(counts.generated_tokens / seconds, 3),
        "prompt_tokens": counts.prompt_tokens,
        "prompt_tokens_per_s": round(counts.prompt_tokens / seconds, 3),
        "used_pages": counts.used_pages,
        "total_pages": model.total_pages,
        "swapped_out_pages": copied["D2H"],
        "swapped_in_pages": copied["H2D"],
        "drafts": counts.drafts,
        "accepted_drafts": counts.accepted_drafts,
        "refused": sum(counts.refused.values()),
        "aborted_batches": counts.aborted_batches,
        "host_p50_us": counts.quantile_us("host", 0.5),
        "host_p99_us": counts.quantile_us("host", 0.99),
        "step_p50_us": counts.quantile_us("step", 0.5),
        "step_p99_us": counts.quantile_us("step", 0.99),
    }


def line(values: dict[str, Any]) -> str:
    """The values of :func:`log_fields` as a text line."""
    used, total = values["used_pages"], values["total_pages"]
    parts = [
        f"{values['steps']:,} steps in {values['seconds']:.1f} s ({values['steps_per_s']:,.1f}/s)",
        f"{values['generated_tokens']:,} tokens generated "
        f"({values['generated_tokens_per_s']:,.1f}/s)",
        f"{values['prompt_tokens']:,} of prompts ({values['prompt_tokens_per_s']:,.1f}/s)",
        f"batch {values['batch']:.1f}",
        f"KV {100 * used / max(1, total):.1f} % ({used:,} of {total:,} pages)",
        f"pages swapped {values['swapped_out_pages']:,} out, {values['swapped_in_pages']:,} in",
    ]
    if values["drafts"]:
        share = 100 * values["accepted_drafts"] / values["drafts"]
        parts.append(
            f"drafts {values['accepted_drafts']:,} of {values['drafts']:,} accepted ({share:.0f} %)"
        )
    if values["refused"] or values["aborted_batches"]:
        parts.append(f"refused {values['refused']:,}, aborted {values['aborted_batches']:,}")
    parts += [_times(name, values) for name in ("host", "step")]
    return ", ".join(parts)


def _times(name: str, values: dict[str, Any]) -> str:
    return f"{name} {_time(values[f'{name}_p50_us'])} (p99 {_time(values[f'{name}_p99_us'])})"


def _time(micros: float | None) -> str:
    if micros is None:
        return "-"
    return f"{micros:.1f} µs" if micros < 1000 else f"{micros / 1000:.1f} ms"
