"""The model's tokenizer, as the runtime uses it: from `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.checkpoint.hub_cache import cached_snapshot
from pie_driver_sglang.errors import ConfigError

#: What models call the end of their turn, besides the ids in their configuration.
_END_NAMES: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
_DOWNLOAD: Final = (
    "pass a folder with config.json, tokenizer.json and weights to --model, "
    "e.g. one from `hf download <repository>`; the default `models/pocket` is in a clone of this "
    "driver's repository"
)


class Tokenizer:
    """Text to tokens, and tokens to text as they come.

    Attributes:
        end_tokens: The tokens that end a text, by the model's configuration and by their names.
    """

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer of a model's folder.

        Raises:
            ConfigError: It cannot be read.
        """
        # The package has no types.
        package: Any = import_module("tokenizers")
        self._new_stream: Any = import_module("tokenizers.decoders").DecodeStream
        path = folder / "tokenizer.json"
        try:
            self._inner = package.Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises plain exceptions.
            raise ConfigError(f"cannot read {str(path)!r}: {error}", _DOWNLOAD) from error
        self.end_tokens = _configured_ends(folder) | self._named_ends()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, with the one that begins a text if the model has it."""
        return [int(token) for token in self._inner.encode(text).ids]

    def stream(self, prompt_tokens: list[int]) -> Callable[[int], str]:
        """Returns a function from the next token after a prompt to its text.

        The text is empty while a character is incomplete, and for special tokens.
        """
        stream = self._new_stream(ids=prompt_tokens, skip_special_tokens=True)
        return lambda token: stream.step(self._inner, token) or ""

    def _named_ends(self) -> frozenset[int]:
        tokens = map(self._inner.token_to_id, _END_NAMES)
        return frozenset(token for token in tokens if token is not None)


def find_model(folder: Path) -> Path:
    """Refuses at once what can never work; the driver checks the rest.

    Returns:
        The folder, or the one in the Hugging Face cache that a repository's name stands for.

    Raises:
        ConfigError: The folder or its tokenizer does not exist.
    """
    folder = folder if folder.is_dir() else cached_snapshot(str(folder)) or folder
    if not folder.is_dir():
        raise ConfigError(f"there is no model folder {str(folder)!r}", _DOWNLOAD)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"the model folder {str(folder)!r} has no tokenizer.json", _DOWNLOAD)
    return folder


def _configured_ends(folder: Path) -> frozenset[int]:
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        listed = _read_json(folder / name).get("eos_token_id")
        tokens = listed if isinstance(listed, list) else [listed]
        ends.update(token for token in tokens if isinstance(token, int))
    return frozenset(ends)


def _read_json(path: Path) -> dict[str, Any]:
    """Returns an object, empty if the file does not hold one: the driver judges the model."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
