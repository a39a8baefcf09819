"""The demo's command line, and what it asks the server."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pie_driver_sglang.checkpoint.packaged import UnavailableError
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.demo.screen import PlainScreen, StreamedAnswer, open_screen
from pie_driver_sglang.demo.server import active_parts, end_by_sigterm, serving
from pie_driver_sglang.frontends.common.model_location import model_folder
from pie_driver_sglang.observability.active import active_line

if TYPE_CHECKING:
    from openai import OpenAI

POCKET: Final = Path("models/pocket")
"""The model of this repository, for machines without a package index."""
QUESTIONS: Final[Sequence[tuple[str, str, dict[str, Any]]]] = (
    ("greedy", "What is the capital of France?", {"temperature": 0}),
    ("temperature 0.5", "Name three uses of a paper clip.", {"temperature": 0.5}),
    ("top-p 0.9", "Why is the sky blue?", {"temperature": 0.5, "top_p": 0.9}),
    ("top-k 20", "Write two sentences about the sea.", {"temperature": 0.5, "top_k": 20}),
    ("min-p 0.1", "Give me a tip for better sleep.", {"temperature": 0.6, "min_p": 0.1}),
    (
        "frequency penalty 0.5",
        "List five fruits.",
        {"temperature": 0.3, "frequency_penalty": 0.5},
    ),
)
TURNS: Final = ("What is photosynthesis?", "Explain it to a child in one sentence.")
CITY: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "continent", "population", "is_capital"],
    "additionalProperties": False,
}
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 24},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
#: Parameters of SGLang that OpenAI's API does not have.
_EXTRA: Final = ("top_k", "min_p")
_FRAME_S: Final = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; errors are raised as in every command.

    Args:
        argv: The arguments after the program's name; None for the process's own.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(argv)
    end_by_sigterm()
    # A terminal that is not UTF-8 shows marks instead of ending the demo.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # Downloads report to the terminal before anything is drawn.
    model, name = _find_model(options.model)
    with (
        tempfile.TemporaryDirectory(prefix="pie-demo-") as folder,
        open_screen(options.save_svg) as screen,
    ):
        shown = str(model) if model == POCKET else options.model
        screen.note(f"pie-sglang serve {shown} --device {options.device}")
        started = time.monotonic()
        log = Path(folder, "log")
        with serving(model, name, options.device, log, screen.waiting) as url:
            screen.note(f"ready after {time.monotonic() - started:.1f} s at {url}")
            _ask_all(url, name, options.tokens, screen)
        _name_what_is_next(shown, screen)
    return 0


def _find_model(name: str) -> tuple[Path, str]:
    """The model's folder, and what clients call it."""
    try:
        return model_folder({"model_path": name}, with_weights=True), Path(name).name
    except UnavailableError as error:
        if not POCKET.is_dir():
            raise
        sys.stderr.write(
            f"pie-sglang: {error}; this is {POCKET} instead, a tiny model of code whose answers "
            "make little sense\n"
        )
        return POCKET, POCKET.name


def _ask_all(url: str, name: str, tokens: int, screen: PlainScreen) -> None:
    """Asks everything, one kind of request after the other, and sums up times and parts."""
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers, seconds = _stream_all(client, name, tokens, screen)
        screen.answers(answers)
        _ask_for_json(client, name, screen)
        _ask_for_a_call(client, name, screen)
        _ask_again(client, name, tokens, screen)
    count = sum(answer.tokens for answer in answers)
    first_s = statistics.median(answer.first_s for answer in answers)
    screen.section(
        f"{count} tokens in {seconds:.1f} s: {count / seconds:.1f} tokens/s, six answers at a time",
        f"First text after {first_s:.2f} s (median). The dots mark answers that ended at the limit "
        f"of {tokens} tokens; --tokens raises it.",
        f"Served by {active_line(active_parts(url))}",
    )


def _name_what_is_next(model: str, screen: PlainScreen) -> None:
    program = _program()
    rows = {
        f"{program} shell --model {model}": "chat in this terminal",
        f"{program} serve {model}": "OpenAI's API at http://127.0.0.1:30000/v1",
        f"{program} serve Qwen/Qwen3-8B": "on a GPU; docs/start/quickstart.md has the steps",
    }
    width = max(map(len, rows))
    screen.section("Try next", *(f"{command:{width}}  {what}" for command, what in rows.items()))


