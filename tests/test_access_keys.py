"""API keys of the HTTP server: which endpoints need which key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.config.api_keys import ApiKeys, hide_keys, take_keys
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.sglang_server.access import (
    AccessKeys,
    AccessLevel,
    access_error,
    access_keys,
)

pytest.importorskip("httptools")


KEYS: dict[str, AccessKeys] = {
    "none": access_keys(ApiKeys()),
    "api": access_keys(ApiKeys("user-key")),
    "both": access_keys(ApiKeys("user-key", "admin-key")),
    "admin": access_keys(ApiKeys(None, "admin-key")),
}


def refused(level: AccessLevel, keys: str, token: str | None, **more: Any) -> int | None:
    headers = {} if token is None else {b"authorization": f"Bearer {token}".encode()}
    headers |= more.get("headers", {})
    found = access_error(level, KEYS[keys], headers, more.get("client", "127.0.0.1"))
    return None if found is None else found[0]


def test_the_warm_up_key_is_for_users_routes_and_the_freezing_after_it() -> None:
    for keys in ("api", "both", "admin"):
        headers = {b"authorization": f"Bearer {KEYS[keys].warm_up}".encode()}
        given = KEYS[keys], headers, "127.0.0.1"
        assert access_error(AccessLevel.USER, *given, "/generate") is None
        assert access_error(AccessLevel.CONTROL, *given, "/freeze_gc") is None
        assert access_error(AccessLevel.CONTROL, *given, "/flush_cache") is not None
        assert access_error(AccessLevel.ADMIN, *given, "/freeze_gc") is not None


@pytest.mark.parametrize(
    ("level", "keys", "token", "status"),
    [
        (AccessLevel.OPEN, "both", None, None),
        (AccessLevel.USER, "none", None, None),
        (AccessLevel.USER, "admin", None, None),
        (AccessLevel.USER, "api", None, 401),
        (AccessLevel.USER, "api", "wrong", 401),
        (AccessLevel.USER, "api", "user-key", None),
        (AccessLevel.USER, "both", "user-key", None),
        (AccessLevel.CONTROL, "none", None, None),
        (AccessLevel.CONTROL, "api", "user-key", None),
        (AccessLevel.CONTROL, "api", None, 401),
        (AccessLevel.CONTROL, "both", "user-key", 401),
        (AccessLevel.CONTROL, "both", "admin-key", None),
        (AccessLevel.CONTROL, "admin", None, 401),
        (AccessLevel.ADMIN, "none", None, 403),
        (AccessLevel.ADMIN, "api", "user-key", 403),
        (AccessLevel.ADMIN, "both", "user-key", 401),
        (AccessLevel.ADMIN, "both", "admin-key", None),
    ],
)
def test_each_level_wants_its_key(
    level: AccessLevel, keys: str, token: str | None, status: int | None
) -> None:
    assert refused(level, keys, token) == status


def test_control_without_keys_is_for_the_loopback() -> None:
    for client in ("127.0.0.1", "::1", "::ffff:127.0.0.1", None):
        assert refused(AccessLevel.CONTROL, "none", None, client=client) is None
    for client in ("10.0.0.7", "::ffff:10.0.0.7", "testclient"):
        assert refused(AccessLevel.CONTROL, "none", None, client=client) == 403
    # A web page that a user of this host looks at.
    page = {b"origin": b"https://evil.example"}
    assert refused(AccessLevel.CONTROL, "none", None, headers=page) == 403
    assert refused(AccessLevel.USER, "none", None, headers=page) is None


def test_the_servers_own_warm_up_is_allowed() -> None:
    token = KEYS["api"].warm_up
    assert refused(AccessLevel.USER, "api", token) is None
    assert refused(AccessLevel.CONTROL, "api", token) == 401
    assert refused(AccessLevel.ADMIN, "both", KEYS["both"].warm_up) == 401
    assert "key" not in repr(KEYS["both"]).replace("keys", "").replace("Keys", "")


def test_keys_come_from_flags_files_and_the_environment(tmp_path: Path) -> None:
    environment = {"PIE_API_KEY": "from-environment", "HOME": "/"}
    keys, rest = take_keys(["--port", "1", "--admin-api-key=a_b"], environment)
    assert (keys, rest) == (("from-environment", "a_b"), ["--port", "1"])
    assert environment == {"HOME": "/"}, "children do not inherit it"
    (tmp_path / "key").write_text("of-a-file\n")
    keys, rest = take_keys(["--api-key-file", str(tmp_path / "key"), "--api-keys", "x"], {})
    assert (keys.api, rest) == ("of-a-file", ["--api-keys", "x"])
    assert keys.variables() == {"PIE_API_KEY": "of-a-file"}
    assert "file" not in repr(keys)
    for words in (
        ["--api-key"],
        ["--api-key", ""],
        ["--api-key", "two words"],
        ["--api-key", "a", "--api_key", "b"],
        ["--api-key-file", str(tmp_path / "none")],
    ):
        with pytest.raises(ConfigError) as error:
            take_keys(words, {})
        assert error.value.hint


def test_keys_are_hidden_in_a_command_line() -> None:
    words = ["x", "--api-key", "SECRET", "--admin-api-key=SECRET", "--api_key=SECRET", "--port"]
    hidden = hide_keys(words)
    assert "SECRET" not in " ".join(hidden)
    assert hidden == ["x", "--api-key", "***", "--admin-api-key=***", "--api_key=***", "--port"]


def test_a_websocket_needs_the_key() -> None:
    from pie_driver_sglang.frontends.sglang_server.access import AccessMiddleware

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*_: Any) -> None:
        sent.append("served")

    scope = {"type": "websocket", "path": "/v1/realtime", "client": None}
    middleware: Any = AccessMiddleware(app, [], lambda: KEYS["api"])
    for headers in ([], [(b"authorization", b"Bearer user-key")]):
        asyncio.run(middleware({**scope, "headers": headers}, None, send))
    assert [sent[0]["type"], sent[1]] == ["websocket.close", "served"]
