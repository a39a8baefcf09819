"""Token streams for the replay: what was given, and what was then said.

    python benches/ngram_replay/streams.py target/ngram_streams.json

- `completion`, `edit`, `chat`: models/pocket continues greedily with the start of a file, with a
  file and the wish to document a function of it, and with questions,
- `source`: files of Python's standard library, of which the first quarter is given,
- `rename`: such a file is given, and said again with its most frequent names replaced.

The model is small and repeats itself more than larger ones do; the last two are written by people.
"""

import collections
import json
import keyword
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[2] / "models" / "pocket"
SOURCES = Path(sysconfig.get_paths()["stdlib"])
FILES = [
    *("bisect", "textwrap", "shlex", "queue", "sched", "netrc", "colorsys", "fnmatch", "glob"),
    *("heapq", "csv", "string"),
]
SAID = 256
QUESTIONS = [
    "What does a heap do?",
    "Explain how a queue works.",
    "Write a function that reads a file.",
    "How do I sort a list by two keys?",
    "What is a context manager?",
    "Write a class that counts words.",
    "Explain what an iterator is.",
    "How can I parse the arguments of a command?",
    "What does `functools.wraps` do?",
    "Write a function that splits a string.",
    "How does a thread wait for another?",
    "What is the difference between a list and a tuple?",
]


def source(name: str) -> str:
    """The text of a module of the standard library."""
    return (SOURCES / f"{name}.py").read_text()


def renamed(text: str) -> str:
    """The same text with its three most frequent names of five letters or more replaced."""
    names = collections.Counter(re.findall(r"\b[a-z_]{5,}\b", text))
    wanted = (name for name, _ in names.most_common() if not keyword.iskeyword(name))
    for name, _ in zip(wanted, range(3), strict=False):
        text = re.sub(rf"\b{name}\b", f"new_{name}", text)
    return text


def generate(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    """What the model says greedily, with all prompts in one batch."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    said = model.generate(
        ids, attention_mask=mask, max_new_tokens=SAID, min_new_tokens=SAID, do_sample=False
    )
    return [
        {"given": prompt, "said": row[longest:].tolist()}
        for prompt, row in zip(prompts, said, strict=True)
    ]


def main(path: Path) -> None:
    """Makes all streams and writes them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)

    def chat(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer(text)["input_ids"]

    texts = [source(name) for name in FILES]
    files = [tokenizer(text)["input_ids"][:4000] for text in texts]
    wish = "Write this function again, with a docstring:\n\n```python\n{}\n```"
    streams = {
        "completion": generate([ids[:400] for ids in files]),
        "edit": generate([chat(wish.format(text[-1500:])) for text in texts]),
        "chat": generate([chat(question) for question in QUESTIONS]),
        "source": [{"given": i[: len(i) // 4], "said": i[len(i) // 4 :][:1500]} for i in files],
        "rename": [
            {
                "given": ids[:1500],
                "said": tokenizer(renamed(tokenizer.decode(ids[:1500])))["input_ids"],
            }
            for ids in files
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(streams))
    for name, entries in streams.items():
        given, said = (sum(len(e[key]) for e in entries) for key in ("given", "said"))
        print(f"{name:12}{len(entries):4} streams, {given:6} tokens given, {said:6} said")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
