"""Decide what to deploy for a load, and what to expect of it: the answer of `mammoth plan`, as values and as words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mammoth_operator.tuning.objective import Goal, Score, score
from mammoth_operator.tuning.planner import Budget, Replicas, needed
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.samples import Ask, Sample, percentile
from mammoth_operator.tuning.trial import Asked
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["Advice", "advise"]

CAPS = (1, 2, 3, 4, 6, 8)
WAITS_MS = (0.0, 20.0, 100.0)
NUM_BINS = 40


@dataclass(frozen=True, slots=True)
class Advice:
    """What to deploy and what to expect. `kept`: all promises are, within the budget. `p95_by_time` has (hours, seconds)."""

    setting: Setting
    expected: Score
    kept: bool
    mean_batch_size: float
    p95_by_time: tuple[tuple[float, float], ...]
    tried: tuple[tuple[str, float], ...]

    def data(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "setting": asdict(self.setting),
            "expected": {**asdict(self.expected), "class_p95_s": dict(self.expected.class_p95_s)},
            "kept": self.kept,
            "mean_batch_size": self.mean_batch_size,
            "p95_by_time": [list(point) for point in self.p95_by_time],
            "tried": [list(pair) for pair in self.tried],
        }


def advise(profile: Profile, asks: Sequence[Ask], goal: Goal, budget: Budget, plant: Plant = Plant()) -> Advice:
    """Return the fewest devices that keep the promises for the whole of `asks`, and the caps that are best with them.

    Replicas first, with the caps of a profile's best waves; then every pair of cap and wait on the whole trace.
    """
    start = Setting(ar_max_num_seqs=plant.ar_slots, dit_max_num_seqs=1, wait_ms=0.0)
    costs = Costs(profile)
    need = needed(costs, asks, start, goal, budget, plant)
    with_replicas = _placed(start, need.replicas)
    trial = Asked(asks, costs, goal, plant)
    outcomes = {}
    for cap in CAPS:
        for wait_ms in WAITS_MS if cap > 1 else WAITS_MS[:1]:
            setting = replace(with_replicas, dit_max_num_seqs=cap, wait_ms=wait_ms)
            samples = trial.samples(setting)
            outcomes[cap, wait_ms] = (setting, samples, score(samples, goal))
    best = min(outcomes.values(), key=lambda each: (each[2].miss, each[2].cost_s, each[0].wait_ms))
    setting, samples, expected = best
    return Advice(
        setting, expected, expected.miss <= 0, sum(sample.wave_size for sample in samples) / len(samples), _by_time(samples),
        tuple((f"cap {cap}, wait {wait:g} ms", outcome[2].p95_s) for (cap, wait), outcome in outcomes.items()),
    )  # fmt: skip


def _placed(setting: Setting, replicas: Replicas) -> Setting:
    return replace(setting, ar_replicas=replicas.ar, dit_replicas=replicas.dit)


def _by_time(samples: Sequence[Sample]) -> tuple[tuple[float, float], ...]:
    """Return p95 by the hour at which pictures were asked for, in equal stretches."""
    last_s = max(sample.ask.at_s for sample in samples) + 1e-9
    bins: Mapping[int, list[float]] = {index: [] for index in range(NUM_BINS)}
    for sample in samples:
        bins[int(NUM_BINS * sample.ask.at_s / last_s) if last_s > 1e-9 else 0].append(sample.latency_s)
    return tuple((index * last_s / NUM_BINS / 3600, percentile(times, 0.95)) for index, times in bins.items() if times)
