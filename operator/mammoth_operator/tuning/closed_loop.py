"""Decide how tuner and planner fare: a twin in which they act as the operator would, for tests, benchmarks and what-if."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mammoth_operator.tuning.objective import Goal
from mammoth_operator.tuning.planner import Budget, Known, Replicas, next_replicas
from mammoth_operator.tuning.profile import Profile
from mammoth_operator.tuning.records import Knob, Record
from mammoth_operator.tuning.samples import Ask, Sample
from mammoth_operator.tuning.tuner import Guard, Limits, Measured, is_due, moved, tune
from mammoth_operator.tuning.twin import Plant, Setting, Twin

__all__ = ["Course", "reversals", "run_planned", "run_tuned"]

FAST_S, SLOW_S = 10.0, 60.0
KEPT = 1200  # pictures that the tuner looks back on
PLANNED_S = 600.0  # seconds that the planner looks back on


@dataclass(slots=True)
class Course:
    """What happened: pictures, changes, settings by time, device seconds."""

    samples: list[Sample]
    records: list[Record] = field(default_factory=list)
    settings: list[tuple[float, Setting]] = field(default_factory=list)
    doubts: list[tuple[float, str]] = field(default_factory=list)
    gpu_s: float = 0.0
    span_s: float = 0.0


def run_tuned(
    plant_profile: Profile,
    asks: Sequence[Ask],
    start: Setting,
    *,
    believed: Profile | None = None,
    limits: Limits = Limits(),
    goal: Goal = Goal(),
    guard: Guard = Guard(),
    plant: Plant = Plant(),
) -> Course:
    """Draw `asks` while the tuner acts. `believed` is the profile that it is given, where that is not the plant's."""
    twin = Twin(plant_profile, start, plant)
    twin.ask(asks)
    course = Course(twin.finished, settings=[(0.0, start)])
    history: tuple[Record, ...] = ()
    weighed_s, num_weighed = 0.0, 0
    while twin.now_s < asks[-1].at_s:
        twin.run(twin.now_s + FAST_S)
        if not is_due(twin.now_s, weighed_s, len(twin.finished) - num_weighed, guard):
            continue
        answer = tune(
            Measured(twin.now_s, twin.finished[-KEPT:]), twin.setting, limits, believed or plant_profile, history,
            goal=goal, guard=guard, plant=plant,
        )  # fmt: skip
        history = answer.history
        if answer.weighed:
            weighed_s, num_weighed = twin.now_s, len(twin.finished)
        if answer.doubt and not course.doubts:
            course.doubts.append((twin.now_s, answer.doubt))
        if answer.record:
            course.records.append(answer.record)
            twin.change(moved(twin.setting, answer.record.knob, answer.record.new))
            course.settings.append((twin.now_s, twin.setting))
    return _ended(course, twin)


def run_planned(
    profile: Profile, asks: Sequence[Ask], start: Setting, goal: Goal, budget: Budget, plant: Plant = Plant()
) -> Course:
    """Draw `asks` while the planner acts."""
    twin = Twin(profile, start, plant)
    twin.ask(asks)
    course = Course(twin.finished, settings=[(0.0, start)])
    needs: tuple[Known, ...] = ()
    seen = 0
    while twin.now_s < asks[-1].at_s:
        twin.run(twin.now_s + SLOW_S)
        while seen < len(asks) and asks[seen].at_s < twin.now_s:
            seen += 1
        recent = [ask for ask in asks[:seen] if ask.at_s >= twin.now_s - PLANNED_S]
        if not recent:
            continue
        current = Replicas(twin.setting.ar_replicas, twin.setting.dit_replicas)
        scale = next_replicas(twin.now_s, current, recent, profile, twin.setting, goal, budget, needs, plant)
        needs = scale.needs
        if scale.replicas != current:
            twin.change(replace(twin.setting, ar_replicas=scale.replicas.ar, dit_replicas=scale.replicas.dit))
            course.settings.append((twin.now_s, twin.setting))
    return _ended(course, twin)


def reversals(records: Sequence[Record], within_s: float) -> int:
    """Return the most turns of one knob against its last direction in any stretch of `within_s`."""
    last: dict[Knob, bool] = {}
    turns: list[float] = []
    for record in records:
        up = record.new > record.old
        if last.get(record.knob, up) != up:
            turns.append(record.time_s)
        last[record.knob] = up
    return max((sum(at_s <= other < at_s + within_s for other in turns) for at_s in turns), default=0)


def _ended(course: Course, twin: Twin) -> Course:
    twin.run()
    course.gpu_s, course.span_s = twin.gpu_s, twin.now_s
    return course
