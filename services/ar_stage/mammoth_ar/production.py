"""Do: bring one order from admission to its pictures: rows from the batcher into logs, logs to the DiT, events back.

The order of things is the contract: every picture is admitted by a DiT replica before anything is decoded, rows leave
while decoding runs, and a stream that fails is replayed from its log.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

import torch

from mammoth_ar.admission import Order, RowLayout, begin_of, check_deadline
from mammoth_ar.batching import Batcher
from mammoth_ar.handover import Replicas, RowLog
from mammoth_ar.prompt import PromptTemplate
from mammoth_ar.replay import History, replay_delay_s
from mammoth_ar.sequence import Rows, Sequence
from mammoth_ar.tickets import Progress, Queued, Ticket
from mammoth_serving.served import ServedLog
from mammoth_serving.telemetry import Metrics, shape_class
from mammoth_wire import tensors
from mammoth_wire.durations import duration, seconds
from mammoth_wire.errors import InvalidRequest, MammothError, Unavailable
from mammoth_wire.params import Bounds, Defaults, conditioning_message, diffusion_message
from mammoth_wire.v1 import control_pb2, types_pb2
from mammoth_wire.v1.diffusion_pb2 import DenoiseEvent, Drawn, ImageChunk, RowChunk, StageTimes
from mammoth_wire.v1.image_generation_pb2 import Accepted, ArProgress, Conditioned, Done, GenerateEvent

__all__ = ["Emit", "Loaded", "Production"]

IMAGE_CHUNK_BYTES = 2**20
NOT_DRAWN = StageTimes()
PARTS = {"negative": RowChunk.PART_NEGATIVE, "condition": RowChunk.PART_CONDITION}
BITS = {4: (torch.int32, "<u4"), 2: (torch.int16, "<u2")}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What exists once the model is loaded. No call passes the gate before."""

    refusal: Callable[[Sequence], InvalidRequest | None]
    served: ServedLog
    batcher: Batcher
    replicas: Replicas
    template: PromptTemplate
    layout: RowLayout
    defaults: Defaults
    bounds: Bounds
    model_digest: str
    environment: types_pb2.Environment


