"""vLLM's settings: `EngineArgs`, the configuration that it resolves, and what that changes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry


def resolve_settings(settings: Mapping[str, Any]) -> VllmConfig:
    """The configuration of `EngineArgs`; vLLM sets variables of the process meanwhile.

    Args:
        settings: Fields of `EngineArgs`.
    """
    with _unchanged_preloads(), _inspecting_in_process():
        return EngineArgs(**settings).create_engine_config()


@contextlib.contextmanager
def _unchanged_preloads() -> Iterator[None]:
    """VLLM has children preload libraries for its own workers, which there are none of."""
    former = os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if former is not None:
            os.environ["LD_PRELOAD"] = former


@contextlib.contextmanager
def _inspecting_in_process() -> Iterator[None]:
    """Within it model classes are looked at in this process, which loads them anyway.

    vLLM starts another one, which imports torch and vLLM once more, so that a parent makes no CUDA
    context.
    """
    lazy: Any = registry._LazyRegisteredModel
    former = lazy.inspect_model_cls

    def inspect(model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    lazy.inspect_model_cls = inspect
    try:
        yield
    finally:
        lazy.inspect_model_cls = former
