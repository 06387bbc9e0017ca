"""Decide: when the rows of a picture are streamed again after a stream failed, and how long to wait before. Pure."""

from __future__ import annotations

from mammoth_wire.errors import (
    AlreadyRunning,
    Cancelled,
    DataLoss,
    DeadlineUnreachable,
    MammothError,
    Overloaded,
    Unavailable,
)

__all__ = ["BUSY", "History", "replay_delay_s"]

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
MAX_DAMAGED = 1  # replays after damaged rows: a second damage is not the network's fault
MIN_ADMISSION_TRIES = 4
# What a replica that dies, drains or is full answers with. An accepted picture outlives all of them.
ELSEWHERE = (AlreadyRunning, Cancelled, Overloaded, Unavailable)
BUSY = (DeadlineUnreachable, Overloaded)  # another replica may have room


class History:
    """The streams of one picture so far."""

    def __init__(self) -> None:
        self.is_accepted = False
        self.num_failed = 0
        self.num_damaged = 0

    def count(self, error: MammothError) -> None:
        self.num_failed += 1
        self.num_damaged += isinstance(error, DataLoss)


def replay_delay_s(
    error: MammothError, history: History, *, num_replicas: int, remaining_s: float, jitter: float
) -> float | None:
    """Return the seconds to wait before the next stream, or None when `error` is the answer.

    `history` counts `error`; `jitter` is from 0 to 1. An accepted picture is replayed until its deadline. One that is not
    accepted yet is offered to every replica once, at once, where one is full or away, and a few times more where none
    answers; a refusal is passed on.
    """
    if isinstance(error, DataLoss):
        again = history.num_damaged <= MAX_DAMAGED
    elif history.is_accepted:
        again = isinstance(error, ELSEWHERE)
    elif isinstance(error, Unavailable):
        again = history.num_failed < max(MIN_ADMISSION_TRIES, 2 * num_replicas)
    else:
        again = isinstance(error, BUSY) and history.num_failed < num_replicas
    pauses = history.num_failed - num_replicas
    delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(pauses, 10)) * (0.5 + 0.5 * jitter) if pauses >= 0 else 0.0
    return delay_s if again and delay_s < remaining_s else None
