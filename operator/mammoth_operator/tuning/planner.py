"""Decide how many replicas of both pools there should be: the fewest devices that keep every promise, within the budget.

Both pools are sized together, on the twin: a picture's time is spent in both, and what one saves the other may spend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mammoth_operator.tuning.objective import Goal, Score
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.samples import Ask
from mammoth_operator.tuning.trial import Asked
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["Budget", "Known", "Need", "Replicas", "Scale", "capacity_per_s", "needed", "next_replicas"]

MAX_UTILISATION = 0.8  # without promises: what a device is loaded to
MAX_ASKS = 300  # that a trial draws
MAX_LONG = 900  # that must be carried by fewer devices
MAX_TRIALS = 8
TOLERANCE = 0.03
MUCH = 0.25  # a miss so large is answered at once, a smaller one when it is seen again
DOUBT = 3.0  # standard errors of a rate by which a smaller number must be able to carry more
STABLE_S = 600.0  # a need that has not come up again for so long is over
REMEMBERED_S = 1.1 * STABLE_S  # so that there is a rate to compare today's with
MAX_GROWTH = 2.0
SHARED_PERIOD = 3  # a load's trend is taken from its last third against the third before


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many of each pool."""

    ar: int
    dit: int

    @property
    def total(self) -> int:
        return self.ar + self.dit


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used: inclusive bounds of each pool, devices a replica, and devices of both together."""

    ar: tuple[int, int] = (1, 8)
    dit: tuple[int, int] = (1, 32)
    ar_devices: int = 1
    dit_devices: int = 1
    devices: int | None = None

    def cost(self, replicas: Replicas) -> int:
        """Return the devices that `replicas` take."""
        return replicas.ar * self.ar_devices + replicas.dit * self.dit_devices

    def allows(self, replicas: Replicas) -> bool:
        return self.devices is None or self.cost(replicas) <= self.devices


@dataclass(frozen=True, slots=True)
class Need:
    """The replicas that a load needs, and how it fares with them. `kept` is False where the budget is too small for it;
    `miss_now` is by how much the replicas that run are late, inf where they were not tried."""

    replicas: Replicas
    score: Score | None
    kept: bool
    miss_now: float = math.inf


@dataclass(frozen=True, slots=True)
class Known:
    """What was found a while ago: the replicas that were needed, and the pictures a second that were asked for (0: not known)."""

    at_s: float
    replicas: Replicas
    per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """What to run from now on and why. `needs` are of the recent past, to be handed in again."""

    replicas: Replicas
    reason: str
    message: str
    needs: tuple[Known, ...]


def capacity_per_s(costs: Costs, asks: Sequence[Ask], setting: Setting, plant: Plant) -> tuple[float, float]:
    """Return the pictures a second of this mix that one AR and one DiT replica can write and draw at most."""
    rows = max(min(setting.ar_max_num_seqs, plant.ar_slots), 1)
    waves = range(1, setting.dit_max_num_seqs + 1)
    ar_s = dit_s = 0.0
    picture_s = cache(lambda size, steps: min(costs.wave_s(size, steps, n) / n for n in waves))
    for ask in asks:
        tokens = ask.num_tokens
        context = ask.prompt_tokens + tokens / 2
        ar_s += ask.rows * (tokens * costs.decode_s(rows, context) / rows + costs.prefill_s(ask.prompt_tokens))
        dit_s += picture_s(ask.size, ask.steps)
    return len(asks) / ar_s, len(asks) / dit_s


def needed(
    costs: Costs,
    asks: Sequence[Ask],
    setting: Setting,
    goal: Goal,
    budget: Budget,
    plant: Plant = Plant(),
    *,
    near: Replicas | None = None,
    tolerance: float = 0.0,
) -> Need:
    """Return the fewest devices that keep the promises for `asks`, which are in order of time.

    Pairs are tried from the fewest devices on that can carry the load at all. Without promises each pool is loaded to
    `MAX_UTILISATION`. `near` says what runs: where that is enough, one fewer is the most that is tried. A promise that is
    missed by no more than `tolerance` counts as kept: a short stretch of a load is a sample of it. When nothing within the budget keeps them, the pair with the least miss of those tried is returned.
    """
    asks = asks[-MAX_ASKS:]
    span_s = max(asks[-1].at_s - asks[0].at_s, 1e-9)
    per_s = (len(asks) - 1) / span_s if len(asks) > 1 else 0.0
    most = capacity_per_s(costs, asks, setting, plant)
    least = Replicas(_within(math.ceil(per_s / most[0]), budget.ar), _within(math.ceil(per_s / most[1]), budget.dit))
    if not goal.promises:
        both = (math.ceil(per_s / (rate * MAX_UTILISATION)) for rate in most)
        wanted = Replicas(
            *(_within(count, bounds) for count, bounds in zip(both, (budget.ar, budget.dit), strict=True))
        )
        return Need(wanted if budget.allows(wanted) else _squeezed(wanted, budget), None, budget.allows(wanted))
    tried: list[tuple[Replicas, Score]] = []
    trial = Asked(asks, costs, goal, plant)

    def keeps(pair: Replicas) -> bool:
        there = replace(setting, ar_replicas=pair.ar, dit_replicas=pair.dit)
        tried.append((pair, trial.score(there)))
        return tried[-1][1].miss <= tolerance

    running = near
    if near is not None:
        near = Replicas(max(near.ar, least.ar), max(near.dit, least.dit))
        if budget.allows(near) and keeps(near):
            outcome = tried[-1][1]
            fewer = [Replicas(near.ar - 1, near.dit), Replicas(near.ar, near.dit - 1)]
            able = [pair for pair in fewer if pair.ar >= least.ar and pair.dit >= least.dit and keeps(pair)]
            best = min(able, key=budget.cost, default=near)
            return Need(best, next((score for pair, score in tried if pair == best), outcome), True)
    miss_now = tried[0][1].miss if tried and tried[0][0] == near == running else math.inf
    for pair in _pairs(least, budget):
        if len(tried) >= MAX_TRIALS:
            break
        if near is not None and budget.allows(near) and budget.cost(pair) <= budget.cost(near):
            continue
        if keeps(pair):
            return Need(pair, tried[-1][1], True, miss_now)
    if not tried:
        return Need(_squeezed(least, budget), None, False)
    pair, outcome = min(tried, key=lambda each: (each[1].miss, budget.cost(each[0])))
    return Need(pair, outcome, False, miss_now)


def next_replicas(
    now_s: float,
    current: Replicas,
    asks: Sequence[Ask],
    profile: Profile,
    setting: Setting,
    goal: Goal,
    budget: Budget,
    needs: Sequence[Known] = (),
    plant: Plant = Plant(),
) -> Scale:
    """Return how many replicas to run from now on.

    More come as soon as a miss is large or seen twice, sized for the load that the trend promises by the time they serve. Fewer come only when for
    `STABLE_S` nothing more was needed and they would carry the load of another `STABLE_S` from now, if it goes on growing as it has
    for the last, and higher by `DOUBT` standard errors of its rate.
    """
    per_s = len(asks) / max(asks[-1].at_s - asks[0].at_s, 1e-9)
    lately = _growth(now_s, per_s, needs)
    costs = Costs(profile)
    asks, trend = _trend(asks, plant.start_s)
    grown = min(trend, MAX_GROWTH)
    need = needed(
        costs, _faster(asks, grown, MAX_ASKS), setting, goal, budget, plant, near=current, tolerance=TOLERANCE
    )
    spare = need.replicas
    if spare.total < current.total and goal.promises:
        there = replace(setting, ar_replicas=spare.ar, dit_replicas=spare.dit)
        pictures = _faster(asks, max(grown, lately) * (1 + DOUBT / math.sqrt(len(asks))), MAX_LONG)
        spare = spare if Asked(pictures, costs, goal, plant).score(there).miss <= 0 else current
    remembered = (*(known for known in needs if now_s - known.at_s < REMEMBERED_S), Known(now_s, spare, per_s))
    recent = [known for known in remembered if now_s - known.at_s < STABLE_S]
    highest = Replicas(max(known.replicas.ar for known in recent), max(known.replicas.dit for known in recent))
    told = f"{len(asks)} pictures, load x{grown:.2f} by the time a replica serves: needs AR {need.replicas.ar}, DiT {need.replicas.dit}"  # fmt: skip
    if not need.kept:
        told += "; the budget or the bounds are too small to keep every promise"
    wanted = Replicas(
        need.replicas.ar if need.replicas.ar > current.ar else min(current.ar, highest.ar),
        need.replicas.dit if need.replicas.dit > current.dit else min(current.dit, highest.dit),
    )
    if not budget.allows(wanted):
        wanted = need.replicas
    again = bool(needs) and needs[-1].replicas.total > current.total
    if wanted.total > current.total and need.miss_now <= MUCH and not again:
        return Scale(current, "Watching", told, remembered)
    covered = bool(needs) and now_s - recent[0].at_s >= STABLE_S * 0.8
    if wanted.total < current.total and not covered and budget.allows(current):
        return Scale(current, "Stabilizing", told, remembered)
    if wanted == current:
        return Scale(current, "AsNeeded", told, remembered)
    return Scale(wanted, "ScaleUp" if wanted.total > current.total else "ScaleDown", told, remembered)


def _pairs(least: Replicas, budget: Budget) -> Iterator[Replicas]:
    """Yield pairs from the fewest devices on, balanced ones first among equals."""
    pairs = [
        Replicas(ar, dit)
        for ar in range(least.ar, budget.ar[1] + 1)
        for dit in range(least.dit, budget.dit[1] + 1)
        if budget.allows(Replicas(ar, dit))
    ]
    yield from sorted(pairs, key=lambda pair: (budget.cost(pair), pair.ar - least.ar))


def _squeezed(wanted: Replicas, budget: Budget) -> Replicas:
    """Return what of `wanted` the budget allows, taking from the larger pool, never below the bounds."""
    while not budget.allows(wanted) and (wanted.ar > budget.ar[0] or wanted.dit > budget.dit[0]):
        takes_dit = wanted.dit > budget.dit[0] and (wanted.dit >= wanted.ar or wanted.ar <= budget.ar[0])
        wanted = replace(wanted, dit=wanted.dit - 1) if takes_dit else replace(wanted, ar=wanted.ar - 1)
    return wanted


def _trend(asks: Sequence[Ask], ahead_s: float) -> tuple[Sequence[Ask], float]:
    """Return the pictures that show what the load is now, and by what factor it will have grown in `ahead_s` if its trend
    goes on: the latest third alone, where it is another load than the third before."""
    if len(asks) < 10 * SHARED_PERIOD:
        return asks, 1.0
    first_s, last_s = asks[0].at_s, asks[-1].at_s
    third_s = (last_s - first_s) / SHARED_PERIOD
    if third_s <= 0:
        return asks, 1.0
    latest = [ask for ask in asks if ask.at_s >= last_s - third_s]
    before = sum(last_s - 2 * third_s <= ask.at_s < last_s - third_s for ask in asks)
    noise = 3 * math.sqrt(before + len(latest))  # three standard deviations of what chance alone would do
    if len(latest) - before <= noise:
        return asks, 1.0
    return latest, 1.0 + (len(latest) - before) / len(latest) * min((ahead_s + third_s / 2) / third_s, 2.0)


def _growth(now_s: float, per_s: float, needs: Sequence[Known]) -> float:
    """Return by what factor the rate is above that of `STABLE_S` ago; 1 where it is not, or where that is not known."""
    past = [known.per_s for known in needs if STABLE_S * 0.9 <= now_s - known.at_s < REMEMBERED_S and known.per_s > 0]
    return min(max(per_s / past[-1], 1.0), MAX_GROWTH) if past else 1.0


def _faster(asks: Sequence[Ask], factor: float, most: int) -> Sequence[Ask]:
    """Return the last `most` of these pictures at `factor` times the rate."""
    if factor == 1.0:
        return asks[-most:]
    first_s = asks[0].at_s
    return [replace(ask, at_s=first_s + (ask.at_s - first_s) / factor) for ask in asks[-most:]]


def _within(count: int, bounds: tuple[int, int]) -> int:
    return min(max(count, bounds[0]), bounds[1])
