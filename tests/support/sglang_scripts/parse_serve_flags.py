"""Parses command lines of `pie-sglang serve`; prints the error of each.

    python tests/support/sglang_scripts/parse_serve_flags.py < LINES

LINES is a JSON list of lists of words; the output one of errors, null for none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from pie_driver_sglang.cli import serve, serve_arguments
from pie_driver_sglang.config.option_checks import valid_names
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.frontends.common.argument_names import OWN, READ, SCHEDULER
from pie_driver_sglang.frontends.gateway.gateway_flags import parse_gateway_arguments
from pie_driver_sglang.frontends.sglang_server import server_process
from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from pie_driver_sglang.frontends.sglang_server.served_flags import refuse_other_engines_flags


def find_fault(http_launch: Any, given: Sequence[str]) -> str | None:
    """What is wrong with a command line; None if nothing is."""
    try:
        refuse_other_engines_flags(given)
        front, words = serve._take_front(serve_arguments.normalized(given))
        if not any(word.partition("=")[0] == "--model-path" for word in words):
            # A command that is named without its arguments.
            words += ["--model-path", "model"]
        if front == "gateway":
            parse_gateway_arguments(words)
            return None
        own = server_process.split_arguments(words)
        http_launch.given_flags(own.sglang)
    except DriverError as error:
        return str(error)
    unknown = own.options.keys() - {*valid_names(), *OWN, *READ, *SCHEDULER}
    return f"there is no option {unknown}" if unknown else None


def main() -> None:
    """Prints the faults."""
    server_environment.prepare_server((), on_cpu=True)
    with server_environment.importing_server():
        from pie_driver_sglang.frontends.sglang_server.compat import http_launch
    print(json.dumps([find_fault(http_launch, words) for words in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
