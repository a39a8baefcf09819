"""Where a model is: its folder, a packaged model, or a repository that is downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.checkpoint.gguf_cache import LOAD_FORMAT, converted_folder, gguf_source
from pie_driver_sglang.checkpoint.hub_cache import (
    fetch_snapshot,
    local_path,
    modelscope_folder,
    uses_modelscope,
)
from pie_driver_sglang.checkpoint.packaged import MODELS, packaged_folder
from pie_driver_sglang.errors import ConfigError, Unsupported, quoted

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_READ_BY_SGLANG: Final = frozenset({"az", "gs", "instance", "redis", "s3"})
"""Schemes of URLs from which SGLang's own loaders read models."""

_OTHER_TOKENIZERS: Final = (
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "qwen.tiktoken",
)
"""Files of tokenizers that SGLang reads by transformers."""


def model_folder(values: Mapping[str, Any], *, with_weights: bool) -> Path:
    """The folder of a model: a path, a packaged model, or a snapshot; downloaded if needed.

    Args:
        values: With `model_path`, `revision` and `download_dir`.
        with_weights: Whether weights are needed, or only configurations and the tokenizer.

    Raises:
        ConfigError: It is neither a folder nor an available repository.
    """
    name = values.get("model_path")
    if name is None or name == "":
        raise ConfigError("`model_path` is missing", "name a folder or a repository")
    if not isinstance(name, str | Path):
        hint = "name a folder or a repository"
        raise ConfigError(f"the model is {quoted(name)}, expected a text or a path", hint)
    for given in ("revision", "download_dir"):
        if not isinstance(values.get(given), str | Path | None):
            hint = f"set `{given}` to one, or remove it"
            raise ConfigError(f"`{given}` is {quoted(values[given])}, expected a text", hint)
    if (scheme := remote_scheme(str(name))) is not None:
        raise _remote(str(name), scheme)
    folder = local_path(name)
    source = gguf_source(folder, load_format_of(values)) if folder is not None else None
    if source is not None:
        return converted_folder(source)
    if folder is not None and folder.is_dir():
        return folder
    if str(name) in MODELS:
        return packaged_folder(str(name))
    if load_format_of(values) == LOAD_FORMAT:
        raise ConfigError(
            f"`load_format` is 'gguf', and the model {quoted(str(name))} is neither a file nor a "
            "folder",
            f"download the file by `hf download {name} FILE.gguf`, and name its path",
        )
    revision, cache = values.get("revision"), values.get("download_dir")
    if uses_modelscope():
        return modelscope_folder(str(name), cache)
    return fetch_snapshot(str(name), revision, cache, with_weights=with_weights)


def remote_scheme(name: str) -> str | None:
    """The scheme of a model's URL, such as `s3`; None for a path or a repository."""
    match = _URL.match(name)
    return None if match is None else match[1].lower()


def _remote(name: str, scheme: str) -> ConfigError:
    kind = Unsupported if scheme in _READ_BY_SGLANG else ConfigError
    return kind(
        f"the model {quoted(name)} is a URL, and the driver reads models from folders and the hub",
        "download it, and name the folder",
    )


def load_format_of(values: Mapping[str, Any]) -> str:
    """SGLang's `load_format`; `auto` where it is not set."""
    return str(values.get("load_format", "auto"))


def tokenizer_folder(values: Mapping[str, Any], model: Path) -> Path:
    """The folder of a model's tokenizer: its own, or that of `tokenizer_path`.

    Args:
        values: With `model_path` and `tokenizer_path`.
        model: The model's folder.

    Raises:
        ConfigError: It has no `tokenizer.json`.
    """
    name = values.get("tokenizer_path") or values["model_path"]
    folder = model
    if str(name) != str(values["model_path"]):
        # The revision is that of the model's repository.
        own = {**values, "model_path": name, "revision": None}
        folder = model_folder(own, with_weights=False)
    if not (folder / "tokenizer.json").is_file():
        raise _no_tokenizer(folder)
    return folder


def _no_tokenizer(folder: Path) -> ConfigError:
    """The error for a folder without `tokenizer.json`; SGLang's scheduler reads other formats."""
    other = next((each for each in _OTHER_TOKENIZERS if (folder / each).is_file()), None)
    if other is not None:
        return Unsupported(
            f"the tokenizer in {quoted(str(folder))} is a {other}, without a tokenizer.json",
            "convert it with transformers: `AutoTokenizer.from_pretrained(…)` writes one by "
            "`save_pretrained(…)`",
        )
    return ConfigError(
        f"there is no tokenizer in {quoted(str(folder))}",
        "download the model again, with tokenizer.json, or set `skip_tokenizer_init`",
    )
