"""Decide: what a quantity is worth, and the one way in which the API server writes it, so that we read back what we apply."""

from __future__ import annotations

import math
import re
from fractions import Fraction

__all__ = ["canonical", "cores"]

BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DECIMAL = {"m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12)}  # fmt: skip


def canonical(text: str) -> str:
    """Return `text` with the largest suffix of its family that leaves a whole number: 1024Mi is 1Gi, 0.5 is 500m.

    Raises ValueError when `text` is no quantity.
    """
    value, suffix = _read(text)
    if value == 0:
        return "0"
    if suffix in BINARY and value >= 1024 and value.denominator == 1:
        return _written(value, {"": Fraction(1), **{name: Fraction(size) for name, size in BINARY.items()}})
    return _written(value, DECIMAL)


def cores(text: str) -> int:
    """Return how many cores a quantity of CPU keeps busy, at least one. Raises ValueError when `text` is no quantity."""
    return max(math.ceil(_read(text)[0]), 1)


def _read(text: str) -> tuple[Fraction, str]:
    """Return a quantity's value and its suffix."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if found is None or found[2] not in BINARY | DECIMAL:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = Fraction(found[1]), found[2]
    return number * (BINARY[suffix] if suffix in BINARY else DECIMAL[suffix]), suffix


def _written(value: Fraction, family: dict[str, Fraction]) -> str:
    for suffix, size in sorted(family.items(), key=lambda pair: -pair[1]):
        if (value / size).denominator == 1:
            return f"{value / size}{suffix}"
    return f"{-(-value // family['m'])}m"
