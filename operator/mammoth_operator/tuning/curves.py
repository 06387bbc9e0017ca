"""Decide what lies between measured points: straight lines between neighbours, and the line of the last two beyond them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

__all__ = ["Curve", "fit_line"]


class Curve:
    """A piecewise linear function through measured points, never below `floor`. At least one point."""

    __slots__ = ("_floor", "_xs", "_ys")

    def __init__(self, points: Mapping[int, float], *, floor: float = 1e-6) -> None:
        assert points, "a curve needs a point"
        pairs = sorted(points.items())
        self._xs, self._ys = [x for x, _ in pairs], [y for _, y in pairs]
        self._floor = floor

    def __call__(self, x: float) -> float:
        """Return the value at `x`. One point alone is proportional: twice the pixels cost twice the time."""
        xs, ys = self._xs, self._ys
        if len(xs) == 1:
            return max(self._floor, ys[0] * x / xs[0]) if xs[0] else ys[0]
        right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return max(self._floor, value if x >= xs[0] else min(value, ys[0]))


def fit_line(points: Mapping[int, float]) -> tuple[float, float, float]:
    """Return (a, b, residual) of the least-squares line a * n + b: `residual` is the largest relative miss of a point."""
    count = len(points)
    mean_x, mean_y = sum(points) / count, sum(points.values()) / count
    spread = sum((x - mean_x) ** 2 for x in points)
    a = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / spread if spread else 0.0
    b = mean_y - a * mean_x
    return a, b, max(abs(a * x + b - y) / y for x, y in points.items())
