"""Measures what n-gram drafts gain, and that they cost nothing where they gain nothing.

    python benches/gpu/draft_check.py --pie-load BINARY [--pocket DIR] --shapes CONFIG_DIR \
        --out DIR [--parts text,cycles,random] [--batch 1,4,16]
    python benches/gpu/draft_check.py --model DIR --out DIR [--batch 1,16,64] [--requests 64]

With `--model`, a real checkpoint, there is one part, `real`: 64 requests each to summarize a text,
to edit code, to translate and to chat, built from what ships with Python (`real_texts.py`). It
prints accepted drafts per step of a sequence and the speed with drafts over that without
(`real_drafts.py`).

Without `--model` the parts are these, each on a driver of its own, which plays the same prompts
without and with drafts in turns:

1. `text`: pocket on text that repeats itself: code edits, lists, tables, paragraphs.
2. `cycles`: random weights and greedy tokens, which fall into cycles.
3. `random`: random weights, tokens drawn at high temperatures. Nothing repeats itself: the ratio
   must stay above the limit.

In the first two `spec_ngram_capacity` is 0, so that a context drafts only from its own text; the
last has the default, and with it the cost of a history. `--option` changes either. The record is
DIR/draft_check.json, everything that was printed goes to DIR/draft_check.log. The status is 1 when
a part failed, a batch was skipped, or a ratio of the last part is below the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import frame
from frame import Report
from processes import Runner
from tokenizers import Tokenizer

REAL_LIMIT_S = 400.0
LEAST_RATIO = 0.98
"""Of tokens per second with drafts that are of no use, by those without."""
STRICT = "spec_ngram_capacity=0"
DUMMY = 'load_format="dummy"'


class Part(NamedTuple):
    """What is played on one driver."""

    batch: str
    sampler: str
    options: tuple[str, ...]
    limit_s: float
    """The longest that it may take, with the driver's start."""


PARTS = {
    "text": Part("1,4,16", "greedy", (STRICT,), 45.0),
    "cycles": Part("1,4,16,64", "greedy", (STRICT, DUMMY), 60.0),
    "random": Part("1,16,64,256", "multinomial:1,multinomial:2,multinomial:5", (DUMMY,), 75.0),
}

NAMES = (
    ("load", "path", "lines"),
    ("merge", "left", "result"),
    ("parse", "text", "fields"),
    ("collect", "source", "items"),
)
"""A function's name, and two of its variables."""
WORDS = (
    ("January", "February", "March", "April", "May", "June"),
    ("red", "orange", "yellow", "green", "blue", "violet"),
    ("north", "south", "east", "west", "up", "down"),
    ("alpha", "beta", "gamma", "delta", "epsilon", "zeta"),
)


def edit(names: tuple[str, str, str]) -> str:
    """A function, and the beginning of the same with one name changed."""
    function, argument, result = names
    body = f"""({argument}, strict=False):
    \"\"\"Return the entries of {argument} in order, without duplicates.\"\"\"
    seen = set()
    {result} = []
    for entry in {argument}:
        if entry in seen:
            if strict:
                raise ValueError("duplicate entry: %r" % (entry,))
            continue
        seen.add(entry)
        {result}.append(entry)
    return {result}

"""
    return "".join(f"def {function}_{kind}{body}\n" for kind in ("first", "second")) + (
        f"def {function}_third({argument}, strict=False):\n"
    )


def listing(words: Sequence[str]) -> str:
    """A table of calls, begun a second time."""
    lines = [
        f'    register("{word}", {number}, default=None)\n' for number, word in enumerate(words)
    ]
    return f"def setup(register):\n{''.join(lines)}\n\ndef setup_again(register):\n{lines[0]}"


def checks(words: Sequence[str]) -> str:
    """Lines that differ in a word each."""
    lines = [f'        self.assertEqual(convert("{word}"), "{word}")\n' for word in words]
    return f"class ConvertTest(unittest.TestCase):\n    def test_convert(self):\n{''.join(lines)}"


def paragraph(words: Sequence[str]) -> str:
    """A comment three times, and the beginning of the fourth."""
    text = (
        f"# The {words[0]} value is read before the {words[1]} one, since a missing {words[2]}\n"
        f"# value may be replaced by the default of the {words[3]} section of the file.\n"
    )
    return text * 3 + text[:20]


def prompts() -> list[str]:
    """Sixteen texts, of which neighbours are of different kinds."""
    rows = zip(NAMES, WORDS, strict=True)
    return [
        text
        for names, words in rows
        for text in (edit(names), listing(words), checks(words), paragraph(words))
    ]


