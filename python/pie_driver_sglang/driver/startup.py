"""The start-up sequence: configuration, region, model, handshake; then serving until SIGTERM.

Cheap checks come first: configuration, snapshot and region errors are reported within a second,
before torch or the inference library is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pie_driver_sglang import __version__, _core
from pie_driver_sglang.config.arch import context_length, image_token_bytes, vocab_size
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.config.hf_config import files_with_code
from pie_driver_sglang.driver.capabilities import UNLIMITED, Capabilities
from pie_driver_sglang.driver.control_channel import control_channel
from pie_driver_sglang.driver.handshake import Handshake
from pie_driver_sglang.driver.library import Library
from pie_driver_sglang.driver.serving_loop import serve, warm_up
from pie_driver_sglang.driver.trace import open_trace
from pie_driver_sglang.errors import DriverError, RingError, StartError
from pie_driver_sglang.logs import (
    LogSource,
    configure_logging,
    end_logging,
    format_failure,
    last_line,
)
from pie_driver_sglang.memory.host import check_budget
from pie_driver_sglang.memory.plan import comparison
from pie_driver_sglang.memory.refusal import run_failure
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.observability.active import active_line, write_active
from pie_driver_sglang.observability.reporter import Reporter
from pie_driver_sglang.observability.served_model import ServedModel, for_group
from pie_driver_sglang.ranks.leader import LeaderExecutor
from pie_driver_sglang.ranks.parallel import Start, Workers
from pie_driver_sglang.ranks.types import ALONE
from pie_driver_sglang.shared_names import use_token

if TYPE_CHECKING:
    from pie_driver_sglang.engine.executor import ModelExecutor, ModelInfo

logger = logging.getLogger(__name__)

# Bytes on the wire, by the sizing rule of the Pie driver protocol.
_FRAME_BYTES = 4096
_REQUEST_BYTES = 96
_TOKEN_BYTES = 32

_STDERR_TIMEOUT_S = 2.0
"""How long a failed start waits for a blocked stderr."""


def main(
    library: Library,
    argv: Sequence[str] | None = None,
    guard: _core.ExitGuard | None = None,
    start_worker: Start | None = None,
) -> int:
    """Run the driver.

    Args:
        library: What runs the model.
        argv: The arguments after the program's name; None for the process's own.
        guard: The handler of SIGTERM; None to install one.
        start_worker: Starts the other ranks of a model; None for new interpreters.

    Returns:
        The exit status of a failed start or a lost device, or 0. A running driver ends by SIGTERM
        or with its parent, natively and with status 0. After a failed start the handshake pipe
        stays open until the error is printed: when it closes, the runtime terminates the driver.
    """
    arguments = _parser(library).parse_args(argv)
    use_token()
    # Inferlets print to the inherited stdout; output of libraries belongs to the log.
    os.dup2(2, 1)
    # Ctrl-C reaches the whole process group; the server decides when its drivers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The Python stacks of all threads, of a driver that hangs.
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        configure_logging()
        if not logger.isEnabledFor(logging.DEBUG):
            # The library and torch warn about platforms and formats that are not in use.
            warnings.simplefilter("ignore")
        handshake = Handshake(arguments.handshake_fd)
        guard = guard or _core.ExitGuard()
        config = load_config(arguments.config, library.rules)
        _name_lines(config, guard)
        library.check_versions()
        _warn_of_code(config)
        check_budget(*_host_budgets(config))
        workers = functools.partial(
            _workers, arguments.config, config, library, guard, start_worker
        )
        run(config, library, guard, handshake, workers)
    except DriverError as error:
        logger.debug("the driver ends", exc_info=True)
        return _fail(library.renamed(error))
    except BaseException as error:
        # A panic of the native half is not an `Exception`.
        logger.exception("the driver stops on an unexpected error")
        return _fail(
            DriverError(f"{type(error).__name__}: {error}", "the traceback above says where")
        )
    return 0


def _host_budgets(config: DriverConfig) -> tuple[int, int, int]:
    """GiB of host memory for swapped pages, and for weights of each rank on a GPU; the ranks."""
    options, devices = config.driver.options, config.driver.device
    offload = options.cpu_offload_gb
    if offload and devices[0] == "cpu":
        logger.info("`cpu_offload_gb` has no effect on a CPU: all weights are in host memory")
        offload = 0
    return options.cpu_mem_budget_in_gb, offload, len(devices)


def _warn_of_code(config: DriverConfig) -> None:
    """Warn if the model's folder has Python code that will be run."""
    if not config.driver.options.trust_remote_code:
        return
    if names := files_with_code(config.model.snapshot_dir):
        text = "the model brings Python code, which is run (`auto_map` in %s); %s refuses it"
        logger.warning(text, ", ".join(names), "`trust_remote_code = false`")


