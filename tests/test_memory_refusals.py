"""Plans that do not fit, and the option with the value that would."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory.plan import (
    plan_memory,
)
from pie_driver_sglang.memory.plan_types import SHARDED, Device, ModelSizes, Part
from pie_driver_sglang.memory.refusal import (
    find_warning,
    out_of_memory,
    pool_too_small,
    require_fit,
    run_failure,
)
from pie_driver_sglang.memory.units import GIB
from support.models.memory_sizes import H200, QWEN, USUAL


def refusal(device: Device, model: ModelSizes, **changes: Any) -> tuple[str, str | None]:
    with pytest.raises(StartError) as caught:
        require_fit(device, model, USUAL._replace(**changes))
    return str(caught.value), caught.value.hint


def test_a_fraction_that_leaves_too_little_names_the_largest_that_is_safe() -> None:
    message, hint = refusal(H200, QWEN, fraction=0.995)
    assert message == (
        "option `mem_fraction_static` is 0.995, which leaves 711.7 MiB of the 139.00 GiB that are "
        "free on cuda:0, less than activations 965.9 MiB, graphs 703.1 MiB, tables 174.7 MiB"
    )
    assert hint == "set `mem_fraction_static = 0.93` in the options"


def test_a_fraction_that_holds_no_context_names_the_smallest_that_does() -> None:
    message, hint = refusal(H200, QWEN, fraction=0.02)
    assert message == (
        "option `mem_fraction_static` is 0.02, which is 2.78 GiB of the 139.00 GiB that are free "
        "on cuda:0, less than weights 1.13 GiB, 40,960 tokens of KV 4.38 GiB"
    )
    assert hint == "set `mem_fraction_static = 0.04` in the options"


def test_a_context_that_does_not_fit_names_the_longest_that_does() -> None:
    message, hint = refusal(H200._replace(free=12 * GIB), QWEN, context_length=131_072)
    assert message.startswith("the model needs more than the 12.00 GiB that are free on cuda:0")
    assert "(140.00 GiB in total): weights 1.13 GiB, 131,072 tokens of KV 14.00 GiB" in message
    assert hint is not None
    assert hint.startswith("set `context_length = ")


def test_weights_that_do_not_fit_name_the_number_of_gpus() -> None:
    large = QWEN._replace(weights=(Part(200 * GIB, SHARDED),))
    _, hint = refusal(H200, large)
    assert hint == "set `tensor_parallel_size = 2` under [model.driver], with as many GPUs"
    message, hint = refusal(Device("cpu", 64 * GIB, 60 * GIB), large)
    assert "weights 200.00 GiB" in message
    assert hint == "free memory, or choose a smaller or a quantized model"


def test_long_contexts_are_named_in_digits() -> None:
    small = QWEN._replace(token_bytes=Part(8192, 8))
    _, hint = refusal(H200, small, context_length=2**25, requests=1)
    assert hint is not None
    found = re.fullmatch(r"set `context_length = (\d+)` in the options", hint)
    assert found is not None
    assert int(found[1]) > 10**6


def test_passes_that_are_too_long_name_a_length() -> None:
    full = Device("cuda:0", 24 * GIB, 23 * GIB)
    _, hint = refusal(full, QWEN, chunk_tokens=2_000_000, context_length=1024)
    assert hint is not None
    assert hint.startswith("set `chunked_prefill_size = ")


def test_an_unsafe_memory_fraction_has_a_warning() -> None:
    settings = USUAL._replace(fraction=0.98)
    warning = find_warning(plan_memory(H200, QWEN, settings), QWEN, settings)
    assert warning is not None
    safe = plan_memory(H200, QWEN, USUAL).fraction
    assert warning.endswith(f"; up to {int(safe * 1000) / 1000} is safe")
    for fraction in (None, 0.5, int(safe * 1000) / 1000):
        settings = USUAL._replace(fraction=fraction)
        assert find_warning(plan_memory(H200, QWEN, settings), QWEN, settings) is None


def test_a_device_that_runs_out_although_the_plan_fits_names_a_smaller_share() -> None:
    plan = plan_memory(H200, QWEN, USUAL._replace(fraction=0.9))
    error = out_of_memory(plan, "tried to allocate 2.00 GiB")
    assert str(error) == "cuda:0 has less memory than was planned with: tried to allocate 2.00 GiB"
    assert error.hint == "set `mem_fraction_static = 0.85` in the options"
    tiny = out_of_memory(plan._replace(fraction=0.02), "")
    assert tiny.hint == "set `mem_fraction_static = 0.01` in the options"
    # Of the vLLM driver, whose users give a share of the memory with activations.
    assert "= 0.65`" in out_of_memory(plan._replace(user_share=0.7), "").hint


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("a graph of 8 rows failed with 1 in use: CUDA error 2 (out of memory)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_in_graphs_or_warm_up_names_a_smaller_share(error: Exception) -> None:
    plan = plan_memory(H200, QWEN, USUAL._replace(fraction=0.9))
    refusal = run_failure(plan, "cuda:0", error)
    first = (str(error) or "MemoryError").splitlines()[0]
    assert str(refusal) == f"cuda:0 has less memory than was planned with: {first}"
    assert refusal.hint == "set `mem_fraction_static = 0.85` in the options"
    # The end of a capture fails, too, once the capture is invalid.
    broken = RuntimeError("operation failed due to a previous error during capture")
    broken.__context__ = error
    assert str(run_failure(plan, "cuda:0", broken)) == str(refusal)


def test_what_fails_otherwise_names_the_backend() -> None:
    plan = plan_memory(H200, QWEN, USUAL)
    refusal = run_failure(plan, "cuda:0", RuntimeError("no float32 here"))
    assert str(refusal) == "the model loads but does not run on cuda:0: no float32 here"
    assert "`attention_backend`" in refusal.hint


def test_a_pool_that_became_too_small_names_the_reason() -> None:
    plan = plan_memory(H200, QWEN, USUAL._replace(fraction=0.05))
    raced = pool_too_small(plan, 30_000, 40_960, plan.weights)
    assert str(raced) == (
        "cuda:0 has room for 30,000 tokens of KV, less than one context of 40,960, where 54,480 "
        "were planned: another process took memory while the model was loaded"
    )
    assert raced.hint == "set `context_length = 30000` in the options"
    none = pool_too_small(plan, 0, 40_960, plan.weights)
    assert none.hint == "end what else uses the device, or choose a smaller model"
    # With weights of 8 GiB a context takes 12.4 of 139.
    slightly = pool_too_small(plan, 0, 40_960, plan.weights + 32 * 2**20)
    assert "another process took memory" in str(slightly), "32 MiB are not the missing ones"
    larger = pool_too_small(plan, 0, 40_960, 8 * GIB)
    assert "the weights take 8.00 GiB instead of 1.13 GiB" in str(larger)
    assert larger.hint == "set `mem_fraction_static = 0.091` in the options"
    assert 0.091 * H200.free > 8 * GIB + 40_960 * plan.token_bytes
