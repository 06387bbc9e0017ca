"""Decide what a deployment can draw before anybody asks: pictures an hour, and the 95th percentile by class, from its profile."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from mammoth_operator.tuning.objective import Promise
from mammoth_operator.tuning.planner import capacity_per_s
from mammoth_operator.tuning.probing import square
from mammoth_operator.tuning.profile import Costs, Profile, Size
from mammoth_operator.tuning.samples import Ask, percentile
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["capacity_of", "images_per_s"]

LOAD = 0.7  # share of what it can draw at which the percentiles are predicted
NUM_PICTURES = 120
SEED = 1
STEPS = 50
MAX_LINES = 8


def images_per_s(profile: Profile, size: Size, setting: Setting, plant: Plant, steps: int = STEPS) -> float:
    """Return the pictures of one size a second that both pools together can draw."""
    ar, dit = capacity_per_s(Costs(profile), [Ask(0.0, *size, steps)], setting, plant)
    return min(setting.ar_replicas * ar, setting.dit_replicas * dit)


def capacity_of(
    profile: Profile, default: Size, promises: Sequence[Promise], setting: Setting, plant: Plant = Plant()
) -> dict[str, Any]:
    """Return `status.capacity`: images an hour of the default size; for each class, its largest picture's p95 at 70 % load; and by
    size the line through its wave times, with its largest miss: how far "a fixed part and so much a picture" may be trusted."""
    per_s = images_per_s(profile, default, setting, plant)
    return {
        "imagesPerHour": round(3600 * per_s, 1),
        "profileTime": profile.time,
        "gpu": profile.hardware[:128],
        "basis": basis_of(profile, default, promises, setting),
        "p95Seconds": [
            {"name": promise.name, "seconds": round(_p95_s(profile, promise, setting, plant), 2)}
            for promise in promises
        ],
        "waves": [
            {
                "size": f"{height}x{width}",
                "pictureMs": round(slope, 3),
                "fixedMs": round(fixed, 3),
                "missPercent": round(100 * miss, 1),
            }
            for (height, width), (slope, fixed, miss) in sorted(profile.residuals.items())[:MAX_LINES]
        ],
    }


def basis_of(profile: Profile, default: Size, promises: Sequence[Promise], setting: Setting) -> str:
    """Return a digest of everything that `capacity_of` depends on, so that it is computed once."""
    return hashlib.sha256(
        repr((profile.key, profile.time, default, tuple(promises), setting, MAX_LINES)).encode()
    ).hexdigest()[:16]


def _p95_s(profile: Profile, promise: Promise, setting: Setting, plant: Plant) -> float:
    """Return the 95th percentile of a seeded load of the class's largest pictures."""
    height, width = square(promise.max_pixels)
    steps = min(promise.max_steps, STEPS)
    per_s = LOAD * images_per_s(profile, (height, width), setting, plant, steps)
    asks = arrivals([Phase(NUM_PICTURES / per_s, per_s, {height: 1.0}, steps)], SEED)
    return percentile([sample.latency_s for sample in replay(profile, setting, asks, plant)], 0.95) if asks else 0.0
