"""Converts a GGUF file to a Hugging Face snapshot: `python -m pie_driver_sglang.checkpoint.gguf`.

transformers dequantizes the weights and rebuilds the tokenizer. Of Gemma's it would make a unigram
model, so that one is rebuilt here: byte pairs that merge by the scores of the pieces. It runs in a
process of its own, so that no caller imports torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_TOKEN_IDS: Final = ("bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id")
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_LLAMA_3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3's tokenizer splits texts before it merges bytes."""
_STRING: Final = "STRING"
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are matched in the text before it is split."""
_LLAMA_3: Final = ("llama-bpe", "llama3", "llama-v3")
"""Values of `tokenizer.ggml.pre` for Llama 3's tokenizer; llama.cpp treats them alike."""
_PRE_TOKENIZERS: Final = ("default", "gpt-2", "qwen2", "smollm", *_LLAMA_3)
"""Values of `tokenizer.ggml.pre` whose splits transformers or `correct_tokenizer` has."""


def convert(source: Path, target: Path) -> None:
    """Write the weights in bfloat16, the configuration and the tokenizer to a folder.

    Args:
        source: The GGUF file.
        target: The folder, which is created if need be.
    """
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(source)
    _check_types(reader, gguf)
    _check_space(reader, target)
    metadata = _metadata(reader)
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder, name = str(source.parent), source.name
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=name)
    # transformers takes a default of its own for some architectures.
    width = metadata.get(f"{metadata['general.architecture']}.attention.key_length")
    if width is not None and hasattr(config, "head_dim"):
        config.head_dim = int(width)
    arguments = {"gguf_file": name, "config": config, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)
    _forget_quantization(model)
    model.save_pretrained(target)
    if str(metadata["general.architecture"]).startswith("gemma"):
        inner = sentencepiece_tokenizer(*_token_tables(reader), metadata)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        _add_tokens(tokenizer.backend_tokenizer, reader)
    correct_tokenizer(tokenizer, metadata)
    tokenizer.save_pretrained(target)
    if (note := tokenizer_note(metadata)) is not None:
        # `gguf_cache.py` shows lines that begin so.
        sys.stderr.write(f"note: {note}\n")


