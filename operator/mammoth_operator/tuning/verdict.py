"""Decide what tuning means for one deployment now: the caps in force, what status says of it, what is news."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from mammoth_operator.decision import Event
from mammoth_operator.limits import Caps
from mammoth_operator.spec import Range, Tuning
from mammoth_operator.tuning.objective import Goal, Promise
from mammoth_operator.tuning.records import MAX_RECORDS, Knob, Record
from mammoth_operator.tuning.standing import Standing, bounds_problem, frozen_until, refusal
from mammoth_operator.tuning.tuner import Answer, Guard, Limits, Measured, is_due, tune
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["Reach", "Verdict", "goal_of", "guard_of", "reach", "under", "verdict"]

MAX_WAIT_MS = 10_000.0
Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the knobs may stand. `problem` says which bounds exclude everything; `limits` is None then."""

    limits: Limits | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The caps in force, the condition's (status, reason, message), what `status.tuning` gets, Events, and whether settings
    were compared."""

    caps: Caps
    condition: tuple[str, str, str]
    status: Status = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    weighed: bool = False
    action: str = ""


def goal_of(tuning: Tuning) -> Goal:
    """Return what a spec asks for; short times where it does not say."""
    promises = tuple(
        Promise(item.name, item.p95_seconds, item.max_pixels, item.max_steps) for item in tuning.slo_classes
    )
    return Goal("throughput" if tuning.objective == "throughput" else "slo", promises)


def guard_of(tuning: Tuning) -> Guard:
    """Return the guard of a spec."""
    guard = tuning.guard
    return Guard(guard.min_samples, float(guard.cooldown_seconds), guard.max_regression_percent / 100)


def reach(tuning: Tuning, capacity: Caps, within: Caps, asked: Caps) -> Reach:
    """Return the limits of the knobs: the spec's bounds, what pods have room for, what memory has taught.

    `within` is what the spec asks for after the memory ceilings, `asked` before them: they differ where a ceiling is in force.
    """
    bounds = tuning.bounds
    ranges: list[tuple[int, int]] = []
    problems = []
    for name, given, most, ceiling in (
        (
            "ditMaxNumSeqs",
            bounds.dit_max_num_seqs,
            capacity.dit_max_num_seqs,
            _ceiling(within.dit_max_num_seqs, asked.dit_max_num_seqs, capacity.dit_max_num_seqs),
        ),
        (
            "arMaxNumSeqs",
            bounds.ar_max_num_seqs,
            capacity.ar_max_num_seqs,
            _ceiling(within.ar_max_num_seqs, asked.ar_max_num_seqs, capacity.ar_max_num_seqs),
        ),
    ):
        known = given or Range(min=1.0, max=float(most))
        problems.append(bounds_problem(known.min, known.max, name, min(most, ceiling)))
        ranges.append((max(-int(-known.min // 1), 1), int(min(known.max, most, ceiling) // 1)))
    wait = bounds.request_batch_max_wait_ms
    problem = "; ".join(text for text in problems if text)
    if problem:
        return Reach(None, problem)
    return Reach(Limits(dit=ranges[0], ar=ranges[1], wait_ms=(wait.min, wait.max) if wait else (0.0, MAX_WAIT_MS)))


def _ceiling(within: int, asked: int, capacity: int) -> int:
    return within if within < asked else capacity


def verdict(
    standing: Standing,
    previous: Mapping[str, Any],
    base: Caps,
    there: Reach,
    setting: Setting,
    plant: Plant,
    now: datetime,
) -> Verdict:
    """Return what to do now. `previous` is `status.tuning`, `base` what the spec asks for, within what memory allows.

    An edit of the spec's caps replaces the tuner's; so does leaving mode Auto. `setting` has the replicas; its caps are not
    looked at.
    """
    tuning = standing.tuning
    history = tuple(Record.parse(item) for item in previous.get("history", ()))
    tuned = _tuned(previous, base, there) if tuning.mode == "Auto" else None
    if tuned is None:  # what was pending is in force no more
        history = tuple(
            replace(item, outcome="kept") if item.outcome in ("pending", "revert") else item for item in history
        )
    caps = tuned or base
    kept = _status(history, base, tuned, previous)
    until = frozen_until(tuning.guard.freeze_windows, now)
    if until:
        kept["frozenUntil"] = until.strftime("%Y-%m-%dT%H:%M:%SZ")
    why = refusal(standing, now)
    if why is not None:
        return Verdict(caps, ("False", *why), kept)
    observed, guard, profile = standing.observed, guard_of(tuning), standing.profiled.profile
    assert profile is not None, "the rules have seen to it"
    assert there.limits is not None, "the rules have seen to it"
    now_s = now.timestamp()
    if not is_due(now_s, observed.weighed_s, observed.num_new, guard) and previous.get("said"):
        return Verdict(caps, ("True", "Watching", previous["said"]), kept)
    answer = tune(
        Measured(now_s, observed.samples), under(setting, caps),
        there.limits, profile, history, goal=goal_of(tuning), guard=guard, plant=plant,
    )  # fmt: skip
    if not answer.weighed:
        status = "False" if answer.reason == "NotEnoughData" else "True"
        return Verdict(caps, (status, answer.reason, answer.message), kept)
    return _acted(answer, tuning.mode, caps, base, tuned, previous, kept)


def _acted(
    answer: Answer, mode: str, caps: Caps, base: Caps, tuned: Caps | None, previous: Mapping[str, Any], kept: Status
) -> Verdict:
    """Return the verdict of a comparison: in mode Auto its change is in force, in mode Recommend it is only told."""
    said = (f"{answer.doubt}. " if answer.doubt else "") + _said(answer)
    record = answer.record
    if record is None:
        status = _status(answer.history, base, tuned, previous) | {"said": said[:512]} | _frozen(kept)
        return Verdict(caps, ("True", "Settled", said), status, weighed=True, action="hold")
    changed = _with(caps, record.knob, record.new)
    if mode == "Auto":
        status = _status(answer.history, base, changed, previous) | {"said": said[:512]} | _frozen(kept)
        reverted = record.outcome == "revert"
        event = Event("TuningReverted" if reverted else "TuningApplied", said[:1000], warning=reverted)
        return Verdict(changed, ("True", "Reverted" if reverted else "Tuned", said), status, (event,), True, "revert" if reverted else "apply")  # fmt: skip
    told = replace(record, outcome="recommended")
    last = answer.history[:-1]
    same = bool(last) and (last[-1].knob, last[-1].new, last[-1].outcome) == (told.knob, told.new, "recommended")
    history = (*(last[:-1] if same else last), told)[-MAX_RECORDS:]
    status = (
        _status(history, base, None, previous) | {"recommended": changed.status(), "said": said[:512]} | _frozen(kept)
    )
    return Verdict(caps, ("True", "Recommends", said), status, weighed=True, action="recommend")


def _frozen(kept: Status) -> Status:
    return {"frozenUntil": kept["frozenUntil"]} if "frozenUntil" in kept else {}


def _said(answer: Answer) -> str:
    if answer.record is not None:
        return f"{answer.message}. {answer.record.evidence}"
    assert answer.now is not None
    return f"nothing would help: p95 {answer.now.p95_s:.2f} s. {answer.message}"


def _status(history: Sequence[Record], base: Caps, tuned: Caps | None, previous: Mapping[str, Any]) -> Status:
    status: Status = {"asked": base.status()}
    if history:
        status["history"] = [record.status() for record in history]
        status["lastDecision"] = history[-1].status()
    if tuned is not None:
        status["tuned"] = tuned.status()
    if "recommended" in previous and tuned is None:
        status["recommended"] = previous["recommended"]
    if "said" in previous:
        status["said"] = previous["said"]
    return status


def _tuned(previous: Mapping[str, Any], base: Caps, there: Reach) -> Caps | None:
    """Return the tuner's own caps, kept within today's limits; None when the spec has been edited since, or there are none."""
    if "tuned" not in previous or previous.get("asked") != base.status() or there.limits is None:
        return None
    raw, limits = previous["tuned"], there.limits
    return Caps(
        int(min(max(raw["arMaxNumSeqs"], limits.ar[0]), limits.ar[1])),
        int(min(max(raw["ditMaxNumSeqs"], limits.dit[0]), limits.dit[1])),
        min(max(float(raw["requestBatchMaxWaitMs"]), limits.wait_ms[0]), limits.wait_ms[1]),
    )


def under(setting: Setting, caps: Caps) -> Setting:
    """Return `setting` with these caps."""
    return replace(
        setting,
        ar_max_num_seqs=caps.ar_max_num_seqs,
        dit_max_num_seqs=caps.dit_max_num_seqs,
        wait_ms=caps.request_batch_max_wait_ms,
    )


def _with(caps: Caps, knob: Knob, value: float) -> Caps:
    match knob:
        case "ditMaxNumSeqs":
            return replace(caps, dit_max_num_seqs=int(value))
        case "requestBatchMaxWaitMs":
            return replace(caps, request_batch_max_wait_ms=float(value))
        case "arMaxNumSeqs":
            return replace(caps, ar_max_num_seqs=int(value))
