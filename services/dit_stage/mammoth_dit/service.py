"""Translate: a Denoise stream to a job, and what becomes of the job to events on the stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from mammoth_dit import png
from mammoth_dit.admission import IDLE, Ask, Limits, Load, refusal
from mammoth_dit.batching import Batcher
from mammoth_dit.intake import Intake, ask_of
from mammoth_dit.jobs import Picture
from mammoth_dit.tickets import Batched, Event, Queued, Step, Ticket
from mammoth_policy.pace import Key
from mammoth_serving.calls import Call, accounted, beating
from mammoth_serving.lifecycle import Gate
from mammoth_serving.telemetry import Metrics, request_context, shape_class
from mammoth_wire.durations import duration
from mammoth_wire.errors import DataLoss, DeadlineExceeded, InvalidRequest, MammothError, to_status
from mammoth_wire.params import Bounds
from mammoth_wire.v1 import diffusion_pb2, diffusion_pb2_grpc, types_pb2
from mammoth_wire.v1.diffusion_pb2 import DenoiseEvent, DenoiseRequest

__all__ = ["DiffusionService", "Loaded"]

IMAGE_CHUNK_BYTES = 2**20
MAX_JOB_ID_CHARS = 128
FIRST_MESSAGE_S = 10.0
DEADLINE_MARGIN_S = 0.1  # our own error, which names the stage, comes before the transport's
Context = grpc.aio.ServicerContext[DenoiseRequest, DenoiseEvent]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is loaded. No call passes the gate before."""

    batcher: Batcher
    limits: Limits
    contract: str
    model_digest: str
    environment: types_pb2.Environment


class DiffusionService(diffusion_pb2_grpc.DiffusionServicer):
    """Owns the ids of pictures whose rows are still on their way; everything later belongs to the batcher."""

    def __init__(self, gate: Gate, metrics: Metrics, *, max_queue: int) -> None:
        self.loaded: Loaded | None = None
        self._gate, self._metrics, self._max_queue = gate, metrics, max_queue
        self._expected: set[str] = set()

    @property
    def num_expected(self) -> int:
        """Pictures that were admitted and whose rows are not complete."""
        return len(self._expected)

    async def Denoise(  # type: ignore[override]  # a coroutine that writes, so that a cancel reaches it where it waits
        self, request_iterator: AsyncIterator[DenoiseRequest], context: Context
    ) -> None:
        async with accounted(context, self._gate, self._metrics) as call:
            try:
                await self._serve(call, context)
            except MammothError as err:
                failed = diffusion_pb2.Failed(status=to_status(err).SerializeToString())
                await context.write(DenoiseEvent(failed=failed))
                raise

    async def _serve(self, call: Call, context: Context) -> None:
        assert self.loaded is not None, "the gate opens after loading"
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                begin = (await _read(context, "begin")).begin
        except TimeoutError:
            raise DeadlineExceeded(f"no begin within {FIRST_MESSAGE_S:.0f} s", stage="admission") from None
        if not (0 < len(begin.job_id) <= MAX_JOB_ID_CHARS and begin.job_id.isprintable()):
            raise InvalidRequest([("job_id", f"1 to {MAX_JOB_ID_CHARS} printable characters, not {len(begin.job_id)}")])
        with request_context(begin.job_id):
            await Drawing(self, self.loaded, begin, call, context).run()

    def admit(self, loaded: Loaded, ask: Ask) -> None:
        """Raise the first reason not to take `ask`, whose rows are still to come."""
        batcher = loaded.batcher
        snapshot = batcher.snapshot()
        load = Load(
            active_ids=batcher.active_ids | self._expected,
            queue_depth=snapshot.queue_depth + self.num_expected,
            max_queue=self._max_queue,
            eta_s=batcher.eta_s(ask.params.key) if batcher.active_ids else None,  # an idle replica finds out
            retry_after_s=batcher.retry_after_s(),
        )
        if (err := refusal(ask, load, loaded.limits)) is not None:
            self._metrics.rejected(err.reason).inc()
            raise err

    def check(self, loaded: Loaded, ask: Ask) -> None:
        """Raise what only the complete rows of an admitted picture can show to be wrong; load is no reason any more."""
        if (err := refusal(ask, IDLE, loaded.limits)) is not None:
            self._metrics.rejected(err.reason).inc()
            raise err

    def expect(self, job_id: str) -> None:
        self._expected.add(job_id)

    def arrived(self, job_id: str) -> None:
        self._expected.discard(job_id)

    @property
    def metrics(self) -> Metrics:
        return self._metrics


