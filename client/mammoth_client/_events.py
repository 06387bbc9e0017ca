"""Decide what the messages of one Generate stream mean: typed events, and pictures put together from their chunks."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration

from mammoth_client.receipts import ConditioningParameters, DiffusionParameters, Receipt, value_of
from mammoth_client.types import Accepted, ArProgress, Batched, Conditioned, Done, Event, Picture, Queued, Step, Times
from mammoth_wire.errors import DataLoss
from mammoth_wire.v1 import diffusion_pb2, image_generation_pb2

__all__ = ["EventReader"]


class EventReader:
    """Folds the messages of one stream, in order, into events.

    Raises DataLoss when a message is missing, an image chunk is out of place, or the stream ends early.
    """

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._num_messages = 0
        self._images: dict[int, bytearray] = {}
        self._total_bytes: dict[int, int] = {}
        self._finished: set[int] = set()

    @property
    def started(self) -> bool:
        """Whether any message has arrived."""
        return self._num_messages > 0

    def read(self, message: image_generation_pb2.GenerateEvent) -> tuple[Event, ...]:
        """Return what `message` says: nothing for a heartbeat or an image chunk, Done and then Picture at the end."""
        if message.sequence != self._num_messages:
            raise _loss(f"event {self._num_messages} is missing before event {message.sequence}")
        self._num_messages += 1
        kind = message.WhichOneof("event")
        if kind == "image":
            self._add(message.image)
            return ()
        if kind == "done":
            return self._done(message.done)
        return () if kind in (None, "heartbeat") else (event_of(getattr(message, kind)),)

    def finish(self) -> None:
        """Check that every picture has arrived."""
        if len(self._finished) != self._num_images:
            raise _loss(f"the stream ended after {len(self._finished)} of {self._num_images} pictures")

    def _add(self, chunk: diffusion_pb2.ImageChunk) -> None:
        """Take the next chunk. Offset 0 begins again: when a replica is lost, another one draws the same picture."""
        index = chunk.image_index
        self._expect(index)
        if chunk.offset == 0:
            self._images[index] = bytearray()
            self._total_bytes[index] = chunk.total_bytes
        have = len(self._images.get(index, b""))
        total = self._total_bytes.get(index)
        if chunk.offset != have or chunk.total_bytes != total or have + len(chunk.data) > total:
            what = f"{len(chunk.data)} bytes at offset {chunk.offset}"
            raise _loss(f"picture {index}: {what} do not follow {have} of {total}")
        self._images[index] += chunk.data

    def _done(self, message: image_generation_pb2.Done) -> tuple[Event, ...]:
        index = message.image_index
        self._expect(index)
        png = bytes(self._images.pop(index, b""))
        total = self._total_bytes.pop(index, None)
        if not png or len(png) != total:
            raise _loss(f"picture {index}: {len(png)} of {total} bytes arrived before its receipt")
        self._finished.add(index)
        done = _done_event(message)
        return (done, Picture(png=png, receipt=done.receipt, image_index=index, times=done.times))

    def _expect(self, index: int) -> None:
        if not 0 <= index < self._num_images or index in self._finished:
            counts = f"{self._num_images} asked for, {len(self._finished)} finished"
            raise _loss(f"picture {index} was not expected: {counts}")


def event_of(message: Any) -> Event:
    """Return the event of a message that stands for itself."""
    match message:
        case image_generation_pb2.Accepted():
            return value_of(
                Accepted, message, eta_s=_eta_s(message),
                diffusion=value_of(DiffusionParameters, message.diffusion),
                conditioning=value_of(ConditioningParameters, message.conditioning),
            )  # fmt: skip
        case diffusion_pb2.Queued():
            return value_of(Queued, message, eta_s=_eta_s(message))
        case image_generation_pb2.ArProgress():
            return value_of(ArProgress, message)
        case image_generation_pb2.Conditioned():
            return value_of(Conditioned, message)
        case diffusion_pb2.Batched():
            return value_of(Batched, message)
        case diffusion_pb2.Step():
            return value_of(Step, message, eta_s=_eta_s(message))
    raise AssertionError(f"no event for {message.DESCRIPTOR.name}")


def _done_event(message: image_generation_pb2.Done) -> Done:
    stage_s = {"ar_queue_s": message.ar_queue_s, "ar_s": message.ar_s, "handover_s": message.handover_s}
    times = value_of(Times, message.dit, **stage_s)
    return Done(image_index=message.image_index, receipt=Receipt.from_message(message.receipt), times=times)


def _eta_s(message: Any) -> float | None:
    eta: Duration = message.eta
    return eta.ToNanoseconds() / 1e9 if message.HasField("eta") else None


def _loss(text: str) -> DataLoss:
    return DataLoss(text, part="events")
