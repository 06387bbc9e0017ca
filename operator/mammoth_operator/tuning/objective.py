"""Decide how good an outcome is: promises by class first, then the tail and the mean of the time to a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from mammoth_operator.tuning.samples import Ask, Sample, percentile

__all__ = ["Goal", "Promise", "Score", "class_of", "score", "score_of"]

TAIL_WEIGHT = 0.7  # the rest goes to the mean, which a few samples hardly disturb
EQUAL = 0.02  # throughputs that differ by less are the same


@dataclass(frozen=True, slots=True)
class Promise:
    """An SLO class: `p95_s` for pictures up to `max_pixels` and `max_steps`."""

    name: str
    p95_s: float
    max_pixels: int
    max_steps: int = 200


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted. Without promises the time to a picture itself is to be short."""

    kind: Literal["slo", "throughput"] = "slo"
    promises: tuple[Promise, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """How a set of pictures fared. `miss` is by how much the worst class is late, 0 when all promises are kept."""

    p95_s: float
    mean_s: float
    images_per_s: float
    miss: float
    class_p95_s: Mapping[str, float]

    @property
    def cost_s(self) -> float:
        """Return the tail and the mean as one figure."""
        return TAIL_WEIGHT * self.p95_s + (1 - TAIL_WEIGHT) * self.mean_s

    def gain_over(self, other: Score, kind: str) -> float:
        """Return by what share this is better than `other`; negative when it is worse."""
        if kind == "throughput":
            gain = self.images_per_s / other.images_per_s - 1
            if abs(gain) > EQUAL:
                return gain
        elif other.miss > 0 or self.miss > 0:
            return 1 - (1 + self.miss) / (1 + other.miss)
        return 1 - self.cost_s / other.cost_s


def class_of(ask: Ask, promises: Sequence[Promise]) -> str:
    """Return the smallest class that a picture fits; "none" when it fits none."""
    fitting = [p for p in promises if ask.height_px * ask.width_px <= p.max_pixels and ask.steps <= p.max_steps]
    return min(fitting, key=lambda p: (p.max_pixels, p.max_steps, p.name)).name if fitting else "none"


def score(samples: Sequence[Sample], goal: Goal) -> Score:
    """Return how `samples` fared; they are all done. Raises ValueError for none."""
    return score_of([sample.ask for sample in samples], [sample.done_s for sample in samples], goal)


def score_of(asks: Sequence[Ask], done_s: Sequence[float], goal: Goal) -> Score:
    """Return how pictures fared that were asked for as `asks` say and done at `done_s`. Raises ValueError for none."""
    if not asks:
        raise ValueError("no picture to judge by")
    times = [end_s - ask.at_s for ask, end_s in zip(asks, done_s, strict=True)]
    p95s = _class_p95s(asks, times, goal.promises) if goal.promises else {}
    late = [p95s[promise.name] / promise.p95_s - 1 for promise in goal.promises if promise.name in p95s]
    kept = [index for index, ask in enumerate(asks) if times[index] <= ask.budget_s]
    span_s = max(done_s[i] for i in kept) - min(asks[i].at_s for i in kept) if kept else math.inf
    return Score(percentile(times, 0.95), fmean(times), len(kept) / max(span_s, 1e-9), max([0.0, *late]), p95s)


def _class_p95s(asks: Sequence[Ask], times: Sequence[float], promises: Sequence[Promise]) -> dict[str, float]:
    names: dict[tuple[int, int, int], str] = {}
    by_class: dict[str, list[float]] = {}
    for ask, time_s in zip(asks, times, strict=True):
        key = (ask.height_px, ask.width_px, ask.steps)
        if key not in names:
            names[key] = class_of(ask, promises)
        by_class.setdefault(names[key], []).append(time_s)
    return {promise.name: percentile(by_class[promise.name], 0.95) for promise in promises if promise.name in by_class}
