"""Do: the checks of tuner and planner that are not a grid: from a bad start, after a step, with a wrong profile, at what cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.scenarios import BUSY, CEILING, ENGINE, LARGE, MEDIUM, MIXED, SMALL, Part, Scenario, day, profile_of
from mammoth_operator.tuning.closed_loop import Course, reversals, run_planned, run_tuned
from mammoth_operator.tuning.objective import Goal, Promise, score
from mammoth_operator.tuning.planner import Budget, Replicas
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.samples import Sample, percentile
from mammoth_operator.tuning.trial import Asked, replay
from mammoth_operator.tuning.tuner import Guard
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["convergence", "planner", "step_in_load", "wrong_profiles"]

WINDOW_S = Guard().cooldown_s
STEADY = [
    Scenario("small", [Part(1, BUSY, SMALL)], seed=31),
    Scenario("medium", [Part(1, BUSY, MEDIUM)], seed=32),
    Scenario("engine", [Part(2, BUSY, MEDIUM)], seed=33, profile=ENGINE, ar_replicas=4),
]
NEAR = 1.05
PROMISE = 3.0  # times what a picture takes alone


def convergence() -> dict[str, Any]:
    """From the worst pair of knobs: changes until p95 is within 5 % of the best cap's, and turns at steady load."""
    most, turns = 0, 0
    for scenario in STEADY:
        profile, asks = profile_of(scenario.profile), scenario.asks()
        caps = [replace(scenario.start, dit_max_num_seqs=cap, wait_ms=0.0) for cap in range(1, 9)]
        best = min(_p95(replay(profile, setting, asks)) for setting in caps)
        course = run_tuned(profile, asks, replace(scenario.start, dit_max_num_seqs=8, wait_ms=100.0))
        most = max(most, _changes_until_good(course, profile, asks, best))
        turns = max(turns, reversals(course.records, 600.0))
    return {"decisions_from_a_bad_start": most, "reversals_in_10_steady_min": turns}


def _changes_until_good(course: Course, profile: Profile, asks: Sequence[Any], best_s: float) -> int:
    """Return after how many changes the setting is one that, kept for the whole trace, is within 5 % of the best."""
    for index, (_, setting) in enumerate(course.settings):
        if _p95(replay(profile, setting, asks)) <= NEAR * best_s:
            return index
    return len(course.settings)


def step_in_load() -> dict[str, Any]:
    """The sizes change at once: windows until the first answer, and until the last."""
    scenario = Scenario("step", [Part(1, BUSY, SMALL), Part(1, BUSY, MEDIUM)], seed=34)
    course = run_tuned(profile_of(CEILING), scenario.asks(), Setting())
    at_s = [record.time_s - 3600.0 for record in course.records if record.time_s >= 3600.0]
    return {"windows_until_a_step_is_answered": math.ceil(min(at_s, default=math.inf) / WINDOW_S) if at_s else 99}


def wrong_profiles() -> dict[str, Any]:
    """Times halved everywhere; and halved for waves alone, which one picture at a time never shows."""
    truth = profile_of(CEILING)
    halved = truth.scaled(0.5, 0.5)
    only_waves = replace(
        truth,
        dit_step_ms={
            size: {n: ms if n == 1 else ms / 2 for n, ms in table.items()} for size, table in truth.dit_step_ms.items()
        },
    )
    asks = Scenario("wrong", [Part(2, BUSY, MEDIUM)], seed=35).asks()
    right = run_tuned(truth, asks, Setting(dit_max_num_seqs=8))
    wrong = run_tuned(truth, asks, Setting(dit_max_num_seqs=8), believed=halved)
    tempted = run_tuned(truth, asks, Setting(dit_max_num_seqs=1, wait_ms=0.0), believed=only_waves)
    base = run_tuned(truth, asks, Setting(dit_max_num_seqs=1, wait_ms=0.0))
    return {
        "halved_profile_noticed_after_windows": math.ceil(wrong.doubts[0][0] / WINDOW_S) if wrong.doubts else 99,
        "halved_profile_p95_ratio": _p95(wrong.samples) / _p95(right.samples),
        "wrong_wave_times_reverts": sum(record.outcome == "revert" for record in tempted.records),
        "wrong_wave_times_windows_above_guard": _windows_above(tempted, base.samples),
        "wrong_wave_times_p95_ratio": _p95(tempted.samples) / _p95(base.samples),
    }


def _windows_above(course: Course, base: Sequence[Sample]) -> int:
    """Return the longest run of windows, counted from a change, in which p95 is above what it would have been without by more
    than the guard."""
    longest = 0
    end_s = max(sample.ask.at_s for sample in base)
    for record in course.records:
        start_s, run = record.time_s, 0
        while start_s < end_s and _is_worse(course.samples, base, start_s):
            run, start_s = run + 1, start_s + WINDOW_S
        longest = max(longest, run)
    return longest


