"""Rejects a model that does not fit its device, and names one option that would make it fit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Final

from pie_driver_sglang.errors import StartError, not_running
from pie_driver_sglang.memory.plan import plan_memory, safe_reserve, shown, size_text
from pie_driver_sglang.memory.plan_types import Device, MemorySettings, ModelSizes, Plan

SHORT_CONTEXT: Final = 2048
"""A shorter context is suggested only if no other option helps."""
SHORT_CHUNK: Final = 256
"""The shortest chunk that is suggested."""
RANKS: Final = (2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that are suggested."""
SMALLER_BY: Final = 0.05
"""Reduction of the fraction that is suggested after an out-of-memory error."""
_NO_MEMORY: Final = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Out-of-memory messages of torch, CUDA, Triton and cuBLAS."""
_FRACTIONS: Final = [thousandths / 1000 for thousandths in range(10, 991)]


def require_fit(device: Device, model: ModelSizes, settings: MemorySettings) -> Plan:
    """Plan a model that fits.

    Raises:
        StartError: It does not fit; the hint names an option and a value with which it would.
    """
    plan = plan_memory(device, model, settings)
    if plan.fits(settings):
        return plan
    remedy = find_remedy(device, model, settings)
    if remedy is None:
        hint = "free memory, or choose a smaller or a quantized model"
    elif remedy[0] == "tensor_parallel_size":
        hint = f"set `tensor_parallel_size = {remedy[1]}` under [model.driver], with as many GPUs"
    else:
        hint = f"set `{remedy[0]} = {remedy[1]}` in the options"
    raise StartError(_reason(plan, model, settings), hint)


def find_warning(plan: Plan, model: ModelSizes, settings: MemorySettings) -> str | None:
    """A warning if the user's fraction is larger than the safe one; else None."""
    needed = safe_reserve(plan.device, model, settings)
    if settings.fraction is None or plan.reserve >= needed:
        return None
    safe = plan_memory(plan.device, model, settings._replace(fraction=None))
    reserve, enough = size_text(plan.reserve), size_text(needed)
    text = f"`mem_fraction_static` = {settings.fraction} leaves a reserve of {reserve}, of {enough}"
    text += " that are safe: a large batch may run out of memory"
    return f"{text}; up to {shown(safe.fraction)} is safe" if safe.tokens else text


def out_of_memory(plan: Plan, text: str) -> StartError:
    """The error for running out of memory although the plan fits."""
    given = plan.fraction if plan.user_share is None else plan.user_share
    smaller = max(_FRACTIONS[0], given - SMALLER_BY)
    return StartError(
        f"{plan.device.name} has less memory than was planned with: {text}",
        f"set `mem_fraction_static = {shown(smaller)}` in the options",
    )


def run_failure(plan: Plan, device: str, error: BaseException) -> StartError:
    """The error for a loaded model whose capture or warm-up fails.

    After an out-of-memory error the hint is a smaller fraction.

    Args:
        plan: The plan of the model.
        device: The device's name for the message.
        error: The exception. An aborted capture raises another one after the first.
    """
    found: BaseException | None = error
    while found is not None:
        text = str(found).strip()
        if isinstance(found, MemoryError) or any(words in text for words in _NO_MEMORY):
            return out_of_memory(plan, (text or type(found).__name__).splitlines()[0][:500])
        found = found.__cause__ or found.__context__
    return not_running(device, error)


