"""Translate: a Generate call to an order, and the events of its production to the stream."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import uuid
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc.aio

from mammoth_ar.admission import Order, order_of
from mammoth_ar.production import Emit, Loaded, Production
from mammoth_serving.calls import Call, accounted, beating
from mammoth_serving.lifecycle import Gate
from mammoth_serving.telemetry import Metrics, request_context, shape_class
from mammoth_wire.errors import AlreadyRunning, DeadlineExceeded, InvalidRequest, MammothError, Overloaded
from mammoth_wire.params import MAX_SEED, Generation, from_message, resolve_generation
from mammoth_wire.v1 import image_generation_pb2_grpc
from mammoth_wire.v1.diffusion_pb2 import Heartbeat
from mammoth_wire.v1.image_generation_pb2 import GenerateEvent, GenerateRequest

__all__ = ["ImageGenerationService"]

DEADLINE_MARGIN_S = 0.1  # our own error, which names the stage, comes before the transport's
Context = grpc.aio.ServicerContext[GenerateRequest, GenerateEvent]

logger = logging.getLogger(__name__)


class ImageGenerationService(image_generation_pb2_grpc.ImageGenerationServicer):
    """Owns the ids of the requests that are running."""

    def __init__(self, gate: Gate, metrics: Metrics, *, max_queue: int) -> None:
        self.loaded: Loaded | None = None
        self._gate, self._metrics, self._max_queue = gate, metrics, max_queue
        self._running: set[str] = set()

    async def Generate(self, request: GenerateRequest, context: Context) -> None:  # type: ignore[override]  # see Denoise
        async with accounted(context, self._gate, self._metrics) as call:
            assert self.loaded is not None, "the gate opens after loading"
            try:
                order = self._admit(self.loaded, request)
            except MammothError as err:
                self._metrics.rejected(err.reason).inc()
                raise
            diffusion = order.generation.diffusion
            call.shape_class = shape_class(diffusion.height, diffusion.width)
            with self._unique(order.request_id), request_context(order.request_id, order.generation.labels):
                logger.info("admitted", extra=_facts(order.generation, order.seed))
                await self._produce(order, self.loaded, call, context)
                logger.info("delivered", extra={"num_images": order.generation.num_images})

    def _admit(self, loaded: Loaded, request: GenerateRequest) -> Order:
        """Return the order, or raise why it is refused: what can never work before what cannot work now."""
        generation = resolve_generation(from_message(request), defaults=loaded.defaults, bounds=loaded.bounds)
        seed = secrets.randbelow(MAX_SEED - generation.num_images) if generation.seed is None else generation.seed
        order = order_of(generation, loaded.template, request_id=generation.request_id or str(uuid.uuid4()), seed=seed)
        if (err := loaded.refusal(order.sequences[0])) is not None:
            raise err
        if len(order.sequences) > self._max_queue:
            raise InvalidRequest(
                [("num_images", f"{len(order.sequences)}; this deployment queues at most {self._max_queue}")]
            )
        if loaded.batcher.snapshot().queue_depth + len(order.sequences) > self._max_queue:
            raise Overloaded(
                f"no room for {len(order.sequences)} more pictures in a queue of {self._max_queue}",
                retry_after_s=loaded.batcher.retry_after_s(),
            )
        return order

    async def _produce(self, order: Order, loaded: Loaded, call: Call, context: Context) -> None:
        emit = Emit()
        deadline_at = call.deadline_at - DEADLINE_MARGIN_S
        production = Production(order, loaded, self._metrics, emit, deadline_at=deadline_at)
        work = asyncio.create_task(_until_end(production, emit))
        try:
            async with asyncio.timeout_at(deadline_at):
                await _write(emit, context)
                await work
        except TimeoutError:
            stage = production.stage
            raise DeadlineExceeded(f"the deadline passed during {stage}", stage=stage) from None
        finally:
            work.cancel()
            await asyncio.wait((work,))

    @contextmanager
    def _unique(self, request_id: str) -> Iterator[None]:
        if request_id in self._running:
            raise AlreadyRunning(f"request {request_id} is running")
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)


async def _until_end(production: Production, emit: Emit) -> None:
    try:
        await production.run()
    finally:
        emit.end()


async def _write(emit: Emit, context: Context) -> None:
    numbers = itertools.count()
    async with aclosing(beating(aiter(emit))) as events:
        async for event in events:
            message = event or GenerateEvent(heartbeat=Heartbeat())
            message.sequence = next(numbers)
            await context.write(message)


def _facts(generation: Generation, seed: int) -> dict[str, Any]:
    """What a log line may say of a request: no word of its prompt."""
    diffusion, conditioning = generation.diffusion, generation.conditioning
    return {
        "size": f"{diffusion.width}x{diffusion.height}",
        "grid": f"{conditioning.ar_width}x{conditioning.ar_height}",
        "steps": diffusion.steps,
        "num_images": generation.num_images,
        "seed": seed,
        "prompt_bytes": len(generation.prompt.encode()),
    }
