"""Do: prove that rows reach a DiT replica: stream a test tensor over the production path and compare digests."""

from __future__ import annotations

import time

import numpy as np

from mammoth_ar.admission import RowLayout
from mammoth_ar.conditioning import Scope
from mammoth_ar.handover import Replicas, RowLog
from mammoth_ar.settings import parse_targets
from mammoth_serving.config import ConfigError
from mammoth_wire.durations import duration
from mammoth_wire.errors import InvalidRequest
from mammoth_wire.tensors import Rows, header
from mammoth_wire.v1 import control_pb2, diffusion_pb2, types_pb2

__all__ = ["check_transport"]

NUM_ROWS = 130  # two whole chunks and a short one
ANSWER_START = 2
TIMEOUT_S = 10.0
PROBE_PX = 16


async def check_transport(address: str, layout: RowLayout, scope: Scope) -> control_pb2.CheckTransportResponse:
    """Stream test rows to `address` as a probe and report whether their digest came back.

    Raises the replica's typed error: Unavailable when nobody answers, ContractMismatch when it serves another model.
    """
    try:
        [target] = parse_targets(address)
    except (ConfigError, ValueError) as err:
        raise InvalidRequest([("address", f"{address!r:.80} is not HOST:PORT")]) from err
    log = _test_log(layout, scope)
    replicas = Replicas([target])
    began = time.perf_counter()
    try:
        events = [event async for event in replicas.denoise(log, timeout_s=TIMEOUT_S)]
    finally:
        await replicas.close()
    received = events[-1].drawn.rows_sha256 if events else ""
    return control_pb2.CheckTransportResponse(
        equal=received == log.sha256.hex(),
        sha256=received,
        total_bytes=log.begin.rows.total_bytes,
        elapsed=duration(time.perf_counter() - began),
    )


def _test_log(layout: RowLayout, scope: Scope) -> RowLog:
    """Return the closed log of rows that count up from 0, which is finite in every element type."""
    begin = diffusion_pb2.Begin(
        job_id=f"probe-{time.monotonic_ns()}",
        parameters=types_pb2.DiffusionParameters(height=PROBE_PX, width=PROBE_PX, steps=1, cfg_end=1.0),
        rows=header("rows", layout.dtype, NUM_ROWS, layout.width),
        answer_start_index=ANSWER_START,
        contract=layout.contract,
        probe=True,
    )
    log = RowLog(begin)
    bits = np.dtype("<u4" if layout.dtype == types_pb2.DTYPE_FLOAT32 else "<u2")
    values = (np.arange(NUM_ROWS * layout.width) % 0x3C00).astype(bits).reshape(NUM_ROWS, layout.width)
    log.append(
        diffusion_pb2.RowChunk.PART_CONDITION,
        Rows(np.full(NUM_ROWS, scope.visual_start, np.int32), values, layout.dtype),
    )
    log.close()
    return log
