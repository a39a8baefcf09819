"""The components of a scheduler process: runtime, requests, adapters, metrics, spans."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.common.arguments import EngineArguments
from pie_driver_sglang.frontends.common.control_socket import ControlSocket
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates
from pie_driver_sglang.frontends.common.profiles import Profiles
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer, configured_ends
from pie_driver_sglang.frontends.sglang_server.served_flags import GRAMMARS_OFF
from pie_driver_sglang.observability import batch_log, start_spans
from pie_driver_sglang.observability.active import LLGUIDANCE, ActiveFile
from pie_driver_sglang.observability.batch_log import BatchLogThread
from pie_driver_sglang.observability.spans import SpanThread

if TYPE_CHECKING:
    from pie_driver_sglang.frontends.sglang_server.scheduler_metrics import MetricsThread
    from pie_driver_sglang.frontends.sglang_server.server_adapters import ServerAdapters

logger = logging.getLogger(__name__)

_SPARE_POSITIONS: Final = 6
"""Positions that SGLang's frontend reserves beyond a prompt."""


class SchedulerComponents:
    """The components of a scheduler process, created in this order.

    SGLang is imported after the drivers have been started, which load meanwhile.

    Attributes:
        runtime: The native runtime: driver and scheduler.
    """

    def __init__(self, plan: EngineArguments, given: Any) -> None:
        """Start the driver.

        Args:
            plan: Arguments of the runtime.
            given: SGLang's arguments, as a ``SchedulerArguments``.
        """
        self._plan, self._given, self._settings = plan, given, given.settings
        folder = None if self._settings.skip_tokenizer_init else plan.tokenizer
        self._tokenizer = None if folder is None else ModelTokenizer(folder)
        keywords = {**_of_replica(plan.runtime, given.replica), **given.limits}
        if self._tokenizer is not None:
            keywords |= self._tokenizer.for_runtime()
            keywords["eos_token_ids"] = sorted(_end_tokens(plan, self._tokenizer))
        keywords["max_image_bytes"] = plan.media_bytes
        self._takes_images = plan.image_bytes > 0
        name, off = GRAMMARS_OFF
        is_off = getattr(self._settings, name) == off
        self._active = ActiveFile(off if is_off else LLGUIDANCE)
        self._socket = ControlSocket(plan.engine)
        keywords = self._socket.runtime(self._active.runtime(keywords))
        self.runtime = _core.Runtime(**keywords)

    def wait_ready(self) -> None:
        """Wait until the driver is ready.

        Raises:
            StartError: It failed.
        """
        while not self.runtime.wait_ready(0.5):
            self.forward_log()
        self.forward_log()

    def forward_log(self) -> None:
        """Log the lines that the driver has logged since the last call."""
        for line in self.runtime.log_lines():
            logger.info("driver: %s", line)

    @property
    def active(self) -> dict[str, Any]:
        """The active components; see `observability.active`."""
        return self._active.read()

    @property
    def capabilities(self) -> dict[str, Any]:
        """The driver's capabilities."""
        return self.runtime.capabilities()

    @property
    def returns_embeddings(self) -> bool:
        """Whether the model returns embeddings."""
        return int(self.capabilities["embedding_size"]) > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens of the KV pool that the scheduler uses."""
        found = self.capabilities
        most = self._plan.runtime.get("max_total_pages")
        pages = int(found["total_pages"])
        return (pages if most is None else min(pages, most)) * int(found["kv_page_size"])

    @property
    def context_length(self) -> int:
        """Positions of a sequence."""
        from pie_driver_sglang.frontends.sglang_server.compat.scheduler_ipc import (
            front_context_length,
        )

        longest = (
            front_context_length(self._given.record),
            int(self.capabilities["max_model_len"]),
        )
        return min(*longest, self.kv_tokens)

    @property
    def prompt_length(self) -> int:
        """The maximum tokens of a prompt."""
        return max(1, self.context_length - _SPARE_POSITIONS)

    def front(self) -> _core.SglangFrontend:
        """The native half of the frontend, which decodes requests and encodes outputs."""
        from pie_driver_sglang.frontends.sglang_server.compat import messages
        from pie_driver_sglang.frontends.sglang_server.compat.scheduler_ipc import refuses_priority
        from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat

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
            vocab_size=int(self.capabilities["vocab_size"]),
            speculate=self._plan.speculates,
            refuse_priority=refuses_priority(settings),
            original_logprobs=messages.original_logprobs(),
            probe_prefix=messages.PROBE_PREFIX,
            bos_token_id=None if tokenizer is None else tokenizer.begin_token,
            dp_rank=self._given.replica,
            takes_images=self._takes_images,
            read_images=scheduler_compat().image_reader(),
            times=_times(settings),
            weight_version=settings.weight_version,
            traces=bool(settings.enable_trace),
        )

    def adapters(self, front: _core.SglangFrontend) -> ServerAdapters:
        """The LoRA adapters, with those of `--lora-paths` loaded.

        Raises:
            StartError: The driver rejects one of these.
        """
        from pie_driver_sglang.frontends.sglang_server.server_adapters import ServerAdapters

        adapters = ServerAdapters(self.runtime, self._socket, front)
        for adapter in self._given.adapters:
            outcome = adapters.load(*adapter)
            if not outcome["success"]:
                raise StartError(outcome["error_message"], "see `--lora-paths`")
        return adapters

    def close(self) -> None:
        """Close the connections to the drivers."""
        self._socket.close()

    def updates(self, front: _core.SglangFrontend) -> ModelUpdates:
        """Updates of the weights, and the release of memory."""
        return ModelUpdates(
            self.runtime,
            self._socket,
            self._plan.model,
            on_pause=front.set_paused,
            on_unavailable=front.set_unavailable,
            on_version=front.set_weight_version,
        )

    def profiles(self) -> Profiles:
        """Profiles of the steps and kernels."""
        return Profiles(self.runtime, self._socket)

    def metrics(self, front: _core.SglangFrontend) -> MetricsThread | None:
        """The thread that writes metrics; None without `--enable-metrics`."""
        if not self._settings.enable_metrics:
            return None
        from pie_driver_sglang.frontends.sglang_server.compat.prometheus import SchedulerMetrics
        from pie_driver_sglang.frontends.sglang_server.scheduler_metrics import MetricsThread

        given = self._given
        metrics = SchedulerMetrics(given.record, rank=given.rank, replica=given.replica)
        return MetricsThread(self.runtime, front, metrics)

    def batch_log(self) -> BatchLogThread | None:
        """The thread that logs batches; None if the log level is above `info`."""
        return batch_log.start_batch_log(
            self.runtime,
            self.active,
            batch_log.line_writer(None),
            interval=self._plan.decode_log_interval,
            device=self._plan.runtime["devices"][0],
            speculates=self._plan.speculates,
        )

    def spans(self, front: _core.SglangFrontend) -> SpanThread | None:
        """The thread that exports spans; None without `--enable-trace`."""
        settings, replica = self._settings, self._given.replica
        if not settings.enable_trace:
            return None
        return SpanThread(
            [front.take_traced],
            settings.otlp_traces_endpoint,
            # As SGLang names it in its other processes; 0.5.17 has no flag for it.
            service=getattr(settings, "otlp_service_name", None) or "sglang",
            model=str(settings.served_model_name),
            attributes={} if replica is None else {"dp_rank": replica},
        )

    def server_info(self) -> dict[str, Any]:
        """The constant part of `/server_info`."""
        able, runtime = self.capabilities, _of_replica(self._plan.runtime, self._given.replica)
        most = runtime.get("max_running_requests")
        return {
            "page_size": able["kv_page_size"],
            "max_running_requests": most or able["max_forward_requests"],
            "context_len": self.context_length,
            # SGLang lists the states of replicas as they come.
            "dp_rank": self._given.replica or 0,
            # The parsed command line, and what the driver reports.
            "resolved": {name: value for name, value in runtime.items() if name != "python"},
            "capabilities": able,
            "active": self.active,
            "start": self.start_spans(),
        }

    def start_spans(self) -> list[dict[str, Any]]:
        """The time line of the start of this process and the driver; see `as_list`."""
        origin = start_spans.origin()
        own = start_spans.as_list(start_spans.recorded(), "scheduler", origin)
        return own + start_spans.as_list(self._active.start_spans(), "driver", origin)


def _of_replica(runtime: dict[str, Any], replica: int | None) -> dict[str, Any]:
    """The runtime's arguments for one replica: each has a process of its own."""
    ranks, first = int(runtime["tensor_parallel_size"]), replica or 0
    devices = list(runtime["devices"])[first * ranks : (first + 1) * ranks]
    return {**runtime, "devices": devices, "replicas": 1}


def _times(settings: Any) -> tuple[float, bytes, tuple[int, int, int, int]] | None:
    """The template for the times of requests, which SGLang's frontend makes metrics of."""
    if not settings.enable_metrics:
        return None
    from pie_driver_sglang.frontends.sglang_server.compat import prometheus

    pickle, offsets = prometheus.times_template()
    return prometheus.clock_s(), pickle, offsets


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
