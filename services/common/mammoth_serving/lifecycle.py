"""Do: bind, load, serve, drain, stop. The order of arriving and of leaving is the whole point.

A stage brings its services and its work; this module owns ports, health, signals and the gate in front of the services.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

import grpc.aio
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mammoth_serving.config import ConfigError, ServingSettings
from mammoth_serving.telemetry import Metrics, serve_metrics
from mammoth_wire.errors import Unavailable

__all__ = ["LIVENESS", "Gate", "Ports", "Stage", "serve"]

LIVENESS = "liveness"  # the health service that a liveness probe names; the empty name is readiness
WATCH_PERIOD_S = 1.0
LONGEST_DRAIN_S = 3600.0  # a call may take as long; how long to wait for it is decided elsewhere
MAX_CONTROL_BYTES = 64 * 2**10
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a shared port
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 15 * 60_000),
)

logger = logging.getLogger(__name__)


class Gate:
    """Counts the calls inside, and says why nobody may enter: loading, draining, dead."""

    def __init__(self) -> None:
        self._closed: str | None = "loading the model"
        self._draining = asyncio.Event()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_inside(self) -> int:
        return self._inside

    @property
    def is_open(self) -> bool:
        return self._closed is None

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def open(self) -> None:
        """Let calls in, unless a drain has begun."""
        if not self.is_draining:
            self._closed = None

    def drain(self) -> None:
        """Refuse new calls for good; those inside go on."""
        self._draining.set()
        self._closed = "draining"

    def close(self, why: str) -> None:
        self._closed = why

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold a place for one call. Raises Unavailable while the gate is closed."""
        if self._closed is not None:
            raise Unavailable(f"not serving: {self._closed}", retry_after_s=1.0)
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def draining(self) -> None:
        """Wait until a drain has begun."""
        await self._draining.wait()

    async def emptied(self) -> None:
        """Wait until no call is inside."""
        await self._empty.wait()


