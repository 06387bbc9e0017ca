"""Do: stand between the operator and the API server: record every request, fail some, cut watches, and call back at a write."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web

SSL_CLOSE_S = 0.25  # aiohttp returns before its TLS connections have said goodbye
GONE = b'{"type":"ERROR","object":{"kind":"Status","status":"Failure","reason":"Expired","code":410,"message":"too old"}}\n'
WRITES = ("POST", "PUT", "PATCH", "DELETE")
HOP = {"transfer-encoding", "content-length", "connection", "content-encoding"}


@dataclass(frozen=True, slots=True)
class Seen:
    """One request that came through."""

    method: str
    path: str
    status: int

    @property
    def writes(self) -> bool:
        return self.method in WRITES and "/leases" not in self.path


@dataclass(slots=True)
class Proxy:
    """A plain HTTP door to the API server that `kubeconfig` names; `fault` returns a status to answer with, or None."""

    kubeconfig: Path
    folder: Path
    fault: Callable[[str, str], int | None] = lambda method, path: None
    before_write: Callable[[int], None] = lambda number: None
    seen: list[Seen] = field(default_factory=list)
    port: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _up: threading.Event = field(default_factory=threading.Event)
    _streams: set[asyncio.Task[object]] = field(default_factory=set)
    _writes: int = 0
    _thread: threading.Thread | None = None
    _end: asyncio.Event | None = None

    def __enter__(self) -> Proxy:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._thread is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    @property
    def config(self) -> Path:
        """Return a kubeconfig that leads through here, with the same token."""
        document = yaml.safe_load(self.kubeconfig.read_text())
        for cluster in document["clusters"]:
            cluster["cluster"] = {"server": f"http://127.0.0.1:{self.port}"}
        path = self.folder / f"proxy-{self.port}.kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path

    def writes(self) -> list[Seen]:
        return [request for request in self.seen if request.writes]

    def cut(self) -> None:
        """Cut every open watch."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in list(self._streams)])

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        document = yaml.safe_load(self.kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        context = ssl.create_default_context(cafile=cluster.get("certificate-authority"))
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context), auto_decompress=False
        ) as session:
            app = web.Application(client_max_size=2**24)

            async def passed(request: web.Request) -> web.StreamResponse:
                return await self._pass(request, session, cluster["server"])

            app.router.add_route("*", "/{tail:.*}", passed)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self._up.set()
            await self._end.wait()
            streams = list(self._streams)
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await runner.cleanup()
        await asyncio.sleep(SSL_CLOSE_S)

    async def _pass(self, request: web.Request, session: aiohttp.ClientSession, server: str) -> web.StreamResponse:
        streams = "watch" in request.query
        counted = request.method in WRITES and "/leases" not in request.path
        if counted:
            self._writes += 1
            self.before_write(self._writes)
        status = self.fault(request.method, request.path_qs)
        if status is not None:
            self.seen.append(Seen(request.method, request.path, status))
            if streams and status == 410:
                return web.Response(body=GONE, content_type="application/json")
            headers = {"Retry-After": "1"} if status == 429 else {}
            return web.json_response(
                {"kind": "Status", "code": status, "message": "injected", "reason": "Injected"},
                status=status,
                headers=headers,
            )
        headers = {
            key: value for key, value in request.headers.items() if key.lower() not in ("host", "content-length")
        }
        body = await request.read()
        async with session.request(request.method, server + request.path_qs, headers=headers, data=body or None,
                                   timeout=aiohttp.ClientTimeout(total=None if streams else 60)) as answer:  # fmt: skip
            self.seen.append(Seen(request.method, request.path, answer.status))
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
            if not streams:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(status=answer.status, headers=kept)
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except (asyncio.CancelledError, ConnectionResetError):
                if request.transport:
                    request.transport.abort()
            finally:
                self._streams.discard(task)
            return response
