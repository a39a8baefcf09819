"""`pie-sglang warm`: compiles the kernels of a model ahead of its first start."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pie_driver_sglang.backends.sglang.compile_ahead import (
    CompileRequest,
    compile_kernels,
    is_compiled,
)
from pie_driver_sglang.backends.sglang.compile_shapes import dry_model, unknown_kernels_reason
from pie_driver_sglang.cli.engine_options import add_engine_options
from pie_driver_sglang.config.config_file import SGLANG_RULES
from pie_driver_sglang.config.hf_config import check_heads, load_hf_config
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.fork_server.cuda_properties import read_properties
from pie_driver_sglang.frontends.common.arguments import parse_arguments

if TYPE_CHECKING:
    from pie_driver_sglang.compilation.compile_pool import CompiledKernel

_HOPPER: Final[Mapping[str, int]] = MappingProxyType(
    {
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "warp_size": 32,
        "shared_memory_per_block_optin": 227 << 10,
        "regs_per_multiprocessor": 1 << 16,
    }
)
GPUS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "h100": {**_HOPPER, "name": "NVIDIA H100 80GB HBM3", "total_memory": 80 << 30},
        "h200": {**_HOPPER, "name": "NVIDIA H200", "total_memory": 141 << 30},
    }
)
"""Properties of GPUs that need not be in this machine, by the values of `--gpu`."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status: 1 if a kernel does not compile."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    request = _request(options)
    if is_compiled(request) and not options.again:
        sys.stdout.write(f"{request.gpu}: all kernels are compiled already\n")
        return 0
    progress = _Progress()
    report = compile_kernels(request, progress)
    progress.end()
    for name, error in report.failed:
        sys.stderr.write(f"{name} does not compile: {error}\n")
    left = "; a process was killed: run the command again" if report.left else ""
    sys.stdout.write(
        f"{request.gpu}: {report.new} of {report.kernels} kernels compiled in "
        f"{report.processes} processes, {time.monotonic() - began:.0f} s{left}\n"
    )
    return int(bool(report.failed or report.left))


def _request(options: argparse.Namespace) -> CompileRequest:
    """What the kernels depend on.

    Raises:
        ConfigError: The model's kernels are not known ahead, or there is no GPU.
    """
    if options.device == "cpu":
        raise ConfigError("`--device cpu` runs no kernels that are compiled", "remove it")
    gpu = GPUS[options.gpu] if options.gpu else next(iter(read_properties()), None)
    if gpu is None:
        raise ConfigError(
            "this machine has no GPU to compile kernels for",
            f"name the GPU that will run them: `--gpu {'` or `--gpu '.join(GPUS)}`",
        )
    given = dict(map(parse_option, options.option))
    parsed = parse_arguments({
        "tp_size": options.tp, **given, "model_path": options.model or options.first,
        "device": "cuda", "load_format": "dummy",
    })  # fmt: skip
    driver_options = SGLANG_RULES.parse_options(parsed.runtime["options"], "cuda:0")
    hf_config = load_hf_config(parsed.model)
    why = unknown_kernels_reason(hf_config, driver_options)
    if why is not None:
        raise ConfigError(
            f"the kernels are not known ahead: {why}", "the first start compiles what it launches"
        )
    ranks = parsed.runtime["tensor_parallel_size"]
    check_heads(hf_config, ranks)
    model = dry_model(
        hf_config, driver_options, parsed.runtime["dtype"],
        major=gpu["major"], memory=gpu["total_memory"], ranks=ranks,
    )  # fmt: skip
    return CompileRequest(model, gpu["name"], dict(gpu))


class _Progress:
    """A line on a terminal."""

    def __init__(self) -> None:
        self._done = 0
        self._is_shown = sys.stderr.isatty()

    def __call__(self, kernel: CompiledKernel, total: int) -> None:
        """Shows a kernel."""
        self._done += 1
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{self._done} of {total} kernels  {kernel.name}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clears the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang warm",
        description="Compiles the kernels of a model in parallel, ahead of its first start. No GPU "
        "and no weights are needed. With PIE_COMPILE_AHEAD=1 the first start of `serve` does the "
        "same while it loads.",
        epilog="Flags are those of `serve`: kernels depend on them.",
    )
    parser.add_argument(
        "first", nargs="?", metavar="MODEL", help="folder, or a repository of the Hugging Face hub"
    )
    help_gpu = "compile for this GPU (default: that of this machine)"
    parser.add_argument("--gpu", choices=tuple(GPUS), help=help_gpu)
    parser.add_argument("--again", action="store_true", help="look for each kernel in the caches")
    add_engine_options(parser, samples=False)
    return parser
