"""Plans and loads models; returns planned and used memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from support.process import drivers


def load(
    config_path: str,
    free: int | None,
    connection: Connection,
    stderr: str,
    lost: int = 0,
) -> None:
    """Loads a model and sends its plan, what it was found to take, and its large tensors.

    Args:
        config_path: `driver.toml` of a model on the CPU.
        free: Bytes of a GPU that the planner and SGLang are to see instead of the host; None for
            the host.
        connection: Sends the plan, what is loaded, and the bytes of each tensor that has half of
            a layer's keys or more; or the error of the start.
        stderr: Where to log.
        lost: Bytes of the GPU that others take while the model is loaded.
    """
    drivers.redirect_output(stderr)
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.errors import StartError

    with ExitStack() as stack:
        if free is not None:
            stack.enter_context(_pretended(free, lost))
        try:
            _, engine = load_engine(load_config(Path(config_path)))
        except StartError as error:
            with connection:
                connection.send(error)
            return
    loaded = engine.measure_memory()
    keys = loaded.kv // (2 * engine.backend.runner.model_config.num_hidden_layers)
    with connection:
        connection.send((engine.plan, loaded, _storages(keys // 2)))


def send_sizes(snapshots: list[str], connection: Connection, stderr: str) -> None:
    """Sends the sizes of each model on one rank, as a start finds them."""
    drivers.redirect_output(stderr)
    from pie_driver_sglang.backends.sglang import measure

    found = []
    for snapshot in snapshots:
        args, model_config = _configured(snapshot, 1)
        found.append(measure.sizes_of(_config(snapshot), model_config, args))
    with connection:
        connection.send(found)


def count_tokens(snapshots: list[str], connection: Connection, stderr: str) -> None:
    """Sends what a token of KV takes in each model on one rank and two, and its state.

    Each is the planner's count, SGLang's, and the bytes of recurrent state by the planner.
    """
    drivers.redirect_output(stderr)
    counts = [[_count_token(snapshot, ranks) for ranks in (1, 2)] for snapshot in snapshots]
    with connection:
        connection.send(counts)


@contextmanager
def _pretended(free: int, lost: int) -> Iterator[None]:
    """Within it the CPU's memory is a GPU's, of which loaded weights take their part."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.mem_cache import kv_cache_configurator

    from pie_driver_sglang.backends.sglang import measure
    from pie_driver_sglang.memory.plan_types import Device

    with (
        mock.patch.object(measure, "measure", lambda *_: Device("cuda:0", free, free)),
        mock.patch.object(bootstrap, "get_available_gpu_memory", _free_by(lambda: free)),
        mock.patch.object(
            kv_cache_configurator,
            "get_available_gpu_memory",
            _free_by(lambda: free - lost - _parameter_bytes()),
        ),
    ):
        yield


def _free_by(free: Callable[[], int]) -> Callable[..., float]:
    """SGLang's function: GiB."""

    def available(*_args: Any, **_kwargs: Any) -> float:
        return free() / 2**30

    return available


def _parameter_bytes() -> int:
    """Of the model that is loaded, which a runner of SGLang holds."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    (runner,) = [found for found in gc.get_objects() if isinstance(found, ModelRunner)]
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _storages(least: int) -> list[int]:
    """Sizes of all memory that tensors of at least so many bytes have, each once."""
    import torch

    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
                if tensor.device.type == "cpu" and tensor.storage_offset() == 0}  # fmt: skip
    return sorted(size for size in storages.values() if size >= least)


def _count_token(snapshot: str, ranks: int) -> tuple[int, int, int]:
    """Bytes by the planner and by SGLang, and recurrent state."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.runtime_context import get_parallel

    from pie_driver_sglang.backends.sglang import measure

    args, model_config = _configured(snapshot, ranks)
    recurrent = mambaish_config(model_config)
    layers = model_config.num_hidden_layers
    theirs: Any = SimpleNamespace(
        kv_cache_dtype_str="auto",
        kv_cache_dtype=torch.bfloat16,
        model_config=model_config,
        layer_info=SimpleNamespace(start_layer=0, end_layer=layers, num_effective_layers=layers),
        server_args=args,
        use_mla_backend=model_config.attention_arch == AttentionArch.MLA,
        ps=SimpleNamespace(pp_size=1),
        spec_algorithm=_NoDrafts(),
        is_draft_worker=False,
    )
    with get_parallel().override(attn_tp_size=ranks):
        cell = DefaultPoolConfigurator(theirs)._cell_size
    sizes = measure.sizes_of(_config(snapshot), model_config, args)
    assert (sizes.state_bytes > 0) == (recurrent is not None)
    return sizes.token_bytes.per_rank(ranks), cell, sizes.state_bytes


def _configured(snapshot: str, ranks: int) -> tuple[Any, Any]:
    """SGLang's arguments and configuration for a model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=snapshot,
        device="cpu",
        dtype="bfloat16",
        attention_backend="triton",
        disable_cuda_graph=True,
        disable_radix_cache=True,
        disable_hybrid_swa_memory=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        tp_size=ranks,
    )
    publish(args, role="scheduler")
    model_config = ModelConfig.from_server_args(args)
    return args, model_config


def _config(snapshot: str) -> Any:
    """As much of a configuration as sizes depend on."""
    import json
    from types import SimpleNamespace

    from pie_driver_sglang.config.option_checks import parse_options

    hf_config = json.loads((Path(snapshot) / "config.json").read_text())
    return SimpleNamespace(
        model=SimpleNamespace(snapshot_dir=Path(snapshot), hf_config=hf_config),
        driver=SimpleNamespace(options=parse_options({}, "cpu")),
    )


class _NoDrafts:
    """SGLang's speculation, off."""

    def is_eagle(self) -> bool:
        return False

    is_standalone = is_dflash_family = is_eagle
