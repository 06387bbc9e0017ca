"""Decide what a DiT device does at every step boundary: step batching, where jobs join, leave and overtake. Pure functions.

Every job is due at a time: its deadline, or, without one, PATIENCE times its own length after it came. So short pictures go
before long ones, and every picture's turn comes: whoever arrives after a job is due cannot go before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["PATIENCE", "Steppable", "Work", "best_unit", "due_at", "next_rows"]

PATIENCE = 4.0
MIN_GAIN = 1.05  # a larger unit must save this much a row, or its first members wait for nothing


class Steppable(Protocol):
    """What the policy knows of an unfinished job; times in seconds on one clock.

    `size` (height, width); `remaining_s` its own steps, alone; `due_at` see the function; `deadline_at` a promise, or None;
    `begun` whether the device holds it.
    """

    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def remaining_s(self) -> float: ...
    @property
    def due_at(self) -> float: ...
    @property
    def deadline_at(self) -> float | None: ...
    @property
    def begun(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Work:
    """A job as a value, for predictions and tests."""

    size: tuple[int, int]
    remaining_s: float
    due_at: float
    deadline_at: float | None = None
    begun: bool = False


W = TypeVar("W", bound=Steppable)


def due_at(arrived_at: float, length_s: float, deadline_at: float | None) -> float:
    """Return when a job is due. A deadline never makes it less urgent than it would be without."""
    patient = arrived_at + PATIENCE * length_s
    return patient if deadline_at is None else min(deadline_at, patient)


def next_rows(jobs: Sequence[W], now: float, *, capacity: int, unit_sizes: Mapping[tuple[int, int], int]) -> list[W]:
    """Return the jobs whose next step runs now: one size, at most its unit size (1 where none is known).

    The first is the job that is due earliest; jobs whose deadline waiting for others would break, and that can still
    make it, come before all others, jobs that cannot make it any more come last. Its company are the next of its size in the
    same order. The device holds at most `capacity` begun jobs: when it is full, only those step.
    """
    num_begun = sum(job.begun for job in jobs)
    order = sorted(jobs, key=lambda job: _urgency(job, now))
    if num_begun >= capacity:
        order = [job for job in order if job.begun]
    if not order:
        return []
    size = order[0].size
    room = capacity - num_begun
    rows: list[W] = []
    for job in order:
        if job.size != size or len(rows) == unit_sizes.get(size, 1):
            continue
        if not job.begun:
            if room <= 0:
                continue
            room -= 1
        rows.append(job)
    return rows


def best_unit(step_ms: Mapping[int, float]) -> int:
    """Return how many rows should step together, from the milliseconds of a step by number of rows; 1 without figures.

    The smallest number that no larger one beats by MIN_GAIN a row: equal throughput is better served one after the other.
    """
    best = 1
    for size in sorted(step_ms):
        if best in step_ms and step_ms[best] / best >= MIN_GAIN * step_ms[size] / size:
            best = size
    return best


def _urgency(job: Steppable, now: float) -> tuple[int, float]:
    if job.deadline_at is None:
        return (1, job.due_at)
    slack_s = job.deadline_at - now - job.remaining_s
    if slack_s < 0:
        return (2, job.due_at)
    return (0 if slack_s < job.remaining_s else 1, job.due_at)
