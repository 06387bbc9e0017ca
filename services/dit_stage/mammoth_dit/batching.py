"""Do: own the queue of jobs: start waves when the policy says so, tell every job how it goes, resolve every job.

`Batcher` lives on the event loop and is the queue's only owner. The device runs elsewhere (an injected `run` coroutine):
what it reports crosses over by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mammoth_dit.jobs import Job, Outcome, Picture, Watch
from mammoth_dit.tickets import Ticket
from mammoth_policy.pace import Key, Pace
from mammoth_policy.waves import Policy, Run, Wait, plan
from mammoth_wire.errors import AlreadyRunning, MammothError, Overloaded, Unavailable

__all__ = ["Batcher", "RunOnDevice", "Sampler", "Snapshot"]

SMOOTHING = 0.3  # weight of the newest wave in the measured rates
MIN_RETRY_S, MAX_RETRY_S = 0.5, 60.0
UNMEASURED_RETRY_S = 5.0


class Sampler(Protocol):
    """The part of the engine that a batcher uses; blocking, called on the device thread."""

    def sample(self, jobs: Sequence[Job], watch: Watch) -> list[Outcome]: ...


SampleFn = Callable[[Sequence[Job], Watch], list[Outcome]]
RunOnDevice = Callable[[SampleFn, Sequence[Job], Watch], Awaitable[list[Outcome]]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The batcher at one moment. Rates are 0 until a wave has been measured; `idle_s` counts from the last progress."""

    queue_depth: int
    in_flight: int
    policy: Policy
    draining: bool
    idle_s: float
    pictures_per_s: float


