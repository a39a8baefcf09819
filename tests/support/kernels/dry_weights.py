"""Compares the stand-in of a dry run with a model that SGLang has loaded.

    PYTHONPATH=tests python tests/support/kernels/dry_weights.py CONFIG

CONFIG is a `driver.toml` of a model in float32 on the CPU. What kernels are specialized for must be
the same: sizes, dtypes, strides, and which parts a layer has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.backends.sglang.compile_shapes import dry_model
from pie_driver_sglang.cli.warm import GPUS
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig


def described(value: Any, *, rows: bool = True) -> Any:
    """Everything but values of tensors, addresses, and numbers that differ between layers."""
    import torch

    if isinstance(value, torch.Tensor):
        # KV pools and rotary tables have as many rows as the memory and the model allow.
        size = list(value.shape)[0 if rows else 1 :]
        # Keys and values may share a storage; kernels are specialized for aligned addresses alone.
        alignment = value.storage_offset() * value.element_size() % 16
        return str(value.dtype), size, list(value.stride()), alignment
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        pooled = ("k_cache", "v_cache", "keys", "values", "cos_sin_cache")
        fields = value._asdict()
        fields.pop("layer_id", None)
        return {name: described(each, rows=name not in pooled) for name, each in fields.items()}
    # Kernels are not specialized for floats.
    return "float" if isinstance(value, float) else value


def compare(config: DriverConfig) -> None:
    """Loads the model, and compares each of its layers."""
    import torch

    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.compilation import dry_run
    from pie_driver_sglang.fork_server.cuda_properties import answering

    _, engine = load_engine(config)
    runner = engine.backend.runner
    loaded = engine.backend.decoder_weights()
    gpu = dict(GPUS["h200"])
    options, dtype = config.driver.options, config.driver.activation_dtype
    # On the CPU it does not decode.
    options = msgspec.structs.replace(options, paged_decode=None)
    model = dry_model(
        config.model.hf_config, options, dtype, major=gpu["major"], memory=gpu["total_memory"]
    )
    with answering([gpu]), dry_run.fake_gpu():
        stand_in = dry_run.DryBackend(model, torch.device("cuda", 0))
        weights = stand_in.decoder_weights()
        assert described(weights.norm) == described(loaded.norm)
        for layer in loaded.layers:
            expected, found = described(layer), described(weights.layers[0])
            assert found == expected, f"\n{found}\n{expected}"
        table = engine.block_table.slots
        assert stand_in.block_table.slots.shape == table.shape
        assert stand_in.info.vocab_size == engine.backend.info.vocab_size
    assert model.head_rows == len(runner.model.lm_head.weight)


if __name__ == "__main__":
    loaded_config = load_config(Path(sys.argv[1]))
    environment.prepare("cpu", loaded_config.model.hf_config["architectures"], spins=False)
    compare(loaded_config)
    print("alike")
