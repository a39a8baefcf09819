"""Formats of weights that cannot be loaded here, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, Unsupported, quoted

#: Names of `torchao_config`; that of 4 bits ends with the size of a group.
TORCHAO: Final = (
    "int8wo",
    "int8dq",
    "fp8wo",
    "fp8dq-per_tensor",
    "fp8dq-per_row",
    "int4wo-32",
    "int4wo-64",
    "int4wo-128",
    "int4wo-256",
)
#: What SGLang imports of torchao for each of them.
_IMPORTED: Final = "float8_dynamic_activation_float8_weight"
#: Formats whose weights come from a URL or another server.
_REMOTE: Final = ("remote", "remote_instance")
_BITSANDBYTES: Final = "bitsandbytes"
_COMPRESSED_TENSORS: Final = "compressed-tensors"


def check_weight_format(settings: Mapping[str, Any], device: str) -> None:
    """Reject formats that cannot be loaded on this machine.

    Args:
        settings: Of SGLang, which the user has set.
        device: `cpu` or `cuda:N`.

    Raises:
        Unsupported: SGLang's own scheduler loads it.
        ConfigError: Neither does, or a value is wrong.
    """
    load_format = settings.get("load_format", "auto")
    if load_format in _REMOTE:
        raise Unsupported(
            f"option `load_format` is {quoted(load_format)}, and the driver reads weights from a "
            "folder",
            "download the model, name its folder, and remove `load_format`",
        )
    if load_format == "gguf":
        raise ConfigError(
            "option `load_format` is 'gguf', and the driver reads GGUF files converted only",
            "convert it by `python -m pie_driver_sglang.checkpoint.gguf FILE FOLDER`, name the "
            "folder, and remove `load_format`; `pie-sglang serve` and the engine do so",
        )
    if settings.get("quantization") == "gguf":
        raise ConfigError(
            "option `quantization` is 'gguf', and GGUF files are served in bfloat16",
            "remove `quantization`",
        )
    for name in ("load_format", "quantization"):
        if settings.get(name) == _BITSANDBYTES:
            _check_bitsandbytes(f"option `{name}` is {quoted(_BITSANDBYTES)}", device)
    if (config := settings.get("torchao_config")) is not None:
        _check_torchao(config)


def check_stored_format(hf_config: Mapping[str, Any], device: str) -> None:
    """Reject a checkpoint in a format that cannot be loaded on this machine.

    Raises:
        ConfigError: It is in one.
    """
    stored = hf_config.get("quantization_config", hf_config.get("compression_config"))
    method = stored.get("quant_method") if isinstance(stored, Mapping) else None
    if method == _BITSANDBYTES:
        _check_bitsandbytes("the weights are quantized by bitsandbytes", device)
    if method == _COMPRESSED_TENSORS and device.startswith("cpu"):
        raise ConfigError(
            "the weights are quantized by compressed-tensors, whose kernels in SGLang need a GPU",
            'set `device = ["cuda:0"]`, or use a checkpoint in bfloat16',
        )


def _check_bitsandbytes(subject: str, device: str) -> None:
    if device == "cpu":
        raise ConfigError(
            f"{subject}, whose kernels in SGLang need a GPU",
            'set `device = ["cuda:0"]`, or use a checkpoint in bfloat16',
        )
    if util.find_spec(_BITSANDBYTES) is None:
        raise ConfigError(
            f"{subject}, and the package bitsandbytes is not installed",
            "install it: `pip install 'bitsandbytes>=0.46.1'`",
        )


def _check_torchao(config: str) -> None:
    if config not in TORCHAO:
        raise ConfigError(
            f"option `torchao_config` is {quoted(config)}, which SGLang does not know",
            f"choose one of {', '.join(TORCHAO)}",
        )
    spec = util.find_spec("torchao")
    folders = [] if spec is None else spec.submodule_search_locations or []
    exported = [Path(folder, "quantization", "__init__.py") for folder in folders]
    if any(_IMPORTED in path.read_text(encoding="utf-8") for path in exported):
        return
    found = "is not installed" if spec is None else f"{metadata.version('torchao')} has not"
    raise ConfigError(
        f"option `torchao_config` is {quoted(config)}, for which SGLang imports {_IMPORTED}, which "
        f"torchao {found}",
        "use a checkpoint in FP8, GPTQ or AWQ, or `quantization` = fp8",
    )
