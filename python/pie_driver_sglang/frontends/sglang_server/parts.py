"""What a scheduler's process is made of: the runtime, its requests, adapters, metrics, spans."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.common.arguments import step_image_bytes
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer, configured_ends
from pie_driver_sglang.frontends.common.types import EngineArguments
from pie_driver_sglang.frontends.sglang_server.driver_log import DriverLog
from pie_driver_sglang.observability.active import ActiveFile
from pie_driver_sglang.observability.spans import SpanThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from pie_driver_sglang.frontends.sglang_server.adapters import ServerAdapters
    from pie_driver_sglang.frontends.sglang_server.compat.image_inputs import ReadImage
    from pie_driver_sglang.frontends.sglang_server.scheduler_metrics import MetricsThread

logger = logging.getLogger(__name__)

_SPARE_POSITIONS: Final = 6
"""Positions that SGLang's front end keeps free of a prompt."""


class Parts:
    """The parts of a scheduler's process, in the order in which each needs those before it.

    Modules of SGLang are imported when the drivers have been started, which load meanwhile.

    Attributes:
        runtime: The driver and its scheduler.
        log: What the driver logs.
    """

    def __init__(self, plan: EngineArguments, given: Any) -> None:
        """Starts the driver.

        Args:
            plan: What the runtime starts with.
            given: SGLang's arguments, as a ``SchedulerArguments``.
        """
        self._plan, self._given, self._settings = plan, given, given.settings
        folder = None if self._settings.skip_tokenizer_init else plan.tokenizer
        self._tokenizer = None if folder is None else ModelTokenizer(folder)
        keywords = {**_of_replica(plan.runtime, given.replica), **given.limits}
        if self._tokenizer is not None:
            keywords |= self._tokenizer.for_runtime()
            keywords["eos_token_ids"] = sorted(_end_tokens(plan, self._tokenizer))
        keywords["max_image_bytes"] = step_image_bytes(plan)
        self._takes_images = keywords["max_image_bytes"] > 0
        self._active = ActiveFile()
        self.runtime = _core.Runtime(**self._active.runtime(keywords))
        self.log = DriverLog(self.runtime)

    def wait_ready(self) -> None:
        """Waits until the driver serves.

        Raises:
            StartError: It cannot.
        """
        while not self.runtime.wait_ready(0.5):
            self.log.pass_on()
        self.log.pass_on()

    @property
    def active(self) -> dict[str, Any]:
        """What serves the model; see `observe.active`."""
        return self._active.read()

    @property
    def able(self) -> dict[str, Any]:
        """What the driver can."""
        return self.runtime.capabilities()

    @property
    def tokens(self) -> int:
        """KV slots that the scheduler uses."""
        most = self._plan.runtime.get("max_total_pages")
        pages = int(self.able["total_pages"])
        return (pages if most is None else min(pages, most)) * int(self.able["kv_page_size"])

    @property
    def context_length(self) -> int:
        """Positions of a sequence."""
        from pie_driver_sglang.frontends.sglang_server.compat.scheduling import front_context_length

        longest = (front_context_length(self._settings), int(self.able["max_model_len"]))
        return min(*longest, self.tokens)

    @property
    def prompt_length(self) -> int:
        """Most tokens of a prompt."""
        return max(1, self.context_length - _SPARE_POSITIONS)

    def front(self) -> _core.SglangFrontend:
        """The requests."""
        from pie_driver_sglang.frontends.sglang_server.compat import messages
        from pie_driver_sglang.frontends.sglang_server.compat.scheduling import refuses_priority

        tokenizer, settings = self._tokenizer, self._settings
        return _core.SglangFrontend(
            self.runtime,
            messages.message_table(),
            eos_token_ids=sorted(_end_tokens(self._plan, tokenizer)),
            think_end_ids=_end_of_thinking(settings, tokenizer),
            stream_interval=settings.stream_interval,
            other_interval=messages.other_interval(),
            max_prompt_tokens=self.prompt_length,
            context_length=self.context_length,
            truncate=bool(settings.allow_auto_truncate),
            vocab_size=int(self.able["vocab_size"]),
            speculate=self._plan.speculates,
            refuse_priority=refuses_priority(settings),
            original_logprobs=messages.original_logprobs(),
            probe_prefix=messages.PROBE_PREFIX,
            bos_token_id=None if tokenizer is None else tokenizer.begin_token,
            dp_rank=self._given.replica,
            read_images=self._read_images(),
            times=_times(settings),
            traces=bool(settings.enable_trace),
        )

    def _read_images(self) -> Callable[[bytes], list[ReadImage]] | None:
        """What reads the images of requests; None for a model without them."""
        if not self._takes_images:
            return None
        from pie_driver_sglang.frontends.sglang_server.compat.image_inputs import read_images

        return read_images

    def adapters(self, front: _core.SglangFrontend) -> ServerAdapters:
        """The adapters, those of `--lora-paths` loaded.

        Raises:
            StartError: The driver does not take one of these.
        """
        from pie_driver_sglang.frontends.sglang_server.adapters import ServerAdapters

        adapters = ServerAdapters(self.runtime, front)
        for adapter in self._given.adapters:
            outcome = adapters.load(*adapter)
            if not outcome["success"]:
                raise StartError(outcome["error_message"], "see `--lora-paths`")
        return adapters

    def metrics(self, front: _core.SglangFrontend) -> MetricsThread | None:
        """What writes metrics; None without `--enable-metrics`."""
        if not self._settings.enable_metrics:
            return None
        from pie_driver_sglang.frontends.sglang_server.compat.prometheus import SchedulerMetrics
        from pie_driver_sglang.frontends.sglang_server.scheduler_metrics import MetricsThread

        given = self._given
        metrics = SchedulerMetrics(given.settings, rank=given.rank, replica=given.replica)
        return MetricsThread(self.runtime, front, metrics)

    def spans(self, front: _core.SglangFrontend) -> SpanThread | None:
        """What exports the spans of requests; None without `--enable-trace`."""
        settings, replica = self._settings, self._given.replica
        if not settings.enable_trace:
            return None
        return SpanThread(
            [front.take_traced],
            settings.otlp_traces_endpoint,
            # As SGLang names it in its other processes.
            service="sglang",
            model=str(settings.served_model_name),
            attributes={} if replica is None else {"dp_rank": replica},
        )

    def facts(self) -> dict[str, Any]:
        """What `/server_info` shows besides counts."""
        able, runtime = self.able, _of_replica(self._plan.runtime, self._given.replica)
        most = runtime.get("max_running_requests")
        return {
            "page_size": able["kv_page_size"],
            "max_running_requests": most or able["max_forward_requests"],
            "context_len": self.context_length,
            # SGLang lists the states of replicas as they come.
            "dp_rank": self._given.replica or 0,
            # What the command line came to, and what the driver made of it.
            "resolved": {name: value for name, value in runtime.items() if name != "python"},
            "capabilities": able,
            "active": self.active,
        }


