"""Translate: conditioning rows to chunks and back. A message is checked before it is believed.

A tensor of rows `[T, H]` is announced by a TensorHeader and travels in RowChunks, each with its rows' token ids and a
crc32c; End closes it with a SHA-256. bfloat16 is kept as its raw bits in uint16: numpy has no such type, and nothing is
ever upcast or pickled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from mammoth_wire.errors import DataLoss, InvalidRequest
from mammoth_wire.v1 import diffusion_pb2, types_pb2

__all__ = ["CHUNK_ROWS", "DTYPES", "MAX_CHUNK_BYTES", "Assembler", "RowDigest", "Rows", "chunks", "contract", "header"]

LAYOUT_VERSION = "rows-1"  # what rows are sent, in which order; raised when that changes
CHUNK_ROWS = 64
MAX_CHUNK_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Storage:
    """How an element type is kept in numpy, and the bits that are all set in an infinity or a NaN."""

    dtype: npt.DTypeLike
    exponent: int

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


STORAGE = {
    types_pb2.DTYPE_FLOAT32: Storage("<u4", 0x7F800000),
    types_pb2.DTYPE_BFLOAT16: Storage("<u2", 0x7F80),
    types_pb2.DTYPE_FLOAT16: Storage("<u2", 0x7C00),
}
DTYPES = {"float32": types_pb2.DTYPE_FLOAT32, "bfloat16": types_pb2.DTYPE_BFLOAT16, "float16": types_pb2.DTYPE_FLOAT16}
NAMES = {value: name for name, value in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows: `ids` int32 [n], `bits` [n, H] unsigned integers that hold the elements of `dtype`."""

    ids: npt.NDArray[np.int32]
    bits: npt.NDArray[Any]
    dtype: types_pb2.DType.ValueType

    def __len__(self) -> int:
        return len(self.ids)


class RowDigest:
    """SHA-256 over rows in order, each its id (int32, little-endian) and then its bytes; independent of the chunking."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, rows: Rows) -> None:
        ids = rows.ids.astype("<i4").view(np.uint8).reshape(len(rows), 4)
        self._sha256.update(np.concatenate([ids, rows.bits.view(np.uint8)], axis=1).data)

    def digest(self) -> bytes:
        return self._sha256.digest()


def contract(width: int, model_digest: str) -> str:
    """Return what both stages must agree on before rows cross: layout version, row width, model."""
    return f"{LAYOUT_VERSION}/{width}/{model_digest[:16]}"


def header(name: str, dtype: types_pb2.DType.ValueType, num_rows: int, width: int) -> types_pb2.TensorHeader:
    """Return the announcement of rows `[num_rows, width]`."""
    total = num_rows * width * STORAGE[dtype].itemsize
    return types_pb2.TensorHeader(name=name, dtype=dtype, shape=[num_rows, width], total_bytes=total)


def chunks(
    rows: Rows, *, part: diffusion_pb2.RowChunk.Part.ValueType, first_index: int = 0, first_row: int = 0
) -> Iterator[diffusion_pb2.RowChunk]:
    """Cut `rows` into messages of at most 64 rows and 2 MiB, continuing at chunk `first_index` and row `first_row`."""
    row_bytes = rows.bits.shape[1] * rows.bits.itemsize
    step = max(1, min(CHUNK_ROWS, MAX_CHUNK_BYTES // row_bytes))
    for index, begin in enumerate(range(0, len(rows), step), first_index):
        ids = rows.ids[begin : begin + step]
        data = rows.bits[begin : begin + step].tobytes()
        yield diffusion_pb2.RowChunk(
            part=part,
            index=index,
            offset=(first_row + begin) * row_bytes,
            token_ids=ids.tolist(),
            data=data,
            crc32c=_crc(ids, data),
        )


class Assembler:
    """Collects the chunks of one announced tensor; the only writer of its buffer.

    An identical repeat of a chunk is ignored. A gap, a changed repeat or a wrong crc raises DataLoss naming the chunk;
    a header that cannot be (dtype, shape, byte count, limit), and rows that are not finite, raise InvalidRequest.
    """

    def __init__(self, head: types_pb2.TensorHeader, *, field: str, part: str, width: int, max_rows: int) -> None:
        storage = STORAGE.get(head.dtype)
        if storage is None:
            raise InvalidRequest([(f"{field}.dtype", f"{head.dtype} is unknown; allowed: {', '.join(DTYPES)}")])
        shape = list(head.shape)
        if len(shape) != 2 or shape[1] != width or not 0 <= shape[0] <= max_rows:
            raise InvalidRequest([(f"{field}.shape", f"{shape} is not [rows, {width}] with at most {max_rows} rows")])
        num_bytes = math.prod(shape) * storage.itemsize
        if head.total_bytes != num_bytes:
            raise InvalidRequest([(f"{field}.total_bytes", f"shape {shape} needs {num_bytes}, not {head.total_bytes}")])
        self.dtype = head.dtype
        self._field, self._part = field, part
        self._storage = storage
        self._num_rows, self._width = shape
        self._row_bytes = width * storage.itemsize
        self._ids = np.empty(self._num_rows, np.int32)
        self._bits = np.empty((self._num_rows, width), storage.dtype)
        self._crcs: list[int] = []
        self._filled = 0
        self._digest = RowDigest()

    @property
    def complete(self) -> bool:
        return self._filled == self._num_rows

    @property
    def num_filled(self) -> int:
        """Rows received so far."""
        return self._filled

    def add(self, chunk: diffusion_pb2.RowChunk) -> None:
        """Take the next chunk, or an identical repeat of an earlier one."""
        ids, data = np.fromiter(chunk.token_ids, np.int32, len(chunk.token_ids)), chunk.data
        if _crc(ids, data) != chunk.crc32c:
            raise self._loss(chunk, "crc32c does not match its ids and bytes")
        if chunk.index < len(self._crcs):
            if self._crcs[chunk.index] != chunk.crc32c:
                raise self._loss(chunk, "repeated with other bytes")
            return
        if chunk.index > len(self._crcs):
            raise self._loss(chunk, f"chunk {len(self._crcs)} is missing before it")
        end = self._filled + len(ids)
        if not len(ids) or len(data) > MAX_CHUNK_BYTES or len(data) != len(ids) * self._row_bytes:
            raise self._loss(
                chunk,
                f"{len(data)} bytes for {len(ids)} rows of {self._row_bytes} bytes (at most {MAX_CHUNK_BYTES})",
            )
        if chunk.offset != self._filled * self._row_bytes or end > self._num_rows:
            raise self._loss(
                chunk, f"rows {self._filled}..{end} at offset {chunk.offset} leave the announced {self._num_rows} rows"
            )
        bits = np.frombuffer(data, self._storage.dtype).reshape(len(ids), self._width)
        if ((bits & self._storage.exponent) == self._storage.exponent).any():
            raise InvalidRequest(
                [(self._field, f"chunk {chunk.index} holds NaN or infinite values; rows must be finite")]
            )
        self._ids[self._filled : end] = ids
        self._bits[self._filled : end] = bits
        self._digest.update(Rows(ids, bits, self.dtype))
        self._crcs.append(chunk.crc32c)
        self._filled = end

    def finish(self, num_rows: int, sha256: bytes) -> Rows:
        """Return the rows once all are there and the sender's count and digest agree."""
        if num_rows != self._num_rows or not self.complete:
            text = f"{self._part}: {self._num_rows} rows announced, {self._filled} received, {num_rows} closed"
            raise DataLoss(text, part=self._part, chunk=str(len(self._crcs)))
        if sha256 != self._digest.digest():
            raise DataLoss(f"{self._part}: the digest of {num_rows} rows does not match", part=self._part)
        return Rows(self._ids, self._bits, self.dtype)

    def _loss(self, chunk: diffusion_pb2.RowChunk, text: str) -> DataLoss:
        return DataLoss(f"{self._part} chunk {chunk.index}: {text}", part=self._part, chunk=str(chunk.index))


def _crc(ids: npt.NDArray[np.int32], data: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(ids.astype("<i4").tobytes()), data))
