"""Decide what a load looks like: seeded arrivals in phases, and traces as files. Equal seeds give equal traces."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mammoth_operator.tuning.samples import Ask

__all__ = ["Phase", "TraceError", "arrivals", "dump", "load"]

Rate = Callable[[float], float]


class TraceError(ValueError):
    """A trace that cannot be read; names the line."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`duration_s` of Poisson arrivals: `per_s` at most, times `shape(share of the phase that has passed)`, sizes by weight."""

    duration_s: float
    per_s: float
    sizes: Mapping[int, float]  # side in pixels to weight
    steps: int = 50
    shape: Rate = lambda share: 1.0


def arrivals(phases: Sequence[Phase], seed: int, *, prompt_tokens: tuple[int, int] = (16, 64)) -> list[Ask]:
    """Return the pictures that are asked for, by thinning a Poisson process at each phase's highest rate.

    Source: Lewis and Shedler 1979, simulation of nonhomogeneous Poisson processes by thinning.
    """
    random_ = random.Random(seed)
    asks, start_s = [], 0.0
    for phase in phases:
        at_s = 0.0
        sides, weights = list(phase.sizes), list(phase.sizes.values())
        while phase.per_s > 0 and (at_s := at_s + random_.expovariate(phase.per_s)) < phase.duration_s:
            keeps = random_.random() < phase.shape(at_s / phase.duration_s)
            [side] = random_.choices(sides, weights)
            tokens = random_.randint(*prompt_tokens)
            if keeps:
                asks.append(Ask(start_s + at_s, side, side, phase.steps, prompt_tokens=tokens))
        start_s += phase.duration_s
    return asks


def dump(asks: Iterable[Ask]) -> str:
    """Return a trace as lines of JSON, one a picture, times from the first."""
    asks = list(asks)
    first_s = asks[0].at_s if asks else 0.0
    lines = [
        {"at_s": round(ask.at_s - first_s, 4), "height": ask.height_px, "width": ask.width_px, "steps": ask.steps,
         "rows": ask.rows, "prompt_tokens": ask.prompt_tokens} | ({"tokens": ask.tokens} if ask.tokens else {})
        for ask in asks
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def load(text: str) -> list[Ask]:
    """Return the trace that `text` holds, in order of time. Raises TraceError naming the first bad line."""
    asks = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            asks.append(_ask(json.loads(line)))
        except (ValueError, KeyError, TypeError) as err:
            raise TraceError(f"line {number}: {err!r}") from err
    if not asks:
        raise TraceError("no picture in it")
    asks.sort(key=lambda ask: ask.at_s)
    first_s = asks[0].at_s
    return [replace(ask, at_s=ask.at_s - first_s) for ask in asks]


def _ask(raw: Mapping[str, Any]) -> Ask:
    ask = Ask(
        at_s=float(raw["at_s"]),
        height_px=int(raw["height"]),
        width_px=int(raw["width"]),
        steps=int(raw.get("steps", 50)),
        rows=int(raw.get("rows", 1)),
        prompt_tokens=int(raw.get("prompt_tokens", 32)),
        tokens=int(raw.get("tokens", 0)),
    )
    if not math.isfinite(ask.at_s) or min(ask.height_px, ask.width_px, ask.steps, ask.rows, ask.prompt_tokens) < 1:
        raise ValueError("times are finite, counts at least 1")
    return ask
