"""Decide what the fake server draws and says: a deterministic PNG and the events of its making, without a model."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from mammoth_wire.params import Generation, conditioning_message, diffusion_message
from mammoth_wire.v1 import diffusion_pb2, image_generation_pb2, types_pb2

__all__ = ["events", "png"]

GenerateEvent = image_generation_pb2.GenerateEvent
ENVIRONMENTS = {
    stage: types_pb2.Environment(stage=stage, device="none", dtype="none", kernels="fake", versions={"mammoth": "fake"})
    for stage in ("ar", "dit")
}


def events(generation: Generation, *, model_digest: str, chunk_bytes: int) -> Iterator[GenerateEvent]:
    """Yield every event of a request whose seed is known, numbered, in the order of the real service."""
    for sequence, event in enumerate(_unnumbered(generation, model_digest, chunk_bytes)):
        event.sequence = sequence
        yield event


def rgb(generation: Generation, model_digest: str) -> bytes:
    """Return the pixels: one row of pseudo-random colours, keyed by everything that a picture depends on, repeated."""
    picture = generation.diffusion
    key = repr((model_digest, replace(generation, request_id="", num_images=1, labels={}))).encode()
    return hashlib.shake_256(key).digest(3 * picture.width) * picture.height


def png(pixels: bytes, *, width: int, height: int) -> bytes:
    """Return 8-bit RGB `pixels` as a PNG file."""
    row_bytes = 3 * width
    rows = b"".join(b"\0" + pixels[begin : begin + row_bytes] for begin in range(0, len(pixels), row_bytes))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, data) for kind, data in chunks)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _unnumbered(generation: Generation, model_digest: str, chunk_bytes: int) -> Iterator[GenerateEvent]:
    seed = generation.seed
    assert seed is not None
    accepted = image_generation_pb2.Accepted(
        request_id=generation.request_id,
        eta=Duration(seconds=1),
        diffusion=diffusion_message(generation.diffusion, seed),
        conditioning=conditioning_message(generation.conditioning, seed),
        num_images=generation.num_images,
    )
    yield GenerateEvent(accepted=accepted)
    for index in range(generation.num_images):
        yield from _picture(replace(generation, seed=seed + index), index, model_digest, chunk_bytes)


def _picture(generation: Generation, index: int, model_digest: str, chunk_bytes: int) -> Iterator[GenerateEvent]:
    diffusion, grid = generation.diffusion, generation.conditioning
    total = grid.ar_height * (grid.ar_width + 1)
    yield GenerateEvent(queued=diffusion_pb2.Queued(eta=Duration(seconds=1), image_index=index))
    for tokens in sorted({0, total // 2, total}):
        yield GenerateEvent(ar_progress=image_generation_pb2.ArProgress(tokens=tokens, total=total, image_index=index))
    yield GenerateEvent(heartbeat=diffusion_pb2.Heartbeat())
    yield GenerateEvent(conditioned=image_generation_pb2.Conditioned(image_index=index))
    yield GenerateEvent(batched=diffusion_pb2.Batched(size=1, image_index=index))
    for step in range(1, diffusion.steps + 1):
        yield GenerateEvent(step=diffusion_pb2.Step(index=step, total=diffusion.steps, image_index=index))
    pixels = rgb(generation, model_digest)
    file = png(pixels, width=diffusion.width, height=diffusion.height)
    for offset in range(0, len(file), chunk_bytes):
        data = file[offset : offset + chunk_bytes]
        chunk = diffusion_pb2.ImageChunk(offset=offset, total_bytes=len(file), data=data, image_index=index)
        yield GenerateEvent(image=chunk)
    yield GenerateEvent(done=_done(generation, index, model_digest, hashlib.sha256(pixels).hexdigest()))


def _done(generation: Generation, index: int, model_digest: str, rgb_sha256: str) -> image_generation_pb2.Done:
    seed: Any = generation.seed
    receipt = types_pb2.Receipt(
        request_id=generation.request_id,
        image_index=index,
        prompt=generation.prompt,
        negative_prompt=generation.negative_prompt,
        conditioning=conditioning_message(generation.conditioning, seed),
        diffusion=diffusion_message(generation.diffusion, seed),
        model_digest=model_digest,
        rows_sha256=hashlib.sha256(generation.prompt.encode()).hexdigest(),
        rgb_sha256=rgb_sha256,
        ar=ENVIRONMENTS["ar"],
        dit=ENVIRONMENTS["dit"],
    )
    times = diffusion_pb2.StageTimes(denoise_s=0.001, decode_s=0.001, encode_s=0.001, batch_size=1)
    return image_generation_pb2.Done(image_index=index, receipt=receipt, ar_s=0.001, dit=times)
