"""Collect the text, train the tokenizer and write token arrays for `train.py`."""

import argparse
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from corpus import Conversation, SourceFile, conversation, functions, stdlib_files
from transformers import PreTrainedTokenizerFast
from vocabulary import ADDED_TOKENS, END_OF_TEXT, train_tokenizer, wrap


def main() -> None:
    """Write the tokenizer, four token arrays and `data.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("target/pocket"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    files = [file for file in stdlib_files() if not _has_added_token(file.text)]
    tokenizer = wrap(train_tokenizer(file.text for file in files if not file.held_out))
    tokenizer.save_pretrained(out / "tokenizer", save_jinja_files=False)

    report: dict[str, Any] = {"python": platform.python_version(), "vocab_size": len(tokenizer)}
    for split in ("train", "validation"):
        chosen = [file for file in files if file.held_out == (split == "validation")]
        talks = _render(tokenizer, _conversations(chosen))
        code = [file.text for file in chosen]
        for kind, documents in (("code", code), ("chat", talks)):
            report[f"{split}_{kind}"] = _write(tokenizer, documents, out / f"{split}_{kind}.npy")
    report["line_ends"] = _line_ends(tokenizer)
    report["end_of_text"] = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    (out / "data.json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in report.items() if key != "line_ends"}, indent=2))


def _has_added_token(text: str) -> bool:
    return any(token in text for token in ADDED_TOKENS)


def _conversations(files: Iterable[SourceFile]) -> list[Conversation]:
    return [conversation(function) for file in files for function in functions(file)]


def _render(tokenizer: PreTrainedTokenizerFast, talks: Iterable[Conversation]) -> list[str]:
    return [
        tokenizer.apply_chat_template(talk.messages, tools=talk.tools, tokenize=False)
        for talk in talks
    ]


def _write(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], path: Path
) -> dict[str, int]:
    """Store the documents as one array; each ends with the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    rows = [[*encoding, end] for encoding in tokenizer(list(documents))["input_ids"]]
    tokens = np.concatenate([np.array(row, dtype=np.uint16) for row in rows])
    np.save(path, tokens)
    return {
        "documents": len(documents),
        "bytes": sum(len(document.encode()) for document in documents),
        "tokens": len(tokens),
    }


def _line_ends(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """List the tokens after which a line begins."""
    return [token for token in range(len(tokenizer)) if tokenizer.decode([token]).endswith("\n")]


if __name__ == "__main__":
    main()
