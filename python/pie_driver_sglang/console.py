"""What commands and servers print on stderr for people, besides the log."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line and a hint, without the usage of all flags."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and end the process with status 2."""
        hint = f"`{self.prog} --help` lists all options"
        if message.endswith("expected one argument"):
            # argparse takes a value with leading dashes for another option.
            hint = f"write a value that begins with dashes as `--option=VALUE`; {hint}"
        self.exit(2, f"{self.prog}: {message}\n\nhint: {hint}\n")


def print_notice(text: str) -> None:
    """Print a line that begins with the program's name."""
    sys.stderr.write(f"pie-sglang: {text}\n")
    sys.stderr.flush()


def announce_server(url: str, model: str, *, has_key: bool = False, embeds: bool = False) -> None:
    """Print where a server is ready, and a request to try it.

    Args:
        url: Of the server.
        model: The name that clients use.
        has_key: Whether requests need an API key.
        embeds: Whether the model returns embeddings, and no text.
    """
    path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    if embeds:
        path, asked = "embeddings", '"input": "Hello"'
    body = f'{{"model": "{model}", {asked}}}'
    key = " -H 'Authorization: Bearer …'" if has_key else ""
    print_notice(
        f"serving at {url}\n\n  curl {url}/v1/{path} -H 'Content-Type: application/json'"
        f"{key} -d '{body}'\n"
    )
