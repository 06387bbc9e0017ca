"""Decide what a profile's costs really are, from what pictures took: measured times replace the ones the profile holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mammoth_operator.tuning.profile import Costs, Profile, Size
from mammoth_operator.tuning.samples import Sample, percentile
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.twin import Plant, Setting

__all__ = ["Calibrated", "calibrated", "overheads", "written"]

MIN_OBSERVATIONS = 3
MAX_ERROR = 1.25  # a profile that is wrong by more is doubted, in either direction


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A profile that agrees with what was seen. `error` is seen time / profile's time of the DiT steps, 1.0 where they agree."""

    profile: Profile
    error: float

    @property
    def doubt(self) -> str:
        """Say how the profile disagrees with what was seen; empty when it does not."""
        if 1 / MAX_ERROR <= self.error <= MAX_ERROR:
            return ""
        return f"steps take {self.error:.2f} times what the profile of {self.profile.hardware} says; measured times are used"


def calibrated(profile: Profile, samples: Iterable[Sample]) -> Calibrated:
    """Return `profile` with its DiT times as `samples` show them.

    A (size, wave size) that was seen often enough gets the median of what was seen; one that was not is scaled as the nearest
    wave size of its size, or as all sizes together: so a profile that is wrong by a factor is put right by one wave.
    """
    steps_ms: dict[Size, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    decode_ms: dict[Size, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.failed or sample.denoise_s <= 0:
            continue
        count = 1 if profile.rows_alone else sample.wave_size
        steps_ms[sample.ask.size][count].append(1e3 * sample.denoise_s / sample.ask.steps)
        decode_ms[sample.ask.size].append(1e3 * sample.decode_s)
    costs = Costs(profile)
    seen = {
        size: {count: median(values) for count, values in by_count.items() if len(values) >= MIN_OBSERVATIONS}
        for size, by_count in steps_ms.items()
    }
    ratios = {
        size: {count: ms / (1e3 * costs.step_s(size, count)) for count, ms in by_count.items()}
        for size, by_count in seen.items()
        if by_count
    }
    if not ratios:
        return Calibrated(profile, 1.0)
    overall = median(ratio for by_count in ratios.values() for ratio in by_count.values())
    tables = {
        size: _corrected(size, ratios.get(size, {}), seen.get(size, {}), profile, costs, overall)
        for size in profile.dit_step_ms.keys() | ratios.keys()
    }
    pictures = {size: ms * overall for size, ms in profile.dit_picture_ms.items()}
    pictures |= {
        size: max(median(values), 1e-3) for size, values in decode_ms.items() if len(values) >= MIN_OBSERVATIONS
    }
    return Calibrated(replace(profile, dit_step_ms=tables, dit_picture_ms=pictures), overall)


def overheads(samples: Sequence[Sample], plant: Plant) -> Plant:
    """Return `plant` with what pictures spent where no device worked on them: the least that some waited to join, and what was
    left of those that were drawn alone."""
    before_s = percentile([sample.joined_s - sample.ask.at_s for sample in samples], 0.1)
    rests = [s.done_s - s.started_s - s.denoise_s - s.decode_s for s in samples if s.wave_size == 1]
    return replace(plant, before_s=max(before_s, 0.0), after_s=max(median(rests), 0.0) if rests else 0.0)


def written(profile: Profile, samples: Sequence[Sample], setting: Setting, plant: Plant) -> Profile:
    """Return `profile` with its AR times scaled so that the twin writes `samples` as fast as they were written."""
    asks = sorted((sample.ask for sample in samples), key=lambda ask: ask.at_s)
    seen_s, foretold_s = (
        median(sample.ready_s - sample.joined_s for sample in side)
        for side in (samples, replay(profile, setting, asks, plant))
    )
    return profile.scaled(1.0, seen_s / foretold_s)


def _corrected(
    size: Size, ratios: dict[int, float], seen: dict[int, float], profile: Profile, costs: Costs, overall: float
) -> dict[int, float]:
    """Return the table of one size: what was seen, and the rest as the nearest that was."""
    counts = profile.dit_step_ms.get(size, {1: 0.0}).keys() | seen.keys()
    out = {}
    for count in counts:
        nearest = min(ratios, key=lambda known: (abs(known - count), known), default=None)
        factor = overall if nearest is None else ratios[nearest]
        out[count] = seen.get(count, 1e3 * costs.step_s(size, count) * factor)
    return out
