"""Decide how fast the tensor codec is, alone and beside a plain copy of the same bytes in the same run.

`encode` cuts rows into messages with their crc32c; `decode` is the receiver's whole check (crc32c, finite, SHA-256) and copy
into place; `codec` is both; `digest` is the SHA-256 that the sender adds; `memcpy` is np.copyto.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mammoth_wire.tensors import Assembler, RowDigest, Rows, chunks, header
from mammoth_wire.v1.diffusion_pb2 import RowChunk

__all__ = ["rates"]


def rates(rows: Rows, *, warm_up: int, repeats: int) -> dict[str, list[float]]:
    """Return GB/s (10^9 payload bytes) of each part by name, a value a repeat, and `codec_to_memcpy`, a ratio of times."""
    measured = [_seconds(rows) for _ in range(warm_up + repeats)][warm_up:]
    giga = rows.bits.nbytes / 1e9
    found = {name: [giga / seconds[name] for seconds in measured] for name in measured[0]}
    found["codec_to_memcpy"] = [seconds["codec"] / seconds["memcpy"] for seconds in measured]
    return found


def _seconds(rows: Rows) -> dict[str, float]:
    """Time every part once."""
    num_rows, width = rows.bits.shape
    head = header("rows", rows.dtype, num_rows, width)
    target = np.zeros_like(rows.bits)
    messages: list[RowChunk] = []
    digest = RowDigest()

    def decode() -> None:
        assembler = Assembler(head, field="rows", part="condition", width=width, max_rows=num_rows)
        for message in messages:
            assembler.add(message)
        assembler.finish(num_rows, digest.digest())

    digest_s = _time(lambda: digest.update(rows))
    encode_s = _time(lambda: messages.extend(chunks(rows, part=RowChunk.PART_CONDITION)))
    decode_s = _time(decode)
    memcpy_s = _time(lambda: np.copyto(target, rows.bits))
    both_s = encode_s + decode_s
    return {
        "encode": encode_s, "decode": decode_s, "codec": both_s, "digest": digest_s, "codec_and_digest": both_s + digest_s,
        "memcpy": memcpy_s,
    }  # fmt: skip


def _time(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s
