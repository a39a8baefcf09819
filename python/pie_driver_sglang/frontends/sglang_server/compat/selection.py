"""The compat modules of the installed version of SGLang's server, chosen once in a process.

Each function imports one module, when it is first called: all of them import SGLang.
"""

from __future__ import annotations

import functools

from pie_driver_sglang.config.sglang_versions import is_0517
from pie_driver_sglang.frontends.sglang_server.compat.protocols import (
    EndpointsCompat,
    LaunchCompat,
    SchedulerCompat,
)


@functools.cache
def launch_compat() -> LaunchCompat:
    """The launch of the HTTP server."""
    if is_0517():
        from pie_driver_sglang.frontends.sglang_server.compat.v0517 import launch as of_0517

        return of_0517
    from pie_driver_sglang.frontends.sglang_server.compat.v0523 import launch as of_0523

    return of_0523


@functools.cache
def scheduler_compat() -> SchedulerCompat:
    """A scheduler's process."""
    if is_0517():
        from pie_driver_sglang.frontends.sglang_server.compat.v0517 import scheduler as of_0517

        return of_0517
    from pie_driver_sglang.frontends.sglang_server.compat.v0523 import scheduler as of_0523

    return of_0523


@functools.cache
def endpoints_compat() -> EndpointsCompat:
    """HTTP endpoints."""
    if is_0517():
        from pie_driver_sglang.frontends.sglang_server.compat.v0517 import endpoints as of_0517

        return of_0517
    from pie_driver_sglang.frontends.sglang_server.compat.v0523 import endpoints as of_0523

    return of_0523
