"""Do: a fake server for tests of programs that use mammoth_client. It speaks the real protocol and draws no picture
worth looking at: deterministic PNGs, no model, no GPU, milliseconds.

    with fake_server(Reply(error=Overloaded("full", retry_after_s=1.0))) as server, Client(server.address) as client:
        ...

`mammoth_client.pipeline` starts the real stages instead.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mammoth_client import _fake
from mammoth_client.pipeline import Pipeline, pipeline
from mammoth_wire.errors import MammothError, as_status
from mammoth_wire.params import Defaults, from_message, resolve_generation
from mammoth_wire.v1 import image_generation_pb2, image_generation_pb2_grpc

__all__ = ["Call", "FakeServer", "Outcome", "Pipeline", "Reply", "fake_server", "pipeline"]

Outcome = Literal["completed", "failed", "cancelled"]
SMALL = Defaults(height=64, width=64, steps=4)
START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    """How one call is answered: `num_events` events (None: all of them), each after `delay_s`, and then `error`.

    With `error` alone nothing is sent before it. With `num_events` alone the call then hangs until the caller leaves.
    """

    error: MammothError | None = None
    num_events: int | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the server received: the fields that were set, and the metadata that came along."""

    fields: Mapping[str, Any]
    metadata: Mapping[str, str | bytes]
    ended: Future[Outcome] = field(default_factory=Future, repr=False)

    def outcome(self, timeout_s: float = 10.0) -> Outcome:
        """Wait until the call has ended on the server and return how. Raises TimeoutError when it has not."""
        return self.ended.result(timeout_s)


class FakeServer(image_generation_pb2_grpc.ImageGenerationServicer):
    """A running fake. `address` is where; `calls` are the calls received so far, oldest first."""

    def __init__(self, replies: tuple[Reply, ...], defaults: Defaults, model_digest: str, chunk_bytes: int) -> None:
        self.address = ""
        self.calls: list[Call] = []
        self._replies = replies
        self._defaults = defaults
        self._model_digest = model_digest
        self._chunk_bytes = chunk_bytes

    async def Generate(
        self, request: image_generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[image_generation_pb2.GenerateEvent]:
        """Answer with the next scripted reply, and with everything once the script has ended."""
        reply = self._replies[len(self.calls)] if len(self.calls) < len(self._replies) else Reply()
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        call = Call(from_message(request), metadata)
        self.calls.append(call)
        outcome: Outcome = "cancelled"
        try:
            async with as_status(context):
                try:
                    async for event in self._answer(call.fields, reply):
                        yield event
                    outcome = "completed"
                except MammothError:
                    outcome = "failed"
                    raise
        finally:
            call.ended.set_result(outcome)

    async def _answer(
        self, fields: Mapping[str, Any], reply: Reply
    ) -> AsyncIterator[image_generation_pb2.GenerateEvent]:
        num_events = 0 if reply.error is not None and reply.num_events is None else reply.num_events
        generation = resolve_generation(fields, defaults=self._defaults)
        if generation.seed is None:
            generation = replace(generation, seed=zlib.crc32(generation.prompt.encode()))
        events = _fake.events(generation, model_digest=self._model_digest, chunk_bytes=self._chunk_bytes)
        for index, event in enumerate(events):
            if index == num_events:
                break
            await asyncio.sleep(reply.delay_s)
            yield event
        if reply.error is not None:
            raise reply.error
        if num_events is not None:
            await asyncio.get_running_loop().create_future()


@contextmanager
def fake_server(
    *replies: Reply,
    defaults: Defaults = SMALL,
    model_digest: str = "0" * 64,
    chunk_bytes: int = 64 * 1024,
    serving: bool = True,
) -> Iterator[FakeServer]:
    """Serve ImageGeneration and health on a free loopback port until the block ends.

    Call i is answered as `replies[i]` says, later calls in full. Requests are checked by the real resolver, with
    `defaults` for what they leave out. Equal requests to servers of equal `model_digest` give equal pictures.
    """
    fake = FakeServer(replies, defaults, model_digest, chunk_bytes)
    started: Future[Callable[[], object]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(fake, serving, started)), name="mammoth-fake-server")
    thread.start()
    stop = started.result(START_TIMEOUT_S)
    try:
        yield fake
    finally:
        stop()
        thread.join()


async def _serve(fake: FakeServer, serving: bool, started: Future[Callable[[], object]]) -> None:
    """Serve until the callable that `started` receives is called, from any thread."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    server = grpc.aio.server()
    image_generation_pb2_grpc.add_ImageGenerationServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(await _health(serving), server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    started.set_result(lambda: loop.call_soon_threadsafe(stop.set))
    await stop.wait()
    await server.stop(None)


async def _health(serving: bool) -> Any:
    states = health_pb2.HealthCheckResponse
    servicer: Any = health.aio.HealthServicer()
    for service in ("", "mammoth.v1.ImageGeneration"):
        await servicer.set(service, states.SERVING if serving else states.NOT_SERVING)
    return servicer
