"""Do: own the channels to the pods' Control service. A pod that does not answer costs a short wait, never a failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

import grpc
import grpc.aio

from mammoth_operator.names import CONTROL_PORT, GRPC_PORT
from mammoth_operator.observed import Child
from mammoth_operator.reports import Load, Transport
from mammoth_operator.tuning.probing import Point, Probe
from mammoth_wire.errors import DeadlineExceeded, InvalidRequest, ShapeTooLarge, from_rpc_error
from mammoth_wire.v1 import control_pb2, control_pb2_grpc

__all__ = ["Control"]

T = TypeVar("T")
ANSWER_S, TRANSPORT_S, PROFILE_S = 2.0, 12.0, 120.0
SILENT_S = 5.0  # a pod that gave no answer is not asked again for so long
MAX_CHANNELS_IDLE_S = 120.0

logger = logging.getLogger(__name__)


class Control:
    """Calls pods by address. Channels are kept while they are used."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[grpc.aio.Channel, float]] = {}
        self._silent: dict[str, float] = {}

    async def loads(self, pods: Iterable[Child], after: Mapping[str, int] | None = None) -> dict[str, Load]:
        """Return what each pod says of itself, by uid; those that do not answer are left out.

        `after` has, by uid, the sequence number of the last picture that is known of a pod.
        """
        pods, known = list(pods), after or {}
        answers = await asyncio.gather(*(self._load(pod, known.get(pod.uid, 0)) for pod in pods))
        self._forget_idle()
        return {pod.uid: load for pod, load in zip(pods, answers, strict=True) if load is not None}

    async def set_limits(self, pod: Child, epoch: int, max_num_seqs: int, wait_ms: float | None) -> bool:
        """Put caps in force in a pod; return whether it agreed."""
        request = control_pb2.SetLimitsRequest(epoch=epoch, max_num_seqs=max_num_seqs, request_batch_max_wait_ms=wait_ms)  # fmt: skip
        return await self._answer(pod, self._stub(pod).SetLimits(request, timeout=ANSWER_S)) is not None

    async def drain(self, pod: Child) -> bool:
        """Tell a pod to refuse new work for good; return whether it agreed."""
        return await self._answer(pod, self._stub(pod).Drain(control_pb2.DrainRequest(), timeout=ANSWER_S)) is not None

    async def check_transport(self, revision: str, ar: Child, dit: Child) -> Transport:
        """Have `ar` send a test tensor to `dit`."""
        assert dit.pod is not None
        request = control_pb2.CheckTransportRequest(address=f"{_host(dit.pod.ip)}:{GRPC_PORT}")
        try:
            answer = await self._stub(ar).CheckTransport(request, timeout=TRANSPORT_S)
        except grpc.aio.AioRpcError as err:
            reason = "VersionMismatch" if err.code() is grpc.StatusCode.FAILED_PRECONDITION else "Unreachable"
            return Transport(revision, False, reason, f"{ar.name} to {dit.name}: {err.details()}")
        if not answer.equal:
            return Transport(revision, False, "Unreachable", f"{ar.name} to {dit.name}: the rows arrived changed")
        return Transport(revision, True)

    async def close(self) -> None:
        for channel, _ in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def profile(self, pod: Child, probe: Probe) -> Point:
        """Have a pod measure itself. What it can never do is `refused`; raises MammothError when it cannot now."""
        height, width = probe.shape
        request = control_pb2.ProfileRequest(
            shapes=[control_pb2.Shape(height=height, width=width)],
            batch_sizes=[probe.batch_size],
            steps=probe.num_steps,
        )
        try:
            answer = await self._stub(pod).Profile(request, timeout=PROFILE_S)
        except grpc.aio.AioRpcError as err:
            error = from_rpc_error(err)
            if isinstance(
                error, InvalidRequest | ShapeTooLarge | DeadlineExceeded
            ):  # what takes so long is not asked for again
                return Point(refused=error.message)
            raise error from err
        [measured] = answer.measurements
        return Point(tuple(measured.step_ms), measured.rest_ms)

    async def _load(self, pod: Child, after: int) -> Load | None:
        if time.monotonic() - self._silent.get(pod.uid, -SILENT_S) < SILENT_S:
            return None
        state = await self._answer(
            pod, self._stub(pod).GetState(control_pb2.GetStateRequest(served_after=after), timeout=ANSWER_S)
        )
        if state is None:
            self._silent[pod.uid] = time.monotonic()
            return None
        return _load_of(state)

    async def _answer(self, pod: Child, call: Awaitable[T]) -> T | None:
        try:
            return await call
        except grpc.aio.AioRpcError as err:
            logger.debug(
                "a pod did not answer", extra={"pod": pod.name, "code": err.code().name, "error": err.details()}
            )
            return None

    def _stub(self, pod: Child) -> control_pb2_grpc.ControlAsyncStub:
        assert pod.pod is not None
        address = f"{_host(pod.pod.ip)}:{CONTROL_PORT}"
        channel, _ = self._channels.get(address, (None, 0.0))
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
        self._channels[address] = (channel, time.monotonic())
        return control_pb2_grpc.ControlStub(channel)

    def _forget_idle(self) -> None:
        limit = time.monotonic() - MAX_CHANNELS_IDLE_S
        for address in [address for address, (_, used) in self._channels.items() if used < limit]:
            channel, _ = self._channels.pop(address)
            asyncio.get_running_loop().create_task(channel.close())
        self._silent = {uid: since for uid, since in self._silent.items() if since >= limit}


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _load_of(state: control_pb2.State) -> Load:
    has_wait = state.limits.HasField("request_batch_max_wait_ms")
    return Load(
        in_flight=state.in_flight,
        queue_depth=state.queue_depth,
        epoch=state.epoch,
        max_num_seqs=state.limits.max_num_seqs,
        wait_ms=state.limits.request_batch_max_wait_ms if has_wait else None,
        serving=state.serving,
        capacity=state.capacity,
        model_digest=state.model_digest,
        instance=state.instance,
        served=tuple(state.served),
        served_total=state.served_total,
        hardware=state.environment.device,
        versions=_versions(state),
        rows_alone=state.environment.row_bucket == 1,
        default_size=_size(state.settings.get("default_size", "")),
    )


def _versions(state: control_pb2.State) -> str:
    """Return what besides the hardware decides how fast a pod is."""
    versions = ", ".join(f"{name} {number}" for name, number in sorted(state.environment.versions.items()))
    return f"{state.environment.kernels}, {state.environment.dtype}, {versions}, model {state.model_digest[:12]}"


def _size(text: str) -> tuple[int, int] | None:
    height, _, width = text.partition("x")
    return (int(height), int(width)) if height.isdecimal() and width.isdecimal() and int(height) > 0 else None
