"""Runs a file of requests by SGLang's application in this process, without an HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import ServerStatus
from tqdm import tqdm

from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import ConfigError, DriverError
from pie_driver_sglang.frontends.batches.batch_records import Batch, LineResult
from pie_driver_sglang.frontends.batches.batch_runner import BatchRunner
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.batches.offline_run import (
    OfflineJob,
    OfflineRun,
    error_messages,
    one_line_errors,
)
from pie_driver_sglang.frontends.sglang_server.compat import http_app
from pie_driver_sglang.frontends.sglang_server.compat.batch_app import (
    application,
    served_endpoints,
)
from pie_driver_sglang.frontends.sglang_server.compat.selection import launch_compat

CONCURRENCY: Final = 1024
"""Lines at once by default: the scheduler admits as many of them as the KV pages allow."""
_STOP_S: Final = 10.0
"""How long a signal waits for aborted lines."""


class OfflineServer:
    """Replaces the HTTP server: it runs one job and ends.

    Attributes:
        status: The exit status: 0 if all lines have a result without an error.
    """

    def __init__(self, job: OfflineJob) -> None:
        """Run a job."""
        self._job = job
        self.status = 1

    @contextlib.contextmanager
    def serving_with(self, arguments: Any) -> Iterator[None]:
        """Within it, SGLang's launch runs the job where it would start the HTTP server.

        Raises:
            ConfigError: The settings are those of several processes.
        """
        if arguments.tokenizer_worker_num > 1:
            raise ConfigError(
                f"`--tokenizer-worker-num` is {arguments.tokenizer_worker_num}, and one process "
                "runs a batch",
                "remove the flag",
            )
        config = http_app.http_config_of(arguments)
        http_app.prepare_app()

        def run(app: Any) -> None:
            try:
                asyncio.run(self._run(app, config))
            except DriverError as error:
                hint = f"\nhint: {error.hint}\n" if error.hint else ""
                sys.stderr.write(f"pie-sglang: {error}\n{hint}")

        with launch_compat().replacing_server(run):
            yield

    @staticmethod
    def warm_up(_arguments: Any) -> bool:
        """Replaces the warm-up request, for which there is no server."""
        http_server.get_global_state().tokenizer_manager.server_status = ServerStatus.Up
        return True

    async def _run(self, app: Any, config: http_app.HttpConfig) -> None:
        protected = http_app.protected(app, lambda: config)
        async with app.router.lifespan_context(app):
            manager = http_server.get_global_state().tokenizer_manager
            with one_line_errors(self._job), OfflineRun(self._job) as run:
                batch = run.batch
                if batch.endpoint not in served_endpoints(manager):
                    raise ConfigError(
                        f"the lines are for {batch.endpoint}, this model serves "
                        f"{', '.join(served_endpoints(manager))}",
                        "name another model",
                    )
                batches = config.settings
                is_given = "batch-concurrency" in batches.given
                limit = batches.batches.batch_concurrency if is_given else CONCURRENCY
                progress = _Progress(batch)
                runner = BatchRunner(
                    run.store,
                    batch,
                    application(protected, manager, config.keys.warm_up),
                    LineSlots(limit, lambda: 0),
                    on_results=progress.add,
                    end_batch=run.end_batch,
                )
                ended = await self._finished(runner, manager)
                progress.close(ended)
                if not ended.is_open:
                    run.remove()
                    for text in error_messages(ended):
                        print_notice(text)
                    print_notice(progress.summary(ended, self._job))
                    self.status = int(ended.failed > 0 or ended.errors is not None)
            if (watchdog := manager._subprocess_watchdog) is not None:
                # The other processes end now, as they should.
                watchdog.stop()

    async def _finished(self, runner: BatchRunner, manager: Any) -> Batch:
        """Run the lines, until all have results or a signal ends the process."""
        running = asyncio.create_task(runner.run())

        async def stop() -> None:
            runner.stop()
            _, late = await asyncio.wait([running], timeout=_STOP_S)
            if late:
                # SGLang waits for these requests, too.
                manager.abort_request(abort_all=True)

        manager.before_exit = stop
        return await running


class _Progress:
    """A progress bar on stderr, where that is a terminal, and its statistics."""

    def __init__(self, batch: Batch) -> None:
        self._begun = time.monotonic()
        self._tokens = self._lines = 0
        self._total = batch.total
        done = batch.completed + batch.failed
        if done:
            print_notice(f"{done} of {batch.total} lines are done already")
        self._bar: Any = tqdm(
            total=batch.total or None, initial=done, unit=" lines", disable=None, file=sys.stderr
        )

    def add(self, results: Sequence[LineResult]) -> None:
        """Count results."""
        for result in results:
            response = json.loads(result.text)["response"]
            body = response["body"] if response else None
            usage = body.get("usage") if isinstance(body, dict) else None
            self._tokens += int((usage or {}).get("completion_tokens") or 0)
        self._lines += len(results)
        rate = self._tokens / max(1e-9, time.monotonic() - self._begun)
        self._bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)
        self._bar.update(len(results))

    def close(self, batch: Batch) -> None:
        """Close the progress bar as it stands."""
        self._bar.total = batch.total
        self._bar.close()

    def summary(self, batch: Batch, job: OfflineJob) -> str:
        """What was done, in one line."""
        seconds = max(1e-9, time.monotonic() - self._begun)
        return (
            f"{batch.completed} lines completed, {batch.failed} failed, in {job.output}; this run: "
            f"{self._lines} lines, {self._tokens:,} tokens in {seconds:.1f} s, "
            f"{self._tokens / seconds:,.1f} tok/s"
        )
