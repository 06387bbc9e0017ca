"""The row codec: what was sent is what arrives, and whatever is damaged says so before it costs memory."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest

from mammoth_wire.errors import DataLoss, InvalidRequest
from mammoth_wire.tensors import CHUNK_ROWS, DTYPES, MAX_CHUNK_BYTES, Assembler, RowDigest, Rows, chunks, header
from mammoth_wire.v1 import diffusion_pb2, types_pb2

CONDITION = diffusion_pb2.RowChunk.PART_CONDITION
BF16 = types_pb2.DTYPE_BFLOAT16
WIDTH = 24


def some_rows(num_rows: int, dtype=BF16, width: int = WIDTH) -> Rows:
    rng = np.random.default_rng(num_rows)
    bits = rng.standard_normal((num_rows, width)).astype("<f4").view("<u4")
    bits = bits if dtype == types_pb2.DTYPE_FLOAT32 else (bits >> 16).astype("<u2")
    if dtype == types_pb2.DTYPE_FLOAT16:
        bits = rng.standard_normal((num_rows, width)).astype("<f2").view("<u2")
    return Rows(rng.integers(0, 184_863, num_rows, dtype=np.int32), bits, dtype)


def assembler(head, *, width: int = WIDTH, max_rows: int = 10_000) -> Assembler:
    return Assembler(head, field="begin.rows", part="condition", width=width, max_rows=max_rows)


def digest(rows: Rows) -> bytes:
    digest = RowDigest()
    digest.update(rows)
    return digest.digest()


def sent(rows: Rows) -> list[diffusion_pb2.RowChunk]:
    return list(chunks(rows, part=CONDITION))


def receiver(rows: Rows) -> Assembler:
    return assembler(header("rows", rows.dtype, len(rows), rows.bits.shape[1]))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 1000])
def test_rows_arrive_as_they_were_sent(dtype, num_rows):
    rows = some_rows(num_rows, dtype)
    into = receiver(rows)
    for chunk in sent(rows):
        into.add(diffusion_pb2.RowChunk.FromString(chunk.SerializeToString()))
    got = into.finish(num_rows, digest(rows))
    assert np.array_equal(got.ids, rows.ids)
    assert np.array_equal(got.bits, rows.bits)
    assert got.dtype == dtype


def test_a_digest_is_over_rows_each_id_then_bytes_and_does_not_see_the_chunking():
    rows = some_rows(100)
    by_hand = hashlib.sha256()
    for token, row in zip(rows.ids, rows.bits, strict=True):
        by_hand.update(int(token).to_bytes(4, "little"))
        by_hand.update(row.tobytes())
    pieces = RowDigest()
    for begin in range(0, 100, 7):
        pieces.update(Rows(rows.ids[begin : begin + 7], rows.bits[begin : begin + 7], BF16))
    assert digest(rows) == pieces.digest() == by_hand.digest()


def test_a_chunk_holds_64_rows_and_never_more_than_2_mib():
    assert [len(chunk.token_ids) for chunk in sent(some_rows(130))] == [64, 64, 2]
    wide = some_rows(10, types_pb2.DTYPE_FLOAT32, width=MAX_CHUNK_BYTES // 4 // 3)
    assert [len(chunk.token_ids) for chunk in sent(wide)] == [3, 3, 3, 1]


def test_an_identical_repeat_is_ignored():
    rows = some_rows(130)
    into = receiver(rows)
    for chunk in sent(rows):
        into.add(chunk)
        into.add(chunk)
    assert np.array_equal(into.finish(130, digest(rows)).bits, rows.bits)


def changed(chunk: diffusion_pb2.RowChunk) -> diffusion_pb2.RowChunk:
    """The same chunk with another first value and a crc that fits it."""
    rows = Rows(np.array(chunk.token_ids, np.int32), np.frombuffer(chunk.data, "<u2").reshape(-1, WIDTH) ^ 1, BF16)
    again = next(chunks(rows, part=CONDITION, first_index=chunk.index))
    again.offset = chunk.offset
    return again


def test_a_changed_repeat_is_data_loss_naming_the_chunk():
    rows = some_rows(130)
    into = receiver(rows)
    first, second, _ = sent(rows)
    into.add(first)
    into.add(second)
    with pytest.raises(DataLoss, match="condition chunk 1: repeated with other bytes") as caught:
        into.add(changed(second))
    assert caught.value.metadata == {"part": "condition", "chunk": "1"}


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param({"index": 2}, "chunk 1 is missing before it", id="gap"),
        pytest.param({"crc32c": 5}, "crc32c does not match", id="wrong-crc"),
        pytest.param({"data": b"short"}, "crc32c does not match", id="other-bytes"),
        pytest.param({"token_ids": [7] * 64}, "crc32c does not match", id="other-ids"),
        pytest.param({"offset": 1}, "at offset 1 leave the announced", id="wrong-offset"),
    ],
)
def test_a_damaged_chunk_is_data_loss_naming_it(damage, text):
    rows = some_rows(192)
    into = receiver(rows)
    first, second, _ = sent(rows)
    into.add(first)
    fields = {field.name: value for field, value in second.ListFields()}
    with pytest.raises(DataLoss, match=text):
        into.add(diffusion_pb2.RowChunk(**{**fields, **damage}))


@pytest.mark.parametrize("cut", [-2, 2], ids=["short", "long"])
def test_bytes_that_do_not_fill_the_rows_are_data_loss(cut):
    rows = some_rows(64)
    [chunk] = sent(rows)
    data = chunk.data[:cut] if cut < 0 else chunk.data + b"\0" * cut
    honest_crc = next(chunks(Rows(rows.ids, np.frombuffer(data, "<u2").reshape(1, -1), BF16), part=CONDITION)).crc32c
    broken = diffusion_pb2.RowChunk(part=CONDITION, token_ids=chunk.token_ids, data=data, crc32c=honest_crc)
    with pytest.raises(DataLoss, match=f"{len(data)} bytes for 64 rows of 48 bytes"):
        receiver(rows).add(broken)


def test_more_rows_than_announced_are_data_loss():
    with pytest.raises(DataLoss, match="leave the announced 10 rows"):
        assembler(header("rows", BF16, 10, WIDTH)).add(sent(some_rows(11))[0])


@pytest.mark.parametrize(
    ("num_rows", "sha256", "text"),
    [
        pytest.param(65, None, "130 rows announced, 130 received, 65 closed", id="count-disagrees"),
        pytest.param(130, bytes(32), "the digest of 130 rows does not match", id="digest-disagrees"),
    ],
)
def test_an_end_that_disagrees_is_data_loss(num_rows, sha256, text):
    rows = some_rows(130)
    into = receiver(rows)
    for chunk in sent(rows):
        into.add(chunk)
    with pytest.raises(DataLoss, match=text):
        into.finish(num_rows, sha256 or digest(rows))


def test_a_stream_that_ends_early_is_data_loss():
    rows = some_rows(130)
    into = receiver(rows)
    into.add(sent(rows)[0])
    with pytest.raises(DataLoss, match="130 rows announced, 64 received"):
        into.finish(130, digest(rows))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    "dtype", [types_pb2.DTYPE_FLOAT32, types_pb2.DTYPE_FLOAT16, BF16], ids=["float32", "float16", "bfloat16"]
)
def test_values_that_are_not_finite_are_refused(value, dtype):
    rows = some_rows(70, dtype)
    wide = np.float16(value).view("<u2") if dtype == types_pb2.DTYPE_FLOAT16 else np.float32(value).view("<u4")
    rows.bits[65, 3] = wide >> 16 if dtype == BF16 else wide
    first, second = sent(rows)
    into = receiver(rows)
    into.add(first)
    with pytest.raises(InvalidRequest, match="begin.rows: chunk 1 holds NaN or infinite values"):
        into.add(second)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        pytest.param({"dtype": 99}, "begin.rows.dtype", "allowed: float32, bfloat16, float16", id="unknown-dtype"),
        pytest.param({"dtype": 0}, "begin.rows.dtype", "0 is unknown", id="unset-dtype"),
        pytest.param({"shape": [10]}, "begin.rows.shape", "is not [rows, 24]", id="one-dimensional"),
        pytest.param({"shape": [10, 23]}, "begin.rows.shape", "is not [rows, 24]", id="other-width"),
        pytest.param({"shape": [-1, 24]}, "begin.rows.shape", "at most 10000 rows", id="negative"),
        pytest.param({"shape": [2**62, 24]}, "begin.rows.shape", "at most 10000 rows", id="overflow"),
        pytest.param({"shape": [10_001, 24]}, "begin.rows.shape", "at most 10000 rows", id="too-many-rows"),
        pytest.param({"total_bytes": 2**40}, "begin.rows.total_bytes", "needs 480, not", id="bytes-disagree"),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_anything_is_allocated(change, field, text):
    head = header("rows", BF16, 10, WIDTH)
    fields = {"name": head.name, "dtype": head.dtype, "shape": list(head.shape), "total_bytes": head.total_bytes}
    tracemalloc.start()
    with pytest.raises(InvalidRequest) as caught:
        assembler(types_pb2.TensorHeader(**{**fields, **change}))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.violations[0][0] == field
    assert text in caught.value.violations[0][1]
    assert peak_bytes < 2**20