def run(
    config: DriverConfig,
    library: Library,
    guard: _core.ExitGuard,
    handshake: Handshake,
    start_workers: Callable[[], AbstractContextManager[Workers | None]],
) -> None:
    """Start the driver, announce it and serve.

    Args:
        config: The checked configuration.
        library: What runs the model.
        guard: Removes the region when this process ends.
        handshake: The pipe to the runtime.
        start_workers: Starts the other ranks, if any, for the duration of its context.

    Raises:
        DriverError: The start failed, or the device was lost; no region is left over.
    """
    start_spans.rest("settings")
    started = start_spans.process_start()
    driver = config.driver
    options = driver.options
    source = _log_source(config)
    trace = open_trace(for_group(options.trace_file, source.group), options.trace_max_mib, source)
    server = _open_region(config, guard)
    try:
        if trace is not None:
            # After the region is locked: the trace of a live driver must not be overwritten.
            trace.begin()
        with start_workers() as workers, Reporter(driver.group_id, options) as reporter:
            engine = _start(config, library, server, workers)
            caps = capabilities(config, engine.model_info, server.request_capacity)
            socket, group = options.control_socket, driver.group_id
            with control_channel(socket, engine, server.wake, group) as control:
                # First, because a frontend reads it once the driver is ready.
                if options.active_file is not None:
                    write_active(engine.active, options.active_file, start_spans.recorded())
                handshake.announce(group, server.name, caps)
                _log_ready(config, engine, started)
                reporter.begin(server.counts, _served_model(config, engine.model_info))
                serve(server, engine, trace, control)
    finally:
        server.unlink()


def _log_ready(config: DriverConfig, engine: ModelExecutor, started: float) -> None:
    info, now = engine.model_info, time.monotonic()
    logger.info("%s", active_line(engine.active))
    spans = start_spans.recorded()
    logger.info("%s", start_spans.summary(spans, started, now))
    for line in start_spans.time_line(start_spans.as_list(spans, "driver", started)):
        logger.debug("%s", line)
    logger.info(
        "serving %s (%s) on %s: %s, %d pages of %d tokens, %d more on the host, ready in %.1f s",
        _model_name(config),
        info.arch_name,
        ", ".join(config.driver.device),
        info.dtype,
        info.total_pages,
        info.page_size,
        info.host_pages,
        now - started,
    )


def _model_name(config: DriverConfig) -> str:
    return config.model.name or config.model.snapshot_dir.name


def _served_model(config: DriverConfig, info: ModelInfo) -> ServedModel:
    return ServedModel(_model_name(config), info.total_pages, info.page_size)


def _log_source(config: DriverConfig) -> LogSource:
    return LogSource(config.driver.group_id, 0, config.driver.device[0])


def _name_lines(config: DriverConfig, guard: _core.ExitGuard) -> None:
    """Log with group, rank and device, in the options' format and level."""
    options, source = config.driver.options, _log_source(config)
    log_format = options.log_format
    configure_logging(options.log_level, source=source, log_format=log_format)
    guard.set_last_line(last_line(source, log_format))


