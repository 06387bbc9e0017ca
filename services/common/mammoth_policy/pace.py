"""Decide how long pictures take, from what the last ones of the same key took."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["Key", "Pace"]

Key = tuple[int, int, int]
SMOOTHING = 0.3  # weight of the newest wave
MAX_KEYS = 64  # the least recently drawn is forgotten


class Pace:
    """Seconds a picture of each (height, width, steps). What was never drawn has no estimate: it is not guessed from others."""

    def __init__(self) -> None:
        self._picture_s: OrderedDict[Key, float] = OrderedDict()

    def measure(self, key: Key, num_pictures: int, elapsed_s: float) -> None:
        """Take in a wave of `num_pictures` that took `elapsed_s`; one that drew nothing says nothing."""
        if not num_pictures or elapsed_s <= 0:
            return
        newest_s = elapsed_s / num_pictures
        known_s = self._picture_s.pop(key, newest_s)
        self._picture_s[key] = known_s + SMOOTHING * (newest_s - known_s)
        if len(self._picture_s) > MAX_KEYS:
            self._picture_s.popitem(last=False)

    def picture_s(self, key: Key) -> float | None:
        """Return the seconds of one picture, or None before the first of its key."""
        return self._picture_s.get(key)

    def total_s(self, keys: Iterable[Key]) -> float:
        """Return the seconds of all these pictures together, as far as they are known: a lower bound."""
        return sum(self._picture_s.get(key, 0.0) for key in keys)