def pool_too_small(plan: Plan, tokens: int, least: int, weights: int) -> StartError:
    """The error for a KV pool that is smaller than one context, although the plan fits.

    Args:
        plan: The plan of the model.
        tokens: Tokens that the pool holds.
        least: Tokens of one context.
        weights: Measured bytes of the weights.
    """
    missing = (plan.tokens - tokens) * plan.token_bytes
    larger = weights - plan.weights > missing // 2
    cause = "another process took memory while the model was loaded"
    if larger:
        cause = f"the weights take {size_text(weights)} instead of {size_text(plan.weights)}"
    stays = weights + plan.adapters + plan.state + least * plan.token_bytes
    fraction = math.ceil(stays / plan.device.free * 1000 + 1) / 1000
    hint = "end what else uses the device, or choose a smaller model"
    if tokens >= min(SHORT_CONTEXT, least // 2):
        hint = f"set `context_length = {tokens}` in the options"
    elif larger and plan.fraction < fraction <= _FRACTIONS[-1]:
        hint = f"set `mem_fraction_static = {fraction}` in the options"
    return StartError(
        f"{plan.device.name} has room for {tokens:,} tokens of KV, less than one context of "
        f"{least:,}, where {plan.tokens:,} were planned: {cause}",
        hint,
    )


def find_remedy(
    device: Device, model: ModelSizes, settings: MemorySettings
) -> tuple[str, int | float] | None:
    """An option and a value with which the model fits; None if there is none."""

    def fits(**changes: Any) -> bool:
        changed = settings._replace(**changes)
        return plan_memory(device, model, changed).fits(changed)

    return next(_remedies(device, model, settings, fits), None)


def _remedies(
    device: Device, model: ModelSizes, settings: MemorySettings, fits: Callable[..., bool]
) -> Iterator[tuple[str, int | float]]:
    """Options and values that help, the cheapest first."""
    if settings.fraction is not None:
        fraction = _nearest_fraction(device, model, settings)
        if fits(fraction=fraction):
            yield "mem_fraction_static", fraction
    longest = _largest(
        settings.context_length // settings.page_size,
        lambda pages: fits(context_length=pages * settings.page_size),
    )
    context = longest * settings.page_size
    if context >= SHORT_CONTEXT:
        yield "context_length", context
    slots = _largest(settings.adapter_slots, lambda count: fits(adapter_slots=count))
    if slots:
        yield "max_loras_per_batch", slots
    tokens = _largest(settings.chunk_tokens, lambda count: fits(chunk_tokens=count))
    if tokens >= SHORT_CHUNK:
        yield "chunked_prefill_size", tokens
    requests = _largest(settings.requests, lambda count: fits(requests=count))
    if requests:
        yield "cuda_graph_max_bs", requests
    if not device.is_host and not settings.adapter_slots:
        counts = (count for count in RANKS if count > settings.ranks and _divide(model, count))
        yield from (("tensor_parallel_size", count) for count in counts if fits(ranks=count))
    if context:
        yield "context_length", context


def _divide(model: ModelSizes, ranks: int) -> bool:
    """Whether ranks can shard the heads evenly; KV heads may be replicated."""
    kv_heads = model.token_bytes.most
    return model.heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _nearest_fraction(device: Device, model: ModelSizes, settings: MemorySettings) -> float:
    """The smallest fraction that holds one context, or the safe one if the given is too large."""

    def holds_context(fraction: float) -> bool:
        plan = plan_memory(device, model, settings._replace(fraction=fraction))
        return plan.tokens >= settings.context_tokens

    if settings.fraction is not None and holds_context(settings.fraction):
        return shown(plan_memory(device, model, settings._replace(fraction=None)).fraction)
    too_small = _largest(len(_FRACTIONS) - 1, lambda index: not holds_context(_FRACTIONS[index]))
    return _FRACTIONS[min(too_small + 1, len(_FRACTIONS) - 1)]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of ``1..=most`` that fits; 0 if none does."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def _reason(plan: Plan, model: ModelSizes, settings: MemorySettings) -> str:
    device = plan.device
    free = f"{size_text(device.free)} that are free on {device.name}"
    given = f"option `mem_fraction_static` is {settings.fraction}"
    passing = {"activations": plan.activations, "graphs": plan.graphs, "tables": plan.tables}
    if settings.fraction is not None and plan.tokens >= settings.context_tokens:
        left = size_text(device.free - int(settings.fraction * device.free))
        return f"{given}, which leaves {left} of the {free}, less than {_listed(passing)}"
    staying = {"weights": plan.weights, "adapters": plan.adapters, "state": plan.state}
    context = f"{settings.context_length:,} tokens of KV"
    staying[context] = settings.context_tokens * plan.token_bytes
    if settings.fraction is not None:
        share = size_text(int(settings.fraction * device.free))
        return f"{given}, which is {share} of the {free}, less than {_listed(staying)}"
    others = {**passing, "reserve": safe_reserve(device, model, settings)}
    total = f"{size_text(device.total)} in total"
    return f"the model needs more than the {free} ({total}): {_listed({**staying, **others})}"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