def problems(part: str, rows: Sequence[Mapping[str, Any]], batches: int) -> list[str]:
    """What a part of so many batches lacks."""
    found = [
        f"{part}: batch {row['batch']} skipped: {row['skipped']}" for row in rows if row["skipped"]
    ]
    if len(rows) < batches:
        found.append(f"{part}: only {len(rows)} batch sizes were played")
    return found


class Check:
    """The parts and their figures."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, report: Report) -> None:
        """Writes the prompts."""
        self._arguments = arguments
        self._report = report
        self._out: Path = arguments.out
        real_s = REAL_LIMIT_S * arguments.patience
        budget_s = real_s if arguments.model else arguments.budget_s
        self._runner = Runner(self._out / "draft_check.log", budget_s)
        self._prompts = folder / "prompts.json"
        tokenizer = Tokenizer.from_file(str(arguments.pocket / "tokenizer.json"))
        tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text in prompts()]
        self._prompts.write_text(json.dumps(tokens))
        shapes = arguments.shapes
        self._shapes = frame.model_folder(shapes, folder) if shapes else None

    def play(self) -> None:
        """Plays the parts that were asked for."""
        if self._arguments.model is not None:
            self._play_real()
            return
        wrong = []
        for name in self._arguments.parts.split(","):
            figures = self._part(name)
            self._report.put(name, figures)
            rows = figures.get("drafts", [])
            wrong += problems(name, rows, len(self._batches(PARTS[name]).split(",")))
            for row in rows if name == "random" else ():
                if "ratio" in row:
                    speed = f"{name}, batch {row['batch']}: speed with drafts"
                    self._report.hold(speed, row["ratio"], at_least=LEAST_RATIO)
        wrong += (f"{name} failed" for name in self._runner.failed)
        for problem in wrong:
            self._runner.say(problem)
        self._report.hold("parts and batches that failed", len(wrong), at_most=0)

    def _play_real(self) -> None:
        """Plays a real model; its figures are held to nothing."""
        arguments = self._arguments
        command: list[object] = [sys.executable, Path(__file__).with_name("real_drafts.py")]
        command += ["--model", arguments.model, "--device", arguments.device]
        command += ["--batches", arguments.batch or "1,16,64", "--prompts", arguments.requests]
        command += ["--output", arguments.output]
        output = self._runner.run("real", command, REAL_LIMIT_S * arguments.patience)
        found = [line[6:] for line in output.splitlines() if line.startswith("found ")]
        for row in json.loads(found[-1]) if found else ():
            self._report.add(model=arguments.model.name, **row)
        self._report.hold("parts that failed", len(self._runner.failed), at_most=0)

    def _batches(self, part: Part) -> str:
        batches: str = self._arguments.batch or part.batch
        return batches

    def _part(self, name: str) -> dict[str, Any]:
        """Plays one part and returns what was written."""
        arguments, part = self._arguments, PARTS[name]
        model = arguments.pocket if name == "text" else self._shapes
        if model is None:
            self._runner.say(f"{name}: no --shapes")
            return {}
        path = self._out / f"drafts.{name}.json"
        path.unlink(missing_ok=True)
        command: list[object] = [arguments.pie_load, "drafts", "--python", sys.executable]
        command += ["--model", model, "--device", arguments.device, "--json", path]
        command += ["--profile", arguments.profile, "--log", self._out / f"drafts.{name}.log"]
        command += ["--draft-batch", self._batches(part), "--draft-sampler", part.sampler]
        command += ["--draft-output", arguments.output, "--draft-repeats", arguments.repeats]
        command += ["--commit", frame.commit()]
        if name == "text":
            command += ["--prompts", self._prompts]
        for option in (*part.options, *arguments.option):
            command += ["--option", option]
        self._runner.run(name, command, part.limit_s * arguments.patience)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "pocket", "shapes", "device", "option")
    made.add_argument("--pie-load", type=Path, help="the load generator, see `make load`")
    made.add_argument("--model", type=Path, help="a checkpoint with its tokenizer, for `real`")
    made.add_argument("--requests", type=int, default=64, help="of each workload of `real`")
    made.add_argument("--parts", default=",".join(PARTS))
    made.add_argument("--batch", help="sizes of batches for all parts, instead of each part's own")
    made.add_argument("--output", type=int, default=384, help="tokens of every context")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--profile", default="latency")
    made.add_argument("--budget-s", type=float, default=150.0, help="seconds for all parts")
    made.add_argument("--patience", type=float, default=1.0, help="factor of the parts' limits")
    return made


def main() -> None:
    """Plays the parts."""
    made = parser()
    arguments = made.parse_args()
    if arguments.model is None and arguments.pie_load is None:
        made.error("name a --model, or the load generator by --pie-load")
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        Check(arguments, Path(folder), report).play()


if __name__ == "__main__":
    main()
