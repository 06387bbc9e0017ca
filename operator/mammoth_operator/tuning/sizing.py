"""Decide the replicas of the pools that the spec leaves to the operator, every few minutes, and what status says of it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mammoth_operator.names import POOLS, Pool
from mammoth_operator.spec import PipelineSpec
from mammoth_operator.tuning.objective import Goal
from mammoth_operator.tuning.planner import Budget, Known, Replicas, next_replicas
from mammoth_operator.tuning.profile import Profile
from mammoth_operator.tuning.samples import Observed
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["budget_of", "planned", "sized"]

PERIOD_S = 60.0
LOOK_BACK_S = 600.0
MIN_PICTURES = 10
MAX_NEEDS = 12
Status = dict[str, Any]


def budget_of(spec: PipelineSpec, current: Replicas) -> Budget:
    """Return what the planner may use. A pool that is not its to size stays as it is."""
    ranges = {}
    for pool in POOLS:
        scaling, now = spec.pool(pool).scaling, current.ar if pool == "ar" else current.dit
        owned = scaling.mode == "Operator"
        ranges[pool] = (max(scaling.min_replicas, 1), max(scaling.max_replicas, 1)) if owned else (now, now)
    devices = {pool: spec.pool(pool).accelerator.count or 1 for pool in POOLS}
    return Budget(ranges["ar"], ranges["dit"], devices["ar"], devices["dit"], spec.tuning.gpu_budget)


def planned(previous: Mapping[str, Any], pool: Pool, running: int, low: int, high: int) -> int:
    """Return the replicas of a pool in mode Operator: the planner's last word, what runs before its first, within the bounds."""
    return min(max(int(previous.get(pool, running)), low), high)


def sized(
    spec: PipelineSpec,
    previous: Mapping[str, Any],
    observed: Observed,
    profile: Profile | None,
    setting: Setting,
    goal: Goal,
    plant: Plant,
    now: datetime,
    *,
    hold: bool,
) -> Status:
    """Return `status.scaling`, which is what the replicas follow. It stays as it is while nothing is known or `hold` is set."""
    if not any(spec.pool(pool).scaling.mode == "Operator" for pool in POOLS):
        return {}
    now_s = now.timestamp()
    since_s = now_s - datetime.fromisoformat(previous["time"]).timestamp() if "time" in previous else PERIOD_S
    asks = [sample.ask for sample in observed.samples if sample.ask.at_s >= now_s - LOOK_BACK_S]
    if hold or profile is None or since_s < PERIOD_S or len(asks) < MIN_PICTURES:
        return dict(previous)
    current = Replicas(setting.ar_replicas, setting.dit_replicas)
    needs = [
        Known(_seconds(item["time"]), Replicas(item["ar"], item["dit"]), item.get("perSecond", 0.0))
        for item in previous.get("needs", ())
    ]
    asks.sort(key=lambda ask: ask.at_s)
    scale = next_replicas(now_s, current, asks, profile, setting, goal, budget_of(spec, current), needs, plant)
    return {
        "ar": scale.replicas.ar,
        "dit": scale.replicas.dit,
        "time": _stamp(now_s),
        "reason": scale.reason,
        "message": scale.message[:512],
        "needs": [
            {
                "time": _stamp(known.at_s),
                "ar": known.replicas.ar,
                "dit": known.replicas.dit,
                "perSecond": round(known.per_s, 4),
            }
            for known in scale.needs[-MAX_NEEDS:]
        ],
    }


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
