"""Both clients behind one face, so that a test says once what is true of either."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import pytest

from mammoth_client import AsyncClient, Client, Event, Picture, RetryPolicy, ServiceHealth

QUICK = RetryPolicy(first_s=0.001, max_s=0.002)


class Blocking:
    """The blocking client."""

    def generate(self, address: str, prompt: str, *, retry: RetryPolicy = QUICK, **given: Any) -> list[Picture]:
        with Client(address, retry=retry) as client:
            return client.generate(prompt, **given)

    def first(self, address: str, num_events: int, and_then: Callable[[], Any], **given: Any) -> list[Event]:
        """Take some events, leave the stream, and call `and_then` while the client is still open."""
        with Client(address) as client:
            with closing(client.stream("a mammoth", **given)) as events:
                taken = [next(events) for _ in range(num_events)]
            and_then()
            return taken

    def stream(self, address: str, prompt: str, **given: Any) -> list[Event]:
        with Client(address) as client:
            return list(client.stream(prompt, **given))

    def status(self, address: str) -> tuple[ServiceHealth, ...]:
        with Client(address) as client:
            return client.status()

    def settings(self, address: str, **settings: Any) -> list[Picture]:
        with Client(address, **settings) as client:
            client.status()
            return client.generate("a mammoth")


class Asyncio:
    """The asyncio client, a loop a call."""

    def generate(self, address: str, prompt: str, *, retry: RetryPolicy = QUICK, **given: Any) -> list[Picture]:
        async def run() -> list[Picture]:
            async with AsyncClient(address, retry=retry) as client:
                return await client.generate(prompt, **given)

        return asyncio.run(run())

    def first(self, address: str, num_events: int, and_then: Callable[[], Any], **given: Any) -> list[Event]:
        async def run() -> list[Event]:
            async with AsyncClient(address) as client:
                async with aclosing(client.stream("a mammoth", **given)) as events:
                    taken = [await anext(events) for _ in range(num_events)]
                await asyncio.to_thread(and_then)
                return taken

        return asyncio.run(run())

    def stream(self, address: str, prompt: str, **given: Any) -> list[Event]:
        async def run() -> list[Event]:
            async with AsyncClient(address) as client:
                return [event async for event in client.stream(prompt, **given)]

        return asyncio.run(run())

    def status(self, address: str) -> tuple[ServiceHealth, ...]:
        async def run() -> tuple[ServiceHealth, ...]:
            async with AsyncClient(address) as client:
                return await client.status()

        return asyncio.run(run())

    def settings(self, address: str, **settings: Any) -> list[Picture]:
        async def run() -> list[Picture]:
            async with AsyncClient(address, **settings) as client:
                await client.status()
                return await client.generate("a mammoth")

        return asyncio.run(run())


@pytest.fixture(params=[Blocking(), Asyncio()], ids=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest) -> Blocking | Asyncio:
    either: Blocking | Asyncio = request.param
    return either


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that nothing listens on, held so that nothing can begin to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MAMMOTH_ADDRESS",
        "MAMMOTH_MODEL",
        "MAMMOTH_TIMEOUT_S",
        "MAMMOTH_TOKEN_FILE",
        "http_proxy",
        "https_proxy",
        "grpc_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
