"""`pie-sglang models`: lists the models that were converted into the cache, and removes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pie_driver_sglang.checkpoint.converted_models import (
    ConvertedModel,
    converted_models,
    remove,
    remove_unfinished,
)
from pie_driver_sglang.checkpoint.packaged import cache_folder
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.memory.units import MIB


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    found = converted_models()
    if not options.remove and not options.prune:
        sys.stdout.write(_table(found))
        return 0
    named = {model.folder.name: model for model in found}
    for name in options.remove:
        if name not in named:
            raise ConfigError(
                f"the cache {quoted(cache_folder())} has no model {quoted(name)}",
                "list its models by `pie-sglang models`",
            )
    chosen = {*options.remove, *(m.folder.name for m in found if options.prune and m.is_stale)}
    for name in sorted(chosen):
        remove(named[name])
        sys.stdout.write(f"removed {name}: {named[name].size // MIB:,} MiB\n")
    if options.prune and (size := remove_unfinished()):
        sys.stdout.write(f"removed interrupted conversions: {size // MIB:,} MiB\n")
    return 0


def _table(models: Sequence[ConvertedModel]) -> str:
    """The cache's folder, and a line for each model."""
    if not models:
        return f"{cache_folder()}: no converted models\n"
    width = max(len(model.folder.name) for model in models)
    lines = []
    for model in models:
        source = "a package" if model.source is None else str(model.source)
        note = "  (gone or changed; --prune removes this)" if model.is_stale else ""
        size = f"{model.size // MIB:,} MiB"
        lines.append(f"  {model.folder.name:<{width}}  {size:>11}  {source!r}{note}\n")
    return f"{cache_folder()}:\n{''.join(lines)}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang models",
        description="Lists the models that were converted into the cache, with their sizes and "
        "the files that they were made of, or removes some. A removed one is converted again when "
        "it is needed.",
    )
    add = parser.add_argument
    add("--remove", metavar="NAME", nargs="+", default=[], help="remove these")
    add(
        "--prune",
        action="store_true",
        help="remove those whose GGUF file is gone or has changed since, and what is left of "
        "interrupted conversions",
    )
    return parser
