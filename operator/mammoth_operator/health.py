"""Translate: the operator's own health and metrics over HTTP.

`/healthz`: the event loop keeps up and the lease is looked after. `/watchz`: every watch has been heard of, and no key waits
for ever. `/livez` is both, for the liveness probe: an operator that has gone deaf is restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

__all__ = ["Checks", "Pulse", "serve"]

MAX_LAG_S = 5.0
MAX_SILENCE_S = 180.0
MAX_OVERDUE_S = 300.0


class Pulse:
    """Measures by how much the event loop is late."""

    def __init__(self) -> None:
        self.lag_s = 0.0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + 1.0
            await asyncio.sleep(1.0)
            self.lag_s = clock() - due


@dataclass(frozen=True, slots=True)
class Checks:
    """Where the probes look. `lease_s` is how long ago the lease was last looked at; `lease_limit_s` is too long."""

    lag_s: Callable[[], float]
    lease_s: Callable[[], float]
    lease_limit_s: float
    silent_s: Callable[[], dict[str, float]]
    overdue_s: Callable[[], float]
    metrics: Callable[[], bytes]

    def alive(self) -> list[str]:
        """Return what speaks against being alive."""
        faults = [f"the event loop is {self.lag_s():.1f} s late"] if self.lag_s() > MAX_LAG_S else []
        if self.lease_s() > self.lease_limit_s:
            faults.append(f"the lease was last looked at {self.lease_s():.0f} s ago")
        return faults

    def watching(self) -> list[str]:
        """Return what speaks against seeing and working."""
        faults = [f"{kind}: silent for {silent:.0f} s" for kind, silent in self.silent_s().items() if silent > MAX_SILENCE_S]  # fmt: skip
        if self.overdue_s() > MAX_OVERDUE_S:
            faults.append(f"a key waits for {self.overdue_s():.0f} s")
        return faults


async def serve(checks: Checks, host: str, port: int) -> web.AppRunner:
    """Serve `/healthz`, `/watchz`, `/livez` and `/metrics`; the caller cleans the returned runner up."""

    def answer(faults: Callable[[], list[str]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def respond(_: web.Request) -> web.Response:
            found = faults()
            return web.Response(status=503 if found else 200, text="\n".join(found) or "ok")

        return respond

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=checks.metrics(), content_type="text/plain")

    app = web.Application()
    app.add_routes([
        web.get("/healthz", answer(checks.alive)), web.get("/watchz", answer(checks.watching)),
        web.get("/livez", answer(lambda: [*checks.alive(), *checks.watching()])), web.get("/metrics", metrics),
    ])  # fmt: skip
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
