"""`pie-sglang shell`: a chat with a model, on a terminal or over a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TextIO

from pie_driver_sglang.cli.conversation import Conversation
from pie_driver_sglang.cli.engine_options import add_engine_options, sampling_of, started
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from pie_driver_sglang.frontends.offline.engine import Engine

HISTORY: Final = Path("~/.local/state/pie-sglang/history")
"""The history file."""
MAX_NEW_TOKENS: Final = 1024
"""Default maximum tokens of an answer."""


class Shell:
    """Handles input lines: messages and commands."""

    COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
        {
            "/help": "list the commands",
            "/reset": "forget the conversation; the instructions stay",
            "/system": "TEXT: set the instructions; without text show them",
            "/save": "FILE: write the conversation to a file",
            "/load": "FILE: go on from a file",
            "/fork": "keep the conversation as a branch; with a number go back to that branch",
            "/stats": "what the last answer took, and the engine's counts",
            "/exit": "leave; so does Ctrl-D",
        }
    )

    def __init__(
        self,
        conversation: Conversation,
        engine: Any,
        output: TextIO,
        console: Console | None = None,
    ) -> None:
        """Start a shell.

        Args:
            conversation: With the engine.
            engine: For statistics.
            output: For answers and the output of commands.
            console: On a terminal, for tables and colours.
        """
        self._conversation = conversation
        self._engine = engine
        self._output = output
        self._console = console
        self._seconds = 0.0
        self._first_s = 0.0

    def take(self, line: str) -> bool:
        """Handle a line; False where it ends the shell."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return True
        if word in ("/exit", "/quit"):
            return False
        try:
            if word.startswith("/"):
                self._command(word)(rest.strip())
            else:
                self._answer(line.strip())
        except ConfigError as error:
            self._say(f"{error}" + (f" ({error.hint})" if error.hint else ""), style="red")
        except KeyboardInterrupt:
            # Before an answer, or in a command.
            self._say("[stopped]")
        return True

    def _command(self, word: str) -> Callable[[str], None]:
        if word not in self.COMMANDS:
            question = nearest(word, self.COMMANDS) or "`/help` lists them"
            raise ConfigError(f"there is no command {word}", question)
        found: Callable[[str], None] = getattr(self, f"_{word[1:]}")
        return found

    def _answer(self, text: str) -> None:
        """Stream an answer; Ctrl-C stops only it."""
        begun = time.monotonic()
        self._first_s = 0.0
        pieces = self._conversation.ask(text)
        try:
            for piece in pieces:
                self._first_s = self._first_s or time.monotonic() - begun
                self._output.write(piece)
                self._output.flush()
        except KeyboardInterrupt:
            self._output.write(" [stopped]")
        finally:
            pieces.close()  # type: ignore[attr-defined]
            self._seconds = time.monotonic() - begun
        self._output.write("\n")
        self._output.flush()

    def _help(self, _: str) -> None:
        width = max(map(len, self.COMMANDS))
        self._list(self.COMMANDS.items(), lambda name, text: f"{name:<{width}}  {text}")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._say("the conversation is empty")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        self._say(f"instructions: {self._conversation.system or 'none'}")

    def _save(self, path: str) -> None:
        self._conversation.save(_path(path))
        self._say(f"saved {len(self._conversation.messages)} messages to {path}")

    def _load(self, path: str) -> None:
        self._conversation.load(_path(path))
        self._say(f"{len(self._conversation.messages)} messages from {path}")

    def _fork(self, number: str) -> None:
        if not number:
            kept = self._conversation.fork()
            self._say(f"branch {kept} is kept; `/fork {kept}` goes back to it")
            return
        if not number.isdecimal():
            raise ConfigError(f"{number!r} is not the number of a branch", "e.g. `/fork 1`")
        self._conversation.go_back(int(number))
        self._say(f"branch {number}: {len(self._conversation.messages)} messages")

    def _stats(self, _: str) -> None:
        meta = self._conversation.meta
        rows = []
        if meta:
            count = meta["completion_tokens"]
            text = (
                f"{count} tokens in {self._seconds:.2f} s "
                f"({count / max(1e-9, self._seconds):.1f} tok/s), first after "
                f"{self._first_s * 1000:.0f} ms; prompt {meta['prompt_tokens']} tokens, "
                f"{meta['cached_tokens']} of them cached"
            )
            rows.append(("last answer", text))
        (counts,) = self._engine.get_server_info()["internal_states"]
        shown = ("steps", "prompt_tokens", "cached_tokens", "output_tokens", "pages_free")
        rows.append(("engine", ", ".join(f"{name} {counts[name]:,}" for name in shown)))
        self._list(rows, lambda name, text: f"{name}: {text}")

    def _list(self, rows: Iterable[tuple[str, str]], line: Callable[[str, str], str]) -> None:
        """A table on a terminal, else a line for each row."""
        if self._console is None:
            for row in rows:
                self._say(line(*row))
            return
        # It comes with SGLang.
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(name, style="bold"), Text(text))
        self._console.print(table)

    def _say(self, text: str, style: str = "dim") -> None:
        if self._console is not None:
            self._console.print(text, style=style, markup=False, highlight=False)
            return
        self._output.write(f"{text}\n")
        self._output.flush()


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser(
        prog="pie-sglang shell",
        description="Chats with a model. Lines that begin with / are commands; /help lists them. "
        "Over a pipe each line of stdin is a message, and answers go to stdout.",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions for the model")
    add_engine_options(parser)
    options = parser.parse_args(arguments)
    with started(options) as engine:
        if engine.tokenizer is None:
            raise ConfigError("a shell needs a tokenizer", "remove `skip_tokenizer_init`")
        sampling = sampling_of(options, max_new_tokens=MAX_NEW_TOKENS)
        conversation = Conversation(engine, engine.tokenizer, sampling)
        conversation.system = options.system
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        shell = Shell(conversation, engine, sys.stdout, _console() if is_terminal else None)
        _run(shell, engine, is_terminal=is_terminal)
    return 0


def _console() -> Console:
    from rich.console import Console

    return Console()


def _run(shell: Shell, engine: Engine, *, is_terminal: bool) -> None:
    if is_terminal:
        name = engine.get_server_info()["model_path"]
        sys.stdout.write(f"{name}; /help lists commands, Ctrl-C stops an answer\n")
    for line in _terminal_lines() if is_terminal else sys.stdin:
        if not shell.take(line):
            return


def _terminal_lines() -> Iterator[str]:
    """Lines with editing, history and completion of commands; Ctrl-C clears a line."""
    # It comes with SGLang, as a part of IPython.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = HISTORY.expanduser()
    history: Any = InMemoryHistory()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.access(path.parent, os.W_OK):
            history = FileHistory(str(path))
    session: Any = PromptSession(
        history=history, completer=WordCompleter(list(Shell.COMMANDS), sentence=True)
    )
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _path(text: str) -> Path:
    if not text:
        raise ConfigError("no file is named", "e.g. `/save talk.json`")
    return Path(text).expanduser()
