"""What a checkpoint's files say of its embeddings: pooling, scaling, heads, attention."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import quoted

MODULES: Final = "modules.json"
_LAST: Final = "lasttoken"
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")
_WITH_HEAD: Final = re.compile("For(Sequence)?Classification|ForRewardModel")
_PREFIX: Final = "pooling_mode_"
_OF_OLDER_FILES: Final = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}


def has_head(architectures: Iterable[object]) -> bool:
    """Whether one of these classes has a classification or reward head."""
    return any(_WITH_HEAD.search(str(name)) for name in architectures)


def pooling_refusal(folder: Path) -> str | None:
    """Why the last token's row is not the embedding of a checkpoint.

    Args:
        folder: The snapshot.

    Returns:
        The reason; None if it is, or if no file says how rows are pooled.

    Raises:
        ValueError: A file is not what sentence-transformers writes.
    """
    modules = _read(folder / MODULES, list)
    for module in modules or ():
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _KNOWN:
            return f"its `{MODULES}` has a {kind} module"
        if kind == "Pooling":
            name = f"{module.get('path', '')}/config.json"
            modes = _modes(_read(folder / name, dict) or {})
            if modes - {_LAST}:
                return f"its `{name}` asks for {', '.join(sorted(modes))} pooling"
    return None


def has_unscaled_embeddings(folder: Path) -> bool:
    """Whether the files of a checkpoint leave its embeddings as they are pooled, of any length.

    Args:
        folder: The snapshot.

    Raises:
        ValueError: A file is not what sentence-transformers writes.
    """
    modules = _read(folder / MODULES, list)
    kinds = {str(module.get("type", "")).rpartition(".")[2] for module in modules or ()}
    return bool(kinds) and "Normalize" not in kinds


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
