"""Fetches the media that requests name by URL, within limits, before SGLang sees the request.

SGLang's processors would fetch any address and open any file (SSRF). They get `data:` URLs instead.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp

from pie_driver_sglang.config.http_limits import MediaPolicy
from pie_driver_sglang.errors import quoted, reason

_FIELDS: Final = ("image_data", "video_data", "audio_data")
_MOST_URLS: Final = 64
"""URLs of one request that are fetched or opened."""
_MOST_REDIRECTS: Final = 5
_AT_ONCE: Final = 8
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_=\s-]*")
_DATA: Final = "data:application/octet-stream;base64,"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class MediaError(ValueError):
    """A medium that is rejected or cannot be fetched; the message is for the client."""


class MediaFetcher:
    """Replaces the URLs in requests by `data:` URLs. For one event loop."""

    def __init__(self, policy: MediaPolicy) -> None:
        """Fetch by a policy."""
        self._policy = policy

    async def resolve(self, request: Any) -> None:
        """Replace every URL of a request's media, in place, by a `data:` URL.

        Args:
            request: Has `image_data`, `video_data` and `audio_data`, each a value or nested lists
                of them: a text, or an object or a map with a `url`.

        Raises:
            MediaError: A URL is not allowed, or cannot be fetched within the limits.
        """
        slots = [slot for name in _FIELDS for slot in _slots(request, name)]
        remote = [slot for slot in slots if not slot[0].startswith("data:")]
        if len(remote) > _MOST_URLS:
            raise MediaError(
                f"the request names {len(remote)} media by URL, and {_MOST_URLS} are fetched for "
                "one request: send some as `data:` URLs"
            )
        if remote:
            budget = _Budget(self._policy)
            try:
                async with asyncio.timeout(self._policy.timeout_s):
                    await self._replace(remote, budget)
            except TimeoutError:
                limit = self._policy.timeout_s
                raise MediaError(
                    f"the request's media were not fetched in {limit:g} s (`--media-timeout`)"
                ) from None

    async def _replace(self, slots: list[tuple[str, Callable[[str], None]]], budget: Any) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)
        connector = aiohttp.TCPConnector(socket_factory=self._open_socket)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:

            async def replace(url: str, put: Callable[[str], None]) -> None:
                async with gate:
                    put(await self._data_url(session, url, budget))

            tasks = [asyncio.create_task(replace(*slot)) for slot in slots]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _data_url(self, session: aiohttp.ClientSession, url: str, budget: _Budget) -> str:
        scheme = url[:12].partition("://")[0].lower() if "://" in url[:12] else ""
        if scheme in ("http", "https"):
            return _DATA + _encoded(await self._fetch(session, url, budget))
        local = self._local_file(url, scheme)
        if local is not None:
            return _DATA + _encoded(await asyncio.to_thread(_read, local, url, budget))
        if scheme or not _BASE64.fullmatch(url):
            raise MediaError(
                f"media {quoted(url)} are not served: use an http, https or data URL, or base64"
            )
        return _DATA + url.translate(str.maketrans("-_", "+/"))

    async def _fetch(self, session: aiohttp.ClientSession, url: str, budget: _Budget) -> bytes:
        here = url
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                self._check_host(here)
                async with session.get(here, allow_redirects=False) as response:
                    if response.status in _REDIRECTS and "location" in response.headers:
                        here = urljoin(here, response.headers["location"])
                        continue
                    if response.status != 200:
                        raise MediaError(f"media {quoted(url)}: HTTP status {response.status}")
                    parts = []
                    async for part in response.content.iter_any():
                        budget.take(len(part))
                        parts.append(part)
                    return b"".join(parts)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = error if isinstance(error, MediaError) else error.__cause__
            if isinstance(cause, MediaError):
                raise cause from None
            text = "it cannot be fetched" if isinstance(error, OSError) else reason(error)
            raise MediaError(f"media {quoted(url)}: {text}") from error
        raise MediaError(f"media {quoted(url)}: more than {_MOST_REDIRECTS} redirects")

    def _check_host(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MediaError(f"media {quoted(url)} are not served: use an http or https URL")
        domains = self._policy.allowed_domains
        if domains and parts.hostname.lower() not in domains:
            raise MediaError(
                f"media of host {quoted(parts.hostname)} are not served: this server fetches from "
                f"{', '.join(domains)} (`--allowed-media-domains`)"
            )

    def _open_socket(self, info: Any) -> socket.socket:
        """A socket for a resolved address; called after each redirect, too."""
        family, kind, protocol, _, address = info
        if not self._policy.allow_private_hosts and not is_public(address[0]):
            raise MediaError(
                "media of private, loopback or link-local addresses are not served; "
                "`--allow-private-media-hosts` allows them"
            )
        return socket.socket(family, kind, protocol)

    def _local_file(self, url: str, scheme: str) -> Path | None:
        """The local file of a URL or path, if it is in the allowed folder."""
        folder = self._policy.local_path
        if folder is None or scheme not in ("", "file") or (not scheme and url[:1] != "/"):
            return None
        path = Path(unquote(urlsplit(url).path) if scheme else url)
        try:
            found = path.resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            found = path
        if not found.is_file() or not found.is_relative_to(Path(folder).resolve()):
            if not scheme:
                return None
            raise MediaError(
                f"media {quoted(url)}: there is no such file below `--allowed-local-media-path`"
            )
        return found


class _Budget:
    """Remaining bytes of a request's media."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._most = self._left = policy.max_bytes

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise MediaError(
                f"the request's media have more than {self._most} bytes: send smaller ones, or "
                "start the server with a larger `--max-media-bytes`"
            )


def is_public(address: str) -> bool:
    """Whether an address is globally routable."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        # IPv6 addresses that embed an IPv4 address.
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
        if inner is not None:
            found = inner
    return found.is_global and not found.is_multicast


_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def _slots(holder: Any, name: str) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Every URL of an attribute, with a function that replaces it."""
    yield from _of_value(getattr(holder, name, None), functools.partial(setattr, holder, name))


def _of_value(
    value: Any, put: Callable[[Any], None]
) -> Iterator[tuple[str, Callable[[str], None]]]:
    if isinstance(value, str):
        yield value, put
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _of_value(each, functools.partial(value.__setitem__, index))
    elif isinstance(value, dict):
        if isinstance(value.get("url"), str):
            yield value["url"], functools.partial(value.__setitem__, "url")
    elif isinstance(getattr(value, "url", None), str):
        yield value.url, functools.partial(setattr, value, "url")


def _read(path: Path, url: str, budget: _Budget) -> bytes:
    try:
        budget.take(path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise MediaError(f"media {quoted(url)}: {reason(error)}") from error


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
