"""The inference library of a driver: what the start-up sequence needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pie_driver_sglang.config.config_file import ConfigRules
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.errors import DriverError, rename_options

if TYPE_CHECKING:
    from pie_driver_sglang import _core
    from pie_driver_sglang.engine.backend_executor import BackendExecutor
    from pie_driver_sglang.ranks.types import Rank


class Library(NamedTuple):
    """An inference library with a backend. Making one imports neither torch nor the library."""

    name: str
    package: str
    """What the runtime starts by ``python -m``."""
    module: str
    """Where it is the constant ``LIBRARY``: the other ranks of a model import it from there."""
    rules: ConfigRules
    check_versions: Callable[[], None]
    """Raises `StartError` if the library is missing, or has another version than the pinned."""
    load_rank: Callable[[DriverConfig, Rank], tuple[_core.Planner, BackendExecutor]]
    """Imports the library and loads a rank's part of the model; see `backends`."""
    option_names: Mapping[str, str] = MappingProxyType({})
    """What its options are called, by the names in `DriverOptions`, where the two differ."""

    hints: Mapping[str, str] = MappingProxyType({})
    """Hints of its own, by the shared ones: of errors whose remedy it lacks."""

    def renamed(self, error: DriverError) -> DriverError:
        """The error, with hints and names of options that this library's users know."""
        error.message = rename_options(error.message, self.option_names)
        error.args = (error.message,)
        hint = self.hints.get(error.hint, error.hint)
        error.hint = rename_options(hint, self.option_names)
        return error
