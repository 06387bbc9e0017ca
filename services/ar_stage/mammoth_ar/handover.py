"""Do: keep a picture's rows until the picture is there, and stream them to one DiT replica, again if need be.

`RowLog` is written once, as rows are decoded, and read from its beginning by every stream that carries it, so that a
replica that dies costs time and never the picture.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc.aio

from mammoth_ar.replay import BUSY
from mammoth_wire.errors import Cancelled, MammothError, Unavailable, from_packed, from_rpc_error
from mammoth_wire.tensors import RowDigest, Rows, chunks
from mammoth_wire.v1 import diffusion_pb2, diffusion_pb2_grpc
from mammoth_wire.v1.diffusion_pb2 import DenoiseEvent, DenoiseRequest, RowChunk

__all__ = ["Replicas", "RowLog"]

ADMISSION_S = 5.0  # admission costs a replica no device work: a longer silence means that it hangs
REST_S = 2.0
NUM_BEHIND_A_NAME = 3
HOP_MARGIN_S = 0.2  # of the caller's deadline, kept for the way back
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 8 * 2**20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config", '{"loadBalancingConfig":[{"round_robin":{}}]}'),
)


class RowLog:
    """The rows of one picture as messages, in order. One writer, any number of readers."""

    def __init__(self, begin: diffusion_pb2.Begin) -> None:
        self.begin = begin
        self.closed_at: float | None = None
        self._messages: list[DenoiseRequest] = [DenoiseRequest(begin=begin)]
        self._num_rows = {RowChunk.PART_NEGATIVE: 0, RowChunk.PART_CONDITION: 0}
        self._num_chunks = {RowChunk.PART_NEGATIVE: 0, RowChunk.PART_CONDITION: 0}
        self._digests = {RowChunk.PART_NEGATIVE: RowDigest(), RowChunk.PART_CONDITION: RowDigest()}
        self._grown = asyncio.Event()

    def append(self, part: RowChunk.Part.ValueType, rows: Rows) -> None:
        """Add the next rows of `part`."""
        self._digests[part].update(rows)
        for chunk in chunks(rows, part=part, first_index=self._num_chunks[part], first_row=self._num_rows[part]):
            self._messages.append(DenoiseRequest(rows=chunk))
            self._num_chunks[part] += 1
        self._num_rows[part] += len(rows)
        self._wake()

    def close(self) -> None:
        """Add End: all rows are there."""
        end = diffusion_pb2.End(
            num_rows=self._num_rows[RowChunk.PART_CONDITION],
            sha256=self.sha256,
            num_negative_rows=self._num_rows[RowChunk.PART_NEGATIVE],
            negative_sha256=self._digests[RowChunk.PART_NEGATIVE].digest(),
        )
        self._messages.append(DenoiseRequest(end=end))
        self.closed_at = asyncio.get_running_loop().time()
        self._wake()

    async def messages(self) -> AsyncIterator[DenoiseRequest]:
        """Yield every message from Begin to End, waiting for those that are still to come."""
        for index in itertools.count():
            while index >= len(self._messages):
                await self._grown.wait()
            message = self._messages[index]
            yield message
            if message.HasField("end"):
                return

    @property
    def sha256(self) -> bytes:
        """Digest of the condition rows so far."""
        return self._digests[RowChunk.PART_CONDITION].digest()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class Replica:
    """A channel, and the loop time until which it is left alone because it did not answer."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        self.resting_until = 0.0


class Replicas:
    """Channels to the DiT replicas; owns whose turn it is. A target that is a name stands for any number of them."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._replicas = [Replica(target) for target in targets]
        self._has_names = any("://" in target for target in targets)
        self._turn = 0

    @property
    def num_replicas(self) -> int:
        """How many replicas are worth asking; a guess where targets are names."""
        return len(self._replicas) + (NUM_BEHIND_A_NAME - 1 if self._has_names else 0)

    async def denoise(self, log: RowLog, *, timeout_s: float) -> AsyncGenerator[DenoiseEvent, None]:
        """Stream `log` to the next replica and yield its events; Drawn is the last.

        Raises the typed error that the replica, or the way to it, answered with; Unavailable when it does not admit or
        refuse within a few seconds.
        """
        replica = self._next()
        stub = diffusion_pb2_grpc.DiffusionStub(replica.channel)
        call: Any = stub.Denoise(log.messages(), timeout=max(0.001, timeout_s - HOP_MARGIN_S))
        events = aiter(call)
        try:
            async with asyncio.timeout(ADMISSION_S) as patience:
                async for event in events:
                    patience.reschedule(None)
                    if event.HasField("failed"):
                        raise self._noted(replica, from_packed(event.failed.status))
                    yield event
        except grpc.aio.AioRpcError as err:
            error = from_rpc_error(err)
            cut = isinstance(error, Cancelled)  # a replica that stops says so; nobody here asked for it
            raise self._noted(replica, Unavailable("the DiT replica cut the stream off") if cut else error) from err
        except TimeoutError as err:
            raise self._noted(replica, Unavailable(f"a DiT replica did not answer within {ADMISSION_S:.0f} s")) from err
        except asyncio.CancelledError as err:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable("the stream to the DiT replica broke off") from err  # grpc.aio's own word for it
        finally:
            call.cancel()

    def _next(self) -> Replica:
        """Return the next replica in turn that is not resting, or the one that has rested longest."""
        now = asyncio.get_running_loop().time()
        order = self._replicas[self._turn :] + self._replicas[: self._turn]
        chosen = min(order, key=lambda replica: max(replica.resting_until, now))
        self._turn = (self._replicas.index(chosen) + 1) % len(self._replicas)
        return chosen

    def _noted(self, replica: Replica, error: MammothError) -> MammothError:
        """Leave a replica alone for a moment that is away or full, so that those who come next are not sent there."""
        if isinstance(error, (Unavailable, *BUSY)) and len(self._replicas) > 1:
            replica.resting_until = asyncio.get_running_loop().time() + REST_S
        return error

    async def close(self) -> None:
        await asyncio.gather(*(replica.channel.close() for replica in self._replicas))
