"""Decide: what pods say of themselves and of each other, as values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "Transport"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a pod's Control service said."""

    in_flight: int
    queue_depth: int
    epoch: int
    max_num_seqs: int
    wait_ms: float | None
    serving: bool
    capacity: int = 1024
    model_digest: str = ""

    @property
    def work(self) -> int:
        return self.in_flight + self.queue_depth


@dataclass(frozen=True, slots=True)
class Transport:
    """How a test tensor fared between two pods of a revision: `reason` and `message` say why not."""

    revision: str
    proven: bool
    reason: str = ""
    message: str = ""
