"""How a checkpoint's embeddings are pooled, by the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

MODULES: Final = "modules.json"
_LAST: Final = "lasttoken"
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")
_PREFIX: Final = "pooling_mode_"
_OF_OLDER_FILES: Final = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}


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
