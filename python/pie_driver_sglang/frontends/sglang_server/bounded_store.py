"""A bounded store of responses, for clients that may never return."""

from __future__ import annotations

from typing import Any


class BoundedStore(dict[str, Any]):
    """A dictionary that drops its oldest entries beyond a number of entries and of bytes.

    The size of an entry is the length of its text.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        """Empty; at most `most` entries of `most_bytes` together, but always the last one."""
        super().__init__()
        self._most, self._most_bytes = most, most_bytes
        self._sizes: dict[str, int] = {}
        self._bytes = 0

    def __setitem__(self, key: str, value: Any) -> None:
        """Add an entry, and drop the oldest ones beyond the bounds."""
        self._bytes -= self._sizes.pop(key, 0)
        self._sizes[key] = size = len(str(value))
        self._bytes += size
        super().__setitem__(key, value)
        while len(self) > 1 and (len(self) > self._most or self._bytes > self._most_bytes):
            oldest = next(iter(self._sizes))
            self._bytes -= self._sizes.pop(oldest)
            super().__delitem__(oldest)