def _forget_quantization(model: Any) -> None:
    """Have a model of GGUF weights saved as the plain one that it is.

    transformers 5.19 would keep blocks quantized, which :func:`convert` forbids, and saves no model
    that came from such a file.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)


def tokenizer_note(metadata: Mapping[str, Any]) -> str | None:
    """Why a text may have other tokens than by the model's own tokenizer; None if it has not.

    transformers splits the texts of such files by GPT-2's expression, and adds no first token.
    """
    split = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or split in _PRE_TOKENIZERS:
        return None
    return (
        f"the file's pre-tokenizer is {split!r}, which is not read: texts may have other tokens "
        "than the model was trained with; name the model's own tokenizer by `--tokenizer-path`"
    )


def _check_types(reader: Any, gguf: Any) -> None:
    """Reject tensors of a type that the package `gguf` cannot dequantize, by name.

    Raises:
        ValueError: It is one.
    """
    tried = set()
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind in tried:
            continue
        tried.add(kind)
        try:
            gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {tensor.name} is of type {kind.name}, which cannot be dequantized"
            ) from error


def _check_space(reader: Any, target: Path) -> None:
    """Reject a file whose weights in bfloat16 need more disk space than there is.

    Raises:
        ValueError: They do.
    """
    needed = 2 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise ValueError(
            f"its weights take {needed >> 20} MiB in bfloat16, and the disk of the model cache has "
            f"{free >> 20} MiB left; set XDG_CACHE_HOME to a folder on another disk"
        )


def correct_tokenizer(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Restore what transformers does not read from the file.

    These are special tokens, the chat template, the context length, and pre-tokenizer and decoder
    of byte-level BPE.

    Args:
        tokenizer: As transformers reads it from the file.
        metadata: The scalar fields of the file.
    """
    for name, field in zip(_TOKEN_NAMES, _TOKEN_IDS, strict=True):
        token = metadata.get(f"tokenizer.ggml.{field}")
        if token is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(token)))
    if "tokenizer.chat_template" in metadata:
        tokenizer.chat_template = metadata["tokenizer.chat_template"]
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
    if metadata.get("tokenizer.ggml.pre") in _LLAMA_3:
        _split_as_llama_3(backend, metadata)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # This pre-tokenizer has a token for each digit; transformers assumes GPT-2's.
        backend.pre_tokenizer = parts.pre_tokenizers.Sequence(
            [
                parts.pre_tokenizers.Digits(individual_digits=True),
                parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _split_as_llama_3(backend: Any, metadata: Mapping[str, Any]) -> None:
    """Split texts as Llama 3's tokenizer does, and begin them with its first token.

    Digits come by three, a word of the vocabulary is one token whatever its merges, and texts begin
    with a token unless the file says otherwise.
    """
    parts: Any = import_module("tokenizers")
    backend.pre_tokenizer = parts.pre_tokenizers.Sequence(
        [
            parts.pre_tokenizers.Split(parts.Regex(_LLAMA_3_SPLIT), "isolated"),
            parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.model.ignore_merges = True
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", True):
        _begin_with(backend, backend.id_to_token(int(begin)), int(begin))


def _begin_with(backend: Any, token: str, number: int) -> None:
    """Have texts begin with a token."""
    parts: Any = import_module("tokenizers")
    backend.post_processor = parts.processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, number)],
    )


def _add_tokens(backend: Any, reader: Any) -> None:
    """Add the tokens that are matched before the text is split; transformers adds a few only.

    Of Qwen's it leaves out `<think>` and `<tool_call>`, which would be split into pieces.
    """
    if not {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"} <= reader.fields.keys():
        return
    parts: Any = import_module("tokenizers")
    tokens, types = (reader.fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    for token, kind in zip(tokens.data, types.data, strict=True):
        number = int(types.parts[kind][0])
        if number in (_CONTROL, _USER_DEFINED):
            text, is_control = bytes(tokens.parts[token]).decode(), number == _CONTROL
            added = parts.AddedToken(text, normalized=False, special=is_control)
            (backend.add_special_tokens if is_control else backend.add_tokens)([added])


def sentencepiece_tokenizer(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    metadata: Mapping[str, Any],
) -> Any:
    """Build Gemma's tokenizer: byte pairs that merge by score, bytes for unknown characters.

    Args:
        tokens: The pieces by id.
        scores: Their scores; two pieces merge first into that of the highest.
        types: Their types, as `gguf.TokenType`.
        metadata: The scalar fields of the file.

    Returns:
        A `tokenizers.Tokenizer`.
    """
    parts: Any = import_module("tokenizers")
    added = {number for number, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    pieces = {
        token if number in added else token.replace(" ", "▁"): number
        for number, token in enumerate(tokens)
    }
    merges = _merges({piece: scores[at] for piece, at in pieces.items() if at not in added})
    unknown = tokens[int(metadata["tokenizer.ggml.unknown_token_id"])]
    tokenizer = parts.Tokenizer(
        parts.models.BPE(
            vocab=pieces, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = parts.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = parts.pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = parts.decoders.Sequence(
        [parts.decoders.Replace("▁", " "), parts.decoders.ByteFallback(), parts.decoders.Fuse()]
    )
    for number in sorted(added):
        is_control = types[number] == _CONTROL
        token = parts.AddedToken(tokens[number], normalized=False, special=is_control)
        (tokenizer.add_special_tokens if is_control else tokenizer.add_tokens)([token])
    if metadata.get("tokenizer.ggml.add_bos_token"):
        first = int(metadata["tokenizer.ggml.bos_token_id"])
        _begin_with(tokenizer, tokens[first], first)
    return tokenizer


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces that are a piece together, those of the highest score first."""
    found = [
        (-score, at, piece)
        for piece, score in scores.items()
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    ]
    return [(piece[:at], piece[at:]) for _, at, piece in sorted(found)]


def _token_tables(reader: Any) -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types of the file's tokens."""
    tokens, scores, types = (
        reader.fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    )
    return (
        [bytes(tokens.parts[at]).decode() for at in tokens.data],
        [float(scores.parts[at][0]) for at in scores.data],
        [int(types.parts[at][0]) for at in types.data],
    )


def _metadata(reader: Any) -> dict[str, Any]:
    """The scalar fields of the file, texts decoded."""
    found = {}
    for name, field in reader.fields.items():
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
    options = parser.parse_args(arguments)
    # Weights would be private to their owner, unlike other files.
    os.umask(0o022)
    try:
        convert(options.source, options.target)
        for file in options.target.iterdir():
            file.chmod(0o644)
    except Exception as error:
        text = " ".join(str(error).split())
        sys.stderr.write(f"{type(error).__name__}: {text}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
