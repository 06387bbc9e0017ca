"""Do: what a decision of the tuner and of the planner takes: those of 500 objects, one after another, as the operator makes them.

Every object has a load of its own: sizes, rate and seed. What is timed is `verdict` and `sized`, which is all that an operator
does of it in a reconcile, with as many pictures as it remembers. CPU time is what counts; the clock's time tells how busy the
machine was.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from bench.scenarios import CEILING, ENGINE, LARGE, MEDIUM, MIXED, SMALL, best_rate, profile_of
from mammoth_operator.limits import asked
from mammoth_operator.spec import PipelineSpec, parse
from mammoth_operator.tuning.observing import MAX_KEPT
from mammoth_operator.tuning.profile import Profile, Profiled
from mammoth_operator.tuning.samples import Observed, Sample, percentile
from mammoth_operator.tuning.sizing import PERIOD_S, sized
from mammoth_operator.tuning.standing import Standing
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.tuner import WEIGH_S
from mammoth_operator.tuning.twin import Plant, Setting
from mammoth_operator.tuning.verdict import goal_of, reach, under, verdict

__all__ = ["decision_cost"]

NUM_OBJECTS = 500
NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
LOADS = (SMALL, MEDIUM, LARGE, MIXED)
SHARES = (0.3, 0.6, 0.9, 1.1)
STEPS = 50
PROMISES = [{"name": "small", "maxPixels": 256 * 256, "p95Seconds": 6}, {"name": "large", "p95Seconds": 60}]


@dataclass(frozen=True, slots=True)
class Thing:
    """An object as a reconcile finds it: nothing has been decided yet."""

    spec: PipelineSpec
    profile: Profile
    observed: Observed
    setting: Setting


def thing(number: int) -> Thing:
    """Return the object of that number."""
    profile = profile_of(CEILING if number % 5 else ENGINE)
    sizes, share = LOADS[number % len(LOADS)], SHARES[number // len(LOADS) % len(SHARES)]
    num_dits = 1 + number % 3
    spec = parse({
        "model": {"source": {"path": "/m"}},
        "ar": {"image": "ar:1", "scaling": {"mode": "Operator", "minReplicas": 1, "maxReplicas": 8}},
        "dit": {"image": "dit:1", "scaling": {"mode": "Operator", "minReplicas": 1, "maxReplicas": 8}},
        "tuning": {"mode": "Auto", "objective": "slo", "sloClasses": PROMISES},
    })  # fmt: skip
    setting = under(Setting(ar_replicas=1 + number % 2, dit_replicas=num_dits), asked(spec))
    per_s = num_dits * share * best_rate(profile, sizes)
    load = arrivals([Phase(1.1 * MAX_KEPT / per_s, per_s, sizes, STEPS)], seed=number)
    samples = replay(profile, setting, load)[:MAX_KEPT]
    shift_s = NOW.timestamp() - samples[-1].done_s
    told = tuple(_later(sample, shift_s) for sample in samples)
    return Thing(spec, profile, Observed(told, len(told), num_new=len(told)), setting)


def decision_cost(num_objects: int = NUM_OBJECTS) -> dict[str, Any]:
    """Return milliseconds of a decision, CPU and clock, and the share of one core that so many objects take at most."""
    cpu: dict[str, list[float]] = {"tuner": [], "planner": []}
    wall: dict[str, list[float]] = {"tuner": [], "planner": []}
    gc.collect()
    gc.freeze()  # what the benchmark itself holds is none of a decision's garbage
    for number in range(num_objects):
        each = thing(number)
        for name, decide in (("tuner", _tune), ("planner", _plan)):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            decided = decide(each)
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            if decided:
                cpu[name].append(1e3 * cpu_s)
                wall[name].append(1e3 * wall_s)
    gc.unfreeze()
    figures: dict[str, Any] = {"objects": num_objects}
    for name, values in cpu.items():
        figures[f"{name}_decisions"] = len(values)
        figures |= _lie(f"{name}_decision_cpu_ms", values) | _lie(f"{name}_decision_wall_ms", wall[name])
    figures["core_share_of_all_decisions"] = sum(cpu["tuner"]) / 1e3 / WEIGH_S + sum(cpu["planner"]) / 1e3 / PERIOD_S
    return figures


def _lie(name: str, values: list[float]) -> dict[str, float]:
    return {
        f"{name}_{label}": percentile(values, share) for label, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def _tune(each: Thing) -> bool:
    spec = each.spec
    base = asked(spec)
    there = reach(spec.tuning, base, base, base)
    standing = Standing(spec.tuning, Profiled(each.profile, "", ""), each.observed, num_ready=2)
    return verdict(standing, {}, base, there, each.setting, Plant(), NOW).weighed


def _plan(each: Thing) -> bool:
    """Decide on the replicas, unless ten minutes brought too few pictures."""
    return bool(
        sized(
            each.spec,
            {},
            each.observed,
            each.profile,
            each.setting,
            goal_of(each.spec.tuning),
            Plant(),
            NOW,
            hold=False,
        )
    )


def _later(sample: Sample, shift_s: float) -> Sample:
    return replace(
        sample,
        ask=replace(sample.ask, at_s=sample.ask.at_s + shift_s),
        **{name: getattr(sample, name) + shift_s for name in ("joined_s", "ready_s", "started_s", "done_s")},
    )


if __name__ == "__main__":
    for key, value in decision_cost().items():
        print(f"{key}: {value:.3g}")