class Batcher:
    """Queue in front of one engine. Every method but none of the engine's calls runs on the event loop."""

    def __init__(self, engine: Sampler, run: RunOnDevice, policy: Policy = Policy(), *, max_queue: int = 64) -> None:
        """`run(fn, *args)` calls `fn` on the device thread; at most `max_queue` jobs wait."""
        self._engine = engine
        self._run_on_device = run
        self._policy = policy
        self._max_queue = max_queue
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._active: dict[str, Ticket] = {}
        self._changed = asyncio.Event()
        self._draining = False
        self._idle_since = self._last_arrival_at = self._last_progress_at = 0.0
        self._pictures_per_s = 0.0
        self._pace = Pace()

    @property
    def last_progress_at(self) -> float:
        """Loop time of the last step, outcome, or job that found the batcher empty. Stale with jobs active means dead."""
        return self._last_progress_at

    @property
    def active_ids(self) -> frozenset[str]:
        return frozenset(self._active)

    def submit(self, job: Job, *, deadline_at: float | None = None) -> Ticket:
        """Queue a job and return its ticket; it ends with DeadlineExceeded at loop time `deadline_at`.

        Raises Unavailable while draining, AlreadyRunning for the id of an active job, Overloaded when the queue is full.
        """
        now = self._now()
        if self._draining:
            raise Unavailable("draining", retry_after_s=MIN_RETRY_S)
        if job.id in self._active:
            raise AlreadyRunning(f"job {job.id} is running")
        if len(self._waiting) >= self._max_queue:
            raise Overloaded(f"{len(self._waiting)} jobs wait, the queue is full", retry_after_s=self.retry_after_s())
        if not self._active:
            self._last_progress_at = now
        ticket = Ticket(job, queued_at=now, on_resolved=self._left)
        self._active[job.id] = ticket
        self._waiting.append(ticket)
        self._last_arrival_at = now
        if deadline_at is not None:
            ticket.expire_at(deadline_at)
        self._tell_places()
        self._changed.set()
        return ticket

    def set_limits(self, *, max_num_seqs: int | None = None, max_wait_s: float | None = None) -> Policy:
        """Change live limits; they hold from the next wave on. Raises ValueError when one is out of range."""
        given = {"max_num_seqs": max_num_seqs, "max_wait_s": max_wait_s}
        self._policy = replace(self._policy, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        self._changed.set()
        return self._policy

    def drain(self) -> None:
        """Refuse new jobs; `run` returns when the accepted ones are done."""
        self._draining = True
        self._changed.set()

    def fail_all(self, err: MammothError) -> None:
        """End every job with `err`: waiting ones at once, running ones at the next step."""
        for ticket in list(self._active.values()):
            ticket.resolve(err)

    def snapshot(self) -> Snapshot:
        """Return what GetState reports."""
        return Snapshot(
            queue_depth=len(self._waiting),
            in_flight=len(self._running),
            policy=self._policy,
            draining=self._draining,
            idle_s=self._now() - self._last_progress_at,
            pictures_per_s=self._pictures_per_s,
        )

    def eta_s(self, key: Key) -> float | None:
        """Estimate the seconds until a picture of `key` that came now would be done; None before the first of its key."""
        picture_s = self._pace.picture_s(key)
        return None if picture_s is None else picture_s + self._ahead_s()

    async def run(self) -> None:
        """Serve until drained or cancelled. Whatever ends it, no job is left without an outcome.

        What the engine raises (a lost device, a bug) ends every job with Unavailable, so that it is drawn elsewhere, and
        is raised on.
        """
        now = self._idle_since = self._now()
        try:
            while self._waiting or not self._draining:
                match self._plan(now):
                    case Run(wave):
                        await self._execute(wave)
                        now = self._now()
                    case Wait(until):
                        now = await self._change_or(until)
        finally:
            self._draining = True
            self.fail_all(Unavailable("this replica has stopped", retry_after_s=MIN_RETRY_S))

    def _plan(self, now: float) -> Run[Ticket] | Wait:
        began_at = max(self._idle_since, self._waiting[0].queued_at) if self._waiting else now
        return plan(self._waiting, now, self._policy, last_arrival_at=self._last_arrival_at, began_at=began_at)

    async def _change_or(self, until: float | None) -> float:
        """Wait for a change of the queue or for `until`; return the time it is then, never just short of `until`."""
        self._changed.clear()  # no await since plan(): an arrival cannot slip in between
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            assert until is not None
            return max(until, self._now())
        return self._now()

    async def _execute(self, wave: Sequence[Ticket]) -> None:
        began_at = self._now()
        self._running = list(wave)
        self._waiting = self._waiting[len(wave) :]
        for ticket in wave:
            ticket.start(began_at, len(wave))
        self._tell_places()
        self._progress()
        try:
            jobs = [ticket.job for ticket in wave]
            outcomes = await self._run_on_device(self._engine.sample, jobs, self._watch(wave))
            for ticket, outcome in zip(wave, outcomes, strict=True):
                ticket.resolve(outcome)
        finally:
            self._running = []
            self._idle_since = self._now()
        self._measure(
            [job for job, outcome in zip(jobs, outcomes, strict=True) if isinstance(outcome, Picture)], began_at
        )

    def _watch(self, wave: Sequence[Ticket]) -> Watch:
        """Reports of the device thread, handed to the loop; only `cancelled` is answered on that thread."""
        hand_over = asyncio.get_running_loop().call_soon_threadsafe

        def on_step(place: int, index: int, total: int) -> None:
            hand_over(self._progress)
            hand_over(wave[place].step, index, total)

        def on_done(place: int, outcome: Outcome) -> None:
            hand_over(wave[place].resolve, outcome)

        return Watch(on_step=on_step, on_done=on_done, cancelled=lambda place: wave[place].resolved)

    def _left(self, ticket: Ticket) -> None:
        """Forget a resolved job: its id is free, its place goes to the next."""
        del self._active[ticket.job.id]
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._tell_places()
            self._changed.set()
        elif ticket in self._running:
            self._progress()

    def _tell_places(self) -> None:
        for position, ticket in enumerate(self._waiting, start=len(self._running)):
            ticket.place(position)

    def _measure(self, drawn: Sequence[Job], began_at: float) -> None:
        if drawn:
            self._take_in(drawn[0].key, len(drawn), self._now() - began_at)

    def _take_in(self, key: Key, num_pictures: int, elapsed_s: float) -> None:
        """Learn from `num_pictures` of one key that took the device `elapsed_s`."""
        if elapsed_s <= 0:
            return
        self._pace.measure(key, num_pictures, elapsed_s)
        weight = SMOOTHING if self._pictures_per_s else 1.0
        self._pictures_per_s += weight * (num_pictures / elapsed_s - self._pictures_per_s)

    def _ahead_s(self) -> float:
        return self._pace.total_s(ticket.key for ticket in self._active.values())

    def retry_after_s(self) -> float:
        """Return when about half of the work ahead will be done."""
        ahead_s = self._ahead_s()
        return min(MAX_RETRY_S, max(MIN_RETRY_S, ahead_s / 2)) if ahead_s else UNMEASURED_RETRY_S

    def _progress(self) -> None:
        self._last_progress_at = self._now()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
