"""Chooses how the demo shows its contexts: live panels or plain lines."""

from __future__ import annotations

import os
import sys

from pie_driver_sglang.demo.display import Display


def open_display() -> Display:
    """Returns live panels on a terminal that can show them, else plain lines."""
    simple = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if simple or not sys.stdout.isatty():
        return Display()
    try:
        from pie_driver_sglang.demo.live import LiveDisplay
    except ImportError:
        return Display()
    return LiveDisplay()
