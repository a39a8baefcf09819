"""Converts a GGUF file to a Hugging Face snapshot: `python -m pie_driver_sglang.checkpoint.gguf`.

transformers dequantizes the weights and rebuilds the tokenizer. It runs in a process of its own, so
that no caller imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id")
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_STRING: Final = "STRING"


def convert(source: Path, target: Path, *, with_tokenizer: bool) -> None:
    """Write the weights in bfloat16, the configuration and the tokenizer to a folder.

    Args:
        source: The GGUF file.
        target: The folder, which is created if need be.
        with_tokenizer: Whether to convert the tokenizer.
    """
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    metadata = _metadata(source)
    folder, name = str(source.parent), source.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    if with_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        correct_tokenizer(tokenizer, metadata)
        tokenizer.save_pretrained(target)


def correct_tokenizer(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Restore what transformers does not read from the file.

    These are special tokens, the context length, and pre-tokenizer and decoder of byte-level BPE.

    Args:
        tokenizer: As transformers reads it from the file.
        metadata: The scalar fields of the file.
    """
    for name, field in zip(_TOKEN_NAMES, _TOKEN_IDS, strict=True):
        token = metadata.get(f"tokenizer.ggml.{field}")
        if token is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(token)))
    context = metadata.get(f"{metadata['general.architecture']}.context_length")
    if context is not None:
        tokenizer.model_max_length = int(context)
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    # Decoding must not remove the space in front of a punctuation mark.
    tokenizer.clean_up_tokenization_spaces = False
    parts: Any = import_module("tokenizers")
    backend = tokenizer.backend_tokenizer
    # transformers adds SentencePiece's decoder, which turns U+2581 into a space.
    backend.decoder = parts.decoders.ByteLevel()
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # This pre-tokenizer has a token for each digit; transformers assumes GPT-2's.
        backend.pre_tokenizer = parts.pre_tokenizers.Sequence(
            [
                parts.pre_tokenizers.Digits(individual_digits=True),
                parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _metadata(source: Path) -> dict[str, Any]:
    """The scalar fields of the file, texts decoded."""
    gguf: Any = import_module("gguf")
    found = {}
    for name, field in gguf.GGUFReader(source).fields.items():
        if len(field.data) != 1:
            continue
        value = field.parts[field.data[0]]
        is_text = bool(field.types) and field.types[-1].name == _STRING
        found[name] = bytes(value).decode() if is_text else value[0]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a file; an error is the last line of stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--without-tokenizer", action="store_true")
    options = parser.parse_args(arguments)
    # Weights would be private to their owner, unlike other files.
    os.umask(0o022)
    try:
        convert(options.source, options.target, with_tokenizer=not options.without_tokenizer)
        for file in options.target.iterdir():
            file.chmod(0o644)
    except Exception as error:
        text = " ".join(str(error).split())
        sys.stderr.write(f"{type(error).__name__}: {text}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
