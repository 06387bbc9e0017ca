"""Decide which replica of a pool a picture goes to, and which come and go. Replicas are told apart by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["Fleet", "Replica"]


class Replica(Protocol):
    """One device of a pool. `ready_s` is when it serves; a leaving one takes nothing new and finishes what it holds."""

    index: int
    ready_s: float
    is_leaving: bool

    @property
    def num_held(self) -> int: ...


R = TypeVar("R", bound=Replica)


class Fleet(Generic[R]):
    """The replicas of a pool, those that leave included. `make(index, ready_s)` makes one."""

    def __init__(self, make: Callable[[int, float], R]) -> None:
        self.replicas: list[R] = []
        self._make = make
        self._turn = self._made = 0

    def pick(self, now_s: float) -> R:
        """Return the next in turn of those that serve; when none does, the one that will be first."""
        serving = [each for each in self.replicas if not each.is_leaving and each.ready_s <= now_s]
        if not serving:
            return min(self.replicas, key=lambda each: (each.is_leaving, each.ready_s))
        self._turn += 1
        return serving[self._turn % len(serving)]

    def find(self, index: int) -> R | None:
        """Return the replica of that number if it is still there."""
        return next((each for each in self.replicas if each.index == index), None)

    def resize(self, wanted: int, now_s: float, ready_s: float) -> None:
        """Add replicas that serve from `ready_s`, or let go: first those that do not serve yet, then the least loaded."""
        self.replicas = [each for each in self.replicas if not each.is_leaving or each.num_held]
        staying = [each for each in self.replicas if not each.is_leaving]
        for _ in range(wanted - len(staying)):
            self.replicas.append(self._make(self._made, ready_s))
            self._made += 1
        order = sorted(staying, key=lambda each: (each.ready_s <= now_s, each.num_held))
        for each in order[: max(len(staying) - wanted, 0)]:
            each.is_leaving = True

    def num_starting(self, now_s: float) -> int:
        """Return how many do not serve yet."""
        return sum(each.ready_s > now_s for each in self.replicas if not each.is_leaving)

    def num_held_devices(self) -> int:
        """Return how many devices are taken: starting and leaving replicas hold one too."""
        return sum(not each.is_leaving or each.num_held > 0 for each in self.replicas)
