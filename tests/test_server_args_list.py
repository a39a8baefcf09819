"""The generated list of server arguments is that of the installed SGLang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from support import REPOSITORY

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]


def test_the_list_is_fresh() -> None:
    # In a process of its own: plugins that another test loads, such as smg's, add flags to
    # SGLang's parser.
    script = REPOSITORY / "tools" / "generate_server_args.py"
    command = [sys.executable, "-W", "ignore", str(script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
