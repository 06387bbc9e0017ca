"""Decide what work costs on one kind of hardware: a frozen table of measured times, and what lies between them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mammoth_operator.tuning.curves import Curve, fit_line

__all__ = ["NO_PROFILE", "Costs", "Profile", "ProfileError", "Profiled", "Size"]

Size = tuple[int, int]  # height, width in pixels


class ProfileError(ValueError):
    """A profile that no prediction may rest on."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured milliseconds. All of a key's values are positive and finite, and every table has an entry.

    `dit_step_ms` by size and wave size: one guided step of the whole wave. `dit_picture_ms` by size: what a picture costs the
    device beside its steps. `ar_decode_ms` by context length and rows: one token of each row. `ar_prefill_ms` by prompt length.
    `rows_alone`: the rows of a wave are drawn one after the other, and leave it one by one. `spread` is the widest relative
    spread of repeated measurements.
    """

    hardware: str
    versions: str
    dit_step_ms: Mapping[Size, Mapping[int, float]]
    dit_picture_ms: Mapping[Size, float]
    ar_decode_ms: Mapping[int, Mapping[int, float]]
    ar_prefill_ms: Mapping[int, float]
    rows_alone: bool = False
    spread: float = 0.0
    time: str = ""

    def __post_init__(self) -> None:
        """Raises ProfileError naming the first value that is no time, or the table that is empty."""
        for name in ("dit_step_ms", "dit_picture_ms", "ar_decode_ms", "ar_prefill_ms"):
            table = getattr(self, name)
            if not table:
                raise ProfileError(f"{name} is empty")
            for key, entry in table.items():
                values = entry.values() if isinstance(entry, Mapping) else (entry,)
                if not values:
                    raise ProfileError(f"{name} {key} is empty")
                for value in values:
                    if not (math.isfinite(value) and value > 0):
                        raise ProfileError(f"{name} {key}: {value} is no time")
        if not (math.isfinite(self.spread) and self.spread >= 0):
            raise ProfileError(f"spread {self.spread} is no share")

    @property
    def key(self) -> str:
        """Return the name under which it is kept: equal hardware and versions, equal key."""
        return hashlib.sha256(f"{self.hardware}\n{self.versions}\n{self.rows_alone}".encode()).hexdigest()[:16]

    @property
    def residuals(self) -> dict[Size, tuple[float, float, float]]:
        """Return, by size, the line wave time = a * n + b in milliseconds a step, and its largest relative miss."""
        return {size: fit_line(by_batch) for size, by_batch in self.dit_step_ms.items()}

    def scaled(self, dit: float, ar: float) -> Profile:
        """Return the profile with every time of a stage multiplied."""

        def times(table: Mapping[Any, Any], factor: float) -> dict[Any, Any]:
            return {
                key: times(value, factor) if isinstance(value, Mapping) else value * factor
                for key, value in table.items()
            }

        return replace(
            self,
            dit_step_ms=times(self.dit_step_ms, dit),
            dit_picture_ms=times(self.dit_picture_ms, dit),
            ar_decode_ms=times(self.ar_decode_ms, ar),
            ar_prefill_ms=times(self.ar_prefill_ms, ar),
        )

    def data(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {
            "hardware": self.hardware,
            "versions": self.versions,
            "ditStepMs": {
                _text(size): {str(n): ms for n, ms in table.items()} for size, table in self.dit_step_ms.items()
            },
            "ditPictureMs": {_text(size): ms for size, ms in self.dit_picture_ms.items()},
            "arDecodeMs": {str(c): {str(n): ms for n, ms in table.items()} for c, table in self.ar_decode_ms.items()},
            "arPrefillMs": {str(n): ms for n, ms in self.ar_prefill_ms.items()},
            "rowsAlone": self.rows_alone,
            "spread": self.spread,
            "time": self.time,
        }

    @classmethod
    def parse(cls, data: Mapping[str, Any] | str) -> Profile:
        """Return what `data` wrote. Raises ProfileError for anything else."""
        try:
            raw = json.loads(data) if isinstance(data, str) else data
            return cls(
                hardware=str(raw["hardware"]),
                versions=str(raw["versions"]),
                dit_step_ms={_size(key): _floats(table) for key, table in raw["ditStepMs"].items()},
                dit_picture_ms={_size(key): float(ms) for key, ms in raw["ditPictureMs"].items()},
                ar_decode_ms={int(key): _floats(table) for key, table in raw["arDecodeMs"].items()},
                ar_prefill_ms=_floats(raw["arPrefillMs"]),
                rows_alone=bool(raw.get("rowsAlone", False)),
                spread=float(raw.get("spread", 0.0)),
                time=str(raw.get("time", "")),
            )
        except ProfileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise ProfileError(f"not a profile: {err!r}") from err


@dataclass(frozen=True, slots=True)
class Profiled:
    """What is known of a deployment's hardware. Without a `profile`, `reason` and `message` say why there is none.

    `data` is what the ConfigMap is to hold, empty when there is nothing to keep.
    """

    profile: Profile | None = None
    reason: str = "ProfileMissing"
    message: str = "no pair of pods has been measured yet"
    data: Mapping[str, str] = field(default_factory=dict)


NO_PROFILE = Profiled()


def _text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _size(text: str) -> Size:
    height, width = text.split("x")
    return int(height), int(width)


def _floats(table: Mapping[str, Any]) -> dict[int, float]:
    return {int(key): float(value) for key, value in table.items()}


@dataclass(slots=True)
class Costs:
    """A profile made fast to ask: seconds, remembered by key. Sizes between measured ones go by their pixels."""

    profile: Profile
    _steps: dict[tuple[Size, int], float] = field(default_factory=dict)
    _pictures: dict[Size, float] = field(default_factory=dict)
    _decodes: dict[tuple[int, int], float] = field(default_factory=dict)
    _contexts: dict[int, Curve] = field(default_factory=dict)
    _prefill: Curve | None = None
    _prefills: dict[int, float] = field(default_factory=dict)

    def step_s(self, size: Size, batch_size: int) -> float:
        """Return the seconds of one step of a wave of `batch_size` pictures of `size`."""
        known = self._steps.get((size, batch_size))
        if known is None:
            table = self.profile.dit_step_ms
            near = {size: table[size]} if size in table else table
            by_pixels = {h * w: _at(waves, batch_size) for (h, w), waves in near.items()}
            known = self._steps[size, batch_size] = Curve(by_pixels)(size[0] * size[1]) / 1e3
        return known

    def picture_s(self, size: Size) -> float:
        """Return the seconds that a picture of `size` takes beside its steps."""
        known = self._pictures.get(size)
        if known is None:
            table = self.profile.dit_picture_ms
            by_pixels = {h * w: ms for (h, w), ms in ({size: table[size]} if size in table else table).items()}
            known = self._pictures[size] = Curve(by_pixels)(size[0] * size[1]) / 1e3
        return known

    def decode_s(self, num_rows: int, context_tokens: float) -> float:
        """Return the seconds of one token of each of `num_rows` rows whose mean context is `context_tokens`."""
        key = (num_rows, int(context_tokens) >> 5)
        known = self._decodes.get(key)
        if known is None:
            by_context = self._contexts.get(num_rows)
            if by_context is None:
                measured = {context: _at(rows, num_rows) for context, rows in self.profile.ar_decode_ms.items()}
                if len(measured) == 1:  # says nothing of how a context tells
                    measured = dict.fromkeys((0, 1), *measured.values())
                by_context = self._contexts[num_rows] = Curve(measured)
            known = self._decodes[key] = by_context((key[1] << 5) + 16) / 1e3
        return known

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds in which a prompt of `num_tokens` is read."""
        known = self._prefills.get(num_tokens)
        if known is None:
            if self._prefill is None:
                self._prefill = Curve(self.profile.ar_prefill_ms)
            known = self._prefills[num_tokens] = self._prefill(num_tokens) / 1e3
        return known

    def parts_s(self, size: Size, num_steps: int, batch_size: int) -> tuple[float, float]:
        """Return the seconds of the steps of a wave, and of each of its pictures beside them. Under `rows_alone` the steps are one
        picture's, since the rows of a wave take turns."""
        steps_s = num_steps * self.step_s(size, batch_size)
        return steps_s / (batch_size if self.profile.rows_alone else 1), self.picture_s(size)

    def wave_s(self, size: Size, num_steps: int, batch_size: int) -> float:
        """Return the seconds in which a wave of `batch_size` pictures is drawn."""
        pictures_s = batch_size * self.picture_s(size)
        return num_steps * self.step_s(size, batch_size) + pictures_s


def _at(by_count: Mapping[int, float], count: int) -> float:
    """Return the time for `count` at once. Beyond the last measured count each one more costs what it cost there."""
    return by_count[count] if count in by_count else Curve(by_count)(count)
