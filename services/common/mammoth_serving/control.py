"""Translate: the Control service of both stages. What differs between them comes in as a `Controlled`."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from mammoth_serving.lifecycle import Gate
from mammoth_serving.served import ServedLog
from mammoth_serving.telemetry import Metrics
from mammoth_wire.errors import InvalidRequest, StaleEpoch, Unavailable, as_status
from mammoth_wire.v1 import control_pb2, control_pb2_grpc

__all__ = ["ControlService", "Controlled", "LiveLimits", "rest_ms"]

MAX_WAIT_MS = 10_000.0
MAX_MEASUREMENTS = 64
MAX_PROFILE_STEPS = 32
DEFAULT_PROFILE_STEPS = 3
NUM_RESTS, LEAST_MS = 3, 0.01

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveLimits:
    """The caps in force. `wait_ms` is None where a stage has no waiting window."""

    max_num_seqs: int
    wait_ms: float | None = None

    def message(self) -> control_pb2.Limits:
        return control_pb2.Limits(max_num_seqs=self.max_num_seqs, request_batch_max_wait_ms=self.wait_ms)


def updated(limits: LiveLimits, request: control_pb2.SetLimitsRequest, *, capacity: int) -> LiveLimits:
    """Return `limits` with what `request` sets. Raises InvalidRequest naming the field and its range."""
    violations = []
    seqs, wait_ms = limits.max_num_seqs, limits.wait_ms
    if request.HasField("max_num_seqs"):
        seqs = request.max_num_seqs
        if not 1 <= seqs <= capacity:
            violations.append(("max_num_seqs", f"{seqs} is not from 1 to the capacity {capacity}"))
    if request.HasField("request_batch_max_wait_ms"):
        wait_ms = request.request_batch_max_wait_ms
        if limits.wait_ms is None:
            violations.append(("request_batch_max_wait_ms", "this stage has no waiting window"))
        elif not (math.isfinite(wait_ms) and 0 <= wait_ms <= MAX_WAIT_MS):
            violations.append(("request_batch_max_wait_ms", f"{wait_ms} is not from 0 to {MAX_WAIT_MS:g} ms"))
    if violations:
        raise InvalidRequest(violations)
    return LiveLimits(seqs, wait_ms)


def check_profile(num_shapes: int, batch_sizes: Sequence[int], steps: int, *, capacity: int) -> None:
    """Raise InvalidRequest, naming the field and its range, for a profile that would take too long or cannot be."""
    violations = []
    if not 1 <= num_shapes * len(batch_sizes) <= MAX_MEASUREMENTS:
        text = f"{num_shapes} shapes x {len(batch_sizes)} batch sizes: 1 to {MAX_MEASUREMENTS} measurements"
        violations.append(("shapes", text))
    if outside := [size for size in batch_sizes if not 1 <= size <= capacity]:
        violations.append(("batch_sizes", f"{outside[0]} is not from 1 to the capacity {capacity}"))
    if not 1 <= steps <= MAX_PROFILE_STEPS:
        violations.append(("steps", f"{steps} is not from 1 to {MAX_PROFILE_STEPS}"))
    if violations:
        raise InvalidRequest(violations)


class Controlled(Protocol):
    """A stage as the operator sees it."""

    capacity: int
    limits: LiveLimits
    served: ServedLog

    def state(self) -> control_pb2.State:
        """Return everything but limits, epoch and gate."""

    def apply_limits(self, limits: LiveLimits) -> None:
        """Put `limits` in force at the next step boundary."""

    async def profile(self, shape: tuple[int, int], batch_size: int, steps: int) -> Sequence[float]:
        """Measure `steps` steps of synthetic work and return the milliseconds of each."""

    async def profile_rest(self, shape: tuple[int, int]) -> float:
        """Measure what a picture of `shape` takes beside its steps, in milliseconds."""

    async def check_transport(self, address: str) -> control_pb2.CheckTransportResponse:
        """Send a test tensor to `address` the way rows travel."""


async def rest_ms(read: Callable[[], Awaitable[float]]) -> float:
    """Return the median of a few readings of what a picture takes beside its steps, in milliseconds.

    It is never 0, which would say "not measured".
    """
    return max(statistics.median([await read() for _ in range(NUM_RESTS)]), LEAST_MS)


class ControlService(control_pb2_grpc.ControlServicer):
    """Owns the epoch of the live limits. Other limits need a higher epoch; what is in force may be repeated."""

    def __init__(self, stage: Controlled, gate: Gate, metrics: Metrics) -> None:
        self._stage, self._gate, self._metrics = stage, gate, metrics
        self._epoch = 0
        self._show()

    async def GetState(
        self, request: control_pb2.GetStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.State:
        async with as_status(context):
            state = self._stage.state()
            state.capacity, state.epoch = self._stage.capacity, self._epoch
            state.limits.CopyFrom(self._stage.limits.message())
            state.serving, state.draining = self._gate.is_open, self._gate.is_draining
            self._stage.served.report(state, after=request.served_after)
        return state

    async def SetLimits(
        self, request: control_pb2.SetLimitsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.SetLimitsResponse:
        async with as_status(context):
            limits = updated(self._stage.limits, request, capacity=self._stage.capacity)
            if request.epoch < self._epoch or (request.epoch == self._epoch and limits != self._stage.limits):
                raise StaleEpoch(f"epoch {request.epoch} does not come after {self._epoch}", epoch=str(self._epoch))
            self._stage.apply_limits(limits)
            self._epoch = request.epoch
            self._show()
            logger.info(
                "limits", extra={"epoch": self._epoch, "max_num_seqs": limits.max_num_seqs, "wait_ms": limits.wait_ms}
            )
        return control_pb2.SetLimitsResponse(epoch=self._epoch, limits=limits.message())

    async def Drain(
        self, request: control_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.DrainResponse:
        async with as_status(context):
            self._gate.drain()
            state = self._stage.state()
        return control_pb2.DrainResponse(in_flight=self._gate.num_inside, queue_depth=state.queue_depth)

    async def Profile(
        self, request: control_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.ProfileResponse:
        async with as_status(context):
            self._require_loaded()
            sizes, steps = list(request.batch_sizes) or [1], request.steps or DEFAULT_PROFILE_STEPS
            check_profile(len(request.shapes), sizes, steps, capacity=self._stage.capacity)
            response = control_pb2.ProfileResponse(environment=self._stage.state().environment)
            for shape, batch_size in itertools.product(request.shapes, sizes):
                if self._gate.is_draining:
                    raise Unavailable("draining")
                size = (shape.height, shape.width)
                step_ms = await self._stage.profile(size, batch_size, steps)
                rest_ms = await self._stage.profile_rest(size) if batch_size == 1 else 0.0
                response.measurements.add(shape=shape, batch_size=batch_size, step_ms=step_ms, rest_ms=rest_ms)
        return response

    async def CheckTransport(
        self, request: control_pb2.CheckTransportRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> control_pb2.CheckTransportResponse:
        async with as_status(context):
            self._require_loaded()
            return await self._stage.check_transport(request.address)

    def _require_loaded(self) -> None:
        if not (self._gate.is_open or self._gate.is_draining):
            raise Unavailable("loading the model", retry_after_s=1.0)

    def _show(self) -> None:
        limits = self._stage.limits
        self._metrics.tuning_epoch.set(self._epoch)
        self._metrics.limit("max_num_seqs").set(limits.max_num_seqs)
        if limits.wait_ms is not None:
            self._metrics.limit("request_batch_max_wait_ms").set(limits.wait_ms)
