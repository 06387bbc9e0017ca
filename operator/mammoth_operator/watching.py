"""Do: own the signs of life of the watches: kopf's HTTP session, with a tap that notes each list and each chunk of a stream.

A watch that is alive says something at least once a minute (bookmarks), so silence is a fault that a probe can see.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import kopf
import kubernetes.client

__all__ = ["Watches", "session"]

QUIET_S, QUIET_AT_MOST_S = 0.5, 30.0
SWEEP_AFTER_S = 15.0


class Watches:
    """Knows when each watched kind was last heard of, and whether the first lists are in."""

    def __init__(
        self,
        kinds: Mapping[str, str],
        required: frozenset[str],
        *,
        noted: Callable[[str], None],
        relisted: Callable[[str], None],
    ) -> None:
        """`kinds` maps plurals to kinds; those `required` must be listed before anything is decided."""
        self._kinds, self._required, self._noted, self._relisted = kinds, required, noted, relisted
        self._heard: dict[str, float] = {}
        self._last_event = 0.0
        self._complete = asyncio.Event()

    def heard(self, url_path: str, *, listing: bool) -> None:
        """Note a sign of life of the collection at `url_path`."""
        kind = self._kinds.get(url_path.rsplit("/", 1)[-1])
        if kind is None:
            return
        if listing:
            self._relisted(kind)
        self._heard[kind] = time.monotonic()
        self._noted(kind)
        if self._required <= self._heard.keys():
            self._complete.set()

    def event(self) -> None:
        """Note that an object came through."""
        self._last_event = time.monotonic()

    def silent_s(self) -> dict[str, float]:
        """Return for how long each kind has been silent; a required one that was never heard, for ever."""
        now = time.monotonic()
        return {kind: now - self._heard.get(kind, -float("inf")) for kind in self._required | self._heard.keys()}

    async def settled(self) -> None:
        """Wait until every required kind was listed and the objects of the lists have come through."""
        await self._complete.wait()
        begin = time.monotonic()
        quiet_at = begin + QUIET_S
        while (now := time.monotonic()) < min(quiet_at, begin + QUIET_AT_MOST_S):
            await asyncio.sleep(quiet_at - now)
            quiet_at = max(quiet_at, self._last_event + QUIET_S)


class _TappedContent:
    """A response's body that tells of each chunk on its way."""

    def __init__(self, content: aiohttp.StreamReader, tell: Callable[[], None]) -> None:
        self._content, self._tell = content, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_chunked(size):
            self._tell()
            yield chunk


def session(configuration: kubernetes.client.Configuration, watches: Watches) -> kopf.AiohttpSession:
    """Return what kopf logs in with: the same server and credentials as the client's, tapped."""

    class Tapped(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 200 and self.method == "GET":
                path, streams = self.url.path, "watch" in self.url.query
                watches.heard(path, listing=not streams)
                if streams:
                    self.content = _TappedContent(self.content, lambda: watches.heard(path, listing=False))  # type: ignore[assignment]
            return self

    tokens: Any = configuration.auth_settings()
    headers = {item["key"]: item["value"] for item in tokens.values() if item["in"] == "header" and item["value"]}
    connector = aiohttp.TCPConnector(limit=0, ssl=_context(configuration))
    http = aiohttp.ClientSession(connector=connector, headers=headers, response_class=Tapped)
    return kopf.AiohttpSession(server=configuration.host, aiohttp_session=http)


def _context(configuration: kubernetes.client.Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
