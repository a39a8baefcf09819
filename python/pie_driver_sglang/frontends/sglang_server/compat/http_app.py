"""SGLang's HTTP application with this package's limits, keys and media policy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple
from unittest import mock

import uvicorn
from sglang.srt.entrypoints import http_server
from sglang.srt.environ import envs

from pie_driver_sglang.config.api_keys import ApiKeys
from pie_driver_sglang.config.http_limits import HttpSettings
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.sglang_server.access import (
    AccessKeys,
    AccessMiddleware,
    App,
    access_keys,
    is_local,
)
from pie_driver_sglang.frontends.sglang_server.compat.batch_app import STOPPED, with_batches
from pie_driver_sglang.frontends.sglang_server.compat.openai_endpoints import (
    INPUT_ERRORS,
    bad_request_text,
)
from pie_driver_sglang.frontends.sglang_server.compat.selection import launch_compat
from pie_driver_sglang.frontends.sglang_server.connections import LimitedProtocol, ServerUsage
from pie_driver_sglang.frontends.sglang_server.error_responses import error_body, short
from pie_driver_sglang.observability import start_spans

logger = logging.getLogger(__name__)

_MOST_DEPTH: Final = 256
"""Levels of lists and maps in a JSON body."""
_MOST_NESTED: Final = 1 << 20
"""Lists and maps in a JSON body."""
HTTP_CONFIG_ATTRIBUTE: Final = "pie_edge"
_WORKER_APP: Final = "pie_driver_sglang.frontends.sglang_server.compat.worker_app:app"


class HttpConfig(NamedTuple):
    """HTTP limits and key digests of the server's processes, as an attribute of `ServerArgs`."""

    settings: HttpSettings
    keys: AccessKeys


def attach_http_config(arguments: Any, settings: HttpSettings, keys: ApiKeys) -> None:
    """Attach our HTTP configuration to SGLang's settings, and remove keys, which SGLang logs.

    Args:
        arguments: ``ServerArgs``.
        settings: Limits and permissions.
        keys: Of command line and environment; those of a `--config` file are in `arguments`.

    Raises:
        ConfigError: A server without these limits would serve.
    """
    own_api, own_admin = launch_compat().take_keys(arguments)
    api, admin = keys.api or own_api, keys.admin or own_admin
    edge = HttpConfig(settings, access_keys(ApiKeys(api, admin)))
    launch_compat().attach(arguments, HTTP_CONFIG_ATTRIBUTE, edge)
    # The settings are not resolved yet: later on the variable is one of them.
    port = arguments.grpc_port if arguments.grpc_port is not None else envs.SGLANG_GRPC_PORT.get()
    grpc = port is not None or arguments.grpc_mode or arguments.smg_grpc_mode
    if grpc and (api or admin or not is_local(arguments.host)):
        raise ConfigError(
            "SGLang's gRPC server has neither keys nor limits: everyone who reaches "
            f"{arguments.host} could use it",
            "remove its flags, or leave it on the loopback of a server without keys",
        )
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            "SGLANG_RUST_SERVER is not served: that server has neither keys nor limits",
            "unset the variable",
        )


def http_config_of(arguments: Any) -> HttpConfig:
    """The HTTP configuration of SGLang's settings; defaults where there is none."""
    found = getattr(arguments, HTTP_CONFIG_ATTRIBUTE, None)
    return found or HttpConfig(HttpSettings(), access_keys(ApiKeys()))


@contextlib.contextmanager
def serving_with(arguments: Any) -> Iterator[None]:
    """Within it, SGLang's server runs with the HTTP configuration of its settings."""
    adapt = functools.partial(_adapted, http_config_of(arguments))
    prepare_app()
    run, config = uvicorn.run, uvicorn.Config
    with (
        mock.patch.object(uvicorn, "run", lambda app, **given: run(**adapt(app, given))),
        mock.patch.object(uvicorn, "Config", lambda app, **given: config(**adapt(app, given))),
    ):
        yield


