"""What the real stages tell the operator: pictures that ended, what they run on, what a picture takes beside its steps."""

from __future__ import annotations

import math
import time

import pytest

from mammoth_client import AsyncClient
from mammoth_operator.control import _load_of
from mammoth_operator.tuning.observing import sample_of
from mammoth_serving.served import MAX_KEPT, ServedLog
from mammoth_wire.v1 import control_pb2, control_pb2_grpc

SMALL = {"height": 32, "width": 32, "steps": 2, "ar_height": 2, "ar_width": 2}


async def test_a_picture_is_told_of_with_its_times_in_order(ar, dit):
    control = control_pb2_grpc.ControlStub(ar.control)
    async with AsyncClient(ar.address) as client:
        [picture] = await client.generate("a mammoth", seed=1, **SMALL)
        await client.generate("a mammoth", seed=2, **SMALL)
    state = await control.GetState(control_pb2.GetStateRequest())
    assert [told.sequence for told in state.served] == [1, 2]
    first = sample_of(state.served[0], now_s=time.time())
    assert first.key == (32, 32, 2)
    assert first.ask.num_tokens == 2 * 3
    assert first.ask.at_s <= first.joined_s <= first.ready_s <= first.started_s <= first.done_s
    assert first.wave_size == 1
    assert first.denoise_s == pytest.approx(picture.times.denoise_s)
    assert not first.failed
    newer = await control.GetState(control_pb2.GetStateRequest(served_after=1))
    assert [told.sequence for told in newer.served] == [2]
    assert newer.instance == state.instance


async def test_the_estimate_of_an_order_is_compared_with_its_end(ar):
    """Nothing was measured when the first was asked for, so that it has none."""

    def compared() -> float | None:
        return ar.stage.metrics.registry.get_sample_value("mammoth_eta_error_seconds_count", {"stage": "ar"})

    async with AsyncClient(ar.address) as client:
        await client.generate("a mammoth", seed=1, **SMALL)
        assert compared() == 0
        await client.generate("a mammoth", seed=2, **SMALL)
    assert compared() == 1
    assert ar.stage.metrics.registry.get_sample_value("mammoth_eta_error_seconds_sum", {"stage": "ar"}) > 0


async def test_a_picture_that_fails_is_told_of_as_failed(serve_ar, serve_dit):
    async with serve_dit() as dit, serve_ar(dit.address) as ar, AsyncClient(ar.address) as client:
        dit.gate.drain()
        with pytest.raises(Exception, match=r".+"):
            await client.generate("a mammoth", timeout_s=2.0, **SMALL)
        state = await control_pb2_grpc.ControlStub(ar.control).GetState(control_pb2.GetStateRequest())
        assert all(told.failed for told in state.served)


async def test_both_stages_say_what_they_run_on(ar, dit):
    loads = [
        _load_of(await control_pb2_grpc.ControlStub(each.control).GetState(control_pb2.GetStateRequest()))
        for each in (ar, dit)
    ]
    assert all(load.hardware and "torch" in load.versions for load in loads)
    assert loads[1].default_size is not None
    assert loads[0].default_size is None
    assert loads[1].rows_alone


@pytest.mark.parametrize("stage", ["ar", "dit"])
async def test_a_profile_says_what_a_picture_takes_beside_its_steps(request, ar, dit, stage):
    control = control_pb2_grpc.ControlStub({"ar": ar, "dit": dit}[stage].control)
    shape = control_pb2.Shape(height=32, width=32)
    reply = await control.Profile(control_pb2.ProfileRequest(shapes=[shape], batch_sizes=[1, 2], steps=2))
    assert [0 < row.rest_ms < math.inf for row in reply.measurements] == [True, False]


async def test_reading_the_rest_of_a_picture_warms_nothing_up_again(dit, monkeypatch):
    """Warming up a fast engine measures unit sizes, which takes far longer than a picture and is none of its time."""

    def warm_up(sizes_px):
        raise AssertionError("a profile reads pictures, it does not warm up")

    monkeypatch.setattr(dit.stage.engine, "warm_up", warm_up)
    assert 0 < await dit.stage.profile_rest((32, 32)) < math.inf


def test_the_oldest_pictures_are_forgotten_and_another_life_is_told_whole():
    log, state = ServedLog(), control_pb2.State()
    for _ in range(MAX_KEPT + 3):
        log.add(control_pb2.Served(total_s=1.0))
    log.report(state, after=0)
    assert (len(state.served), state.served[0].sequence, state.served_total) == (MAX_KEPT, 4, MAX_KEPT + 3)
    assert all(told.asked_ago_s >= 1.0 for told in state.served)
    again = control_pb2.State()
    log.report(again, after=10_000)
    assert len(again.served) == MAX_KEPT
    assert ServedLog()._instance != log._instance
