"""Prints the help and parses the arguments of each script of `benches/gpu`.

    python tests/support/sglang_scripts/gpu_check_help.py FOLDER

FOLDER has a `config.json`. Prints what was found, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[3] / "benches" / "gpu"
sys.path.insert(0, str(SCRIPTS))

import all_checks  # noqa: E402
import frame  # noqa: E402
from registry import CHECKS, Check  # noqa: E402


def help_of(script: Path) -> str:
    """What `python SCRIPT --help` prints; it must end with status 0."""
    printed = io.StringIO()
    sys.argv = [str(script), "--help"]
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{script.name} ended with {end.code}"
        else:
            raise AssertionError(f"{script.name} went on")
    return printed.getvalue()


def parsed(check: Check, name: str, model: Path) -> dict[str, str]:
    """The arguments of a row as its script takes them."""
    values: dict[str, object] = {
        "small": model,
        "large": model,
        "pocket": frame.POCKET,
        "pie_load": "pie_load",
        "several": "4,2",
    }
    words = all_checks.words(name, check, values, Path("out"), 60)
    script = runpy.run_path(str(SCRIPTS / check.script), run_name=Path(check.script).stem)
    parser: Any = script["parser"]()
    found = vars(parser.parse_args(words))
    return {key: str(value) for key, value in found.items() if value is not None}


if __name__ == "__main__":
    model = Path(sys.argv[1])
    checks = sorted(SCRIPTS.glob("*_check.py"))
    helps = {script.name: help_of(script) for script in [*checks, SCRIPTS / "all_checks.py"]}
    arguments = {name: parsed(check, name, model) for name, check in CHECKS.items()}
    print(json.dumps({"helps": helps, "arguments": arguments, "table": all_checks.table()}))
