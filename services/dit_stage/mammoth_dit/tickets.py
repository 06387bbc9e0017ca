"""Own the life of one queued job as its caller sees it: events while it waits and runs, then exactly one outcome.

A ticket belongs to the event loop. The device thread only reads `resolved`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from mammoth_dit.jobs import Job, Outcome, Picture
from mammoth_wire.errors import Cancelled, DeadlineExceeded, MammothError

__all__ = ["Batched", "Event", "Queued", "Step", "Ticket"]


@dataclass(frozen=True, slots=True)
class Queued:
    """The job waits; `position` jobs, running ones included, are ahead of it."""

    position: int


@dataclass(frozen=True, slots=True)
class Batched:
    """The job's wave of `size` jobs has begun."""

    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """`index` of `total` steps are done."""

    index: int
    total: int


Event = Queued | Batched | Step


class Ticket:
    """Handle of one job in a batcher."""

    def __init__(self, job: Job, *, queued_at: float, on_resolved: Callable[[Ticket], None]) -> None:
        loop = asyncio.get_running_loop()
        self.job = job
        self.queued_at = queued_at
        self.started_at: float | None = None
        self.wave_size = 0
        self._outcome: asyncio.Future[Outcome] = loop.create_future()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._on_resolved = on_resolved
        self._expiry: asyncio.TimerHandle | None = None
        self._position: int | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return self.job.key

    @property
    def resolved(self) -> bool:
        return self._outcome.done()

    @property
    def stage(self) -> Literal["queued", "denoising"]:
        return "queued" if self.started_at is None else "denoising"

    @property
    def waited_s(self) -> float:
        """Time from queued to the start of the wave; 0 while the job waits."""
        return 0.0 if self.started_at is None else self.started_at - self.queued_at

    async def events(self) -> AsyncIterator[Event]:
        """Yield what happens to the job until its outcome stands. For one reader."""
        while (event := await self._events.get()) is not None:
            yield event

    async def result(self) -> Picture:
        """Return the picture, or raise the MammothError that took its place."""
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, MammothError):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """Leave: a waiting job frees its place at once, a running one at the next step. No effect once resolved."""
        self.resolve(Cancelled("the caller left", stage=self.stage))

    def expire_at(self, when: float) -> None:
        """Let the job end with DeadlineExceeded at loop time `when`."""
        self._expiry = asyncio.get_running_loop().call_at(when, self._expire)

    def place(self, position: int) -> None:
        """Tell the caller of a new place in the queue."""
        if position != self._position:
            self._position = position
            self._events.put_nowait(Queued(position))

    def start(self, now: float, size: int) -> None:
        """Tell the caller that the wave has begun."""
        self.started_at, self.wave_size = now, size
        self._events.put_nowait(Batched(size))

    def step(self, index: int, total: int) -> None:
        """Tell the caller of progress."""
        if not self.resolved:
            self._events.put_nowait(Step(index, total))

    def resolve(self, outcome: Outcome) -> None:
        """Set the outcome, once; later ones are dropped."""
        if self.resolved:
            return
        self._outcome.set_result(outcome)
        self._events.put_nowait(None)
        if self._expiry is not None:
            self._expiry.cancel()
        self._on_resolved(self)

    def _expire(self) -> None:
        self.resolve(DeadlineExceeded(f"the deadline passed while the job was {self.stage}", stage=self.stage))
