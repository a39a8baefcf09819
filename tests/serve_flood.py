"""Many streams at once. Run by `test_serve.py`; `make conformance` has a thousand of them."""

from __future__ import annotations

from flood import flood
from sglang_server import Server


class TestFlood:
    def test_nothing_is_lost_and_nothing_left(self, server: Server) -> None:
        ends = flood(server, 150)
        assert ends["length"] > 120
        assert ends["left"] + ends["abort"] > 4
        assert not ends["lost"]
