"""Decide what would happen: both stages on a virtual clock, run by their own policies, with a profile's costs.

The policies are the functions that the stages run (`mammoth_policy`). Between two of their decisions nothing changes, so
time jumps from one to the next: a run of decode steps is one event, a wave is one event.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from mammoth_operator.tuning.diffusing import DitReplica
from mammoth_operator.tuning.fleet import Fleet
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.samples import Ask, Sample
from mammoth_operator.tuning.writing import ArReplica
from mammoth_policy.waves import Policy

__all__ = ["Plant", "Setting", "Twin"]

Act = Callable[[float, object], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be changed while it runs: caps, the wait for company, and replicas."""

    ar_max_num_seqs: int = 32
    dit_max_num_seqs: int = 8
    wait_ms: float = 20.0
    ar_replicas: int = 1
    dit_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Plant:
    """What cannot: KV rows of an AR replica, seconds until a new replica serves, and what a picture spends where no device works
    on it: until it may join (`before_s`), between the stages (`hop_s`), until its last byte is there (`after_s`)."""

    ar_slots: int = 32
    start_s: float = 120.0
    hop_s: float = 0.01
    before_s: float = 0.0
    after_s: float = 0.0
    prefill_chunk_tokens: int = 512


class Twin:
    """A deployment that draws pictures on paper. Equal inputs give equal outputs: there is no chance in it."""

    def __init__(self, profile: Profile, setting: Setting, plant: Plant = Plant(), *, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.setting = setting
        self.plant = plant
        self.costs = Costs(profile)
        self.finished: list[Sample] = []
        self.active: dict[int, Sample] = {}
        self._events: list[tuple[float, int, Act, object]] = []
        self._order = count()
        self._asks: deque[Ask] = deque()
        self._ars = Fleet(lambda index, ready_s: ArReplica(self, index, ready_s))
        self._dits = Fleet(lambda index, ready_s: DitReplica(self, index, ready_s))
        self.gpu_s = 0.0
        self._billed_to_s = start_s
        self._put(setting, ready_s=start_s)

    def ask(self, asks: Iterable[Ask]) -> None:
        """Add pictures that will be asked for; they must be in order, and not before now."""
        self._asks.extend(asks)

    def resume(self, samples: Iterable[Sample]) -> None:
        """Add pictures whose rows are or will be complete at their `ready_s`: the DiT stage alone decides how they fare."""
        for sample in samples:
            known = Sample(sample.ask, joined_s=sample.joined_s)
            self.active[id(known)] = known
            dit = self._dits.pick(self.now_s)
            dit.num_expected += 1
            known.replica = dit.index
            self.at(max(sample.ready_s, self.now_s), self._ready, known)

    def change(self, setting: Setting) -> None:
        """Put a setting in force now. New replicas serve after `start_s`; those that go finish what they have."""
        self._bill()
        self.setting = setting
        self._put(setting, ready_s=self.now_s + self.plant.start_s)
        for ar in self._ars.replicas:
            ar.wake(self.now_s)
        for dit in self._dits.replicas:
            dit.wake(self.now_s)

    def run(self, until_s: float = math.inf) -> None:
        """Let time pass to `until_s`, or until everything is done."""
        events, asks = self._events, self._asks
        while True:
            next_event_s = events[0][0] if events else math.inf
            next_ask_s = asks[0].at_s if asks else math.inf
            at_s = min(next_event_s, next_ask_s)
            if at_s > until_s or at_s == math.inf:
                break
            self.now_s = max(self.now_s, at_s)
            if next_ask_s <= next_event_s:
                self._arrive(asks.popleft())
            else:
                _, _, act, thing = heapq.heappop(events)
                act(at_s, thing)
        if until_s != math.inf:
            self.now_s = until_s
        self._bill()

    @property
    def num_starting(self) -> int:
        """Return how many replicas are not there yet."""
        return self._ars.num_starting(self.now_s) + self._dits.num_starting(self.now_s)

    def at(self, when_s: float, act: Act, thing: object) -> None:
        """Call `act(when_s, thing)` at that time; for the replicas."""
        heapq.heappush(self._events, (when_s, next(self._order), act, thing))

    def _arrive(self, ask: Ask) -> None:
        sample = Sample(ask)
        self.active[id(sample)] = sample
        dit = self._dits.pick(self.now_s)  # the DiT admits before anything is decoded
        dit.num_expected += 1
        sample.replica = dit.index
        if self.plant.before_s:
            self.at(self.now_s + self.plant.before_s, self._join, sample)
        else:
            self._join(self.now_s, sample)

    def _join(self, now_s: float, thing: object) -> None:
        assert isinstance(thing, Sample)
        self._ars.pick(now_s).submit(now_s, thing)

    def rows_complete(self, now_s: float, sample: Sample) -> None:
        """Hand a picture whose rows are complete to its DiT replica; for the AR replicas."""
        self.at(now_s + self.plant.hop_s, self._ready, sample)

    def _ready(self, now_s: float, thing: object) -> None:
        assert isinstance(thing, Sample)
        thing.ready_s = now_s
        dit = self._dits.find(thing.replica)
        assert dit is not None, "it expects this picture, so it stays"
        dit.num_expected -= 1
        dit.submit(now_s, thing)

    def drawn(self, now_s: float, sample: Sample) -> None:
        """Take a finished picture; for the DiT replicas."""
        sample.done_s = now_s + self.plant.after_s
        sample.failed = sample.done_s - sample.ask.at_s > sample.ask.budget_s
        del self.active[id(sample)]
        self.finished.append(sample)

    def _put(self, setting: Setting, *, ready_s: float) -> None:
        self._ars.resize(setting.ar_replicas, self.now_s, ready_s)
        self._dits.resize(setting.dit_replicas, self.now_s, ready_s)
        for ar in self._ars.replicas:
            ar.cap = setting.ar_max_num_seqs
        for dit in self._dits.replicas:
            dit.policy = Policy(setting.dit_max_num_seqs, setting.wait_ms / 1e3)

    def _bill(self) -> None:
        """Count the device time up to now."""
        held = self._ars.num_held_devices() + self._dits.num_held_devices()
        self.gpu_s += held * max(self.now_s - self._billed_to_s, 0.0)
        self._billed_to_s = self.now_s
