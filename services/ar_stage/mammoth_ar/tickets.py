"""Do: carry one sequence's events from the batcher to whoever submitted it, and its cancellation back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from mammoth_ar.sequence import Rows, Sequence
from mammoth_wire.errors import Cancelled, MammothError

__all__ = ["Event", "Progress", "Queued", "Ticket"]


@dataclass(frozen=True, slots=True)
class Queued:
    """Place in the queue, 0 for the next to join."""

    position: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`num_tokens` of `total` grid tokens have their rows delivered; 0 is sent when the prompt is through."""

    num_tokens: int
    total: int


Event = Queued | Progress | Rows


class Ticket:
    """One submitted sequence: an asynchronous iterator of its events, which ends or raises a MammothError.

    Use it as a context manager, so that leaving early cancels. `post` and `end` belong to the batcher.
    """

    def __init__(self, sequence: Sequence, wake: Callable[[], None]) -> None:
        self.sequence = sequence
        self.is_over = False
        self.joined_at: float | None = None  # loop time at which it left the queue
        self._wake = wake
        self._events: asyncio.Queue[Event | MammothError | None] = asyncio.Queue()

    def cancel(self, reason: MammothError | None = None) -> None:
        """End now with `reason` (Cancelled by default); queue place and slots are free within one token."""
        self.end(reason or Cancelled("the caller left"))
        self._wake()

    def post(self, event: Event) -> None:
        if not self.is_over:
            self._events.put_nowait(event)

    def end(self, error: MammothError | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._events.put_nowait(error)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Event:
        if self.is_over and self._events.empty():
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, MammothError):
            raise event
        return event

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