class Stage(Protocol):
    """What a stage brings to `serve`."""

    metrics: Metrics
    max_request_bytes: int  # the largest message that the public port accepts

    async def start(self) -> None:
        """Load and warm up; raise when that fails."""

    async def run(self) -> None:
        """Work until cancelled. Returning or raising means that the engine is dead."""

    def register(self, public: grpc.aio.Server, control: grpc.aio.Server) -> list[str]:
        """Add the services to the two servers and return their full names, for health and reflection."""

    def stalled_s(self) -> float:
        """Return for how long work has been waiting without any progress."""

    async def close(self) -> None:
        """Free what `start` took."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that were bound; keys of the ports file."""

    port: int
    control_port: int
    health_port: int
    metrics_port: int

    def write(self, path: Path) -> None:
        """Write the ports as JSON, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({name: getattr(self, name) for name in self.__slots__}) + "\n")
        partial.replace(path)


async def serve(stage: Stage, gate: Gate, settings: ServingSettings) -> None:
    """Run `stage` until SIGTERM or SIGINT: bind, load, SERVING, drain within `drain_seconds`, stop.

    Raises ConfigError when a port is taken, and whatever the stage raises: a dead engine ends the process. A second
    signal exits at once.
    """
    health = grpc_health.aio.HealthServicer()
    public, control, probes = (
        grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", size)))
        for size in (stage.max_request_bytes, MAX_CONTROL_BYTES, MAX_CONTROL_BYTES)
    )
    names = stage.register(public, control)
    for server in (public, probes):
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if settings.reflection:
        reflection.enable_server_reflection((*names, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME), public)
    beacon = Beacon(health, names, stage, gate, settings.stall_seconds)
    await beacon.show(stalled=False)
    ports, metrics_server = _bind(settings, stage.metrics, public, control, probes)
    stop = _signals()
    leaving = asyncio.create_task(_hang_up(public, gate), name="leaving")
    try:
        if settings.stop_with_stdin:
            _stop_with_stdin(stop)
        for server in (probes, control, public):
            await server.start()
        if settings.ports_file:
            ports.write(Path(settings.ports_file))
        logger.info("listening", extra={name: getattr(ports, name) for name in ports.__slots__})
        await _serve_until(stop, stage, gate, beacon, settings.drain_seconds)
    finally:
        leaving.cancel()
        await asyncio.gather(*(server.stop(None) for server in (public, control, probes)))
        await asyncio.to_thread(metrics_server.shutdown)
        metrics_server.server_close()
        await stage.close()
    logger.info("stopped")


async def _serve_until(stop: asyncio.Event, stage: Stage, gate: Gate, beacon: Beacon, drain_s: float) -> None:
    """Load, serve with an open gate until `stop`, then wait for the accepted calls; raise when the engine dies."""
    stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    start = asyncio.create_task(stage.start(), name="start")
    vital = [start]
    try:
        await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            gc.collect()
            gc.freeze()  # what loading left lives as long as the process: no collection need walk it in mid-stream
            vital = [asyncio.create_task(stage.run(), name="engine"), asyncio.create_task(beacon.watch(), name="watch")]
            gate.open()
            await beacon.show(stalled=False)
            logger.info("serving")
            await asyncio.wait((*vital, stopped), return_when=asyncio.FIRST_COMPLETED)
            gate.drain()
            await beacon.show(stalled=False)
            logger.info("draining", extra={"in_flight": gate.num_inside})
            emptied = asyncio.create_task(gate.emptied())
            await asyncio.wait((*vital, emptied), return_when=asyncio.FIRST_COMPLETED, timeout=drain_s)
            emptied.cancel()
            if gate.num_inside:
                logger.warning("calls are cut off", extra={"in_flight": gate.num_inside, "drain_seconds": drain_s})
            for task in vital:
                if task.done():
                    task.result()
                    raise RuntimeError(f"the {task.get_name()} task ended by itself")
    finally:
        gate.close("the engine has stopped")
        for task in (*vital, stopped):
            task.cancel()
        await asyncio.gather(*vital, stopped, return_exceptions=True)


async def _hang_up(public: grpc.aio.Server, gate: Gate) -> None:
    """Once a drain has begun, take no new connection or call and say so on the open ones; what is inside goes on.

    A connection outlives its place behind a load balancer: a client that was only refused would ask the same replica again.
    """
    await gate.draining()
    await public.stop(LONGEST_DRAIN_S)


class Beacon:
    """Tells health checks two things apart: whether to come here, and whether the process is worth keeping.

    The empty name and the services are SERVING while the gate is open and the engine makes progress. `LIVENESS` is
    SERVING while it makes progress, so that a stage that loads or drains is left alone for as long as that takes.
    """

    def __init__(
        self, health: grpc_health.aio.HealthServicer, names: list[str], stage: Stage, gate: Gate, stall_s: float
    ) -> None:
        self._health, self._names, self._stage, self._gate, self._stall_s = health, ["", *names], stage, gate, stall_s
        self._shown: dict[str, bool] = {}

    async def show(self, *, stalled: bool) -> None:
        """Say what is true now: `stalled` of the engine, and whether the gate is open."""
        await self._set(LIVENESS, not stalled)
        for name in self._names:
            await self._set(name, self._gate.is_open and not stalled)

    async def watch(self) -> None:
        """Turn a stuck engine into NOT_SERVING, so that the liveness probe ends it, in a drain too."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            stalled_s = self._stage.stalled_s()
            stalled = stalled_s > self._stall_s
            if stalled and self._shown[LIVENESS]:
                logger.error("no progress with work waiting", extra={"stalled_s": round(stalled_s, 1)})
            await self.show(stalled=stalled)

    async def _set(self, name: str, serving: bool) -> None:
        if self._shown.get(name) != serving:
            self._shown[name] = serving
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(name, status)


def _bind(
    settings: ServingSettings,
    metrics: Metrics,
    public: grpc.aio.Server,
    control: grpc.aio.Server,
    probes: grpc.aio.Server,
) -> tuple[Ports, WSGIServer]:
    """Bind every port, or raise ConfigError naming the one that is taken."""

    def bound(server: grpc.aio.Server, name: str) -> int:
        port = getattr(settings, name)
        try:
            return server.add_insecure_port(f"{settings.host}:{port}")
        except RuntimeError as err:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {settings.host}:{port} is taken or not an address of this machine"
            ) from err

    port, control_port, health_port = (
        bound(server, name) for server, name in ((public, "port"), (control, "control_port"), (probes, "health_port"))
    )
    try:
        server = serve_metrics(metrics, settings.host, settings.metrics_port)
    except OSError as err:
        raise ConfigError(f"--metrics-port: {settings.host}:{settings.metrics_port}: {err.strerror}") from err
    return Ports(port, control_port, health_port, server.server_port), server


def _stop_with_stdin(stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends: whoever started us is gone, however it went."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop.set()

    try:
        loop.add_reader(stdin, on_readable)
    except PermissionError as err:  # a file or /dev/null is never waited for
        raise ConfigError("--stop-with-stdin: standard input is not a pipe, socket or terminal") from err


def _signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            logger.error("second signal: leaving at once")
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop
