"""Arriving and leaving: health says the truth at every moment, accepted calls finish, a dead engine ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mammoth_serving.config import ConfigError, ServingSettings
from mammoth_serving.control import ControlService, LiveLimits
from mammoth_serving.lifecycle import LIVENESS, Gate, serve
from mammoth_serving.served import ServedLog
from mammoth_serving.telemetry import Metrics
from mammoth_wire.errors import InvalidRequest, StaleEpoch, Unavailable, as_status, from_rpc_error
from mammoth_wire.v1 import control_pb2, control_pb2_grpc, diffusion_pb2, diffusion_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class SlowStage(diffusion_pb2_grpc.DiffusionServicer):
    """A stage whose loading, work and progress the test holds in its hands."""

    capacity = 8
    max_request_bytes = 2**20

    def __init__(self, gate: Gate) -> None:
        self.gate, self.metrics = gate, Metrics("dit")
        self.limits = LiveLimits(8, 20.0)
        self.served = ServedLog()
        self.loaded, self.released, self.crash = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.entered = asyncio.Event()
        self.stalled = 0.0
        self.runs = self.reads = False

    async def start(self):
        await self.loaded.wait()

    async def run(self):
        self.runs = True
        await self.crash.wait()
        raise RuntimeError("the device fell off the bus")

    def register(self, public, control):
        diffusion_pb2_grpc.add_DiffusionServicer_to_server(self, public)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(self, self.gate, self.metrics), control)
        return ["mammoth.v1.Diffusion"]

    def stalled_s(self):
        return self.stalled

    async def close(self):
        pass

    def state(self):
        return control_pb2.State(stage="dit", queue_depth=1)

    def apply_limits(self, limits):
        self.limits = limits

    async def profile(self, shape, batch_size, steps):
        return [1.0] * steps

    async def profile_rest(self, shape):
        return 1.0

    async def check_transport(self, address):
        return control_pb2.CheckTransportResponse(equal=True)

    async def Denoise(self, request_iterator, context):
        async with as_status(context):
            with self.gate.entered():
                self.entered.set()
                if self.reads:
                    await context.read()
                await self.released.wait()
                yield diffusion_pb2.DenoiseEvent(drawn=diffusion_pb2.Drawn(rgb_sha256="done"))


class Served:
    """A running `serve` and channels to its ports."""

    def __init__(self, stage, task, ports):
        self.stage, self.task, self.ports = stage, task, ports
        self.public = grpc.aio.insecure_channel(f"127.0.0.1:{ports['port']}")
        self.control = grpc.aio.insecure_channel(f"127.0.0.1:{ports['control_port']}")
        self.probes = grpc.aio.insecure_channel(f"127.0.0.1:{ports['health_port']}")
        self.commands = control_pb2_grpc.ControlStub(self.control)

    async def health(self, service=""):
        return (
            await health_pb2_grpc.HealthStub(self.probes).Check(health_pb2.HealthCheckRequest(service=service))
        ).status

    async def until(self, status, service=""):
        async with asyncio.timeout(10):
            while await self.health(service) != status:
                await asyncio.sleep(0.01)

    async def hung_up(self):
        """Wait until the open connection has been ended and the port takes no other one."""
        async with asyncio.timeout(10):
            await self.public.wait_for_state_change(grpc.ChannelConnectivity.READY)
            while accepts(self.ports["port"]):
                await asyncio.sleep(0.01)

    def call(self):
        return diffusion_pb2_grpc.DiffusionStub(self.public).Denoise(iter(()))

    async def load(self):
        self.stage.loaded.set()
        await self.until(SERVING)


def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture
def settings(tmp_path):
    return ServingSettings(
        model="m",
        port=0,
        control_port=0,
        health_port=0,
        metrics_port=0,
        ports_file=str(tmp_path / "ports"),
        drain_seconds=10,
    )


@asynccontextmanager
async def serving(settings):
    gate = Gate()
    stage = SlowStage(gate)
    task = asyncio.create_task(serve(stage, gate, settings))
    async with asyncio.timeout(10):
        while not os.path.exists(settings.ports_file):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.005)
    with open(settings.ports_file) as file:
        served = Served(stage, task, json.load(file))
    try:
        yield served
    finally:
        for channel in (served.public, served.control, served.probes):
            await channel.close()
        stage.released.set()
        task.cancel()  # a signal might be the second one, which ends the process and hides why the test failed
        await asyncio.gather(task, return_exceptions=True)


async def test_health_says_serving_only_after_loading_and_calls_before_it_are_told_to_retry(settings):
    async with serving(settings) as served:
        assert await served.health() == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.call().read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, Unavailable)
        assert "loading" in error.message
        assert error.retry_after_s == 1.0
        await served.load()


async def test_an_accepted_call_survives_sigterm_and_a_new_one_is_refused(settings):
    async with serving(settings) as served:
        await served.load()
        accepted = served.call()
        await served.stage.entered.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await served.hung_up()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(served.public).Check(health_pb2.HealthCheckRequest())
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        assert await served.health() == NOT_SERVING
        served.stage.released.set()
        assert (await accepted.read()).drawn.rgb_sha256 == "done"
        await served.task


async def test_a_drain_ends_idle_connections_so_that_clients_look_for_another_replica(settings):
    async with serving(settings) as served:
        await served.load()
        accepted = served.call()
        await served.stage.entered.wait()
        await served.commands.Drain(control_pb2.DrainRequest())
        await served.hung_up()
        served.stage.released.set()
        assert (await accepted.read()).drawn.rgb_sha256 == "done"


async def test_a_call_that_outlasts_the_drain_does_not_keep_the_process(settings):
    async with serving(replace(settings, drain_seconds=0.05)) as served:
        await served.load()
        call = served.call()
        await served.stage.entered.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await served.task
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()


async def test_a_dead_engine_ends_the_process_with_its_error(settings):
    async with serving(settings) as served:
        await served.load()
        served.stage.crash.set()
        with pytest.raises(RuntimeError, match="fell off the bus"):
            await served.task


async def test_a_stuck_engine_is_not_serving_until_it_moves_again(settings):
    async with serving(settings) as served:
        await served.load()
        served.stage.stalled = settings.stall_seconds + 1
        await served.until(NOT_SERVING)
        await served.until(NOT_SERVING, LIVENESS)
        served.stage.stalled = 0.0
        await served.until(SERVING)


@pytest.mark.parametrize("told", ["by a signal", "through Control"])
async def test_a_stage_that_loads_or_drains_is_alive(settings, told):
    async with serving(settings) as served:
        assert await served.health(LIVENESS) == SERVING
        await served.load()
        accepted = served.call()
        await served.stage.entered.wait()
        if told == "by a signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            await served.commands.Drain(control_pb2.DrainRequest())
        await served.until(NOT_SERVING)
        assert await served.health(LIVENESS) == SERVING
        served.stage.released.set()
        assert (await accepted.read()).drawn.rgb_sha256 == "done"
        if told == "by a signal":
            await served.task


async def test_a_stage_that_is_stuck_in_its_drain_is_dead(settings):
    async with serving(settings) as served:
        await served.load()
        await served.commands.Drain(control_pb2.DrainRequest())
        await served.until(NOT_SERVING)
        served.stage.stalled = settings.stall_seconds + 1
        await served.until(NOT_SERVING, LIVENESS)
        served.stage.stalled = 0.0
        await served.until(SERVING, LIVENESS)
        assert await served.health() == NOT_SERVING


async def test_a_failed_start_ends_the_process(settings):
    class Broken(SlowStage):
        async def start(self):
            raise ValueError("no such checkpoint")

    gate = Gate()
    with pytest.raises(ValueError, match="no such checkpoint"):
        await serve(Broken(gate), gate, settings)


@pytest.mark.parametrize("name", ["port", "control_port", "health_port", "metrics_port"])
async def test_a_taken_port_is_named(settings, name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gate = Gate()
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
            await serve(SlowStage(gate), gate, replace(settings, **{name: taken.getsockname()[1]}))


async def test_limits_change_live_under_an_epoch_that_only_rises(settings):
    async with serving(settings) as served:
        await served.load()
        reply = await served.commands.SetLimits(control_pb2.SetLimitsRequest(epoch=3, max_num_seqs=2))
        assert (reply.epoch, reply.limits.max_num_seqs, reply.limits.request_batch_max_wait_ms) == (3, 2, 20.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.commands.SetLimits(control_pb2.SetLimitsRequest(epoch=2, max_num_seqs=8))
        error = from_rpc_error(caught.value)
        assert isinstance(error, StaleEpoch)
        assert error.metadata["epoch"] == "3"
        state = await served.commands.GetState(control_pb2.GetStateRequest())
        assert (state.epoch, state.limits.max_num_seqs, state.capacity, state.serving) == (3, 2, 8, True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"max_num_seqs": 0}, "max_num_seqs: 0 is not from 1 to the capacity 8", id="zero"),
        pytest.param({"max_num_seqs": 9}, "max_num_seqs: 9 is not from 1 to the capacity 8", id="above-capacity"),
        pytest.param({"request_batch_max_wait_ms": -1.0}, "-1.0 is not from 0 to 10000 ms", id="negative-wait"),
        pytest.param({"request_batch_max_wait_ms": float("nan")}, "nan is not from 0 to 10000 ms", id="nan-wait"),
    ],
)
async def test_limits_outside_their_range_are_refused_and_change_nothing(settings, fields, text):
    async with serving(settings) as served:
        await served.load()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.commands.SetLimits(control_pb2.SetLimitsRequest(epoch=1, **fields))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert text in error.message
        state = await served.commands.GetState(control_pb2.GetStateRequest())
        assert (state.epoch, state.limits.max_num_seqs) == (0, 8)


async def test_drain_by_control_refuses_new_work_and_stays_up(settings):
    async with serving(settings) as served:
        await served.load()
        call = served.call()
        await served.stage.entered.wait()
        reply = await served.commands.Drain(control_pb2.DrainRequest())
        assert (reply.in_flight, reply.queue_depth) == (1, 1)
        await served.until(NOT_SERVING)
        served.stage.released.set()
        assert (await call.read()).drawn.rgb_sha256 == "done"
        assert (await served.commands.GetState(control_pb2.GetStateRequest())).draining


async def test_other_limits_need_a_higher_epoch_and_a_repeat_is_welcome(settings):
    async with serving(settings) as served:
        await served.load()
        for _ in range(2):
            await served.commands.SetLimits(control_pb2.SetLimitsRequest(epoch=1, max_num_seqs=2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.commands.SetLimits(control_pb2.SetLimitsRequest(epoch=1, max_num_seqs=3))
        assert isinstance(from_rpc_error(caught.value), StaleEpoch)


async def test_control_before_loading_says_so_and_a_drain_then_holds(settings):
    async with serving(settings) as served:
        profile = served.commands.Profile(control_pb2.ProfileRequest(shapes=[control_pb2.Shape(height=16, width=16)]))
        for call in (profile, served.commands.CheckTransport(control_pb2.CheckTransportRequest(address="x:1"))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert isinstance(from_rpc_error(caught.value), Unavailable)
        await served.commands.Drain(control_pb2.DrainRequest())
        served.stage.loaded.set()
        async with asyncio.timeout(10):
            while not served.stage.runs:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert await served.health() == NOT_SERVING


async def test_a_message_beyond_the_stage_s_limit_is_refused(settings):
    async with serving(settings) as served:
        await served.load()
        served.stage.reads = True
        begin = diffusion_pb2.Begin(job_id="x" * (SlowStage.max_request_bytes + 1))
        request = iter([diffusion_pb2.DenoiseRequest(begin=begin)])
        with pytest.raises(grpc.aio.AioRpcError):
            await diffusion_pb2_grpc.DiffusionStub(served.public).Denoise(request).read()


async def test_reflection_lists_the_services_when_it_is_on(settings):
    async with serving(replace(settings, reflection=True)) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.public)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert names >= {"mammoth.v1.Diffusion", "grpc.health.v1.Health"}


@pytest.mark.parametrize("kind", ["pipe", "file"])
async def test_a_parent_that_is_gone_stops_the_stage_and_a_file_is_no_parent(settings, monkeypatch, tmp_path, kind):
    (tmp_path / "stdin").write_text("")
    read, write = os.pipe()
    source = os.fdopen(read) if kind == "pipe" else (tmp_path / "stdin").open()
    monkeypatch.setattr("sys.stdin", source)
    gate = Gate()
    stage = SlowStage(gate)
    task = asyncio.create_task(serve(stage, gate, replace(settings, stop_with_stdin=True)))
    if kind == "pipe":
        await asyncio.sleep(0.2)
        assert not task.done()
        os.close(write)
        await asyncio.wait_for(task, 10)
    else:
        os.close(write)
        with pytest.raises(ConfigError, match="--stop-with-stdin: standard input is not a pipe"):
            await task
        os.close(read)
    source.close()


async def test_metrics_are_served_with_the_limits_in_force(settings):
    async with serving(settings) as served:
        await served.load()
        await served.commands.SetLimits(control_pb2.SetLimitsRequest(epoch=5, request_batch_max_wait_ms=7.5))
        url = f"http://127.0.0.1:{served.ports['metrics_port']}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
        assert 'mammoth_limit{knob="request_batch_max_wait_ms",stage="dit"} 7.5' in text
        assert 'mammoth_tuning_epoch{stage="dit"} 5.0' in text
