"""Decide which promise a picture falls under, and whether it was kept: what burn rates are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mammoth_operator.spec import MAX_PIXELS, MAX_STEPS
from mammoth_operator.tuning.objective import Promise, class_of
from mammoth_operator.tuning.samples import Sample

__all__ = ["Result", "burning", "promises_of", "result_of"]

MISSED_MAX = 0.3  # six times the twentieth that a 95th percentile leaves: as the alert on a slow burn
LONG_S, SHORT_S = 3600.0, 300.0
MIN_LONG, MIN_SHORT = 20, 5  # pictures, fewer say nothing
Result = Literal["kept", "late", "failed"]


def promises_of(spec: Mapping[str, Any]) -> tuple[Promise, ...]:
    """Return the promises of a spec as it is written, which the schema has checked."""
    classes = (spec.get("tuning") or {}).get("sloClasses") or ()
    return tuple(
        Promise(item["name"], item["p95Seconds"], item.get("maxPixels", MAX_PIXELS), item.get("maxSteps", MAX_STEPS))
        for item in classes
    )


def result_of(sample: Sample, promises: tuple[Promise, ...]) -> tuple[str, Result] | None:
    """Return (class, result) of a picture; None when it falls under no promise."""
    name = class_of(sample.ask, promises)
    promise = next((promise for promise in promises if promise.name == name), None)
    if promise is None:
        return None
    if sample.failed:
        return name, "failed"
    return name, "kept" if sample.latency_s <= promise.p95_s else "late"


def burning(samples: Sequence[Sample], promises: tuple[Promise, ...], now_s: float) -> str:
    """Say which promise is being missed by far; empty when none is: both in the last hour, and still in the last minutes.

    `samples` are those that are remembered, by their end. The class that misses most is named.
    """
    counts = {promise.name: _Count() for promise in promises}
    found: dict[tuple[int, int, int], Promise | None] = {}
    for sample in reversed(samples if promises else ()):
        ago_s = now_s - sample.done_s
        if ago_s > LONG_S:
            break
        if sample.key not in found:
            name = class_of(sample.ask, promises)
            found[sample.key] = next((promise for promise in promises if promise.name == name), None)
        if promise := found[sample.key]:
            missed = sample.failed or sample.latency_s > promise.p95_s
            counts[promise.name].add(missed, is_recent=ago_s <= SHORT_S)
    worst = max(promises, key=lambda promise: counts[promise.name].share, default=None)
    if worst is None or counts[worst.name].share <= MISSED_MAX:
        return ""
    known = counts[worst.name]
    return f"{worst.name}: {known.missed} of {known.all} pictures of the last hour were late or failed, {known.missed_lately} of {known.lately} of the last minutes; p95 {worst.p95_s:g} s is promised"  # fmt: skip


@dataclass(slots=True)
class _Count:
    """Pictures of a class in the last hour and in the last minutes, and how many of them were late or failed."""

    all: int = 0
    missed: int = 0
    lately: int = 0
    missed_lately: int = 0

    def add(self, missed: bool, *, is_recent: bool) -> None:
        self.all += 1
        self.missed += missed
        self.lately += is_recent
        self.missed_lately += missed and is_recent

    @property
    def share(self) -> float:
        """Return the share that is missed, in the better of both times; 0 where there are too few pictures to tell."""
        if self.all < MIN_LONG or self.lately < MIN_SHORT:
            return 0.0
        return min(self.missed / self.all, self.missed_lately / self.lately)
