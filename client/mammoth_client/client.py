"""Do: the two clients. Each owns a channel; what they send and how they read it is shared, only the sending differs."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing, closing
from pathlib import Path
from typing import Self, Unpack

import grpc
import grpc.aio

from mammoth_client._core import CHANNEL_OPTIONS, Exchange, RetryPolicy
from mammoth_client._health import SERVICES, checker, health_of, health_without, question
from mammoth_client.receipts import GenerateFields
from mammoth_client.settings import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, Settings
from mammoth_client.types import Event, Picture, ServiceHealth
from mammoth_wire.errors import Cancelled, MammothError, from_rpc_error
from mammoth_wire.v1 import image_generation_pb2_grpc

__all__ = ["STATUS_TIMEOUT_S", "AsyncClient", "Client"]

STATUS_TIMEOUT_S = 5.0


class _Base:
    """What the clients are told: where the server is and how patient they are."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        token_file: str | Path | None = None,
        retry: RetryPolicy = RetryPolicy(),
    ) -> None:
        """Keep the settings; nothing is sent until the first call.

        `address` is host:port or any gRPC target. `timeout_s` is the default of every request, at most 3600.
        The token in `token_file` travels as `authorization: Bearer TOKEN`, unencrypted: the channel is plaintext.
        """
        path = Path(token_file) if token_file is not None else None
        self.settings = Settings(address=address, timeout_s=timeout_s, token_file=path, retry=retry)
        self._closed = False
        self._open()

    @classmethod
    def from_env(cls) -> Self:
        """Return a client of MAMMOTH_ADDRESS, MAMMOTH_TIMEOUT_S and MAMMOTH_TOKEN_FILE, defaults where unset."""
        settings = Settings.from_env(os.environ)
        return cls(settings.address, timeout_s=settings.timeout_s, token_file=settings.token_file, retry=settings.retry)

    def _open(self) -> None:
        """Prepare the channel, as far as that can be done before the first call."""

    def _delay_after(self, exchange: Exchange, err: MammothError) -> float:
        """Return the pause before the next attempt, or raise `err`."""
        if self._closed:
            raise err
        return exchange.delay_after(err, time.monotonic(), random.random())

    def _exchange(self, prompt: str, timeout_s: float | None, fields: GenerateFields) -> Exchange:
        patience_s = self.settings.timeout_s if timeout_s is None else timeout_s
        return Exchange(prompt, fields, timeout_s=patience_s, policy=self.settings.retry, now_s=time.monotonic())


