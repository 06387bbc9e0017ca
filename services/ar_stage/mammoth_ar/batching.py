"""Do: own the queue and the running set of the AR stage; one loop feeds the engine and answers every ticket.

The loop is the only one that touches the engine, through an injected `run(function, *args)` that executes on the device
worker. Whatever happens to a sequence (done, failed, cancelled, engine lost, shutdown), its ticket ends and its slots
come back. Policy lives in `mammoth_policy.tokens`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch

from mammoth_ar.sequence import Rows, Running
from mammoth_ar.sequence import Sequence as TokenSequence
from mammoth_ar.tickets import Progress, Queued, Ticket
from mammoth_policy.tokens import Action, Load, Work, plan, steps_until_done
from mammoth_wire.errors import EngineFailed, InvalidRequest, MammothError, Overloaded, Unavailable

__all__ = ["Batcher", "BatcherEngine", "Run", "Snapshot"]


R = TypeVar("R")
SMOOTHING = 0.1  # weight of the newest decode step in the moving average of step times
DEFAULT_RETRY_S = 1.0


class BatcherEngine(Protocol):
    """What the batcher needs of an engine; `decode` may return any number of rows per sequence and step."""

    @property
    def num_slots(self) -> int: ...
    @property
    def num_free_slots(self) -> int: ...
    def refusal(self, sequence: TokenSequence) -> InvalidRequest | None: ...
    def admit(self, sequence: TokenSequence) -> Running: ...
    def prefill(self, running: Running) -> Rows | EngineFailed | None: ...
    def decode(self, runnings: Sequence[Running]) -> Sequence[Rows | EngineFailed]: ...
    def release(self, running: Running) -> None: ...


class Run(Protocol):
    """Executes a blocking function on the device worker."""

    def __call__(self, fn: Callable[..., R], /, *args: Any) -> Awaitable[R]: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The batcher at one moment. Times are of the event loop's clock; rates are None until something was decoded."""

    queue_depth: int
    num_running: int
    rows_in_use: int
    free_slots: int
    num_slots: int
    max_num_seqs: int
    tokens_per_s: float | None
    step_s: float | None
    last_progress_at: float


@dataclass(slots=True, eq=False)
class _Job:
    """An admitted sequence; `held` are rows decoded but not yet posted, `num_posted` grid rows that were."""

    ticket: Ticket
    running: Running
    held: list[Rows] = field(default_factory=list)
    num_posted: int = 0

    @property
    def work(self) -> Work:
        running = self.running
        return Work(running.sequence.num_slots, running.sequence.grid.num_tokens - running.num_decoded)

    def flush(self) -> None:
        """Post the held rows as one, then the progress they make."""
        if self.held:
            ids, hidden = (torch.cat([getattr(rows, name) for rows in self.held]) for name in ("ids", "hidden"))
            self.num_posted += len(ids)
            self.held.clear()
            self.ticket.post(Rows("condition", ids, hidden))
        self.ticket.post(Progress(self.num_posted, self.running.sequence.grid.num_tokens))


