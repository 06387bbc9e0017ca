"""Decide the loads that the tuner and the planner are judged on. Rates follow from a profile by one rule, seeds are fixed.

A phase is loaded to a share of the pictures a second that the best cap could draw: `capacity_per_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mammoth_operator.tuning.planner import capacity_per_s
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.samples import Ask
from mammoth_operator.tuning.traces import Phase, Rate, arrivals
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["CEILING", "ENGINE", "NUM_STEPS", "SCENARIOS", "Scenario", "profile_of"]

FOLDER = Path(__file__).resolve().parent / "profiles"
CEILING, ENGINE = "h200", "h200-reference"
NUM_STEPS = 50
HOUR_S = 3600.0
BUSY = 0.9  # share of the best possible rate
SMALL, MEDIUM, LARGE = {256: 1.0}, {512: 1.0}, {1024: 1.0}
MIXED = {256: 0.6, 512: 0.3, 1024: 0.1}


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a load: `share` of the best rate of its sizes, times `shape` over the stretch."""

    hours: float
    share: float
    sizes: Mapping[int, float]
    shape: Rate = lambda share: 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load on one profile. `shifts`: what is best changes on the way. The engine of ENGINE writes slowly: more of it feeds a DiT."""

    name: str
    parts: Sequence[Part]
    seed: int
    profile: str = CEILING
    shifts: bool = False
    ar_replicas: int = 1

    @property
    def start(self) -> Setting:
        """Return the defaults, with as many AR replicas as feed the DiT."""
        return Setting(ar_replicas=self.ar_replicas)

    def asks(self, num_dits: int = 1) -> list[Ask]:
        """Return its pictures, for as many DiT replicas."""
        profile = profile_of(self.profile)
        phases = [
            Phase(part.hours * HOUR_S, num_dits * part.share * best_rate(profile, part.sizes), part.sizes, NUM_STEPS, part.shape)
            for part in self.parts
        ]  # fmt: skip
        return arrivals(phases, self.seed)


def profile_of(name: str) -> Profile:
    """Return a profile that ships with the benchmarks."""
    return Profile.parse((FOLDER / f"{name}.json").read_text())


def best_rate(profile: Profile, sizes: Mapping[int, float]) -> float:
    """Return the pictures a second of a mix that one DiT replica could draw at most, every size at its best wave size."""
    total, costs = sum(sizes.values()), Costs(profile)
    per_picture_s = sum(
        weight / total / capacity_per_s(costs, [Ask(0.0, side, side, NUM_STEPS)], Setting(), Plant())[1]
        for side, weight in sizes.items()
    )
    return 1.0 / per_picture_s


def day(share: float) -> float:
    """Two days in one stretch: quiet nights at a tenth, busy afternoons."""
    return 0.55 - 0.45 * math.cos(4 * math.pi * share)


def bursts(share: float) -> float:
    """Twelve bursts of a twelfth of the time each, a tenth of their rate between them."""
    return 1.0 if (share * 12) % 1.0 < 1 / 12 else 0.1


SCENARIOS = (
    Scenario("steady-small", [Part(1, BUSY, SMALL)], seed=11),
    Scenario("steady-medium", [Part(2, BUSY, MEDIUM)], seed=12),
    Scenario("steady-large", [Part(4, BUSY, LARGE)], seed=13),
    Scenario("quiet", [Part(4, 0.15, MIXED)], seed=14),
    Scenario("mixed-sizes", [Part(4, 0.8, MIXED)], seed=15),
    Scenario("day-curve", [Part(4, 0.95, MEDIUM, day)], seed=16),
    Scenario("bursts", [Part(2, 1.5, SMALL, bursts)], seed=17),
    Scenario("shape-shift", [Part(1, BUSY, SMALL), Part(1, BUSY, MEDIUM)], seed=18, shifts=True),
    Scenario("engine-steady", [Part(4, BUSY, MEDIUM)], seed=19, profile=ENGINE, ar_replicas=4),
    Scenario("engine-shift", [Part(3, 0.3, LARGE), Part(3, BUSY, MEDIUM)], seed=20, profile=ENGINE, ar_replicas=4),
)
