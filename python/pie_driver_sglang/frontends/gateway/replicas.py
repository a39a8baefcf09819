"""The replicas of a model, each with a runtime and a gRPC port of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pie_driver_sglang._core import Gateway, Runtime
from pie_driver_sglang.config.arch import image_merge
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.frontends.common.arguments import EngineArguments
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer, read_json
from pie_driver_sglang.frontends.gateway.gateway_flags import GatewayArguments
from pie_driver_sglang.observability.active import ActiveFile
from pie_driver_sglang.observability.spans import DEFAULT_ENDPOINT, SpanThread

_CLOSE_S: Final = 10.0
"""How long requests may take to end when a server is closed; the gateway has drained before."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters whose defaults the gateway supports."""


class Replicas:
    """Runtimes with their gRPC servers. Use it as a context manager."""

    def __init__(self, plan: EngineArguments, arguments: GatewayArguments) -> None:
        """Start every driver without waiting.

        Args:
            plan: Arguments of the engine.
            arguments: This command's.
        """
        assert plan.tokenizer is not None, "`skip_tokenizer_init` is refused"
        tokenizer = ModelTokenizer(plan.tokenizer)
        ends = sorted(tokenizer.turn_ends)
        self._plan, self._arguments = plan, arguments
        self._model_info = _model_info(plan, arguments, ends)
        self._stack = contextlib.ExitStack()
        self._servers: list[Gateway] = []
        self._traces = bool(arguments.front.get("enable_trace"))
        self._spans: SpanThread | None = None
        keywords = {**plan.runtime, **tokenizer.for_runtime()}
        keywords |= {
            "eos_token_ids": ends,
            "kv_events": not keywords.get("disable_radix_cache", False),
            "replicas": 1,
            "max_image_bytes": plan.media_bytes,
        }
        if "watchdog_timeout" in arguments.front:
            keywords["step_timeout_s"] = float(arguments.front["watchdog_timeout"])
        count, ranks = plan.runtime["replicas"], plan.runtime["tensor_parallel_size"]
        devices = plan.runtime["devices"]
        shares = [devices[first * ranks : (first + 1) * ranks] for first in range(count)]
        self.runtimes: list[Runtime] = []
        self._active = ActiveFile()
        try:
            for share in shares:
                runtime = Runtime(**self._active.runtime({**keywords, "devices": share}))
                self.runtimes.append(self._stack.enter_context(runtime))
        except BaseException:
            self._stack.close()
            raise

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until all drivers are ready; False after the timeout.

        Raises:
            StartError: A driver failed.
        """
        return all([runtime.wait_ready(timeout_s) for runtime in self.runtimes])

    @property
    def active(self) -> dict[str, Any]:
        """The active components (`observability.active`), the same in all replicas."""
        return self._active.read()

    def log_lines(self) -> list[str]:
        """New lines of the drivers' logs; with several replicas prefixed by `[number] `."""
        lines = []
        for number, runtime in enumerate(self.runtimes):
            prefix = f"[{number}] " if len(self.runtimes) > 1 else ""
            lines += [prefix + line for line in runtime.log_lines()]
        return lines

    def open(self) -> list[str]:
        """Start the gRPC servers, and return their URLs.

        Raises:
            OSError: A port is taken.
        """
        arguments = self._arguments
        for number, runtime in enumerate(self.runtimes):
            port = arguments.grpc_port + number if arguments.grpc_port else 0
            server = Gateway(
                runtime,
                contract=arguments.contract,
                host=arguments.grpc_host,
                port=port,
                max_running_requests=self._plan.runtime.get("max_running_requests"),
                speculate=self._plan.speculates,
                traces=self._traces,
                **self._model_info,
            )
            self._servers.append(server)
        if self._traces:
            self._export_spans()
        return [f"grpc://{server.address}" for server in self._servers]

    def _export_spans(self) -> None:
        self._spans = SpanThread(
            [server.take_traced for server in self._servers],
            str(self._arguments.front.get("otlp_traces_endpoint", DEFAULT_ENDPOINT)),
            service="pie-sglang",
            model=self._model_info["served_model_name"],
        )

    def close(self) -> None:
        """Close the servers and stop the drivers."""
        for server in self._servers:
            server.close(_CLOSE_S)
        if self._spans is not None:
            self._spans.close()
        self._stack.close()

    def __enter__(self) -> Replicas:
        """Return the replicas."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self.close()


def served_name(arguments: GatewayArguments) -> str:
    """The name that clients use for the model."""
    return str(arguments.front.get("served_model_name") or arguments.engine["model_path"])


def _model_info(
    plan: EngineArguments, arguments: GatewayArguments, ends: list[int]
) -> dict[str, Any]:
    """Model information of the services."""
    front = arguments.front
    config = load_hf_config(plan.model)
    return {
        "model_path": str(plan.model),
        "tokenizer_path": str(plan.tokenizer),
        "served_model_name": served_name(arguments),
        "model_type": str(config.get("model_type", "")),
        "architectures": list(config.get("architectures") or ()),
        "eos_token_ids": ends,
        "bos_token_id": _token(config.get("bos_token_id")),
        "pad_token_id": _token(config.get("pad_token_id")),
        "context_length": plan.context_length,
        "image_merge": image_merge(config) if plan.image_bytes else None,
        "default_sampling": _default_sampling(plan, front),
        "weight_version": str(front.get("weight_version", "default")),
        "version": _version(),
    }


def _default_sampling(plan: EngineArguments, front: Mapping[str, Any]) -> str:
    """Default sampling parameters: the operator's over those of `generation_config.json`."""
    found: dict[str, Any] = {}
    if front.get("sampling_defaults", "model") == "model":
        found |= read_json(plan.model / "generation_config.json")
    found |= plan.sampling
    known = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
    return json.dumps(known) if known else ""


def _token(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _version() -> str:
    try:
        return version("pie-driver-sglang")
    except PackageNotFoundError:
        return "0"