def _is_worse(samples: Sequence[Sample], base: Sequence[Sample], start_s: float) -> bool:
    now, then = ([s.latency_s for s in side if start_s <= s.ask.at_s < start_s + WINDOW_S] for side in (samples, base))
    return bool(now and then) and percentile(now, 0.95) > percentile(then, 0.95) * (1 + Guard().max_regression)


PLANNED = (
    Scenario("plan-steady", [Part(2, 3.5, MEDIUM)], seed=41),
    Scenario("plan-mixed", [Part(3, 3.0, MIXED)], seed=42),
    Scenario("plan-day", [Part(12, 5.0, MEDIUM, day)], seed=43),
    Scenario("plan-step", [Part(2, 1.0, LARGE), Part(2, 4.0, LARGE)], seed=44),
)


def planner() -> list[dict[str, Any]]:
    """The planner against the fewest devices, fixed for the whole trace, that an exhaustive search finds to keep the promise."""
    rows = []
    for scenario in PLANNED:
        profile, asks = profile_of(scenario.profile), scenario.asks()
        goal, start = goal_of(profile, scenario), Setting(dit_max_num_seqs=1, wait_ms=0.0)
        least = _exhaustive(profile, asks, goal, start)
        begin = replace(start, ar_replicas=least.ar, dit_replicas=least.dit)
        course = run_planned(profile, asks, begin, goal, Budget((1, 4), (1, 16)), Plant(start_s=120.0))
        outcome = score(course.samples, goal)
        rows.append({
            "name": scenario.name, "seed": scenario.seed, "pictures": len(asks),
            "promise_s": goal.promises[-1].p95_s, "p95_s": outcome.class_p95_s[goal.promises[-1].name], "kept": outcome.miss <= 0,
            "mean_gpus": course.gpu_s / course.span_s, "exhaustive_gpus": least.total,
            "gpu_ratio": course.gpu_s / course.span_s / least.total, "scalings": len(course.settings) - 1,
            "flaps": _flaps(course),
        })  # fmt: skip
        print(
            f"{scenario.name}: {rows[-1]['mean_gpus']:.2f} GPUs against {least.total}, kept {rows[-1]['kept']}",
            flush=True,
        )
    return rows


def goal_of(profile: Profile, scenario: Scenario) -> Goal:
    """Return a promise for each size: a few times what a picture takes with nobody else there."""
    costs, promises = Costs(profile), []
    for side in sorted({side for part in scenario.parts for side in part.sizes}):
        tokens = (side // 16) * (side // 16 + 1)
        alone_s = tokens * costs.decode_s(1, tokens / 2) + costs.wave_s((side, side), 50, 1)
        promises.append(Promise(f"px{side}", PROMISE * alone_s, side * side))
    return Goal("slo", tuple(promises))


def _exhaustive(profile: Profile, asks: Sequence[Any], goal: Goal, start: Setting) -> Replicas:
    """Return the fewest replicas that keep every promise over the whole trace."""
    trial = Asked(asks, Costs(profile), goal, Plant())
    for total in range(2, 20):
        for ar in range(1, min(total, 5)):
            setting = replace(start, ar_replicas=ar, dit_replicas=total - ar)
            if _could(profile, asks, setting) and trial.score(setting).miss <= 0:
                return Replicas(ar, total - ar)
    raise AssertionError("no number of devices keeps the promise")


def _could(profile: Profile, asks: Sequence[Any], setting: Setting) -> bool:
    """Return whether the replicas can draw the trace in its time at all; what cannot needs no trial."""
    costs = Costs(profile)
    busy_s = sum(costs.wave_s(ask.size, ask.steps, 1) for ask in asks)
    return busy_s / setting.dit_replicas < 1.05 * (asks[-1].at_s - asks[0].at_s)


def _flaps(course: Course) -> int:
    """Return how often a pool shrank and grew again within ten minutes."""
    flaps = 0
    for pool in ("ar_replicas", "dit_replicas"):
        shrunk_s = -math.inf
        for (_, before), (at_s, after) in zip(course.settings, course.settings[1:], strict=False):
            change = getattr(after, pool) - getattr(before, pool)
            flaps += change > 0 and at_s - shrunk_s < 600.0
            shrunk_s = at_s if change < 0 else shrunk_s
    return flaps


def _p95(samples: Sequence[Sample]) -> float:
    return percentile([sample.latency_s for sample in samples], 0.95)