def _adapted(edge: HttpConfig, app: Any, given: dict[str, Any]) -> dict[str, Any]:
    limits = edge.settings.connections
    timeout = limits.keep_alive_timeout_s
    if "keep-alive-timeout" not in edge.settings.given:
        timeout = given.get("timeout_keep_alive", timeout)
    is_worker = isinstance(app, str)
    return {
        **given,
        "app": _WORKER_APP if is_worker else guarded(app, lambda: edge),
        "http": functools.partial(LimitedProtocol, limits=limits, usage=ServerUsage()),
        "timeout_keep_alive": timeout,
    }


def guarded(app: Any, config: Callable[[], HttpConfig]) -> App:
    """SGLang's application with our authentication, batches, and 400 for exceptions over bad input.

    Args:
        app: The application.
        config: Returns the server's configuration, once it has started.
    """
    return with_batches(app, protected(app, config), config)


def protected(app: Any, config: Callable[[], HttpConfig]) -> App:
    """As `guarded`, without batches."""
    for kind in INPUT_ERRORS:
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(http_server.RequestValidationError, _name_fields)
    http_server._admin_api_key_missing_response = _refuse_storage
    return AccessMiddleware(app, app.router.routes, lambda: config().keys)


async def _refuse(request: Any, error: Exception) -> Any:
    """Answer 400 to input that made a handler raise; SGLang answers 500."""
    logger.warning("a request to %s is not taken", request.url.path, exc_info=error)
    body = error_body(400, short(bad_request_text(error)))
    return http_server.Response(body, 400, media_type="application/json")


def _refuse_storage(status_code: int = 400) -> Any:
    """Answer for `/hicache/storage-backend`, where SGLang finds no key: this server has it."""
    text = (
        "not served: no storage is attached while the server runs; start it with "
        "`--scheduler sglang --enable-hierarchical-cache --hicache-storage-backend NAME`"
    )
    return http_server.Response(
        error_body(status_code, text), status_code, media_type="application/json"
    )


async def _name_fields(request: Any, error: Any) -> Any:
    """Name the invalid fields; SGLang repeats them, and names its own files."""
    text = http_server._anthropic_validation_message(error.errors())
    handler = request.app.exception_handlers[http_server.HTTPException]
    return await handler(request, http_server.HTTPException(400, text))


def send_warm_up(token: str, arguments: Any) -> bool:
    """Send SGLang's warm-up requests with this server's own key, unless the server stops first.

    SGLang repeats them for minutes while nothing answers, and its shutdown waits for that: the
    socket of several tokenizer workers stays open until all of them have ended.
    """
    answered = concurrent.futures.Future[bool]()
    start_spans.rest("scheduler, driver and HTTP application")

    def send() -> None:
        try:
            span = start_spans.span("port open to first answer")
            with span, launch_compat().warming_up(arguments, token) as with_key:
                answered.set_result(bool(http_server._execute_server_warmup(with_key)))
        except Exception as error:
            answered.set_exception(error)

    threading.Thread(target=send, name="warm-up", daemon=True).start()
    ends: list[concurrent.futures.Future[Any]]
    ends = [answered, getattr(http_server.app.state, STOPPED)]
    concurrent.futures.wait(ends, return_when=concurrent.futures.FIRST_COMPLETED)
    return answered.done() and answered.result()


def prepare_app() -> None:
    """Reject JSON bodies that are nested too deeply for their readers, and send our key."""
    http_server.ORJSONRequest.json = _json
    launch_compat().freeze_with_key(lambda arguments: http_config_of(arguments).keys.warm_up)


async def _json(self: Any) -> Any:
    if not hasattr(self, "_json"):
        body = await self.body()
        if body.count(b"[") + body.count(b"{") > _MOST_NESTED:
            raise http_server.HTTPException(
                400, f"the JSON body has more than {_MOST_NESTED} lists and maps: send several"
            )
        found = http_server.orjson.loads(body)
        if is_deeper(found, _MOST_DEPTH):
            raise http_server.HTTPException(
                400, f"the JSON body is nested more than {_MOST_DEPTH} levels deep: flatten it"
            )
        self._json = found
    return self._json


def is_deeper(value: Any, most: int) -> bool:
    """Whether a JSON value has more than so many levels of lists and maps."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(most):
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return bool(level)
