"""Decide whether the tuner may act on a deployment now: the first rule that says no gives the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from mammoth_operator.spec import Freeze, Tuning
from mammoth_operator.tuning.profile import Profiled
from mammoth_operator.tuning.samples import Observed

__all__ = ["Standing", "bounds_problem", "frozen_until", "refusal"]

PROFILE_AGE = timedelta(days=7)
Why = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the rules depend on. Pods are the ready ones: `silent` gave no answer, `old` are of another revision, `unacked` do
    not run under the epoch in force."""

    tuning: Tuning
    profiled: Profiled
    observed: Observed
    num_ready: int
    silent: Sequence[str] = ()
    old: Sequence[str] = ()
    unacked: Sequence[str] = ()
    rolling: str = ""
    paused: bool = False
    batching: str = "request"
    bounds: str = ""  # what they exclude, when that is everything


def refusal(standing: Standing, now: datetime) -> Why | None:
    """Return (reason, message) of the first rule that forbids to act, or None."""
    return next((why for rule in RULES if (why := rule(standing, now)) is not None), None)


def frozen_until(windows: Sequence[Freeze], now: datetime) -> datetime | None:
    """Return when the freeze window that `now` is in ends; None outside of all."""
    for window in windows:
        start, end = (_today(now, clock) for clock in (window.start, window.end))
        if end <= start:
            end += timedelta(days=1)
        for shift in (timedelta(0), timedelta(days=1)):
            if start - shift <= now < end - shift:
                return end - shift
    return None


def _today(now: datetime, clock: str) -> datetime:
    hour, minute = clock.split(":")
    return now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)


def _off(standing: Standing, _: datetime) -> Why | None:
    return ("Off", "spec.tuning.mode is Off") if standing.tuning.mode == "Off" else None


def _paused(standing: Standing, _: datetime) -> Why | None:
    return ("Frozen", "spec.paused is true") if standing.paused else None


def _window(standing: Standing, now: datetime) -> Why | None:
    until = frozen_until(standing.tuning.guard.freeze_windows, now)
    return ("Frozen", f"a freeze window ends at {until:%H:%M} UTC") if until else None


def _moving(standing: Standing, _: datetime) -> Why | None:
    return (
        ("Frozen", f"a rollout or a change of replicas is under way: {standing.rolling}") if standing.rolling else None
    )


def _old(standing: Standing, _: datetime) -> Why | None:
    return ("Frozen", f"of an old revision: {', '.join(standing.old)}") if standing.old else None


def _nobody(standing: Standing, _: datetime) -> Why | None:
    return ("NotEnoughData", "no pod takes work") if not standing.num_ready else None


def _silent(standing: Standing, _: datetime) -> Why | None:
    return ("PodSilent", f"no answer from {', '.join(standing.silent)}") if standing.silent else None


def _unacked(standing: Standing, _: datetime) -> Why | None:
    if not standing.unacked:
        return None
    return (
        "AckMissing",
        f"{standing.num_ready - len(standing.unacked)} of {standing.num_ready} pods confirmed the limits",
    )


def _bounds(standing: Standing, _: datetime) -> Why | None:
    return ("BoundsExcludeEverything", standing.bounds) if standing.bounds else None


def _clocks(standing: Standing, _: datetime) -> Why | None:
    return ("MeasurementsUnusable", standing.observed.unusable) if standing.observed.unusable else None


def _mode(standing: Standing, _: datetime) -> Why | None:
    if standing.batching == "step":
        return ("StepBatching", "jobs join and leave at every step: there is no wave and no wait to tune")
    return None


def _profile(standing: Standing, now: datetime) -> Why | None:
    profile = standing.profiled.profile
    if profile is None:
        return (standing.profiled.reason, standing.profiled.message)
    if profile.time and now - datetime.fromisoformat(profile.time) > PROFILE_AGE:
        return ("ProfileOld", f"measured at {profile.time}, more than {PROFILE_AGE.days} days ago")
    return None


def _data(standing: Standing, _: datetime) -> Why | None:
    return ("NotEnoughData", "no pod has told of a picture yet") if not standing.observed.samples else None


RULES = (_off, _paused, _window, _moving, _old, _nobody, _silent, _unacked, _bounds, _clocks, _mode, _profile, _data)


def bounds_problem(low: float, high: float, name: str, capacity: float) -> str:
    """Return what is wrong with a range of whole numbers within a capacity; empty when a value is left."""
    first, last = -int(-low // 1), int(min(high, capacity) // 1)
    return "" if max(first, 1) <= last else f"{name}: no whole number from {low:g} to {min(high, capacity):g}"