class Drawing:
    """One picture's stream from Begin to Drawn."""

    def __init__(
        self, service: DiffusionService, loaded: Loaded, begin: diffusion_pb2.Begin, call: Call, context: Context
    ) -> None:
        self._service, self._loaded, self._begin, self._call, self._context = service, loaded, begin, call, context
        self._metrics = service.metrics

    async def run(self) -> None:
        """Admit, receive, queue, relay, deliver. Whatever ends it, the job leaves the batcher."""
        begin = self._begin
        ask = ask_of(begin, contract=self._loaded.contract, bounds=Bounds(), budget_s=self._call.remaining_s)
        self._call.shape_class = shape_class(ask.params.height, ask.params.width)
        self._service.admit(self._loaded, ask)
        intake = Intake(begin, ask, self._loaded.limits)
        self._service.expect(begin.job_id)
        try:
            await self._write(queued=self._queued(self._loaded.batcher.snapshot().queue_depth, ask.params.key))
            end = await self._receive(intake)
            ask, job = intake.finish(end)
            self._service.check(self._loaded, ask)
            if begin.probe:
                return await self._write(drawn=diffusion_pb2.Drawn(rows_sha256=end.sha256.hex()))
            ticket = self._loaded.batcher.submit(job, deadline_at=self._deadline_at)
        finally:
            self._service.arrived(begin.job_id)
        try:
            async for event in beating(ticket.events()):
                await self._relay(event, ticket)
            await self._deliver(await ticket.result(), ticket, end.sha256.hex())
        finally:
            ticket.cancel()
        return None

    @property
    def _deadline_at(self) -> float:
        return self._call.deadline_at - DEADLINE_MARGIN_S

    async def _receive(self, intake: Intake) -> diffusion_pb2.End:
        try:
            async with asyncio.timeout_at(self._deadline_at):
                while (message := await _read(self._context, "rows", "end")).HasField("rows"):
                    self._metrics.conditioning_bytes.inc(intake.take(message.rows))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before all rows had arrived", stage="rows") from None
        return message.end

    async def _relay(self, event: Event | None, ticket: Ticket) -> None:
        match event:
            case Queued(position):
                await self._write(queued=self._queued(position, ticket.key))
            case Batched(size):
                self._metrics.queue_wait.observe(ticket.waited_s)
                self._metrics.batch_size.observe(size)
                await self._write(batched=diffusion_pb2.Batched(size=size))
            case Step(index, total):
                self._metrics.steps.inc()
                await self._write(step=diffusion_pb2.Step(index=index, total=total))
            case None:
                await self._write(heartbeat=diffusion_pb2.Heartbeat())

    async def _deliver(self, picture: Picture, ticket: Ticket, rows_sha256: str) -> None:
        began = time.perf_counter()
        data = await asyncio.to_thread(png.encode, picture.rgb)
        encode_s = time.perf_counter() - began
        for offset in range(0, len(data), IMAGE_CHUNK_BYTES):
            part = data[offset : offset + IMAGE_CHUNK_BYTES]
            await self._write(image=diffusion_pb2.ImageChunk(offset=offset, total_bytes=len(data), data=part))
        times = diffusion_pb2.StageTimes(
            queue_s=ticket.waited_s,
            denoise_s=picture.denoise_s,
            decode_s=picture.decode_s,
            encode_s=encode_s,
            batch_size=ticket.wave_size,
        )
        environment = self._loaded.environment
        if picture.kernels is not None:
            environment = types_pb2.Environment()
            environment.CopyFrom(self._loaded.environment)
            environment.kernels = picture.kernels
        await self._write(
            drawn=diffusion_pb2.Drawn(
                rgb_sha256=picture.rgb_sha256,
                rows_sha256=rows_sha256,
                model_digest=self._loaded.model_digest,
                environment=environment,
                times=times,
            )
        )
        self._count(picture, ticket)

    def _count(self, picture: Picture, ticket: Ticket) -> None:
        params, drawn_s = ticket.job.params, picture.denoise_s + picture.decode_s
        self._metrics.images(self._call.shape_class).inc()
        self._metrics.image_pixels.inc(params.height * params.width)
        self._metrics.stage_duration(self._call.shape_class).observe(drawn_s)
        self._metrics.step_seconds.observe(picture.denoise_s / params.steps)
        logger.info(
            "drawn",
            extra={
                "size": f"{params.width}x{params.height}",
                "steps": params.steps,
                "batch_size": ticket.wave_size,
                "queue_s": round(ticket.waited_s, 4),
                "drawn_s": round(drawn_s, 4),
            },
        )

    def _queued(self, position: int, key: Key) -> diffusion_pb2.Queued:
        batcher = self._loaded.batcher
        snapshot, eta_s = batcher.snapshot(), batcher.eta_s(key)
        return diffusion_pb2.Queued(
            position=position,
            eta=duration(eta_s),
            load=diffusion_pb2.Load(
                queue_depth=snapshot.queue_depth + self._service.num_expected,
                in_flight=snapshot.in_flight,
                max_num_seqs=snapshot.policy.max_num_seqs,
            ),
        )

    async def _write(self, **event: Any) -> None:
        await self._context.write(DenoiseEvent(**event))


async def _read(context: Context, *kinds: str) -> DenoiseRequest:
    """Return the next message, which must be one of `kinds`. Raises DataLoss when the stream ends before it."""
    message: Any = await context.read()
    if message is grpc.aio.EOF:
        raise DataLoss(f"the stream ended before {' or '.join(kinds)}", part="stream")
    assert isinstance(message, DenoiseRequest)
    kind = message.WhichOneof("part")
    if kind not in kinds:
        raise InvalidRequest([("part", f"{kind} where {' or '.join(kinds)} comes next")])
    return message
