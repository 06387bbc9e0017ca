"""Do: own the order of work: one reconcile of a key at a time, any number of wishes for it become one, failures wait longer.

A key asked for while it runs, runs once more afterwards. The clock is the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from mammoth_operator.errors import TransientError

__all__ = ["Queue", "backoff_s"]

K = TypeVar("K", bound=Hashable)
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 300.0
JITTER = 0.2

logger = logging.getLogger(__name__)


def backoff_s(failures: int, jitter: float) -> float:
    """Return the wait after the `failures`-th failure in a row: 1 s, doubling to 5 min; `jitter` is from 0 to 1."""
    wait_s = min(FIRST_BACKOFF_S * 2.0 ** (failures - 1), LAST_BACKOFF_S)
    return wait_s * (1 - JITTER + 2 * JITTER * jitter)


class Queue(Generic[K]):
    """Runs `work(key)`, which returns the seconds after which the key wants to run again, or None for never."""

    def __init__(self, work: Callable[[K], Awaitable[float | None]], *, workers: int = 16) -> None:
        self._work = work
        self._slots = asyncio.Semaphore(workers)
        self._due: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._running: set[K] = set()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: K, *, after_s: float = 0.0) -> None:
        """Ask for a run of `key` in at most `after_s`; an earlier wish stands."""
        due = asyncio.get_running_loop().time() + after_s
        self._due[key] = min(due, self._due.get(key, due))
        self._changed.set()

    def oldest_s(self) -> float:
        """Return for how long the longest-waiting key has been overdue."""
        now = asyncio.get_running_loop().time()
        return max((now - due for key, due in self._due.items() if key not in self._running), default=0.0)

    async def run(self) -> None:
        """Work until cancelled. A failure that is not transient is a bug, and ends the process."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                now = loop.time()
                for key in [key for key, due in self._due.items() if due <= now and key not in self._running]:
                    del self._due[key]
                    self._running.add(key)
                    tasks.create_task(self._run_one(key), name=f"reconcile {key}")
                self._changed.clear()
                soonest = min((due for key, due in self._due.items() if key not in self._running), default=now + 3600)
                try:
                    async with asyncio.timeout_at(soonest):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _run_one(self, key: K) -> None:
        try:
            async with self._slots:
                again_s = await self._work(key)
            self._failures.pop(key, None)
        except TransientError as err:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again_s = max(backoff_s(failures, random.random()), err.retry_after_s or 0.0)
            logger.warning("will retry", extra={"key": str(key), "error": str(err), "failures": failures, "in_s": round(again_s, 1)})  # fmt: skip
        finally:
            self._running.discard(key)
            self._changed.set()
        if again_s is not None:
            self.add(key, after_s=again_s)
