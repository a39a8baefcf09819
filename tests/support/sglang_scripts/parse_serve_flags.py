"""Parses command lines of `pie-sglang serve`; prints the error of each.

    python tests/support/sglang_scripts/parse_serve_flags.py < LINES

LINES is a JSON list of lists of words; the output one of errors, null for none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from pie_driver_sglang.config.option_checks import valid_names
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.frontends.common.arguments import OWN, READ, SCHEDULER
from pie_driver_sglang.frontends.gateway.flags import parse_words
from pie_driver_sglang.frontends.sglang_server import launch, serve
from pie_driver_sglang.frontends.sglang_server.compat import environment
from pie_driver_sglang.frontends.sglang_server.flags import refuse_other_engines_flags


def find_fault(launching: Any, given: Sequence[str]) -> str | None:
    """What is wrong with a command line; None if nothing is."""
    try:
        refuse_other_engines_flags(given)
        front, words = serve._take_front(serve.normalized(given))
        if not any(word.partition("=")[0] in ("--model-path", "--config") for word in words):
            # A command that is named without its arguments.
            words += ["--model-path", "model"]
        if front == "gateway":
            parse_words(words)
            return None
        own = launch.split_words(words)
        launching.given_flags(own.words)
    except DriverError as error:
        return str(error)
    unknown = own.options.keys() - {*valid_names(), *OWN, *READ, *SCHEDULER}
    return f"there is no option {unknown}" if unknown else None


def main() -> None:
    """Prints the faults."""
    environment.prepare_server((), on_cpu=True)
    with environment.importing_server():
        from pie_driver_sglang.frontends.sglang_server.compat import launching
    print(json.dumps([find_fault(launching, words) for words in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
