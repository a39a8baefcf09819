"""The HTTP application of one of several tokenizer workers, started by uvicorn."""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.entrypoints import http_server

from pie_driver_sglang.frontends.sglang_server.compat.http_app import (
    HttpConfig,
    guarded,
    http_config_of,
    prepare_app,
    send_warm_up,
)
from pie_driver_sglang.shared_names import use_token

_WAIT = http_server._wait_and_warmup
# The settings are in shared memory whose name has the server's token.
use_token()


def _config() -> HttpConfig:
    return http_config_of(http_server.get_global_state().tokenizer_manager.server_args)


def _wait(server_args: Any, **keywords: Any) -> None:
    token = http_config_of(server_args).keys.warm_up
    _WAIT(server_args, execute_warmup_func=functools.partial(send_warm_up, token), **keywords)


http_server._wait_and_warmup = _wait
prepare_app()
app = guarded(http_server.app, _config)
