"""Decide how pictures would fare under a setting that stays as it is: both stages' policies and costs, without the twin's clock.

With nothing that changes on the way, replicas know nothing of each other: each is drawn from beginning to end, wave by wave. The
outcome is the twin's to the last bit, and what several settings share is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from mammoth_operator.tuning.diffusing import ends_s
from mammoth_operator.tuning.objective import Goal, Score, score_of
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.samples import Ask, Sample
from mammoth_operator.tuning.twin import Plant, Setting
from mammoth_operator.tuning.writing import ArReplica
from mammoth_policy.waves import Policy, Wait, plan

__all__ = ["Asked", "Written", "replay", "waves"]


class Job(NamedTuple):
    """A picture as a DiT replica's queue sees it: its place in the load, and when its rows are complete."""

    place: int
    key: tuple[int, int, int]
    ready_s: float


class Wave(NamedTuple):
    """A wave: the place of its first picture in the queue, how many, when it starts, what its steps and each picture take,
    and when each picture leaves."""

    first: int
    num: int
    start_s: float
    denoise_s: float
    decode_s: float
    ends_s: list[float]


def waves(jobs: Sequence[Job], costs: Costs, policy: Policy, idle_s: float) -> list[Wave]:
    """Return the waves that one replica draws, idle since `idle_s`; `jobs` are in order of `ready_s`, none before that.

    A wave is the head of the queue, so that waves and queue have one order.
    """
    drawn: list[Wave] = []
    num, most, alone = len(jobs), policy.max_num_seqs, costs.profile.rows_alone
    head = arrived = 0
    now_s = idle_s
    while head < num:
        if arrived == head:  # nobody waits
            now_s = jobs[head].ready_s
            arrived += 1
        answer = plan(
            jobs[head : min(arrived, head + most)], now_s, policy,
            last_arrival_at=jobs[arrived - 1].ready_s, began_at=max(idle_s, jobs[head].ready_s),
        )  # fmt: skip
        if isinstance(answer, Wait):
            until = answer.until
            assert until is not None, "somebody waits"
            if arrived < num and jobs[arrived].ready_s <= until:
                now_s = jobs[arrived].ready_s
                arrived += 1
            else:
                now_s = until
            continue
        count = len(answer.jobs)
        height, width, steps = jobs[head].key
        denoise_s, decode_s = costs.parts_s((height, width), steps, count)
        ends = ends_s(now_s, count, denoise_s, decode_s, alone=alone)
        drawn.append(Wave(head, count, now_s, denoise_s, decode_s, ends))
        head += count
        idle_s = now_s = ends[-1]
        while arrived < num and jobs[arrived].ready_s <= now_s:
            arrived += 1
    return drawn


class Written:
    """Pictures whose rows are complete when they were: the DiT stage alone decides how they fare.

    Time begins where the device took the first of them: those that came before waited till then.
    """

    def __init__(self, samples: Iterable[Sample], costs: Costs, goal: Goal, plant: Plant) -> None:
        known = sorted(samples, key=attrgetter("ready_s"))
        self.asks = [sample.ask for sample in known]
        self._start_s = min(sample.started_s for sample in known)
        self._jobs = [Job(i, s.key, max(s.ready_s, self._start_s)) for i, s in enumerate(known)]
        self._costs, self._goal, self._plant = costs, goal, plant
        self._queues: dict[int, list[list[Job]]] = {}

    def score(self, setting: Setting) -> Score:
        """Return how they fare under `setting`."""
        num = setting.dit_replicas
        if num not in self._queues:
            self._queues[num] = _dealt(self._jobs, num)
        return score_of(
            self.asks, _done_s(self._queues[num], self._costs, setting, self._start_s, self._plant), self._goal
        )


