"""What a checkpoint's files say of its embeddings: pooling, scaling, heads, attention."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import quoted

MODULES: Final = "modules.json"
LAST: Final = "lasttoken"
MEAN: Final = "mean"
CLS: Final = "cls"
DENSE_WEIGHTS: Final = "model.safetensors"
_MODES: Final = (LAST, MEAN, CLS)
_ACTIVATIONS: Final = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
"""Classes of `torch.nn` that a Dense module may name."""
_WITH_HEAD: Final = re.compile("For(Sequence)?Classification|ForRewardModel")
_PREFIX: Final = "pooling_mode_"
_OF_OLDER_FILES: Final = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}


class DenseModule(NamedTuple):
    """A linear layer after the pooling."""

    path: Path
    """Its weights: `linear.weight` ``[outputs, inputs]``, and `linear.bias` ``[outputs]``."""
    inputs: int
    outputs: int
    bias: bool
    activation: str
    """A class of `torch.nn`."""


class PoolingFiles(NamedTuple):
    """How a checkpoint's files say that an embedding is made of hidden states."""

    mode: str = LAST
    """`LAST`, `MEAN` or `CLS`: the state of the last token, the mean of all, that of the first."""
    dense: tuple[DenseModule, ...] = ()
    normalize: bool | None = None
    """Whether it is scaled to length 1; None where no file says so."""

    @property
    def needs_all_states(self) -> bool:
        """Whether states of earlier parts of a prompt are needed, which a cached prefix lacks."""
        return self.mode != LAST


def has_head(architectures: Iterable[object]) -> bool:
    """Whether one of these classes has a classification or reward head."""
    return any(_WITH_HEAD.search(str(name)) for name in architectures)


def read_pooling(folder: Path) -> PoolingFiles:
    """Read `modules.json` of sentence-transformers, and the files that it names.

    Args:
        folder: The snapshot.

    Raises:
        UnsupportedPoolingError: They ask for what is not computed here.
        ValueError: A file is not what sentence-transformers writes.
        OSError: One cannot be read.
    """
    modules = _read(folder / MODULES, list)
    if not modules:
        return PoolingFiles()
    found = PoolingFiles(normalize=False)
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise UnsupportedPoolingError(f"its `{MODULES}` has a {kind} module")
        if found.normalize:
            raise UnsupportedPoolingError(f"its `{MODULES}` has a {kind} module after Normalize")
        if kind == "Pooling":
            found = found._replace(mode=_mode(folder, path))
        elif kind == "Dense":
            found = found._replace(dense=(*found.dense, _dense(folder, path)))
        elif kind == "Normalize":
            found = found._replace(normalize=True)
    return found


class UnsupportedPoolingError(ValueError):
    """Files of a checkpoint ask for a pooling that is not computed here; the text says which."""


def _mode(folder: Path, path: str) -> str:
    name = f"{path}/config.json"
    config = _read(folder / name, dict) or {}
    modes = _modes(config)
    if len(modes) > 1 or not modes <= {*_MODES}:
        raise UnsupportedPoolingError(f"its `{name}` asks for {', '.join(sorted(modes))} pooling")
    if config.get("include_prompt") is False:
        raise UnsupportedPoolingError(f"its `{name}` leaves prompts out of the pooling")
    return next(iter(modes), LAST)


def _dense(folder: Path, path: str) -> DenseModule:
    name = f"{path}/config.json"
    config = _read(folder / name, dict)
    if config is None:
        raise UnsupportedPoolingError(f"its Dense module has no `{name}`")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedPoolingError(
            f"its `{name}` has the activation {quoted(activation)}, not one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    weights = folder / path / DENSE_WEIGHTS
    if not weights.is_file():
        raise UnsupportedPoolingError(f"its Dense module has no `{path}/{DENSE_WEIGHTS}`")
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if not (isinstance(inputs, int) and isinstance(outputs, int) and min(inputs, outputs) > 0):
        raise ValueError(f"{name} has no `in_features` and `out_features`")
    return DenseModule(weights, inputs, outputs, bool(config.get("bias", True)), activation)


def may_attend_ahead(hf_config: Mapping[str, Any]) -> str | None:
    """Why the code of an embedding model may attend to later tokens, as that of gte-Qwen2 does.

    Args:
        hf_config: Its `config.json`.

    Returns:
        What says so; None if nothing does.
    """
    if hf_config.get("is_causal") is False:
        return "`is_causal` is false"
    own = hf_config.get("auto_map")
    code = own.get("AutoModel") if isinstance(own, Mapping) else None
    return None if code is None else f"`auto_map` names its own code, {quoted(str(code))}"


def _modes(config: dict[str, Any]) -> set[str]:
    """The modes of pooling; several are concatenated."""
    mode = config.get("pooling_mode")
    if mode is not None:
        return {mode} if isinstance(mode, str) else set(map(str, mode))
    found = {name.removeprefix(_PREFIX) for name, on in config.items() if on is True}
    names = {name for name in found if f"{_PREFIX}{name}" in config}
    return {_OF_OLDER_FILES.get(name, name) for name in names}


def _read(path: Path, kind: type) -> Any:
    """The content of a JSON file; None if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(content, kind):
        raise ValueError(f"{path.name} is no {kind.__name__}")
    return content
