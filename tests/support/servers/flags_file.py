"""Files of flags, for `--config`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def as_file(words: Sequence[str], path: Path) -> list[str]:
    """The command line that names a file with these flags instead."""
    flags: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        else:
            flags[name].append(word)
    table = {
        name: values[0] if len(values) == 1 else values or True for name, values in flags.items()
    }
    path.write_text(json.dumps(table))  # Which is YAML, too.
    return ["--config", str(path)]
