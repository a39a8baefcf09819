"""`python -m pie_driver_sglang.frontends.gateway.smg_process PARENT ARGUMENTS`: smg, as a child.

Arguments with keys come by stdin as a JSON list: other users can read a process's arguments.
"""

from __future__ import annotations

import json
import sys


def main(arguments: list[str]) -> None:
    """Run smg."""
    from pie_driver_sglang._core import die_with_parent

    die_with_parent(int(arguments[0]))
    command, *others = arguments[1:]
    sys.argv = ["smg", command, *json.load(sys.stdin), *others]
    import smg.launch_router
    from smg.cli import main as smg_main

    # The banner fills a screen.
    smg.launch_router.print_banner = lambda *_: None
    smg_main()


if __name__ == "__main__":
    main(sys.argv[1:])