def _program() -> str:
    """How this program is started again: by its name if that is in PATH, else as it was."""
    if shutil.which("pie-sglang"):
        return "pie-sglang"
    started = Path(sys.argv[0])
    return str(started) if started.name == "pie-sglang" else "python -m pie_driver_sglang"


def _stream_all(
    client: OpenAI, name: str, tokens: int, screen: PlainScreen
) -> tuple[list[StreamedAnswer], float]:
    """Streams all questions side by side; returns the answers and the seconds."""
    answers = [StreamedAnswer(title, question) for title, question, _ in QUESTIONS]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(answers)) as pool:
        running = [
            pool.submit(_stream, client, name, tokens, answer, params)
            for answer, (_, _, params) in zip(answers, QUESTIONS, strict=True)
        ]
        while not all(each.done() for each in running):
            screen.growing(answers)
            time.sleep(_FRAME_S)
        for each in running:
            each.result()
    return answers, time.perf_counter() - started


def _stream(
    client: OpenAI, name: str, tokens: int, answer: StreamedAnswer, params: dict[str, Any]
) -> None:
    extra = {key: params[key] for key in _EXTRA if key in params}
    sampling = {key: value for key, value in params.items() if key not in _EXTRA}
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": answer.question}],
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
        **sampling,
    )
    for chunk in stream:
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content and not answer.text:
                answer.first_s = time.perf_counter() - started
            answer.text += choice.delta.content or ""
            answer.is_cut |= choice.finish_reason == "length"
    answer.done = True


def _ask_for_json(client: OpenAI, name: str, screen: PlainScreen) -> None:
    """An answer that the grammar of a JSON schema constrains."""
    question = (
        "Extract city, continent and population as JSON: "
        "Tokyo is a city in Japan with 14000000 people."
    )
    found = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": question}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
        temperature=0,
        max_tokens=96,
    )
    text = found.choices[0].message.content or ""
    screen.section("JSON by a schema", question, json.dumps(json.loads(text), ensure_ascii=False))


def _ask_for_a_call(client: OpenAI, name: str, screen: PlainScreen) -> None:
    """A call of a function; its arguments are constrained, too."""
    question = "What is the weather in Paris, in celsius?"
    tools: Any = [WEATHER]
    found = client.chat.completions.create(
        model=name,
        messages=[
            # The model's chat template does not show it the tools.
            {"role": "system", "content": f"You call functions. {json.dumps(WEATHER)}"},
            {"role": "user", "content": question},
        ],
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=96,
    )
    calls: Any = found.choices[0].message.tool_calls or []
    shown = [f"{call.function.name}({call.function.arguments})" for call in calls]
    screen.section("A tool call", question, *shown)


def _ask_again(client: OpenAI, name: str, tokens: int, screen: PlainScreen) -> None:
    """A second turn, whose first one is in the prefix cache."""
    messages: list[Any] = []
    lines: list[str] = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        found = client.chat.completions.create(
            model=name, messages=messages, temperature=0, max_tokens=tokens
        )
        text = found.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        cut = " …" if found.choices[0].finish_reason == "length" else ""
        lines += [f"> {question}", text + cut]
        usage: Any = found.usage
        details = usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        lines.append(f"({cached} of {usage.prompt_tokens} prompt tokens from the prefix cache)")
    screen.section("A second turn", *lines)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang demo",
        description="Serves a small chat model and asks it: six questions with six samplers at a "
        "time, JSON by a schema, a tool call, and a second turn.",
    )
    add = parser.add_argument
    help_model = "folder, repository of the Hugging Face hub, or smollm2 (default: %(default)s)"
    add("--model", "--model-path", default="smollm2", help=help_model)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add("--tokens", type=_count, default=64, help="most tokens per answer (default: %(default)s)")
    add("--save-svg", type=Path, metavar="FILE", help="write a picture of the run")
    return parser