class Client(_Base):
    """Talks to one MammothModa2 deployment, blocking. A context manager; safe to share between threads."""

    def _open(self) -> None:
        self._channel = grpc.insecure_channel(self.settings.address, options=CHANNEL_OPTIONS)
        self._generation = image_generation_pb2_grpc.ImageGenerationStub(self._channel)
        self._check_health = checker(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; running requests are cancelled."""
        self._closed = True
        self._channel.close()

    def generate(
        self,
        prompt: str,
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_s: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> list[Picture]:
        """Return the pictures of `prompt`, in order of image_index.

        `on_event` is called with every event as it arrives; what it raises cancels the request. Raises a MammothError:
        InvalidRequest before anything is sent when no deployment would accept a field, else what the server said.
        """
        pictures: list[Picture] = []
        with closing(self.stream(prompt, timeout_s=timeout_s, **fields)) as events:
            for event in events:
                _tell(on_event, event, pictures)
        return _in_order(pictures)

    def stream(
        self, prompt: str, *, timeout_s: float | None = None, **fields: Unpack[GenerateFields]
    ) -> Generator[Event, None, None]:
        """Return an iterator of the request's events, each picture among them as soon as it is finished.

        The request is checked now and sent at the first `next`. Closing the iterator, or leaving its loop, cancels it.
        """
        return self._events(self._exchange(prompt, timeout_s, fields))

    def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> tuple[ServiceHealth, ...]:
        """Return the health of the server and of ImageGeneration. Raises Unavailable when nothing answers."""
        return tuple(self._check(service, timeout_s) for service in SERVICES)

    def _events(self, exchange: Exchange) -> Generator[Event, None, None]:
        while True:
            left_s = exchange.begin(time.monotonic())
            call = self._generation.Generate(exchange.request, timeout=left_s, metadata=self.settings.metadata())
            try:
                for message in call:
                    yield from exchange.read(message)
                exchange.finish()
                return
            except grpc.RpcError as err:
                delay_s = self._delay_after(exchange, from_rpc_error(err))
            finally:
                call.cancel()
            time.sleep(delay_s)

    def _check(self, service: str, timeout_s: float) -> ServiceHealth:
        metadata = self.settings.metadata()
        try:
            return health_of(service, self._check_health(question(service), timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as err:
            return health_without(service, from_rpc_error(err))


class AsyncClient(_Base):
    """Talks to one MammothModa2 deployment from one asyncio loop. An async context manager; the twin of Client."""

    def _open(self) -> None:
        self._opened: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; running requests are cancelled."""
        self._closed = True
        if self._opened is not None:
            await self._opened.close()

    async def generate(
        self,
        prompt: str,
        *,
        on_event: Callable[[Event], None] | None = None,
        timeout_s: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> list[Picture]:
        """Return the pictures of `prompt`; see Client.generate. Cancelling the task cancels the request."""
        pictures: list[Picture] = []
        async with aclosing(self.stream(prompt, timeout_s=timeout_s, **fields)) as events:
            async for event in events:
                _tell(on_event, event, pictures)
        return _in_order(pictures)

    def stream(
        self, prompt: str, *, timeout_s: float | None = None, **fields: Unpack[GenerateFields]
    ) -> AsyncGenerator[Event, None]:
        """Return an async iterator of the request's events; see Client.stream. Close it with `contextlib.aclosing`."""
        return self._events(self._exchange(prompt, timeout_s, fields))

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> tuple[ServiceHealth, ...]:
        """Return the health of the server and of ImageGeneration. Raises Unavailable when nothing answers."""
        return tuple([await self._check(service, timeout_s) for service in SERVICES])

    @property
    def _channel(self) -> grpc.aio.Channel:
        """The channel, made at first use: it belongs to the loop that runs then."""
        if self._opened is None:
            self._opened = grpc.aio.insecure_channel(self.settings.address, options=CHANNEL_OPTIONS)
        return self._opened

    async def _events(self, exchange: Exchange) -> AsyncGenerator[Event, None]:
        generation = image_generation_pb2_grpc.ImageGenerationStub(self._channel)
        while True:
            left_s = exchange.begin(time.monotonic())
            call = generation.Generate(exchange.request, timeout=left_s, metadata=self.settings.metadata())
            try:
                async for message in call:
                    for event in exchange.read(message):
                        yield event
                exchange.finish()
                return
            except grpc.RpcError as err:
                delay_s = self._delay_after(exchange, from_rpc_error(err))
            except asyncio.CancelledError:
                if _task_is_cancelled():
                    raise
                delay_s = self._delay_after(exchange, Cancelled("the server cancelled the request"))
            finally:
                call.cancel()
            await asyncio.sleep(delay_s)

    async def _check(self, service: str, timeout_s: float) -> ServiceHealth:
        check, metadata = checker(self._channel), self.settings.metadata()
        try:
            return health_of(service, await check(question(service), timeout=timeout_s, metadata=metadata))
        except grpc.RpcError as err:
            return health_without(service, from_rpc_error(err))


def _tell(on_event: Callable[[Event], None] | None, event: Event, pictures: list[Picture]) -> None:
    if isinstance(event, Picture):
        pictures.append(event)
    if on_event is not None:
        on_event(event)


def _in_order(pictures: Iterable[Picture]) -> list[Picture]:
    return sorted(pictures, key=lambda picture: picture.image_index)


def _task_is_cancelled() -> bool:
    """Tell a CancelledError of the caller from grpc.aio's word for a server that ended the call with CANCELLED."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