def capabilities(config: DriverConfig, info: ModelInfo, request_bytes: int) -> Capabilities:
    """The capabilities for the handshake; limits that the driver handles itself are unlimited.

    Every batch of tokens, pages and images within the limits fits a frame of `request_bytes` bytes,
    with one logit mask of any kind. The protocol has no limit on logit masks: a batch with several
    can exceed it, and must be split by its sender, as this project's runtime does.
    """
    requests = config.driver.options.max_forward_requests
    budget = request_bytes - _FRAME_BYTES - _REQUEST_BYTES * requests - 4 * info.vocab_size
    budget -= _media_bytes(config, config.model.hf_config)
    # Half of the space for tokens, half for pages; a whole context always fits.
    pool_tokens = info.total_pages * info.page_size
    tokens = max(info.context_length, min(pool_tokens, budget // 2 // _TOKEN_BYTES))
    if budget < _TOKEN_BYTES * tokens + 4 * -(-tokens // info.page_size):
        raise StartError(
            f"a context of {tokens} tokens does not fit a request of {request_bytes} bytes",
            "set `context_length` in the options",
        )
    return Capabilities(
        total_pages=info.total_pages,
        kv_page_size=info.page_size,
        swap_pool_size=info.host_pages,
        max_forward_tokens=tokens,
        max_forward_requests=requests,
        max_page_refs=(budget - _TOKEN_BYTES * tokens) // 4,
        max_logit_rows=UNLIMITED,
        max_prob_rows=UNLIMITED,
        max_custom_mask_bytes=UNLIMITED,
        max_sampler_rows=UNLIMITED,
        max_logprob_labels=UNLIMITED,
        arch_name=info.arch_name,
        vocab_size=info.vocab_size,
        embedding_size=info.embedding_size,
        embedding_normalized=info.embedding_normalized,
        # Only this project's own runtime asks for hidden states.
        hidden_size=0 if config.driver.options.control_socket is None else info.hidden_size,
        embed_size=info.embed_size if config.driver.options.max_input_embeds_bytes else 0,
        max_model_len=info.context_length,
        activation_dtype=config.driver.activation_dtype,
        snapshot_dir=str(config.model.snapshot_dir),
        rs_cache_required=info.state_slots > 0,
        rs_cache_slots=info.state_slots,
        rs_cache_slot_bytes=info.state_bytes,
        # Rejected drafts would stay in recurrent state.
        system_speculation_supported=not info.state_slots,
        enable_system_speculation=config.driver.options.drafts != "off",
    )


def request_bytes(config: DriverConfig, hf_config: Mapping[str, Any]) -> int:
    """The maximum frame size in bytes.

    A full context in a full batch, a logit mask or a bias per token, and `max_image_tokens`
    or `max_input_embeds_bytes`.
    """
    options = config.driver.options
    context = options.context_length or context_length(hf_config)
    pages = 2 * (context // options.page_size + 1)
    lists = 8 * (vocab_size(hf_config) or 0)
    fixed = _FRAME_BYTES + _REQUEST_BYTES * options.max_forward_requests
    media = _media_bytes(config, hf_config)
    return fixed + lists + _TOKEN_BYTES * context + 4 * pages + media


def _image_bytes(config: DriverConfig, hf_config: Mapping[str, Any]) -> int:
    """Bytes of the images of a frame."""
    return config.driver.options.max_image_tokens * image_token_bytes(hf_config)


def _media_bytes(config: DriverConfig, hf_config: Mapping[str, Any]) -> int:
    """Bytes of the images and the `input_embeds` of a frame, which have one budget."""
    return max(_image_bytes(config, hf_config), config.driver.options.max_input_embeds_bytes)


def _parser(library: Library) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {library.package}",
        description=f"The Pie runtime's driver process on {library.name}. The runtime starts it.",
    )
    parser.add_argument("--config", type=Path, required=True, help="driver.toml")
    parser.add_argument("--handshake-fd", type=int, required=True, help="write end of a pipe")
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _open_region(config: DriverConfig, guard: _core.ExitGuard) -> _core.Server:
    needed = request_bytes(config, config.model.hf_config)
    try:
        return _core.Server(
            f"/pie_shmem_g{config.driver.group_id}",
            guard,
            spin_budget_us=config.driver.spin_budget_us,
            min_request_bytes=needed,
        )
    except RingError as error:
        message, _, hint = str(error).partition("\n\nhint: ")
        # Errors without a hint: the region is larger than the protocol allows.
        images = " or `max_image_tokens`" if _image_bytes(config, config.model.hf_config) else ""
        remedy = f"lower `context_length`{images} in the options"
        raise StartError(message, hint or remedy) from error


@contextlib.contextmanager
def _workers(
    path: Path,
    config: DriverConfig,
    library: Library,
    guard: _core.ExitGuard,
    start: Start | None,
) -> Iterator[Workers | None]:
    """The other ranks of a model on several devices; None for a model on one."""
    devices = config.driver.device
    if len(devices) == 1:
        yield None
        return

    def fail(error: DriverError) -> None:
        # Other threads run until the process ends, but must not log after this.
        end_logging(_STDERR_TIMEOUT_S)
        # A rank's progress bar may have left its line unfinished.
        guard.exit(_fail(error, begin="\n"))

    with Workers(path, devices, library.module, fail, start) as workers:
        yield workers


def _start(
    config: DriverConfig, library: Library, server: _core.Server, workers: Workers | None
) -> ModelExecutor:
    """Load the model and warm it up."""
    driver = config.driver
    planner, own = library.load_rank(config, ALONE if workers is None else workers.rank)
    engine: ModelExecutor = own if workers is None else LeaderExecutor(own, workers.broadcast)
    server.serve(
        planner,
        engine.block.data,
        _report,
        host_pages=engine.model_info.host_pages,
        graph_path=engine.make_graph_path(),
        steps=driver.options.trace_file is not None,
    )
    logger.info("warming up")
    try:
        with start_spans.span("warm-up"):
            warm_up(server, engine)
    except Exception as error:
        logger.debug("the warm-up failed", exc_info=True)
        raise run_failure(own.plan, ", ".join(driver.device), error) from error
    if not own.model_info.embedding_size:
        size = own.hidden.states.shape[1]
        own.model_info = own.model_info._replace(hidden_size=size)
        server.set_hidden_size(size)
    logger.info("%s", comparison(own.plan, own.measure_memory()))
    return engine


def _report(kind: str, text: str) -> None:
    level = logging.INFO if kind == "drafts" else logging.WARNING
    logger.log(level, "%s", text, extra={"kind": kind})


def _fail(error: DriverError, begin: str = "") -> int:
    # A full stderr pipe must not keep the handshake open.
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    if poller.poll(1000 * _STDERR_TIMEOUT_S):
        with contextlib.suppress(OSError):
            # In one call, because other threads may write.
            sys.stderr.write(f"{begin}{format_failure(error)}\n")
            sys.stderr.flush()
    return 1
