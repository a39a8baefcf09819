"""A local Hugging Face hub: the endpoints that its client requests for one model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

COMMIT: Final = "c" * 40
MODEL: Final = "house/pocket"
GATED: Final = "house/gated"
_BRANCHES: Final = ("main", "v1")


class Hub(ThreadingHTTPServer):
    """Serves files as the model `MODEL`; `GATED` has the same, and gives none.

    Attributes:
        commit: Of all its branches.
        fetched: Files that were asked for.
        url: Its address.
    """

    def __init__(self, files: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.fetched = files, set[str]()
        self.commit = COMMIT
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        words = path.removeprefix("/").removeprefix("api/models/").split("/", 4)
        owner, name, verb, revision, file = [*words, *[""] * (5 - len(words))]
        model = f"{owner}/{name}"
        if model not in (MODEL, GATED):
            self._fail(401, "RepoNotFound")
        elif revision not in (*_BRANCHES, self.server.commit):
            self._fail(404, "RevisionNotFound")
        elif verb == "tree":
            self._give(json.dumps([self._entry(each) for each in self.server.files]).encode())
        elif verb == "revision":
            siblings = [{"rfilename": each} for each in self.server.files]
            self._give(
                json.dumps({"id": model, "sha": self.server.commit, "siblings": siblings}).encode()
            )
        elif model == GATED:
            self._fail(403, "GatedRepo")
        elif file not in self.server.files:
            self._fail(404, "EntryNotFound")
        else:
            self.server.fetched.add(file)
            self._give(self.server.files[file].read_bytes())

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.server.files[name].read_bytes()
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    def _give(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def hub_of(files: dict[str, Path]) -> Iterator[Hub]:
    """A hub with these files, by their names in the repository."""
    with Hub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()
