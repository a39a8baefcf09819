"""SGLang's warm-up requests, which end when the server stops."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from pie_driver_sglang.frontends.sglang_server.compat import server_environment
from support import versions

# Of SGLang's own modules.
pytestmark = pytest.mark.filterwarnings("ignore")
ARGUMENTS = SimpleNamespace(api_key=None)


class Serving:
    """The published settings, which newer versions send the key of."""

    api_key: str | None = None

    @contextmanager
    def override(self, *, api_key: str) -> Iterator[None]:
        """Within it this is the key."""
        self.api_key = api_key
        yield
        self.api_key = None


SERVING = Serving()


@pytest.fixture(scope="module")
def app() -> Iterator[ModuleType]:
    """Our changes of SGLang's HTTP application."""
    with mock.patch.dict(os.environ):
        server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
        with server_environment.importing_server():
            from pie_driver_sglang.frontends.sglang_server.compat import http_app
        yield http_app


@pytest.fixture(autouse=True)
def published(app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings without a server."""
    if not versions.IS_OLDEST:
        monkeypatch.setattr(app.launch_compat(), "get_serving", lambda: SERVING)


@pytest.fixture
def stopped(app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Future[None]:
    """Done once the server stops."""
    found = Future[None]()
    monkeypatch.setattr(app.http_server.app.state, app.STOPPED, found, raising=False)
    return found


def warm_up(
    app: ModuleType, monkeypatch: pytest.MonkeyPatch, requests: Callable[[SimpleNamespace], bool]
) -> bool:
    """Warm up with these in the place of SGLang's requests."""
    monkeypatch.setattr(app.http_server, "_execute_server_warmup", requests)
    done: bool = app.send_warm_up("token", ARGUMENTS)
    return done


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("answer", [True, False])
def test_it_has_the_key_and_returns_what_the_server_answers(
    answer: bool, app: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    def send(arguments: SimpleNamespace) -> bool:
        keys.append(arguments.api_key if versions.IS_OLDEST else SERVING.api_key)
        return answer

    assert warm_up(app, monkeypatch, send) is answer
    assert (keys, ARGUMENTS.api_key, SERVING.api_key) == (["token"], None, None)


@pytest.mark.timeout(30)
def test_it_ends_with_the_server(
    app: ModuleType, stopped: Future[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang repeats its requests for minutes."""
    release = threading.Event()

    def repeat(_: SimpleNamespace) -> bool:
        stopped.set_result(None)
        return release.wait()

    try:
        assert not warm_up(app, monkeypatch, repeat)
    finally:
        release.set()


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("stopped")
def test_its_failure_is_reported(app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another server answers at that port."""

    def fail(_: SimpleNamespace) -> bool:
        raise KeyError("is_generation")

    with pytest.raises(KeyError, match="is_generation"):
        warm_up(app, monkeypatch, fail)
