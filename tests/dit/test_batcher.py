"""The queue on a clock that takes no time: every job learns how it goes, and every job ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mammoth_dit.batching import Batcher
from mammoth_dit.isolation import DeviceLost
from mammoth_dit.jobs import Picture
from mammoth_dit.testing import SimulatedDevice, TinyEngine, outcome_of, story
from mammoth_dit.testing import simulated_job as job
from mammoth_dit.tickets import Batched, Queued, Step
from mammoth_policy.waves import Policy
from mammoth_serving.device import DeviceWorker
from mammoth_wire.errors import (
    AlreadyRunning,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Unavailable,
)

pytestmark = pytest.mark.looptime
STEP_S = 1.0


@asynccontextmanager
async def serving(device: SimulatedDevice, policy: Policy = Policy(), **options) -> AsyncIterator[Batcher]:
    batcher = Batcher(device, device.run, policy, **options)
    task = asyncio.create_task(batcher.run())
    await asyncio.sleep(0)
    try:
        yield batcher
    finally:
        batcher.drain()
        await task


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_job_is_told_all_that_happens_to_it(looptime):
    async with serving(SimulatedDevice(STEP_S)) as batcher:
        ticket = batcher.submit(job("a"))
        assert await story(ticket) == [Queued(0), Batched(1), Step(1, 3), Step(2, 3), Step(3, 3)]
        assert isinstance(await ticket.result(), Picture)
        assert looptime == pytest.approx(3 * STEP_S + Policy().quiet_s)


async def test_jobs_of_one_key_share_a_wave_and_another_key_waits():
    device = SimulatedDevice(STEP_S)
    async with serving(device) as batcher:
        tickets = [batcher.submit(job(name, steps=steps)) for name, steps in (("a", 3), ("b", 3), ("c", 4), ("d", 3))]
        for ticket in tickets:
            await ticket.result()
    assert device.waves == [["a", "b"], ["c"], ["d"]]
    assert tickets[1].wave_size == 2


async def test_the_first_job_waits_for_company_while_it_comes():
    device = SimulatedDevice(STEP_S)
    async with serving(device) as batcher:
        tickets = []
        for name in "abcdef":
            tickets.append(batcher.submit(job(name)))
            await asyncio.sleep(0.0035)
        await tickets[0].result()
    assert device.waves == [list("abcdef")]


async def test_the_wait_ends_at_its_deadline_however_jobs_come():
    device = SimulatedDevice(STEP_S)
    async with serving(device, Policy(max_num_seqs=100, max_wait_s=0.020)) as batcher:
        for index in range(12):
            batcher.submit(job(str(index)))
            await asyncio.sleep(0.003)
        await asyncio.sleep(STEP_S)
        assert len(device.waves[0]) == 7  # at 0, 3, ... 18 ms


async def test_a_full_wave_starts_at_once(looptime):
    async with serving(SimulatedDevice(STEP_S), Policy(max_num_seqs=2)) as batcher:
        tickets = [batcher.submit(job(name)) for name in "ab"]
        await asyncio.gather(*(ticket.result() for ticket in tickets))
        assert looptime == pytest.approx(3 * STEP_S)


async def test_places_move_up_as_waves_leave():
    async with serving(SimulatedDevice(STEP_S), Policy(max_num_seqs=1)) as batcher:
        first, second, third = (batcher.submit(job(name, steps=1)) for name in "abc")
        assert await story(third) == [Queued(2), Queued(1), Batched(1), Step(1, 1)]
        assert (await story(second))[0] == Queued(1)
        assert (await story(first))[0] == Queued(0)


async def test_a_waiting_job_that_leaves_frees_its_place_at_once():
    device = SimulatedDevice(STEP_S)
    async with serving(device, Policy(max_num_seqs=1), max_queue=2) as batcher:
        batcher.submit(job("a"))
        await asyncio.sleep(0.1)
        second, third = batcher.submit(job("b")), batcher.submit(job("c"))
        with pytest.raises(Overloaded):
            batcher.submit(job("d"))
        second.cancel()
        batcher.submit(job("d"))
        error = await outcome_of(second)
        assert isinstance(error, Cancelled)
        assert error.metadata["stage"] == "queued"
        await third.result()
    assert device.waves == [["a"], ["c"], ["d"]]


async def test_a_running_job_that_leaves_ends_at_once_and_its_neighbour_goes_on(looptime):
    device = SimulatedDevice(STEP_S)
    async with serving(device, Policy(max_num_seqs=2)) as batcher:
        leaver, stayer = batcher.submit(job("a")), batcher.submit(job("b"))
        await asyncio.sleep(1.5)
        leaver.cancel()
        assert isinstance(await outcome_of(leaver), Cancelled)
        assert looptime == pytest.approx(1.5)
        assert (await story(leaver))[-1] == Step(1, 3)
        assert isinstance(await stayer.result(), Picture)
        assert (await story(stayer))[-1] == Step(3, 3)


async def test_a_wave_that_everybody_left_makes_room_at_the_next_step():
    device = SimulatedDevice(STEP_S)
    async with serving(device, Policy(max_num_seqs=1)) as batcher:
        leaver, waiter = batcher.submit(job("a", steps=50)), batcher.submit(job("b", steps=1))
        await asyncio.sleep(1.5)
        leaver.cancel()
        await waiter.result()
        assert now() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("deadline_at", "stage"), [pytest.param(0.5, "queued", id="waiting"), pytest.param(4.5, "denoising", id="running")]
)
async def test_a_deadline_says_where_the_job_was(deadline_at, stage):
    async with serving(SimulatedDevice(STEP_S), Policy(max_num_seqs=1)) as batcher:
        batcher.submit(job("a"))
        ticket = batcher.submit(job("b"), deadline_at=deadline_at)
        error = await outcome_of(ticket)
        assert isinstance(error, DeadlineExceeded)
        assert error.metadata["stage"] == stage
        assert now() == pytest.approx(deadline_at)


async def test_a_deadline_that_was_kept_means_nothing():
    async with serving(SimulatedDevice(STEP_S)) as batcher:
        ticket = batcher.submit(job("a"), deadline_at=5.0)
        assert isinstance(await ticket.result(), Picture)
        await asyncio.sleep(10)
        assert isinstance(await ticket.result(), Picture)


async def test_an_id_is_taken_until_its_job_ends():
    async with serving(SimulatedDevice(STEP_S)) as batcher:
        ticket = batcher.submit(job("a"))
        with pytest.raises(AlreadyRunning):
            batcher.submit(job("a"))
        await ticket.result()
        assert isinstance(await batcher.submit(job("a")).result(), Picture)


async def test_a_full_queue_says_when_to_come_back():
    async with serving(SimulatedDevice(STEP_S), Policy(max_num_seqs=1), max_queue=1) as batcher:
        await batcher.submit(job("measured", steps=4)).result()
        await asyncio.sleep(1)
        batcher.submit(job("a", steps=4))
        await asyncio.sleep(0.1)
        batcher.submit(job("b", steps=4))
        with pytest.raises(Overloaded) as refused:
            batcher.submit(job("c"))
        assert refused.value.retry_after_s == pytest.approx((4 + 4) * STEP_S / 2, rel=0.1)


async def test_a_bad_row_fails_alone():
    device = SimulatedDevice(STEP_S, fail={"b": EngineFailed("internal error 7")})
    async with serving(device) as batcher:
        outcomes = await asyncio.gather(*[outcome_of(batcher.submit(job(name))) for name in "abc"])
    assert [type(one) for one in outcomes] == [Picture, EngineFailed, Picture]


@pytest.mark.parametrize("error", [DeviceLost("gone"), AssertionError("a bug")], ids=["device lost", "bug"])
async def test_an_engine_that_breaks_ends_every_job_and_is_heard(error):
    device = SimulatedDevice(STEP_S)
    batcher = Batcher(device, device.run, Policy(max_num_seqs=1))
    task = asyncio.create_task(batcher.run())
    tickets = [batcher.submit(job(name)) for name in "ab"]
    await asyncio.sleep(0.5)
    device.broken = error
    outcomes = await asyncio.gather(*[outcome_of(ticket) for ticket in tickets])
    assert [type(one) for one in outcomes] == [Unavailable, Unavailable]
    with pytest.raises(type(error)):
        await task
    with pytest.raises(Unavailable):
        batcher.submit(job("late"))


async def test_an_outcome_too_few_is_a_bug_that_is_heard():
    device = SimulatedDevice(STEP_S)

    async def lose_one(fn, jobs, watch):
        return device.sample(jobs[1:], watch)

    batcher = Batcher(device, lose_one, Policy(max_num_seqs=2))
    task = asyncio.create_task(batcher.run())
    tickets = [batcher.submit(job(name)) for name in "ab"]
    with pytest.raises(ValueError, match="zip"):
        await task
    assert all(ticket.resolved for ticket in tickets)


async def test_draining_refuses_the_new_and_finishes_the_old():
    device = SimulatedDevice(STEP_S)
    batcher = Batcher(device, device.run, Policy(max_num_seqs=1))
    task = asyncio.create_task(batcher.run())
    tickets = [batcher.submit(job(name)) for name in "ab"]
    batcher.drain()
    with pytest.raises(Unavailable):
        batcher.submit(job("c"))
    await task
    assert [type(await outcome_of(ticket)) for ticket in tickets] == [Picture, Picture]
    assert batcher.snapshot().draining


async def test_an_idle_batcher_drains_at_once(looptime):
    async with serving(SimulatedDevice(STEP_S)):
        await asyncio.sleep(1)
    assert looptime == pytest.approx(1)


async def test_a_stopped_batcher_leaves_nobody_behind():
    device = SimulatedDevice(STEP_S)
    batcher = Batcher(device, device.run, Policy(max_num_seqs=1))
    task = asyncio.create_task(batcher.run())
    tickets = [batcher.submit(job(name)) for name in "ab"]
    await asyncio.sleep(0.5)
    task.cancel()
    assert [type(await outcome_of(ticket)) for ticket in tickets] == [Unavailable, Unavailable]
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_limits_change_between_waves():
    device = SimulatedDevice(STEP_S)
    async with serving(device, Policy(max_num_seqs=1, max_wait_s=0.0)) as batcher:
        tickets = [batcher.submit(job(name)) for name in "abcd"]
        await asyncio.sleep(0.5)
        assert batcher.set_limits(max_num_seqs=3) == Policy(3, 0.0)
        assert batcher.set_limits(max_wait_s=0.010) == Policy(3, 0.010)
        await asyncio.gather(*(ticket.result() for ticket in tickets))
        with pytest.raises(ValueError, match="max_num_seqs"):
            batcher.set_limits(max_num_seqs=0)
    assert device.waves == [["a"], ["b", "c", "d"]]


async def test_a_snapshot_counts_what_waits_runs_and_was_measured():
    async with serving(SimulatedDevice(STEP_S), Policy(max_num_seqs=2)) as batcher:
        assert batcher.eta_s(job("x", steps=2).key) is None
        await asyncio.gather(*[batcher.submit(job(name, steps=2)).result() for name in "ab"])
        await asyncio.sleep(0.1)
        for name in "cde":
            batcher.submit(job(name, steps=2))
        await asyncio.sleep(0.5)
        seen = batcher.snapshot()
        assert (seen.queue_depth, seen.in_flight, seen.policy.max_num_seqs) == (1, 2, 2)
        assert seen.pictures_per_s == pytest.approx(1.0)
        assert seen.idle_s == pytest.approx(0.5)
        assert batcher.eta_s(job("x", steps=2).key) == pytest.approx(4.0)
        assert batcher.eta_s(job("x", steps=3).key) is None
        assert batcher.active_ids == {"c", "d", "e"}


async def test_progress_is_fresh_for_a_job_that_finds_the_batcher_empty():
    async with serving(SimulatedDevice(STEP_S)) as batcher:
        await asyncio.sleep(1000)
        ticket = batcher.submit(job("a"))
        assert batcher.last_progress_at == pytest.approx(1000)
        await ticket.result()
        assert batcher.last_progress_at == pytest.approx(1000 + 3 * STEP_S, abs=0.1)


async def test_two_hundred_random_leavers_leak_nothing():
    chance = random.Random(7)
    device = SimulatedDevice(0.01)
    async with serving(device, max_queue=1000) as batcher:

        async def caller(index: int) -> type:
            await asyncio.sleep(chance.uniform(0, 2))
            ticket = batcher.submit(job(str(index), steps=chance.choice([2, 3, 5])))
            await asyncio.sleep(chance.uniform(0, 0.3))
            ticket.cancel()
            return type(await outcome_of(ticket))

        ends = await asyncio.gather(*[caller(index) for index in range(200)])
        await asyncio.sleep(1)
        seen = batcher.snapshot()
        assert (seen.queue_depth, seen.in_flight) == (0, 0)
        assert not batcher.active_ids
    assert set(ends) == {Picture, Cancelled}


@pytest.mark.looptime(False)
async def test_a_real_engine_on_its_thread_draws_what_it_draws_alone(tmp_path):
    engine = TinyEngine(tmp_path)
    jobs = [engine.job(name, seed=seed) for seed, name in enumerate("abc")]
    alone = [engine.sample([one])[0].rgb_sha256 for one in jobs]
    worker = DeviceWorker("device")
    batcher = Batcher(engine, worker.run)
    task = asyncio.create_task(batcher.run())
    tickets = [batcher.submit(one) for one in jobs]
    stories = [await story(ticket) for ticket in tickets]
    assert [(await ticket.result()).rgb_sha256 for ticket in tickets] == alone
    assert all(events[-1] == Step(3, 3) and Batched(3) in events for events in stories)
    batcher.drain()
    await task
    worker.close()
