"""Methods of SGLang's `Engine` that are not supported, with what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn

_SGLANGS: Final = "use SGLang's `Engine`"
_SESSIONS: Final = "name a conversation by `session_id` of `generate`, and end it by `end_session`"

UNSUPPORTED_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "open_session": _SESSIONS,
        "close_session": _SESSIONS,
        "update_weights_from_ipc": (
            "use `update_weights_from_tensor` or `update_weights_from_distributed`"
        ),
        "save_sharded_model": _SGLANGS,
        "save_remote_model": _SGLANGS,
        "collective_rpc": _SGLANGS,
        "start_expert_distribution_record": _SGLANGS,
        "stop_expert_distribution_record": _SGLANGS,
        "dump_expert_distribution_record": _SGLANGS,
    }
)
"""What to use, by the name of the method."""


class UnsupportedMethods:
    """Attributes of `Engine` that SGLang's has: each raises an AttributeError with a hint."""

    # Type checkers would take every name for an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise; called where there is no such attribute."""
            if (hint := UNSUPPORTED_METHODS.get(name)) is None:
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            error = AttributeError(f"`Engine.{name}` is not supported")
            error.add_note(f"hint: {hint}")
            raise error
