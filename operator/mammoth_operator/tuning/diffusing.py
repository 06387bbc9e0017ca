"""Decide how a DiT replica fares on a virtual clock: the queue and the waves of `mammoth_policy.waves`, with a profile's costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mammoth_operator.tuning.profile import Costs
from mammoth_operator.tuning.samples import Sample
from mammoth_policy.waves import Policy, Run, Wait, plan

__all__ = ["DitReplica", "ends_s"]

Act = Callable[[float, object], None]


def ends_s(now_s: float, count: int, denoise_s: float, decode_s: float, *, alone: bool) -> list[float]:
    """Return when each picture of a wave that starts now leaves: one by one under `alone`, otherwise after the last step of all."""
    first_s, each_s = (now_s, decode_s + denoise_s) if alone else (now_s + denoise_s, decode_s)
    ends = []
    for _ in range(count):
        first_s += each_s
        ends.append(first_s)
    return ends


class World(Protocol):
    """What a DiT replica needs of the twin around it."""

    costs: Costs

    def at(self, when_s: float, act: Act, thing: object) -> None: ...
    def drawn(self, now_s: float, sample: Sample) -> None: ...


class DitReplica:
    """One device. `ready_s` is when it serves; `policy` may change at any time."""

    def __init__(self, world: World, index: int, ready_s: float) -> None:
        self.index, self.ready_s = index, ready_s
        self.is_leaving = False
        self._world = world
        self.policy = Policy()
        self.num_expected = 0  # admitted, their rows still to come
        self._waiting: list[Sample] = []
        self._num_drawing = 0
        self._is_busy = False
        self._idle_since_s = ready_s
        self._last_arrival_s = ready_s
        self._timer = 0  # the latest wait; older timers mean nothing
        if ready_s > 0:
            world.at(ready_s, self._look, 0)

    @property
    def num_held(self) -> int:
        return self.num_expected + len(self._waiting) + self._num_drawing

    def wake(self, now_s: float) -> None:
        """Decide again: something has changed."""
        self._look(now_s, self._timer)

    def submit(self, now_s: float, sample: Sample) -> None:
        """Queue a picture whose rows are complete."""
        self._waiting.append(sample)
        self._last_arrival_s = now_s
        self._look(now_s, self._timer)

    def _look(self, now_s: float, timer: object) -> None:
        if self._is_busy or timer != self._timer or now_s < self.ready_s:
            return
        waiting = self._waiting
        if not waiting:
            return
        began_s = max(self._idle_since_s, waiting[0].ready_s)
        match plan(waiting, now_s, self.policy, last_arrival_at=self._last_arrival_s, began_at=began_s):
            case Run(wave):
                self._start(now_s, list(wave))
            case Wait(until):
                assert until is not None, "somebody waits"
                self._timer += 1
                self._world.at(until, self._look, self._timer)

    def _start(self, now_s: float, wave: list[Sample]) -> None:
        """Draw a wave."""
        costs, count = self._world.costs, len(wave)
        del self._waiting[: len(wave)]
        self._is_busy, self._num_drawing = True, len(wave)
        self._timer += 1
        denoise_s, decode_s = costs.parts_s(wave[0].ask.size, wave[0].ask.steps, count)
        ends = ends_s(now_s, count, denoise_s, decode_s, alone=costs.profile.rows_alone)
        for sample, end_s in zip(wave, ends, strict=True):
            sample.started_s, sample.wave_size = now_s, count
            sample.denoise_s, sample.decode_s = denoise_s, decode_s
            self._world.at(end_s, self._one, sample)
        self._world.at(ends[-1], self._end, None)

    def _one(self, now_s: float, thing: object) -> None:
        assert isinstance(thing, Sample)
        self._num_drawing -= 1
        self._world.drawn(now_s, thing)

    def _end(self, now_s: float, _: object) -> None:
        self._is_busy = False
        self._idle_since_s = now_s
        self._look(now_s, self._timer)
