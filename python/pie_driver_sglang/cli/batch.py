"""`pie-sglang batch`: runs a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pie_driver_sglang.cli.engine_options import default_model
from pie_driver_sglang.cli.serve import run_server
from pie_driver_sglang.cli.serve_arguments import expand_arguments
from pie_driver_sglang.config import flag_names
from pie_driver_sglang.config.api_keys import take_keys
from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.batches.input_lines import read_lines
from pie_driver_sglang.frontends.batches.offline_run import (
    OfflineJob,
    OfflineRun,
    error_messages,
    one_line_errors,
)
from pie_driver_sglang.frontends.sglang_server.served_flags import refuse_other_engines_flags

_HELP: Final = """\
usage: pie-sglang batch FILE [--output OUTPUT] [options]

Run every request of FILE, a JSONL file in the format of OpenAI's batch API, and write the results
to OUTPUT in the same order. Run the command again to continue after a kill.

  --output OUTPUT            results (default: FILE with the suffix .output.jsonl)
  --model, --model-path M    a folder, or a repository of the Hugging Face hub (default:
                             models/pocket in a clone of this repository)
  --batch-concurrency N      lines at once; 1024
  --log-level LEVEL          SGLang's log; error

All other options are those of `pie-sglang serve`.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the file; returns 1 if a line failed."""
    if not arguments or "-h" in arguments or "--help" in arguments:
        sys.stdout.write(_HELP)
        raise SystemExit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise ConfigError(
            f"the first argument is {quoted(arguments[0])}, expected the input",
            "write `pie-sglang batch FILE`, options after it",
        )
    job, flags = parse_job(arguments)
    # Before a model is loaded for it.
    with OfflineRun(job):
        pass
    if job.output.exists():
        # It was killed after its last step but one.
        return _finish(job)
    words = [str(job.input), str(job.output), job.model]
    status = run_server(["batch", *words, *flags])
    if job.folder.exists() and not status:
        print_notice("run the command again to continue")
        raise KeyboardInterrupt
    return status


def _finish(job: OfflineJob) -> int:
    with OfflineRun(job) as run, one_line_errors(job):
        path = run.store.path_of(run.batch.input_file_id)
        # Its last step may be missing, which needs no model.
        batch = run.end_batch(run.store, run.batch.id, lambda: read_lines(path))
        run.remove()
    for text in error_messages(batch):
        print_notice(text)
    print_notice(f"{job.output} was complete already")
    return int(batch.failed > 0 or batch.errors is not None)


def parse_job(arguments: Sequence[str]) -> tuple[OfflineJob, list[str]]:
    """What to run, and the flags of the server.

    Args:
        arguments: The input first.
    """
    path = Path(arguments[0])
    found, rest = flag_names.pop_flags(arguments[1:], lambda flag: flag == "--output" or None)
    default = path.with_name(f"{path.stem}.output.jsonl")
    output = Path(found[-1][1]) if found else default
    refuse_other_engines_flags(rest)
    flags = expand_arguments(rest)
    # There is no server for keys to protect.
    _, flags = take_keys(flags)
    models, _ = flag_names.pop_flags(flags, lambda flag: flag == "--model-path" or None)
    model = models[-1][1] if models else default_model(None)
    if not models:
        flags += ["--model-path", model]
    levels, _ = flag_names.pop_flags(flags, lambda flag: flag == "--log-level" or None)
    if not levels:
        flags += ["--log-level", "error"]
    return OfflineJob(path, output.absolute(), model), flags
