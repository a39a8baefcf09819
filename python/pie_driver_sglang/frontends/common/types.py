"""What an engine of this package starts with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pie_driver_sglang.frontends.common.adapters import AdapterPath


class EngineArguments(NamedTuple):
    """What an engine starts with.

    Attributes:
        model: The snapshot's folder.
        tokenizer: The folder of the tokenizer; None for an engine without text.
        runtime: The keyword arguments of `_core.Runtime` that do not depend on the tokenizer.
        sampling: Parameters for requests that do not set them.
        speculates: Whether requests ask for drafts.
        context_length: That the user set; None for the model's.
        adapters: What to load at the start.
        max_adapters: How many may be loaded; 0 where adapters are off.
        reasoning_parser: SGLang's name of the parser of the model's thinking.
    """

    model: Path
    tokenizer: Path | None
    runtime: dict[str, Any]
    sampling: Mapping[str, Any]
    speculates: bool
    context_length: int | None
    adapters: tuple[AdapterPath, ...] = ()
    max_adapters: int = 0
    reasoning_parser: str | None = None
