"""Decide what to measure next on new hardware, and the profile that the measurements make. Bounded: it ends by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from mammoth_operator.names import Pool
from mammoth_operator.tuning.profile import Profile, Size

__all__ = ["Point", "Probe", "next_probe", "probed", "sizes_to_measure", "square"]

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
ENOUGH_GAIN = 0.05  # a larger wave that brings less more pictures a second ends the series
SHORT_CONTEXT_TOKENS = 32
NUM_STEPS = 3
MAX_SIZES = 4
CELL_PX = 16


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement: `shape` is (height, width) for the DiT and (context length, 1) for the AR."""

    pool: Pool
    shape: tuple[int, int]
    batch_size: int
    num_steps: int = NUM_STEPS


@dataclass(frozen=True, slots=True)
class Point:
    """What a measurement gave: milliseconds of each step, and the rest of a picture; `refused` where the pod cannot do it."""

    step_ms: tuple[float, ...] = ()
    rest_ms: float = 0.0
    refused: str = ""


Points = Mapping[Probe, Point]


def sizes_to_measure(default: Size, wanted: Iterable[Size]) -> list[Size]:
    """Return the picture sizes to measure: the deployment's default first, then the wanted ones, a few at most."""
    return list(dict.fromkeys([default, *wanted]))[:MAX_SIZES]


def square(max_pixels: int) -> Size:
    """Return the largest square of whole grid cells with at most `max_pixels`."""
    side = max(math.isqrt(max_pixels) // CELL_PX * CELL_PX, CELL_PX)
    return (side, side)


def next_probe(points: Points, sizes: Sequence[Size], dit_capacity: int, ar_capacity: int) -> Probe | None:
    """Return what to measure next; None when it is done. A series ends when larger waves gain less than 5 %, or are refused."""
    tokens = (sizes[0][0] // CELL_PX) * (sizes[0][1] // CELL_PX + 1)
    series: list[tuple[Pool, tuple[int, int], int]] = [("dit", size, dit_capacity) for size in sizes]
    series += [("ar", (length, 1), ar_capacity) for length in dict.fromkeys((SHORT_CONTEXT_TOKENS, max(tokens, SHORT_CONTEXT_TOKENS)))]  # fmt: skip
    for pool, shape, capacity in series:
        best = 0.0
        for batch_size in BATCH_SIZES:
            if batch_size > capacity:
                break
            probe = Probe(pool, shape, batch_size)
            if probe not in points:
                return probe
            if points[probe].refused:
                break
            per_s = batch_size / median(points[probe].step_ms)
            if best and per_s < best * (1 + ENOUGH_GAIN):
                break
            best = max(best, per_s)
    return None


@dataclass(slots=True)
class _Tables:
    dit: dict[Size, dict[int, float]] = field(default_factory=dict)
    pictures: dict[Size, float] = field(default_factory=dict)
    ar: dict[int, dict[int, float]] = field(default_factory=dict)
    prefill: dict[int, float] = field(default_factory=dict)
    spread: float = 0.0


def probed(points: Points, hardware: str, versions: str, *, rows_alone: bool, time: str) -> Profile:
    """Return the profile of all measurements. Raises ProfileError when they make none: nothing measured, or no times."""
    tables = _Tables()
    for probe, point in points.items():
        if point.refused:
            continue
        middle = median(point.step_ms)
        tables.spread = max(tables.spread, (max(point.step_ms) - min(point.step_ms)) / middle if middle else math.inf)
        if probe.pool == "dit":
            tables.dit.setdefault(probe.shape, {})[probe.batch_size] = middle
            if probe.batch_size == 1:
                tables.pictures[probe.shape] = point.rest_ms
        else:
            tables.ar.setdefault(probe.shape[0], {})[probe.batch_size] = middle
            if probe.batch_size == 1:
                tables.prefill[probe.shape[0]] = point.rest_ms
    return Profile(
        hardware, versions, tables.dit, tables.pictures, tables.ar, tables.prefill,
        rows_alone=rows_alone, spread=round(tables.spread, 3), time=time,
    )  # fmt: skip
