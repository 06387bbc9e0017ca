"""Decide how an AR replica fares on a virtual clock: joining, prefill and decoding of `mammoth_policy.tokens`, with a
profile's costs. A run of decode steps between two changes is one event.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

from mammoth_operator.tuning.profile import Costs
from mammoth_operator.tuning.samples import Sample
from mammoth_policy.tokens import Action, Load, plan

__all__ = ["ArReplica"]

Act = Callable[[float, object], None]


class Slots(Protocol):
    """The part of a plant that an AR replica is made of."""

    @property
    def ar_slots(self) -> int: ...
    @property
    def prefill_chunk_tokens(self) -> int: ...


class World(Protocol):
    """What an AR replica needs of the twin around it."""

    costs: Costs

    @property
    def plant(self) -> Slots: ...
    def at(self, when_s: float, act: Act, thing: object) -> None: ...
    def rows_complete(self, now_s: float, sample: Sample) -> None: ...


class _Row:
    """A picture in the KV cache. `context` is what its rows read in the step before the replica's first, all of them together."""

    __slots__ = ("chunks_left", "context", "rows", "sample", "tokens")

    def __init__(self, sample: Sample, chunk_tokens: int) -> None:
        ask = sample.ask
        self.sample, self.rows, self.tokens, self.context = sample, ask.rows, ask.num_tokens, 0
        self.chunks_left = ask.rows * math.ceil(ask.prompt_tokens / chunk_tokens)


class ArReplica:
    """One device. `ready_s` is when it serves; `cap` may change at any time.

    Rows are counted as they come and go: every decoding row takes every step, so the number of the step that is its last is
    known when it begins, and the context of all together grows by their number a step.
    """

    def __init__(self, world: World, index: int, ready_s: float) -> None:
        self.index, self.ready_s = index, ready_s
        self.is_leaving = False
        self._world = world
        self.cap = 1
        self._waiting: deque[Sample] = deque()
        self._prefilling: deque[_Row] = deque()
        self._decoding: list[tuple[int, int, _Row]] = []  # a heap by last step
        self._order = count()
        self._num_steps = self._num_rows = self._context = 0  # taken so far; of the decoding rows
        self._rows_in_use = 0
        self._last: Action = "wait"
        self._busy: tuple[Action, float, int, float] | None = None  # what, since when, steps planned, seconds a step
        self._run = 0  # the latest run of steps; older ends mean nothing
        if ready_s > 0:
            world.at(ready_s, self._look, None)

    @property
    def num_held(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def wake(self, now_s: float) -> None:
        """Decide again at the next step boundary: something has changed."""
        if self._busy is None:
            self._look(now_s, None)
        else:
            self._cut(now_s)

    def submit(self, now_s: float, sample: Sample) -> None:
        """Queue a picture."""
        self._waiting.append(sample)
        if self._busy is None:
            self._look(now_s, None)
        elif len(self._waiting) == 1:  # behind others it could not join before them anyway
            self._cut(now_s)

    def _look(self, now_s: float, _: object) -> None:
        if self._busy is not None or now_s < self.ready_s:
            return
        while True:
            num_slots = self._world.plant.ar_slots
            waiting = (self._waiting[0].ask.rows,) if self._waiting else ()
            load = Load(waiting, self._rows_in_use, len(self._prefilling), len(self._decoding), self._last)
            action = self._last = plan(load, max_num_seqs=self.cap, num_slots=num_slots)
            if action != "admit":
                break
            self._admit(now_s, self._waiting.popleft())
        if action == "prefill":
            ask = self._prefilling[0].sample.ask
            chunk = min(self._world.plant.prefill_chunk_tokens, ask.prompt_tokens)
            self._begin(now_s, action, 1, self._world.costs.prefill_s(chunk))
        elif action == "decode":
            steps = 1 if self._prefilling else self._decoding[0][0] - self._num_steps
            self._begin(now_s, action, steps, self._step_s(steps))

    def _admit(self, now_s: float, sample: Sample) -> None:
        sample.joined_s = now_s
        self._rows_in_use += sample.ask.rows
        self._prefilling.append(_Row(sample, self._world.plant.prefill_chunk_tokens))

    def _step_s(self, steps: int) -> float:
        """Return the seconds of a step, taken in the middle of a run of `steps`: costs are straight lines of the context."""
        context = self._context + self._num_rows * self._num_steps
        return self._world.costs.decode_s(self._num_rows, context / self._num_rows + steps / 2)

    def _begin(self, now_s: float, action: Action, steps: int, step_s: float) -> None:
        self._run += 1
        self._busy = (action, now_s, steps, step_s)
        self._world.at(now_s + steps * step_s, self._end, self._run)

    def _cut(self, now_s: float) -> None:
        """End a run of decode steps at the next step boundary."""
        assert self._busy is not None
        action, since_s, steps, step_s = self._busy
        if action != "decode" or steps == 1:
            return
        until = min(max(math.ceil((now_s - since_s) / step_s), 1), steps)
        self._run += 1
        self._busy = (action, since_s, until, step_s)
        self._world.at(max(now_s, since_s + until * step_s), self._end, self._run)

    def _end(self, now_s: float, run: object) -> None:
        if run != self._run or self._busy is None:
            return
        action, _, steps, _ = self._busy
        self._busy = None
        if action == "prefill":
            row = self._prefilling[0]
            row.chunks_left -= 1
            if row.chunks_left <= 0:
                self._decode(self._prefilling.popleft())
        else:
            self._num_steps += steps
            while self._decoding and self._decoding[0][0] <= self._num_steps:
                _, _, row = heapq.heappop(self._decoding)
                self._num_rows -= row.rows
                self._context -= row.context
                self._rows_in_use -= row.rows
                self._world.rows_complete(now_s, row.sample)
        self._look(now_s, None)

    def _decode(self, row: _Row) -> None:
        """Let a picture whose prompt is read write from the next step on."""
        row.context = row.rows * (row.sample.ask.prompt_tokens - self._num_steps)
        self._num_rows += row.rows
        self._context += row.context
        heapq.heappush(self._decoding, (self._num_steps + row.tokens, next(self._order), row))