class Batcher:
    """`max_num_seqs` is a live cap in rows, `max_queue` bounds the waiting, grid rows go out `chunk_rows` at a time."""

    def __init__(
        self, engine: BatcherEngine, run: Run, *, max_num_seqs: int, max_queue: int = 256, chunk_rows: int = 64
    ) -> None:
        self._engine = engine
        self._run = run
        self._max_queue = max_queue
        self._chunk_rows = chunk_rows
        self._waiting: list[Ticket] = []
        self._jobs: list[_Job] = []
        self._last: Action = "wait"
        self._wakeup = asyncio.Event()
        self._closed: MammothError | None = None
        self._step_s: float | None = None
        self._tokens_per_step = 0.0
        self._last_progress_at = 0.0
        self.set_limits(max_num_seqs)

    def set_limits(self, max_num_seqs: int) -> None:
        """Change the live cap; running rows are never evicted. At least 1, and no more than there are slots counts."""
        assert max_num_seqs >= 1, f"a cap of {max_num_seqs} rows serves nobody"
        self._max_num_seqs = min(max_num_seqs, self._engine.num_slots)
        self._wakeup.set()

    def wake(self) -> None:
        """Look again: slots that somebody else held are free."""
        self._wakeup.set()

    def submit(self, sequence: TokenSequence) -> Ticket:
        """Queue `sequence`. Raises InvalidRequest when it can never run, Overloaded when the queue is full."""
        if self._closed is not None:
            raise self._closed
        if refusal := self._engine.refusal(sequence):
            raise refusal
        waiting = self._present()
        if len(waiting) >= self._max_queue:
            raise Overloaded(
                f"{len(waiting)} requests wait already",
                retry_after_s=self.retry_after_s(),
                queue_depth=str(len(waiting)),
            )
        if not waiting and not self._jobs:
            self._touch()
        ticket = Ticket(sequence, self._wakeup.set)
        ticket.post(Queued(len(waiting)))
        self._waiting = [*waiting, ticket]
        self._wakeup.set()
        return ticket

    def estimate_s(self, sequence: TokenSequence) -> float | None:
        """Return how long `sequence` would take from now until its last row; None before anything was decoded."""
        if self._step_s is None:
            return None
        waiting = [_work(other) for other in (*(ticket.sequence for ticket in self._present()), sequence)]
        running = [job.work for job in self._jobs]
        return self._step_s * steps_until_done(running, waiting, max_num_seqs=self._max_num_seqs)

    def retry_after_s(self) -> float:
        """Return when the first of the running ends, which lets the queue move; at least a second."""
        remaining = min((job.work.num_tokens for job in self._jobs), default=0)
        return max(DEFAULT_RETRY_S, remaining * (self._step_s or 0.0))

    def snapshot(self) -> Snapshot:
        return Snapshot(
            queue_depth=len(self._present()),
            num_running=len(self._jobs),
            rows_in_use=sum(job.running.sequence.num_slots for job in self._jobs),
            free_slots=self._engine.num_free_slots,
            num_slots=self._engine.num_slots,
            max_num_seqs=self._max_num_seqs,
            tokens_per_s=self._tokens_per_step / self._step_s if self._step_s else None,
            step_s=self._step_s,
            last_progress_at=self._last_progress_at,
        )

    async def run(self) -> None:
        """Serve until cancelled. An exception of the engine itself ends every ticket and leaves through here."""
        try:
            while True:
                await self._step()
        finally:
            error = sys.exception()
            is_ours = isinstance(error, asyncio.CancelledError | None)
            self._close(
                Unavailable("the server is stopping") if is_ours else EngineFailed(f"the engine is lost: {error}")
            )

    async def _step(self) -> None:
        self._sweep()
        load = self._load()
        num_slots = load.rows_in_use + self._engine.num_free_slots  # a measurement may hold some
        action = plan(load, max_num_seqs=self._max_num_seqs, num_slots=num_slots)
        match action:
            case "wait":
                self._wakeup.clear()  # no await since the sweep: nothing can have arrived in between
                await self._wakeup.wait()
            case "admit":
                await self._admit(self._waiting[0])
            case "prefill":
                await self._prefill(next(job for job in self._jobs if not job.running.is_prefilled))
            case "decode":
                await self._decode([job for job in self._jobs if job.running.is_prefilled])
        self._last = action
        self._touch()

    def _load(self) -> Load:
        num_decoding = sum(job.running.is_prefilled for job in self._jobs)
        return Load(
            waiting_rows=tuple(ticket.sequence.num_slots for ticket in self._waiting),
            rows_in_use=sum(job.running.sequence.num_slots for job in self._jobs),
            num_prefilling=len(self._jobs) - num_decoding,
            num_decoding=num_decoding,
            last=self._last,
        )

    def _sweep(self) -> None:
        """Forget tickets that are over, and give their slots back."""
        before = len(self._waiting)
        self._waiting = self._present()
        if len(self._waiting) < before:
            self._tell_positions()
        for job in self._jobs:
            if job.ticket.is_over:
                self._engine.release(job.running)
        self._jobs = [job for job in self._jobs if not job.ticket.is_over]

    async def _admit(self, ticket: Ticket) -> None:
        running = await self._run(self._engine.admit, ticket.sequence)
        ticket.joined_at = asyncio.get_running_loop().time()
        self._jobs.append(_Job(ticket, running))
        self._waiting = [other for other in self._waiting if other is not ticket]
        self._tell_positions()

    async def _prefill(self, job: _Job) -> None:
        outcome = await self._run(self._engine.prefill, job.running)
        if isinstance(outcome, EngineFailed):
            job.ticket.end(outcome)
        elif outcome is not None:
            job.ticket.post(outcome)
        if job.running.is_prefilled:
            job.flush()

    async def _decode(self, jobs: Sequence[_Job]) -> None:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        outcomes = await self._run(self._engine.decode, [job.running for job in jobs])
        self._measure(clock() - started_at, len(jobs))
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, EngineFailed):
                job.ticket.end(outcome)
                continue
            if len(outcome.ids):
                job.held.append(outcome)
            if job.running.is_done or sum(len(rows.ids) for rows in job.held) >= self._chunk_rows:
                job.flush()
            if job.running.is_done:
                job.ticket.end(None)

    def _close(self, error: MammothError) -> None:
        self._closed = error
        for ticket in chain(self._waiting, (job.ticket for job in self._jobs)):
            ticket.end(error)
        self._sweep()

    def _present(self) -> list[Ticket]:
        return [ticket for ticket in self._waiting if not ticket.is_over]

    def _tell_positions(self) -> None:
        for position, ticket in enumerate(self._waiting):
            ticket.post(Queued(position))

    def _touch(self) -> None:
        self._last_progress_at = asyncio.get_running_loop().time()

    def _measure(self, step_s: float, num_tokens: int) -> None:
        if self._step_s is None:
            self._step_s, self._tokens_per_step = step_s, num_tokens
        self._step_s += SMOOTHING * (step_s - self._step_s)
        self._tokens_per_step += SMOOTHING * (num_tokens - self._tokens_per_step)


def _work(sequence: TokenSequence) -> Work:
    return Work(sequence.num_slots, sequence.grid.num_tokens)
