"""`pie-sglang generate`: answers for prompts from the command line, a file or a pipe, as JSONL."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from pie_driver_sglang.cli.engine_options import (
    add_engine_options,
    check_sampling,
    sampling_of,
    started,
)
from pie_driver_sglang.cli.report import open_output
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, StartError, quoted, reason

if TYPE_CHECKING:
    from pie_driver_sglang.frontends.offline.engine import Engine


MOST_SEQUENCES: Final = 4096
"""The engine's limit of `n`."""
_UTF8: Final = "name a text file in UTF-8, with a prompt in each line"


class Prompt(NamedTuple):
    """One line of the input.

    Attributes:
        text: The prompt; None where there are tokens.
        tokens: The prompt's tokens; None where there is text.
        sampling: Parameters of this prompt only.
        others: Fields that are copied to the answer.
    """

    text: str | None
    tokens: list[int] | None
    sampling: dict[str, Any]
    others: dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    prompts = list(read_prompts(options.prompts, options.file, sys.stdin))
    if not prompts:
        raise ConfigError("there are no prompts", "pass some, a `--file`, or lines on stdin")
    defaults = sampling_of(options)
    for prompt in prompts:
        check_sampling({**defaults, **prompt.sampling})
    with open_output(options.output) as output, started(options) as engine:
        if options.chat:
            prompts = [_as_chat(engine, prompt) for prompt in prompts]
        summary = answer(engine, prompts, defaults, output, logprobs_of(options))
    sys.stderr.write(f"{summary}\n")
    return 0


def logprobs_of(options: argparse.Namespace) -> dict[str, Any]:
    """The engine's log-probability arguments; empty if not requested."""
    if options.logprobs is None and not options.prompt_logprobs:
        return {}
    return {
        "return_logprob": True,
        "top_logprobs_num": options.logprobs or 0,
        "logprob_start_len": 0 if options.prompt_logprobs else -1,
        "return_text_in_logprobs": True,
    }


def answer(
    engine: Engine,
    prompts: Sequence[Prompt],
    defaults: dict[str, Any],
    output: TextIO,
    logprobs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write a line for each output as soon as it has ended.

    Args:
        engine: Generates them.
        prompts: The input.
        defaults: Sampling parameters of all prompts.
        output: Where the lines go.
        logprobs: The engine's arguments of log-probabilities.

    Returns:
        A summary in one line.
    """
    samplings = [{**defaults, **prompt.sampling} for prompt in prompts]
    counts = [_sequences(sampling.get("n")) for sampling in samplings]
    # The prompt of each answer, and its number among the prompt's answers.
    owners = [(index, sample) for index, count in enumerate(counts) for sample in range(count)]
    begun = time.monotonic()
    progress = Progress(len(owners), begun)
    inputs = _inputs(engine, prompts)
    for found in engine.as_completed(**inputs, sampling_params=samplings, **logprobs):
        index, sample = owners[found["index"]]
        line = _line(index, sample if counts[index] > 1 else None, prompts[index], found)
        _write(output, line)
        progress.add(found["meta_info"])
    progress.close()
    return progress.summary(time.monotonic())


def _sequences(count: Any) -> int:
    """Output sequences of a prompt; one for a value that the engine will reject."""
    is_count = isinstance(count, int) and not isinstance(count, bool)
    return count if is_count and 1 <= count <= MOST_SEQUENCES else 1


def _write(output: TextIO, line: dict[str, Any]) -> None:
    """Write an output at once.

    Raises:
        StartError: The write failed, for example on a full disk.
    """
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode(output.encoding or "utf-8")
    except UnicodeEncodeError:
        # A lone surrogate, or an output in ASCII.
        text = json.dumps(line)
    try:
        output.write(f"{text}\n")
        output.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StartError(
            f"the answers cannot be written: {reason(error)}",
            "make room, or name another `--output`",
        ) from error


class Progress:
    """A progress bar on stderr, and its statistics."""

    def __init__(self, total: int, begun: float) -> None:
        """Start at `begun`, for `total` outputs."""
        # It comes with SGLang.
        from tqdm import tqdm

        self._begun = begun
        self._prompt = self._cached = self._output = 0
        # None: no bar where stderr is not a terminal.
        self._bar: Any = tqdm(total=total, unit=" answers", disable=None, file=sys.stderr)

    def add(self, meta: dict[str, Any]) -> None:
        """Count an answer by its `meta_info`."""
        self._prompt += meta["prompt_tokens"]
        self._cached += meta["cached_tokens"]
        self._output += meta["completion_tokens"]
        rate = self._output / max(1e-9, time.monotonic() - self._begun)
        self._bar.set_postfix_str(f"{rate:,.0f} tok/s, {self._hits():.0%} cached", refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Close the progress bar as it stands."""
        self._bar.close()

    def summary(self, now: float) -> str:
        """What was done, in one line."""
        seconds = max(1e-9, now - self._begun)
        return (
            f"{self._output:,} tokens in {seconds:.1f} s, {self._output / seconds:,.1f} tok/s; "
            f"{self._prompt:,} prompt tokens, {self._hits():.0%} of them cached"
        )

    def _hits(self) -> float:
        return self._cached / max(1, self._prompt)


def read_prompts(words: Sequence[str], path: str | None, stdin: TextIO) -> Iterator[Prompt]:
    """The prompts: those of the command line, then of a file; else of stdin, if it is a pipe.

    Raises:
        ConfigError: The file cannot be read, or a line of it is wrong.
    """
    yield from (Prompt(word, None, {}, {}) for word in words)
    if path is not None and path != "-":
        file = Path(path)
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read prompts {quoted(path)}: {reason(error)}",
                _UTF8,
            ) from error
        yield from parse_lines(lines, file.suffix == ".jsonl")
    elif path == "-" or (not words and not stdin.isatty()):
        try:
            lines = stdin.read().split("\n")
        except ValueError as error:
            raise ConfigError(f"cannot read prompts of stdin: {reason(error)}", _UTF8) from error
        yield from parse_lines(lines, None)