class Emit:
    """The events of one call in the order in which they leave; iterating ends after `end`."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[GenerateEvent | None] = asyncio.Queue()

    def __call__(self, **event: Any) -> None:
        self._events.put_nowait(GenerateEvent(**event))

    def end(self) -> None:
        self._events.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        while (event := await self._events.get()) is not None:
            yield event


class Picture:
    """One picture of an order: its rows, how far it is, and the bytes that came back."""

    def __init__(self, index: int, sequence: Sequence, log: RowLog) -> None:
        self.index, self.sequence, self.log = index, sequence, log
        self.admitted: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self.history = History()
        self.asked_at = _now()
        self.submitted_at = self.started_at = _now()
        self.conditioned_at: float | None = None
        self.num_tokens = 0
        self.data = bytearray()


class Production:
    """All pictures of one order. `stage` says where it is, for whoever gives up on it."""

    def __init__(self, order: Order, loaded: Loaded, metrics: Metrics, emit: Emit, *, deadline_at: float) -> None:
        self._order, self._loaded, self._metrics, self._emit = order, loaded, metrics, emit
        self._deadline_at = deadline_at
        self._shape_class = shape_class(order.generation.diffusion.height, order.generation.diffusion.width)
        self._expected_at: float | None = None
        self.stage = "admission"

    async def run(self) -> None:
        """Emit everything up to the last Done; raise the first error of any picture, and leave nothing running."""
        pictures = [self._picture(index, sequence) for index, sequence in enumerate(self._order.sequences)]
        with ExitStack() as tickets:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for picture in pictures:
                        tasks.create_task(self._draw(picture))
                    etas_s = [await picture.admitted for picture in pictures]
                    for picture, ticket in self._accept(pictures, etas_s, tickets):
                        tasks.create_task(self._decode(picture, ticket))
            except BaseExceptionGroup as group:
                raise _first(group) from None
        if self._expected_at is not None:
            self._metrics.eta_error.observe(abs(_now() - self._expected_at))

    def _picture(self, index: int, sequence: Sequence) -> Picture:
        job_id = f"{self._order.request_id}/{index}"
        expected_in_s = self._loaded.batcher.estimate_s(sequence)
        check_deadline(expected_in_s, self._remaining_s)
        begin = begin_of(job_id, sequence, self._order.generation, self._loaded.layout, expected_in_s)
        return Picture(index, sequence, RowLog(begin))

    def _accept(
        self, pictures: list[Picture], etas_s: list[float | None], tickets: ExitStack
    ) -> list[tuple[Picture, Ticket]]:
        """Queue every picture for decoding and say so: from here on the order is ours to finish."""
        submitted = []
        for picture in pictures:
            estimate_s = self._loaded.batcher.estimate_s(picture.sequence)
            ticket = self._loaded.batcher.submit(picture.sequence)
            tickets.callback(ticket.cancel)
            submitted.append((picture, ticket))
            picture.submitted_at = _now()
            picture.history.is_accepted = True
        known = [eta_s for eta_s in etas_s if eta_s is not None]
        eta_s = estimate_s + max(known) if estimate_s is not None and known else None
        self._expected_at = None if eta_s is None else _now() + eta_s
        generation, seed = self._order.generation, self._order.seed
        self._emit(
            accepted=Accepted(
                request_id=self._order.request_id,
                eta=duration(eta_s),
                diffusion=diffusion_message(generation.diffusion, seed),
                conditioning=conditioning_message(generation.conditioning, seed),
                num_images=generation.num_images,
            )
        )
        self.stage = "decoding"
        return submitted

    async def _decode(self, picture: Picture, ticket: Ticket) -> None:
        """Log the rows of `ticket` as they are decoded."""
        async for event in ticket:
            match event:
                case Queued(position):
                    self._emit(queued={"position": position, "image_index": picture.index})
                case Progress(num_tokens, total):
                    self._metrics.tokens.inc(num_tokens - picture.num_tokens)
                    picture.num_tokens = num_tokens
                    self._emit(ar_progress=ArProgress(tokens=num_tokens, total=total, image_index=picture.index))
                case Rows():
                    picture.started_at = ticket.joined_at or picture.started_at
                    rows = _to_wire(event)
                    self._metrics.conditioning_bytes.inc(rows.bits.nbytes)
                    picture.log.append(PARTS[event.kind], rows)
        picture.log.close()
        self.stage = "denoising"

    async def _draw(self, picture: Picture) -> None:
        """Stream the picture's rows until a replica has drawn it, and emit the picture."""
        while True:
            try:
                return self._deliver(picture, await self._stream(picture))
            except MammothError as err:
                picture.history.count(err)
                delay_s = replay_delay_s(
                    err,
                    picture.history,
                    num_replicas=self._loaded.replicas.num_replicas,
                    remaining_s=self._remaining_s,
                    jitter=random.random(),
                )
                if delay_s is None:
                    self._loaded.served.add(self._served(picture, failed=True))
                    raise
                logger.warning("rows are replayed", extra={"image_index": picture.index, "because": err.message})
                self._metrics.conditioning_resends.inc()
                await asyncio.sleep(delay_s)

    async def _stream(self, picture: Picture) -> Drawn:
        """Carry the log to one replica. Its first event is the admission, the second says that all rows are there."""
        picture.data.clear()
        drawn = None
        stream = self._loaded.replicas.denoise(picture.log, timeout_s=self._remaining_s)
        async with aclosing(stream) as events:
            is_admitted = False
            async for event in events:
                if is_admitted:
                    drawn = self._relay(picture, event) or drawn
                elif not picture.admitted.done():
                    picture.admitted.set_result(seconds(event.queued.eta) if event.queued.HasField("eta") else None)
                is_admitted = True
        if drawn is None:
            raise Unavailable("the DiT replica ended the stream without a picture")
        return drawn

    def _relay(self, picture: Picture, event: DenoiseEvent) -> Drawn | None:
        if picture.conditioned_at is None and not event.HasField("heartbeat"):
            picture.conditioned_at = _now()
            self._metrics.conditioning_transfer.observe(self._handover_s(picture))
            self._emit(conditioned=Conditioned(image_index=picture.index))
        match kind := event.WhichOneof("event"):
            case "queued" | "batched" | "step":
                message = getattr(event, kind)
                message.image_index = picture.index
                self._emit(**{kind: message})
            case "image":
                picture.data += event.image.data
            case "drawn":
                return event.drawn
        return None

    def _deliver(self, picture: Picture, drawn: Drawn) -> None:
        data = bytes(picture.data)
        for offset in range(0, len(data), IMAGE_CHUNK_BYTES):
            part = data[offset : offset + IMAGE_CHUNK_BYTES]
            index = picture.index
            self._emit(image=ImageChunk(image_index=index, offset=offset, total_bytes=len(data), data=part))
        decoded_at = picture.log.closed_at or picture.started_at
        self._emit(
            done=Done(
                image_index=picture.index,
                receipt=self._receipt(picture, drawn),
                ar_queue_s=picture.started_at - picture.submitted_at,
                ar_s=decoded_at - picture.started_at,
                handover_s=self._handover_s(picture),
                dit=drawn.times,
            )
        )
        self._loaded.served.add(self._served(picture, drawn.times, ar_s=decoded_at - picture.started_at))
        self._metrics.images(self._shape_class).inc()
        self._metrics.stage_duration(self._shape_class).observe(decoded_at - picture.started_at)

    def _served(
        self, picture: Picture, times: StageTimes = NOT_DRAWN, *, ar_s: float = 0.0, failed: bool = False
    ) -> control_pb2.Served:
        """Return what the operator's tuner is told of a picture that has ended."""
        sequence, params = picture.sequence, self._order.generation.diffusion
        return control_pb2.Served(
            height=params.height,
            width=params.width,
            steps=params.steps,
            rows=sequence.num_slots,
            prompt_tokens=len(sequence.prompt_ids) + len(sequence.negative_ids),
            grid_tokens=sequence.grid.num_tokens,
            batch_size=times.batch_size,
            failed=failed,
            ar_queue_s=picture.started_at - picture.asked_at,
            ar_s=ar_s,
            handover_s=self._handover_s(picture),
            dit_queue_s=times.queue_s,
            denoise_s=times.denoise_s,
            decode_s=times.decode_s,
            total_s=_now() - picture.asked_at,
        )

    def _receipt(self, picture: Picture, drawn: Drawn) -> types_pb2.Receipt:
        generation, seed = self._order.generation, picture.sequence.sampling.seed
        return types_pb2.Receipt(
            request_id=self._order.request_id,
            image_index=picture.index,
            prompt=generation.prompt,
            negative_prompt=generation.negative_prompt,
            conditioning=conditioning_message(generation.conditioning, seed),
            diffusion=diffusion_message(generation.diffusion, seed),
            model_digest=drawn.model_digest,
            rows_sha256=drawn.rows_sha256,
            rgb_sha256=drawn.rgb_sha256,
            ar=self._loaded.environment,
            dit=drawn.environment,
        )

    def _handover_s(self, picture: Picture) -> float:
        if picture.conditioned_at is None or picture.log.closed_at is None:
            return 0.0
        return picture.conditioned_at - picture.log.closed_at

    @property
    def _remaining_s(self) -> float:
        return self._deadline_at - _now()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _to_wire(rows: Rows) -> tensors.Rows:
    """View the engine's rows as the codec's bits, without a copy."""
    signed, unsigned = BITS[rows.hidden.element_size()]
    dtype = tensors.DTYPES[str(rows.hidden.dtype).removeprefix("torch.")]
    return tensors.Rows(rows.ids.numpy(), rows.hidden.contiguous().view(signed).numpy().view(unsigned), dtype)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first MammothError in the group, which is what the caller is told, or else the group."""
    ours: BaseException | None = group.subgroup(MammothError)
    while isinstance(ours, BaseExceptionGroup):
        ours = ours.exceptions[0]
    return ours or group