class Asked:
    """Pictures that are asked for, in order of time: both stages decide how they fare. What the AR stage does is computed once
    for all settings that differ in the DiT stage alone."""

    def __init__(self, asks: Sequence[Ask], costs: Costs, goal: Goal, plant: Plant) -> None:
        self.asks = asks
        self._costs, self._goal, self._plant = costs, goal, plant
        self._start_s = min((ask.at_s for ask in asks), default=0.0)
        self._rows: dict[tuple[int, int], list[Sample]] = {}
        self._queues: dict[tuple[int, int, int], list[list[Job]]] = {}

    def score(self, setting: Setting) -> Score:
        """Return how they fare under `setting`."""
        return score_of(
            self.asks, _done_s(self._queued(setting), self._costs, setting, self._start_s, self._plant), self._goal
        )

    def samples(self, setting: Setting) -> list[Sample]:
        """Return every picture as it fares under `setting`, by its end."""
        written = self._written(setting)
        out = [Sample(sample.ask, sample.joined_s, sample.ready_s) for sample in written]
        for replica, jobs in enumerate(self._queued(setting)):
            for wave in waves(jobs, self._costs, _policy(setting), self._start_s):
                for job, end_s in zip(jobs[wave.first : wave.first + wave.num], wave.ends_s, strict=True):
                    sample = out[job.place]
                    sample.started_s, sample.wave_size, sample.replica = wave.start_s, wave.num, replica
                    sample.denoise_s, sample.decode_s = wave.denoise_s, wave.decode_s
                    sample.done_s = end_s + self._plant.after_s
                    sample.failed = sample.latency_s > sample.ask.budget_s
        return sorted(out, key=attrgetter("done_s"))

    def _written(self, setting: Setting) -> list[Sample]:
        """Return the pictures in the order in which they were asked for, their rows complete."""
        part = (setting.ar_replicas, setting.ar_max_num_seqs)
        if part not in self._rows:
            self._rows[part] = _rows(self.asks, self._costs, setting, self._plant, self._start_s)
        return self._rows[part]

    def _queued(self, setting: Setting) -> list[list[Job]]:
        """Return each DiT replica's queue. A picture has its replica from the moment it was asked for."""
        part = (setting.ar_replicas, setting.ar_max_num_seqs, setting.dit_replicas)
        if part not in self._queues:
            jobs = [Job(index, sample.key, sample.ready_s) for index, sample in enumerate(self._written(setting))]
            self._queues[part] = [
                sorted(queue, key=attrgetter("ready_s")) for queue in _dealt(jobs, setting.dit_replicas)
            ]
        return self._queues[part]


def replay(profile: Profile, setting: Setting, asks: Iterable[Ask], plant: Plant = Plant()) -> list[Sample]:
    """Return how `asks` fare under one setting from beginning to end."""
    return Asked(list(asks), Costs(profile), Goal(), plant).samples(setting)


def _dealt(things: Sequence[Job], num: int) -> list[list[Job]]:
    """Return the things of each of `num` replicas that take turns, as `fleet` deals them out."""
    return [list(things[(replica - 1) % num :: num]) for replica in range(num)]


def _policy(setting: Setting) -> Policy:
    return Policy(setting.dit_max_num_seqs, setting.wait_ms / 1e3)


def _done_s(
    queues: Sequence[Sequence[Job]], costs: Costs, setting: Setting, start_s: float, plant: Plant
) -> list[float]:
    """Return when each picture is done, by its place in the load."""
    done_s = [math.inf] * sum(len(jobs) for jobs in queues)
    for jobs in queues:
        ends = [end_s for wave in waves(jobs, costs, _policy(setting), start_s) for end_s in wave.ends_s]
        for job, end_s in zip(jobs, ends, strict=True):
            done_s[job.place] = end_s + plant.after_s
    return done_s


class _Desk:
    """The world of one AR replica: its next event, since one that it has put off means nothing any more."""

    def __init__(self, costs: Costs, plant: Plant) -> None:
        self.costs, self.plant = costs, plant
        self.next: tuple[float, Callable[[float, object], None], object] | None = None

    def at(self, when_s: float, act: Callable[[float, object], None], thing: object) -> None:
        self.next = (when_s, act, thing)

    def rows_complete(self, now_s: float, sample: Sample) -> None:
        sample.ready_s = now_s + self.plant.hop_s


def _rows(asks: Sequence[Ask], costs: Costs, setting: Setting, plant: Plant, start_s: float) -> list[Sample]:
    """Return `asks` with their rows complete, as that many AR replicas write them."""
    samples = [Sample(ask) for ask in asks]
    num = setting.ar_replicas
    for replica in range(num):
        desk = _Desk(costs, plant)
        ar = ArReplica(desk, replica, start_s)
        ar.cap = setting.ar_max_num_seqs
        for sample in samples[(replica - 1) % num :: num]:
            at_s = sample.ask.at_s + plant.before_s
            _run(desk, at_s)
            ar.submit(at_s, sample)
        _run(desk, math.inf)
    return samples


def _run(desk: _Desk, until_s: float) -> None:
    """Let time pass to `until_s`."""
    while desk.next is not None and desk.next[0] < until_s:
        when_s, act, thing = desk.next
        desk.next = None
        act(when_s, thing)
