"""Media that requests name by URL: what is fetched and what is refused, with local servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.config.http_limits import MediaPolicy

pytest.importorskip("aiohttp")

from pie_driver_sglang.frontends.sglang_server.media import MediaError, MediaFetcher, is_public

CONTENT = bytes(range(256)) * 4
LOCAL = MediaPolicy(allow_private_hosts=True)


class Pages(BaseHTTPRequestHandler):
    """Answers with content, endless content, nothing, or a redirection to what the path names."""

    server: Any

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(65536))
        elif self.path == "/silent":
            self.server.ends.wait(60)
        elif self.path == "/missing":
            self.send_error(404)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONTENT)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    found: Any = server
    found.asked, found.ends = [], threading.Event()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    found.ends.set()
    server.shutdown()
    thread.join()
    server.server_close()


def resolved(policy: MediaPolicy, **data: Any) -> Any:
    request = SimpleNamespace(**{"image_data": None, "video_data": None, "audio_data": None} | data)
    asyncio.run(MediaFetcher(policy).resolve(request))
    return request


def refusal(url: Any, policy: MediaPolicy = LOCAL) -> str:
    with pytest.raises(MediaError) as error:
        resolved(policy, image_data=[url])
    assert "\n" not in str(error.value)
    return str(error.value)


def content(url: str) -> bytes:
    head, _, data = url.partition(",")
    assert head.endswith(";base64")
    return base64.b64decode(data, validate=True)


def test_every_url_becomes_its_content(pages: Any) -> None:
    url = f"{pages.url}/cat.png"
    typed = SimpleNamespace(url=url, detail="low")
    text = base64.b64encode(CONTENT).decode()
    request = resolved(
        LOCAL,
        image_data=[url, [typed], {"url": url, "other": 1}, f"data:image/png;base64,{text}", text],
        video_data=url,
        audio_data=[SimpleNamespace(url=f"{pages.url}/to/{url}")],
    )
    first, [second], third, fourth, fifth = request.image_data
    found = [first, second.url, third["url"], fourth, fifth]
    found += [request.video_data, request.audio_data[0].url]
    assert [content(each) for each in found] == [CONTENT] * 7
    assert (second.detail, third["other"]) == ("low", 1)
    assert fourth.startswith("data:image/png")


def test_what_is_no_url_stays(pages: Any) -> None:
    given = [{"format": "precomputed_embedding", "feature": [1.0]}, b"bytes", None]
    assert resolved(LOCAL, image_data=list(given)).image_data == given
    assert pages.asked == []


@pytest.mark.parametrize(
    "url", ["ftp://a.example/x", "s3://bucket/x", "gopher://a/", "./x.png", "x y.png", "://", "\0"]
)
def test_other_schemes_and_names_are_refused(url: str) -> None:
    assert "not served" in refusal(url)


def test_private_addresses_are_refused_by_default(pages: Any) -> None:
    port = pages.server_address[1]
    hosts = [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "0.0.0.0",
        "169.254.169.254",
        "10.1.2.3",
        "2130706433",
    ]
    for host in hosts:
        text = refusal(f"http://{host}:{port}/", MediaPolicy())
        assert (
            "--allow-private-media-hosts" in text
            or "it cannot be fetched" in text
            or "canonical" in text
        ), host
    assert "--allow-private-media-hosts" in refusal(f"http://127.0.0.1:{port}/", MediaPolicy())
    assert pages.asked == []


def test_a_name_is_judged_by_the_address_that_is_connected_to(pages: Any) -> None:
    """A name server may give another answer each time it is asked."""
    port = pages.server_address[1]

    async def rebinding(self: Any, host: str, *_: Any, **__: Any) -> Any:
        return [
            {
                "hostname": host,
                "host": "127.0.0.1",
                "port": port,
                "family": 2,
                "proto": 0,
                "flags": 0,
            }
        ]

    with mock.patch("aiohttp.resolver.ThreadedResolver.resolve", rebinding):
        text = refusal(f"http://public.example:{port}/", MediaPolicy())
        assert "--allow-private-media-hosts" in text
        assert pages.asked == []
        resolved(LOCAL, image_data=[f"http://public.example:{port}/"])
    assert pages.asked == ["/"]


def test_each_redirect_is_judged(pages: Any) -> None:
    """From a host that is allowed to one that is not."""
    allowed = MediaPolicy(allow_private_hosts=True, allowed_domains=("127.0.0.1",))
    there = pages.url.replace("127.0.0.1", "localhost")
    assert "--allowed-media-domains" in refusal(f"{pages.url}/to/{there}/x", allowed)
    assert "--allowed-media-domains" in refusal(f"{there}/x", allowed)
    assert "not served" in refusal(f"{pages.url}/to/file:///etc/passwd", allowed)
    assert "redirects" in refusal(f"{pages.url}/to/" * 7 + pages.url, allowed)
    assert "404" in refusal(f"{pages.url}/missing", allowed)


def test_size_time_and_number_are_limited(pages: Any) -> None:
    small = LOCAL._replace(max_bytes=100_000)
    assert "--max-media-bytes" in refusal(f"{pages.url}/endless", small)
    with pytest.raises(MediaError, match="--max-media-bytes"):
        resolved(LOCAL._replace(max_bytes=1500), image_data=[f"{pages.url}/a", f"{pages.url}/b"])
    assert "--media-timeout" in refusal(f"{pages.url}/silent", LOCAL._replace(timeout_s=0.05))
    with pytest.raises(MediaError, match="65 media"):
        resolved(LOCAL, image_data=[f"{pages.url}/a"] * 65)


def test_local_files_are_refused_by_default(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    inside, outside = tmp_path / "in" / "a.png", tmp_path / "b.png"
    inside.write_bytes(CONTENT)
    outside.write_bytes(CONTENT)
    (tmp_path / "in" / "link.png").symlink_to(outside)
    assert "not served" in refusal(f"file://{inside}")
    assert "not served" in refusal(str(inside))
    # What could be base64 is taken for that, and never opened.
    assert resolved(LOCAL, image_data="/etc/passwd").image_data.endswith(",/etc/passwd")
    allowed = LOCAL._replace(local_path=str(tmp_path / "in"))
    found = resolved(allowed, image_data=[f"file://{inside}", str(inside)]).image_data
    assert [content(each) for each in found] == [CONTENT] * 2
    for url in (
        f"file://{outside}",
        f"file://{tmp_path}/in/../b.png",
        f"file://{tmp_path}/in/link.png",
    ):
        assert "--allowed-local-media-path" in refusal(url, allowed)
    assert "--max-media-bytes" in refusal(f"file://{inside}", allowed._replace(max_bytes=10))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("nonsense", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
