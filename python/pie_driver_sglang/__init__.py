"""A Pie driver on SGLang: the process that runs a model's forward passes for the Pie runtime.

Importing this package is instant: names are loaded on first use, and neither torch nor SGLang is
imported before the engine starts.

`__main__.py` starts the driver (`driver`) or a command (`cli`, `demo`). `frontends` take
requests without Pie: the `Engine` class and two HTTP servers. `engine` is the interface to a loaded
model, which `backends` implement and `ranks` spread over devices; `kernels` compute, and
`compilation` compiles them ahead. The `fork_server` forks drivers from a process that has SGLang.
`config`, `memory` and `checkpoint` are read before a model is loaded; `observability` has metrics,
spans and log lines. `sglang_plugins` bring the drafter and the prefix index into stock SGLang.
`errors.py`, `logs.py`, `console.py` and `interpreter.py` are for all; `server_guard.py` removes
what a server leaves behind, by the names of `shared_names.py`. `_core` is the Rust half.
"""

# Nothing is imported here: `python -m` searches the working directory until `__main__` forbids it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pie_driver_sglang._core import Drafter, PagePool, RadixIndex
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.config.driver_config import DriverConfig
    from pie_driver_sglang.config.options import DriverOptions
    from pie_driver_sglang.driver.capabilities import Capabilities
    from pie_driver_sglang.driver.handshake import Handshake
    from pie_driver_sglang.errors import (
        ConfigError,
        DriverError,
        PagesError,
        RadixError,
        StartError,
    )
    from pie_driver_sglang.frontends.offline.engine import Engine

__version__ = "0.2.0"

__all__ = [
    "Capabilities",
    "ConfigError",
    "Drafter",
    "DriverConfig",
    "DriverError",
    "DriverOptions",
    "Engine",
    "Handshake",
    "PagePool",
    "PagesError",
    "RadixError",
    "RadixIndex",
    "StartError",
    "__version__",
    "load_config",
]


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    modules = {
        "Capabilities": "driver.capabilities",
        "ConfigError": "errors",
        "Drafter": "_core",
        "DriverConfig": "config.driver_config",
        "DriverError": "errors",
        "DriverOptions": "config.options",
        "Engine": "frontends.offline.engine",
        "Handshake": "driver.handshake",
        "PagePool": "_core",
        "PagesError": "errors",
        "RadixError": "errors",
        "RadixIndex": "_core",
        "StartError": "errors",
        "load_config": "config.config_file",
    }
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{modules[name]}"), name)


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__})
