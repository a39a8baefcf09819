"""Flags of the commands that start an engine, and its start."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pie_driver_sglang
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.config.options import OPTIONS
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError, quoted, reason

if TYPE_CHECKING:
    from pie_driver_sglang.frontends.offline.engine import Engine


_FLAGS: Final = frozenset({"device", "dp_size", "log_file", "model_path", "tp_size"})
"""Arguments of the engine with a flag of their own."""
_KINDS: Final = {name: argument.type for name, argument in SERVER_ARGS.items()} | {
    name: option.type for name, option in OPTIONS.items()
}
"""The types of the engine's arguments, by name."""
_SAMPLING: Final = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "sampling_seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_regex",
)


def add_engine_options(
    parser: argparse.ArgumentParser, *, samples: bool = True, positional: bool = True
) -> None:
    """Add the flags of the engine.

    Args:
        parser: The command's.
        samples: Whether to add those of sampling, too.
        positional: Whether the command may name the model without a flag.
    """
    if positional:
        # Without it the default would replace what `--model` has set.
        default = argparse.SUPPRESS
        parser.add_argument("model", nargs="?", metavar="MODEL", default=default, help="the model")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model",
        "--model-path",
        help="folder, or a repository of the Hugging Face hub (default: models/pocket in a clone "
        "of this repository)",
    )
    engine.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    engine.add_argument(
        "--tp", "--tp-size", type=int, metavar="N", help="GPUs that share the model"
    )
    engine.add_argument("--dp", "--dp-size", type=int, metavar="N", help="replicas of the model")
    engine.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any argument of `pie_driver_sglang.Engine`; may be given several times",
    )
    engine.add_argument("--log", metavar="FILE", help="append the drivers' log to a file")
    _add_arguments(parser)
    if not samples:
        return
    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add("--max-new-tokens", type=int, metavar="N", help="maximum output tokens")
    add("--temperature", type=float, metavar="T", help="0 for the most probable token")
    add("--top-p", type=float, metavar="P", help="probability mass kept")
    add("--top-k", type=int, metavar="K", help="tokens kept")
    add("--min-p", type=float, metavar="P", help="share of the largest probability that is kept")
    add("--sampling-seed", type=int, metavar="N", help="the same draws in every run")
    add("--frequency-penalty", type=float, metavar="X", help="for each time a token was produced")
    add("--presence-penalty", type=float, metavar="X", help="for a token that was produced")
    add("--repetition-penalty", type=float, metavar="X", help="scales a token that was produced")
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID=X",
        help="added to the logit of a token; may be given several times",
    )
    add(
        "--stop", action="append", metavar="TEXT", help="ends an answer; may be given several times"
    )
    add(
        "--stop-regex",
        action="append",
        metavar="REGEX",
        help="ends an answer where it matches; may be given several times",
    )
    bound = sampling.add_mutually_exclusive_group()
    bound.add_argument(
        "--json-schema", metavar="FILE", help="answers are JSON that fits the schema"
    )
    bound.add_argument("--regex", metavar="REGEX", help="answers match the expression as a whole")
    bound.add_argument("--ebnf", metavar="FILE", help="answers follow the grammar")
    bound.add_argument("--structural-tag", metavar="FILE", help="parts of answers are structured")
    add("--ignore-eos", action="store_true", help="ignore the end-of-sequence token")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add SGLang's flags and the driver's options by their names; `--help` does not list them."""
    for name, kind in sorted(_KINDS.items()):
        if name in _FLAGS:
            continue
        flag = f"--{name.replace('_', '-')}"
        nargs = {"bool": 0}.get(kind, "+" if kind.startswith("list") else None)
        parser.add_argument(
            flag, dest="option", action=_Argument, nargs=nargs, help=argparse.SUPPRESS
        )


class _Argument(argparse.Action):
    """A flag that is an argument of the engine: `--load-format dummy` as `--option`."""

    def __call__(
        self, _parser: Any, options: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        """Append it to the options."""
        assert flag is not None
        name = flag.removeprefix("--").replace("-", "_")
        text = "true" if self.nargs == 0 else flag_text(values)
        options.option = [*options.option, f"{name}={text}"]


def flag_text(value: str | list[str]) -> str:
    """The value of a flag, or its values, as TOML: words without quotes are numbers or strings."""
    if isinstance(value, str):
        return value
    return f"[{', '.join(json.dumps(parse_option(f'value={each}')[1]) for each in value)}]"


def _bias(text: str) -> tuple[str, float]:
    """The token and the value of `ID=X`."""
    token, equals, value = text.partition("=")
    try:
        bias = float(value)
    except ValueError:
        bias = math.nan
    if not token.isdecimal() or not equals or not math.isfinite(bias):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 42=-1.5, a token's id and a number")
    return token, bias


def sampling_of(options: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The sampling parameters of the command line, over defaults; checked before a model loads.

    Raises:
        ConfigError: One has a wrong value.
    """
    values = {name: getattr(options, name) for name in _SAMPLING}
    given = {name: value for name, value in values.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if options.regex is not None:
        given["regex"] = options.regex
    for name in ("json_schema", "ebnf", "structural_tag"):
        if getattr(options, name) is not None:
            given[name] = _text(getattr(options, name))
    if options.ignore_eos:
        given["ignore_eos"] = True
    check_sampling(given)
    return {**defaults, **given}


def check_sampling(given: Mapping[str, Any]) -> None:
    """Check sampling parameters as an engine does when it is asked.

    Raises:
        ConfigError: One is unknown, or has a wrong value.
    """
    from pie_driver_sglang.frontends.offline.sampling import check_ranges, parse_sampling

    check_ranges(parse_sampling(given))


def _text(path: str) -> str:
    """The text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {quoted(path)}: {reason(error)}", "name a file") from error


def default_model(name: str | None) -> str:
    """The named model, or `models/pocket` of the repository.

    Raises:
        ConfigError: None is named, and this is not a clone of the repository.
    """
    if name is not None:
        return name
    root = Path(pie_driver_sglang.__file__).parents[2]
    folders = (Path("models/pocket"), root / "models" / "pocket")
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is None:
        raise ConfigError(
            "no model is named, and `models/pocket` is not here",
            "pass `--model` with a folder or a repository of the Hugging Face hub",
        )
    return str(found)


@contextmanager
def started(options: argparse.Namespace) -> Iterator[Engine]:
    """An engine within a context; its start is shown on stderr."""
    from pie_driver_sglang.frontends.offline.engine import Engine

    arguments = {
        "model_path": default_model(options.model),
        "device": options.device,
        "tp_size": options.tp,
        "dp_size": options.dp,
        "log_file": options.log,
        **dict(map(parse_option, options.option)),
    }
    if "on_start" in arguments:
        raise ConfigError("`on_start` is a function, and no `--option`", "remove it")
    with LoadingLine(str(arguments["model_path"])) as loading:
        engine = Engine(on_start=loading, **arguments)
    with engine:
        yield engine


class LoadingLine:
    """Shows the drivers' start: in one line on a terminal, else by lines of their log."""

    def __init__(self, model: str) -> None:
        """Show the start of a model."""
        self._model = model
        self._line = ""
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, seconds: float, line: str) -> None:
        """Show a new line of the log; an empty one for none."""
        self._line = line or self._line
        if self._is_terminal:
            text = f"loading {self._model}: {seconds:.0f} s  {self._line}"
            width = os.get_terminal_size(2).columns - 1
            self._write(f"\r\x1b[K{text[:width]}")
        elif line:
            self._write(f"{line}\n")

    def __enter__(self) -> Self:
        """Return itself, for the engine to call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line."""
        if self._is_terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
