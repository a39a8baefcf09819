"""A model's configuration, its runner, and what SGLang does to either on a CPU.

`ModelConfig` and `ModelRunner` are passed on for annotations. Their public fields and methods are
used everywhere in the adapter, and `tools/check_compat.py` looks for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, ModelImpl
from sglang.srt.layers import logits_processor
from sglang.srt.layers.rotary_embedding import base as rotary_base
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.utils import get_resolved_model_impl

from pie_driver_sglang.backends.sglang.compat import selection, settings
from pie_driver_sglang.backends.sglang.compat.ranks import TpRank, runner_arguments
from pie_driver_sglang.backends.sglang.compat.settings import Resolved, ServerArgs

__all__ = ["ModelConfig", "ModelRunner"]

Fitting = Callable[[ModelRunner], AbstractContextManager[None]]
"""Within what it gives, a runner that has loaded its model makes its LoRA manager."""


def load_model_config(args: ServerArgs) -> ModelConfig:
    """The `ModelConfig` of published settings; it must know dtype, quantization and context."""
    return ModelConfig.from_server_args(args)


def make_runner(
    model_config: ModelConfig, args: ServerArgs, gpu_id: int, rank: TpRank, fitting: Fitting
) -> ModelRunner:
    """A `ModelRunner` with its weights; the settings are published, with the rank."""

    class FittedRunner(ModelRunner):
        """Its adapters fit the model that it has loaded, by a step that its `__init__` takes."""

        def init_lora_manager(self) -> None:
            with fitting(self):
                super().init_lora_manager()

    selection.ranks().make_groups(args, model_config)
    return FittedRunner(
        model_config=model_config,
        mem_fraction_static=Resolved(args).mem_fraction_static,
        gpu_id=gpu_id,
        # The process groups are there already.
        nccl_port=0,
        server_args=args,
        **runner_arguments(rank, gpu_id),
    )


def attach_head(runner: Any, head: torch.nn.Module) -> None:
    """Gives a runner an EAGLE head, whose layer is one more of its KV pool."""
    runner.draft_head = head


def attached_head(runner: Any) -> torch.nn.Module | None:
    """The EAGLE head of a runner; None for one without."""
    found: torch.nn.Module | None = getattr(runner, "draft_head", None)
    return found


def resolved(runner: ModelRunner) -> Resolved:
    """The settings that a runner was made with."""
    return Resolved(runner.server_args)


def take_cpu_for_one() -> None:
    """Sets `_is_cpu` of two modules, or rotary embeddings and soft-capped logits ask for CUDA."""
    rotary_base._is_cpu = True
    logits_processor._is_cpu = True


@contextmanager
def unpadded() -> Iterator[None]:
    """Within it models on a CPU keep their sizes; `adjust_config_with_unaligned_cpu_tp` does not.

    SGLang rounds heads and widths up for Intel's matrix units, which are not used here, and fills
    what it adds by code that only they run.
    """

    def keep(config: ModelConfig, *_args: Any) -> ModelConfig:
        return config

    with mock.patch.object(model_runner, "adjust_config_with_unaligned_cpu_tp", keep):
        yield


@contextmanager
def device_module_of(device: str) -> Iterator[None]:
    """Within it `torch.get_device_module()` is the module of a model's device, such as `torch.cpu`.

    Qwen3-Next makes norms where that module says. A torch with CUDA (from 2.14), or one that finds
    a GPU, takes `torch.cuda` otherwise, whatever the model runs on.
    """
    own = torch.get_device_module

    def of_model(found: torch.device | str | None = None) -> Any:
        return own(device if found is None else found)

    with mock.patch.object(torch, "get_device_module", of_model):
        yield


def uses_latent_attention(model_config: ModelConfig) -> bool:
    """Whether a model attends to latent KV (MLA); reads `attention_arch`."""
    return bool(model_config.attention_arch == AttentionArch.MLA)


def is_from_transformers(model_config: ModelConfig) -> bool:
    """Whether SGLang would run transformers' own code for a model."""
    return bool(get_resolved_model_impl(model_config) == ModelImpl.TRANSFORMERS)


def recurrent_config(model_config: ModelConfig) -> Any:
    """What SGLang knows of recurrent layers before they are made; None for a model without."""
    return mambaish_config(model_config)


def state_bytes(recurrent: Any, ranks: int) -> int:
    """Bytes of a context's recurrent state on one of so many ranks.

    Args:
        recurrent: As :func:`recurrent_config` gives it.
        ranks: The model's.
    """
    # The groups that it asks about are made later.
    with settings.rank_count(ranks):
        return int(recurrent.mamba2_cache_params.mamba_cache_per_req)


def attention_layer_count(model_config: ModelConfig, recurrent: Any) -> int:
    """Layers that keep KV; reads `full_attention_layer_ids` where some are recurrent."""
    layers = len(recurrent.full_attention_layer_ids) if recurrent else None
    return int(model_config.num_hidden_layers) if layers is None else layers


def kv_dtype(args: ServerArgs, model_config: ModelConfig) -> torch.dtype:
    """The dtype of the KV pool, as SGLang will choose it without the model's own scales."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=Resolved(args).kv_cache_dtype,
        model=torch.nn.Module(),
        model_dtype=model_config.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    found: torch.dtype = dtype
    return found