def _of_replica(runtime: dict[str, Any], replica: int | None) -> dict[str, Any]:
    """A runtime's keywords for one of several replicas, each of which has a process of its own."""
    ranks, first = int(runtime["tensor_parallel_size"]), replica or 0
    devices = list(runtime["devices"])[first * ranks : (first + 1) * ranks]
    return {**runtime, "devices": devices, "replicas": 1}


def _times(settings: Any) -> tuple[float, bytes, tuple[int, int, int, int]] | None:
    """What writes the times of requests, where the front end makes metrics of them."""
    if not settings.enable_metrics:
        return None
    from pie_driver_sglang.frontends.sglang_server.compat import prometheus

    pickle, places = prometheus.times_template()
    return prometheus.clock_s(), pickle, places


def _end_tokens(plan: EngineArguments, tokenizer: ModelTokenizer | None) -> set[int]:
    if tokenizer is None:
        return configured_ends(load_hf_config(plan.model))
    return tokenizer.turn_ends


def _end_of_thinking(settings: Any, tokenizer: ModelTokenizer | None) -> list[int]:
    parser = settings.reasoning_parser
    if tokenizer is None or parser in (None, "auto"):
        return []
    from pie_driver_sglang.frontends.sglang_server.compat.messages import end_of_thinking

    return tokenizer.encode_plain(end_of_thinking(parser))