def parse_lines(lines: Iterable[str], is_json: bool | None) -> Iterator[Prompt]:
    """Prompts from lines, without empty ones.

    Args:
        lines: Without their ends.
        is_json: Whether each is a JSON object; None for what the line looks like.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if is_json or (is_json is None and line.lstrip().startswith('{"')):
            yield _parse_object(line, number)
        else:
            yield Prompt(line, None, {}, {})


def _parse_object(line: str, number: int) -> Prompt:
    hint = 'write {"prompt": "..."} or {"input_ids": [...]}, with "sampling_params" if you like'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} is not JSON: {reason(error)}", hint) from error
    if not isinstance(found, dict):
        raise ConfigError(f"line {number} is {quoted(found)}, not a JSON object", hint)
    text, tokens = found.pop("prompt", None), found.pop("input_ids", None)
    sampling = found.pop("sampling_params", {})
    is_text = isinstance(text, str) and tokens is None
    is_tokens = isinstance(tokens, list) and text is None
    if not (is_text or is_tokens) or not isinstance(sampling, dict):
        raise ConfigError(f"line {number} has no prompt, or more than one", hint)
    return Prompt(text, tokens, sampling, found)


def _as_chat(engine: Engine, prompt: Prompt) -> Prompt:
    if prompt.text is None or engine.tokenizer is None:
        return prompt
    text = engine.tokenizer.chat([{"role": "user", "content": prompt.text}])
    others = {**prompt.others, "prompt": prompt.text}
    return Prompt(None, engine.tokenizer.encode_plain(text), prompt.sampling, others)


def _inputs(engine: Engine, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The prompts as texts, or as tokens if some are."""
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    if len(texts) == len(prompts):
        return {"prompt": texts}
    encoded = iter(engine.tokenizer.encode(texts) if engine.tokenizer and texts else ())
    return {"input_ids": [p.tokens if p.text is None else next(encoded) for p in prompts]}


def _line(index: int, sample: int | None, prompt: Prompt, found: dict[str, Any]) -> dict[str, Any]:
    meta = found["meta_info"]
    given = {} if prompt.text is None else {"prompt": prompt.text}
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
    answered = {"text": found["text"]} if "text" in found else {}
    logprobs = {name: value for name, value in meta.items() if name.endswith("_logprobs")}
    return {
        "index": index,
        **({} if sample is None else {"sample": sample}),
        **prompt.others,
        **given,
        **answered,
        "output_ids": found["output_ids"],
        **{name: meta[name] for name in names},
        **logprobs,
    }


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang generate",
        description="Generates answers for prompts and writes a JSON object for each to stdout, as "
        "soon as it has ended. Progress and a summary go to stderr.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt")
    parser.add_argument(
        "--file",
        help="a prompt in each line, or JSON objects (.jsonl) with prompt or input_ids, and "
        "sampling_params; - for stdin",
    )
    parser.add_argument("--output", metavar="FILE", help="write answers there instead of stdout")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="add the log-probability of each token, and the N most probable tokens",
    )
    parser.add_argument(
        "--prompt-logprobs", action="store_true", help="the same of the prompt's tokens"
    )
    add_engine_options(parser, positional=False)
    return parser
