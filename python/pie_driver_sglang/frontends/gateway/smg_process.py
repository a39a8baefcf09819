"""`python -m pie_driver_sglang.frontends.gateway.smg_process PARENT WORDS`: smg, as a child.

Words with keys come by its input, as a JSON list: other users of the host can read its arguments.
"""

from __future__ import annotations

import json
import sys


def main(words: list[str]) -> None:
    """Runs smg's command line."""
    from pie_driver_sglang._core import die_with_parent

    die_with_parent(int(words[0]))
    command, *others = words[1:]
    sys.argv = ["smg", command, *json.load(sys.stdin), *others]
    import smg.launch_router
    from smg.cli import main as smg_main

    # It fills a screen, and says nothing that this command does not say.
    smg.launch_router.print_banner = lambda *_: None
    smg_main()


if __name__ == "__main__":
    main(sys.argv[1:])
