"""Do: what every call of both services has in common: its place inside the gate, its deadline, its count in the metrics."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from mammoth_serving.lifecycle import Gate
from mammoth_serving.telemetry import Metrics
from mammoth_wire.errors import DeadlineExceeded, InvalidRequest, MammothError, as_status

__all__ = ["Call", "accounted", "beating", "budget_s"]

DEFAULT_BUDGET_S = 600.0
MAX_BUDGET_S = 3600.0
HEARTBEAT_S = 5.0
T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """One call in progress. `deadline_at` is event-loop time; `shape_class` labels its duration once it is known."""

    deadline_at: float
    shape_class: str = "unknown"

    @property
    def remaining_s(self) -> float:
        return self.deadline_at - asyncio.get_running_loop().time()


def budget_s(remaining_s: float | None) -> float:
    """Return the seconds that a call may take, given what its deadline leaves (None: the caller set none).

    Raises DeadlineExceeded when nothing is left, InvalidRequest when it is more than an hour.
    """
    if remaining_s is None or math.isinf(remaining_s):
        return DEFAULT_BUDGET_S
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline had passed on arrival", stage="admission")
    if remaining_s > MAX_BUDGET_S * 1.01:  # the transport rounds deadlines up
        raise InvalidRequest([("deadline", f"{remaining_s:.0f} s; at most {MAX_BUDGET_S:.0f} s")])
    return remaining_s


@asynccontextmanager
async def accounted(context: grpc.aio.ServicerContext[Any, Any], gate: Gate, metrics: Metrics) -> AsyncIterator[Call]:
    """Hold a call's place in the gate, end it with the status of its error, and count it by status and duration.

    Raises what `as_status` raises; leaving the block by cancellation counts as CANCELLED.
    """
    started = time.perf_counter()
    call = Call(math.inf)
    code = "INTERNAL"
    metrics.requests_in_flight.inc()
    try:
        async with as_status(context):
            try:
                with gate.entered():
                    call.deadline_at = asyncio.get_running_loop().time() + budget_s(context.time_remaining())
                    yield call
                    code = "OK"
            except MammothError as err:
                code = err.status.name
                raise
            except asyncio.CancelledError:
                code = "CANCELLED"
                metrics.cancelled.inc()
                raise
    finally:
        metrics.requests_in_flight.dec()
        metrics.requests(code).inc()
        metrics.request_duration(call.shape_class).observe(time.perf_counter() - started)


async def beating(events: AsyncIterator[T], period_s: float = HEARTBEAT_S) -> AsyncGenerator[T | None, None]:
    """Yield the events, and None whenever `period_s` pass without one."""
    upcoming: asyncio.Task[T] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((upcoming,), timeout=period_s)
            if not done:
                yield None
                continue
            try:
                event = upcoming.result()
            except StopAsyncIteration:
                return
            upcoming = None
            yield event
    finally:
        if upcoming is not None:
            upcoming.cancel()
