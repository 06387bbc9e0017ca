"""Decide what a picture asked for and how it fared: the values that measurements, traces and the twin share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Ask", "Observed", "Sample", "percentile", "throughput"]

CELL_PX = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """A picture that is asked for at `at_s`. `rows`: 2 with guidance in the LLM. `budget_s`: what its caller allows.
    `tokens`: of its grid where that is not the size's own."""

    at_s: float
    height_px: int
    width_px: int
    steps: int
    rows: int = 1
    prompt_tokens: int = 32
    budget_s: float = math.inf
    tokens: int = 0

    @property
    def size(self) -> tuple[int, int]:
        return (self.height_px, self.width_px)

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.height_px, self.width_px, self.steps)

    @property
    def num_tokens(self) -> int:
        """Return the grid tokens: a cell for every 16 pixels, and an end of line each."""
        return self.tokens or (self.height_px // CELL_PX) * (self.width_px // CELL_PX + 1)


@dataclass(slots=True)
class Sample:
    """One picture on one clock: asked for, in the LLM's rows, its rows complete, in a wave, done. inf is what did not happen.

    `wave_size` pictures were in its wave, whose steps took `denoise_s`; the picture itself then took `decode_s`. `failed`
    says that it ended without a picture.
    """

    ask: Ask
    joined_s: float = math.inf
    ready_s: float = math.inf
    started_s: float = math.inf
    done_s: float = math.inf
    wave_size: int = 0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    failed: bool = False
    replica: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        return self.ask.key

    @property
    def latency_s(self) -> float:
        return self.done_s - self.ask.at_s


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of a deployment's pictures: `samples` by their end, in seconds since 1970.

    `num_told` pictures were ever told, `num_lost` were forgotten before they were asked for. `unusable` says which pod told
    lengths that cannot be. `weighed_s` is when settings were last compared, `num_new` ended since.
    """

    samples: tuple[Sample, ...] = ()
    num_told: int = 0
    num_lost: int = 0
    unusable: str = ""
    weighed_s: float = 0.0
    num_new: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of `values` do not exceed; NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def throughput(samples: Iterable[Sample]) -> float:
    """Return the pictures a second from the first that was asked for to the last that was done; NaN for none."""
    done = [sample for sample in samples if not sample.failed and math.isfinite(sample.done_s)]
    if not done:
        return math.nan
    return len(done) / max(max(s.done_s for s in done) - min(s.ask.at_s for s in done), 1e-9)
