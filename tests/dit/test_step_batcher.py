"""Step mode on a clock that takes no time, and with the real engine: joining, leaving, overtaking, and the same bits."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch

from mammoth_dit.batching import Batcher
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.jobs import Job, Outcome, Picture, Watch
from mammoth_dit.step_batching import StepBatcher
from mammoth_dit.stepper import Canvas, Stepper
from mammoth_dit.testing import SimulatedDevice, SimulatedSteps, TinyEngine, outcome_of, story
from mammoth_dit.testing import simulated_job as job
from mammoth_dit.tickets import Batched, Queued, Step
from mammoth_policy.waves import Policy
from mammoth_serving.device import DeviceWorker
from mammoth_wire.errors import Cancelled, DeadlineExceeded, EngineFailed, Unavailable

STEP_S = {16: 0.1, 32: 1.0}


def step_s(size: tuple[int, int], rows: int) -> float:
    return STEP_S[size[0]] * rows


@asynccontextmanager
async def serving(device: SimulatedSteps, policy: Policy = Policy()) -> AsyncIterator[StepBatcher]:
    batcher = StepBatcher(device, device.run, policy)
    batcher._step_s = {(side, side): seconds for side, seconds in STEP_S.items()}
    task = asyncio.create_task(batcher.run())
    await asyncio.sleep(0)
    try:
        yield batcher
    finally:
        batcher.drain()
        await task


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.looptime
async def test_a_job_is_told_all_that_happens_to_it():
    async with serving(SimulatedSteps(step_s)) as batcher:
        ticket = batcher.submit(job("a"))
        assert await story(ticket) == [Queued(0), Batched(1), Step(1, 3), Step(2, 3), Step(3, 3)]
        assert isinstance(await ticket.result(), Picture)
        assert now() == pytest.approx(3.0)  # no waiting window


@pytest.mark.looptime
async def test_a_small_picture_overtakes_a_large_one_at_a_step_boundary():
    device = SimulatedSteps(step_s)
    async with serving(device) as batcher:
        large = batcher.submit(job("large", steps=5))
        await asyncio.sleep(1.5)
        small = batcher.submit(job("small", side=16, steps=2))
        await small.result()
        assert now() == pytest.approx(2.2)
        await large.result()
        assert now() == pytest.approx(5.2)
    assert device.order == [["large"]] * 2 + [["small"]] * 2 + [["large"]] * 3


@pytest.mark.looptime
async def test_jobs_of_a_size_join_and_leave_a_running_batch():
    device = SimulatedSteps(lambda size, rows: 1.0, {(32, 32): 4})
    async with serving(device) as batcher:
        first = batcher.submit(job("a", steps=4))
        await asyncio.sleep(1.5)
        second = batcher.submit(job("b", steps=1))
        await asyncio.gather(first.result(), second.result())
    assert [sorted(rows) for rows in device.order] == [["a"], ["a"], ["a", "b"], ["a"]]


@pytest.mark.looptime
async def test_a_deadline_that_would_be_missed_comes_first():
    device = SimulatedSteps(step_s)
    async with serving(device) as batcher:
        patient = batcher.submit(job("patient", steps=6))
        await asyncio.sleep(0.5)
        urgent = batcher.submit(job("urgent", steps=6), deadline_at=8.0)
        assert isinstance(await outcome_of(urgent), Picture)
        assert now() == pytest.approx(7.0)
        await patient.result()


@pytest.mark.looptime
@pytest.mark.parametrize("phase", ["waiting", "running"])
async def test_a_job_that_leaves_makes_room_at_once(phase):
    device = SimulatedSteps(step_s)
    async with serving(device, Policy(max_num_seqs=1)) as batcher:
        first, second = batcher.submit(job("a", steps=5)), batcher.submit(job("b", steps=5))
        await asyncio.sleep(1.5)
        leaver, stayer = (second, first) if phase == "waiting" else (first, second)
        leaver.cancel()
        assert isinstance(await outcome_of(leaver), Cancelled)
        assert isinstance(await outcome_of(stayer), Picture)
        assert now() == pytest.approx(5.0 if phase == "waiting" else 7.0)
        again = batcher.submit(job(leaver.job.id, steps=1))
        assert isinstance(await outcome_of(again), Picture)
    assert batcher.snapshot().in_flight == batcher.snapshot().queue_depth == 0


@pytest.mark.looptime
async def test_a_job_that_fails_fails_alone_and_a_late_one_expires():
    device = SimulatedSteps(step_s, fail={"bad": EngineFailed("boom", error_id="1")})
    async with serving(device) as batcher:
        bad, good = batcher.submit(job("bad")), batcher.submit(job("good"))
        late = batcher.submit(job("late"), deadline_at=2.0)
        assert isinstance(await outcome_of(bad), EngineFailed)
        assert isinstance(await outcome_of(late), DeadlineExceeded)
        assert isinstance(await outcome_of(good), Picture)


@pytest.mark.looptime
async def test_a_device_that_is_lost_ends_every_job():
    async def lost(fn, canvases):
        raise RuntimeError("lost")

    batcher = StepBatcher(SimulatedSteps(step_s), lost)
    tickets = [batcher.submit(job("a")), batcher.submit(job("b"))]
    with pytest.raises(RuntimeError, match="lost"):
        await batcher.run()
    for ticket in tickets:
        assert isinstance(await outcome_of(ticket), Unavailable)


# ms of a guided step by number of rows, as measured on an H200
H200_MS = {256: {1: 4.5, 2: 7.8, 4: 14.9}, 512: {1: 12.7}, 1024: {1: 56.0}}


class WavesOfPictures(SimulatedDevice):
    """Request mode with the same engine: units of a size run to the end, one after the other."""

    def __init__(self, times: Callable[[tuple[int, int], int], float], unit_sizes) -> None:
        super().__init__(step_s=0.0)
        self._times, self._unit_sizes = times, unit_sizes

    async def run(self, _fn: object, jobs: list[Job], watch: Watch) -> list[Outcome]:
        outcomes: list[Outcome] = []
        size = jobs[0].key[:2]
        while len(outcomes) < len(jobs):
            unit = jobs[len(outcomes) :][: self._unit_sizes.get(size, 1)]
            for _ in range(unit[0].params.steps):
                await asyncio.sleep(self._times(size, len(unit)))
            for made in unit:
                outcomes.append(self._outcome(len(outcomes), made, watch))
                watch.on_done(len(outcomes) - 1, outcomes[-1])
        return outcomes


def arrivals(seed: int) -> list[tuple[float, Job, float | None]]:
    """200 jobs of mixed sizes, steps and deadlines at about nine tenths of what the device can take."""
    dice, at, made = random.Random(seed), 0.0, []
    for number in range(200):
        side, steps = dice.choice([256, 256, 512, 1024]), dice.choice([4, 12, 20])
        length_s = H200_MS[side][1] * steps / 1000
        at += dice.expovariate(1 / 0.25)
        deadline = at + dice.uniform(20, 60) * max(length_s, 0.2) if dice.random() < 0.3 else None
        made.append((at, job(str(number), side=side, steps=steps), deadline))
    return made


@dataclass
class Played:
    latencies_s: list[float]
    num_missed: int
    pictures_per_s: float


async def played(batcher: Batcher, jobs: list[tuple[float, Job, float | None]]) -> Played:
    """Submit jobs at their times, and wait for all of them; one that misses its deadline waited until then."""
    task = asyncio.create_task(batcher.run())
    start = now()

    async def one(at: float, made: Job, deadline: float | None) -> tuple[float, bool]:
        await asyncio.sleep(start + at - now())
        ticket = batcher.submit(made, deadline_at=None if deadline is None else start + deadline)
        missed = isinstance(await outcome_of(ticket), DeadlineExceeded)
        return now() - start - at, missed

    ends = await asyncio.gather(*(one(*each) for each in jobs))
    took_s = now() - start
    batcher.drain()
    await task
    num_missed = sum(missed for _, missed in ends)
    return Played([latency for latency, _ in ends], num_missed, (len(jobs) - num_missed) / took_s)


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(3))
async def test_200_random_jobs_wait_less_in_step_mode_and_nobody_starves(seed):
    def times(size: tuple[int, int], rows: int) -> float:
        return H200_MS[size[0]][rows] / 1000

    unit_sizes, jobs = {(256, 256): 4}, arrivals(seed)

    def powers(size: tuple[int, int], rows: int) -> float:
        return sum(times(size, part) for part in (4, 2, 1) if rows & part)

    steps, waves = SimulatedSteps(powers, unit_sizes), WavesOfPictures(powers, unit_sizes)
    in_steps = await played(StepBatcher(steps, steps.run, max_queue=256), jobs)
    in_waves = await played(Batcher(waves, waves.run, max_queue=256), jobs)
    assert statistics.mean(in_steps.latencies_s) <= statistics.mean(in_waves.latencies_s)
    assert in_steps.pictures_per_s >= 0.98 * in_waves.pictures_per_s
    assert in_steps.num_missed <= in_waves.num_missed
    assert max(in_steps.latencies_s) <= 2 * max(in_waves.latencies_s)


@pytest.mark.parametrize("kernels", [TinyEngine, FastEngine])
def test_bits_do_not_depend_on_when_a_picture_joins(tmp_path, kernels):
    tiny = TinyEngine(tmp_path)
    engine = tiny if kernels is TinyEngine else FastEngine(tiny._model)
    if isinstance(engine, FastEngine):
        engine.take_times((32, 48), {1: 8.0, 8: 1.0})
    jobs = [tiny.job(str(seed), seed=seed, steps=2 + seed, num_text=3 + seed) for seed in range(4)]
    alone = {made.id: engine.sample([made])[0].rgb_sha256 for made in jobs}
    stepper, waiting = Stepper(engine), [Canvas(made) for made in jobs]
    running: list[Canvas] = []
    ended: dict[str, Outcome] = {}
    while running or waiting:
        running += [waiting.pop()] if waiting else []
        for canvas, made in stepper.step(running):
            ended[canvas.job.id] = made
        running = [canvas for canvas in running if canvas.job.id not in ended]
    assert {name: made.rgb_sha256 for name, made in ended.items()} == alone


def test_a_row_that_is_not_finite_ends_alone_in_step_mode(tmp_path):
    tiny = TinyEngine(tmp_path)
    engine = FastEngine(tiny._model)
    engine.take_times((32, 48), {1: 8.0, 8: 1.0})
    bad = tiny.job("bad", seed=2)
    bad = dataclasses.replace(bad, hidden_TH=torch.full_like(bad.hidden_TH, math.nan))
    good = tiny.job("good")
    stepper, canvases = Stepper(engine), [Canvas(bad), Canvas(good)]
    ended: dict[str, Outcome] = {}
    while len(ended) < 2:
        ended |= {canvas.job.id: made for canvas, made in stepper.step(canvases)}
    assert isinstance(ended["bad"], EngineFailed)
    assert ended["good"].rgb_sha256 == FastEngine(tiny._model).sample([good])[0].rgb_sha256


def test_what_raises_for_one_picture_ends_it_alone(tmp_path):
    tiny = TinyEngine(tmp_path)
    misfit = dataclasses.replace(tiny.job("misfit"), hidden_TH=torch.zeros(14, 3, dtype=torch.float64))
    good = tiny.job("good", seed=2)
    stepper, running = Stepper(tiny), [Canvas(misfit), Canvas(good)]
    ended: dict[str, Outcome] = {}
    while running:
        ended |= {canvas.job.id: made for canvas, made in stepper.step(running)}
        running = [canvas for canvas in running if canvas.job.id not in ended]
    assert isinstance(ended["misfit"], EngineFailed)
    assert ended["good"].rgb_sha256 == tiny.sample([good])[0].rgb_sha256


async def test_the_real_engine_in_step_mode(tmp_path):
    tiny = TinyEngine(tmp_path)
    worker = DeviceWorker("test")
    batcher = StepBatcher(Stepper(tiny), worker.run)
    task = asyncio.create_task(batcher.run())
    jobs = [tiny.job("a"), tiny.job("b", size_px=(32, 32), seed=2), tiny.job("c", seed=3, steps=2)]
    pictures = await asyncio.gather(*(batcher.submit(made).result() for made in jobs))
    batcher.drain()
    await task
    worker.close()
    for made, picture in zip(jobs, pictures, strict=True):
        assert picture.rgb_sha256 == tiny.sample([made])[0].rgb_sha256
