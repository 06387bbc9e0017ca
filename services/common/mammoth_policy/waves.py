"""Decide when an idle DiT device starts which wave: request batching. Pure functions over keys and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

__all__ = ["Keyed", "Policy", "Run", "Wait", "plan"]

MAX_QUIET_S = 0.050


@dataclass(frozen=True, slots=True)
class Policy:
    """Live limits of wave formation. `max_wait_s` 0 switches waiting off."""

    max_num_seqs: int = 8
    max_wait_s: float = 0.020

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or not 0 <= self.max_wait_s < float("inf"):
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} must be at least 1, max_wait_s {self.max_wait_s} at least 0"
            )

    @property
    def quiet_s(self) -> float:
        """A pause in arrivals this long ends the wait."""
        return min(MAX_QUIET_S, self.max_wait_s / 5)


class Keyed(Protocol):
    """What `plan` knows of a waiting job."""

    @property
    def key(self) -> tuple[int, int, int]: ...


W = TypeVar("W", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Run(Generic[W]):
    """Start a wave of these jobs now."""

    jobs: Sequence[W]


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again at this time, or at the next arrival; None means only then."""

    until: float | None


def plan(waiting: Sequence[W], now: float, policy: Policy, *, last_arrival_at: float, began_at: float) -> Run[W] | Wait:
    """Decide what an idle device does next.

    It waits for company only while that is allowed (`max_wait_s` above 0, `max_num_seqs` above 1): until `max_num_seqs`
    jobs wait, arrivals have paused for `quiet_s`, or `max_wait_s` has passed since `began_at`, when the wait began. A wave
    is the head of the queue up to the first job of another key: nobody overtakes.

    Source: request-level batching of vLLM-Omni (PR #7476).
    """
    if not waiting:
        return Wait(until=None)
    until = min(began_at + policy.max_wait_s, last_arrival_at + policy.quiet_s)
    if len(waiting) < policy.max_num_seqs and now < until:
        return Wait(until)
    peers = takewhile(lambda job: job.key == waiting[0].key, waiting[: policy.max_num_seqs])
    return Run(list(peers))
