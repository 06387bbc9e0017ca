"""Do: own the queue in step mode: before every step, ask the policy which pictures step next, and let them.

No wave and no waiting window: a picture joins at the step boundary where the policy first picks it, and leaves after its last.
Admission, tickets, events and limits are request mode's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from mammoth_dit.batching import MIN_RETRY_S, SMOOTHING, Batcher
from mammoth_dit.jobs import Job, Outcome, Picture
from mammoth_dit.stepper import Canvas, Ended
from mammoth_dit.tickets import Ticket
from mammoth_policy.steps import due_at, next_rows
from mammoth_policy.waves import Policy
from mammoth_wire.errors import Unavailable

__all__ = ["StepBatcher", "StepsJobs"]


class StepsJobs(Protocol):
    """The device's side (`stepper.Stepper`); `step` and `collect` block, on the device thread."""

    @property
    def num_pending(self) -> int: ...
    def unit_sizes(self, sizes: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], int]: ...
    def step(self, canvases: Sequence[Canvas]) -> Ended: ...
    def collect(self, *, wait: bool) -> Ended: ...


class Running:
    """A ticket as the policy sees it."""

    def __init__(self, ticket: Ticket, canvas: Canvas, deadline_at: float | None) -> None:
        self.ticket, self.canvas, self.deadline_at = ticket, canvas, deadline_at
        self.step_s, self.due_at, self.busy_s = 0.0, 0.0, 0.0
        self.begun = False

    @property
    def size(self) -> tuple[int, int]:
        height_px, width_px, _ = self.canvas.job.key
        return height_px, width_px

    @property
    def num_steps(self) -> int:
        return self.canvas.job.params.steps

    @property
    def remaining_s(self) -> float:
        return self.step_s * (self.num_steps - self.canvas.num_done)


class StepBatcher(Batcher):
    """The queue in front of one stepper."""

    def __init__(
        self,
        stepper: StepsJobs,
        run: Callable[..., Awaitable[Any]],
        policy: Policy = Policy(),
        *,
        max_queue: int = 64,
    ) -> None:
        """`run(fn, *args)` calls `fn` on the device thread; of `policy` only `max_num_seqs` matters: begun pictures."""
        super().__init__(NoWaves(), run, policy, max_queue=max_queue)
        self._stepper, self._call = stepper, run
        self._jobs: dict[str, Running] = {}
        self._step_s: dict[tuple[int, int], float] = {}

    def submit(self, job: Job, *, deadline_at: float | None = None) -> Ticket:
        self._forget_resolved()
        ticket = super().submit(job, deadline_at=deadline_at)
        running = Running(ticket, Canvas(job), deadline_at)
        running.step_s = self._step_s.get(running.size, 0.0)
        running.due_at = due_at(ticket.queued_at, running.remaining_s, deadline_at)
        self._jobs[job.id] = running
        return ticket

    async def run(self) -> None:
        try:
            while self._jobs or self._stepper.num_pending or not self._draining:
                self._forget_resolved()
                if rows := self._choose():
                    await self._step(rows)
                elif self._stepper.num_pending:
                    self._settle(await self._call(lambda: self._stepper.collect(wait=True)))
                else:
                    await self._change_or(None)
        finally:
            self._draining = True
            self.fail_all(Unavailable("this replica has stopped", retry_after_s=MIN_RETRY_S))

    def _choose(self) -> list[Running]:
        jobs = [job for job in self._jobs.values() if job.canvas.num_done < job.num_steps]
        for job in jobs:
            job.step_s = self._step_s.get(job.size, 0.0)
        unit_sizes = self._stepper.unit_sizes(sorted({job.size for job in jobs}))
        return next_rows(jobs, self._now(), capacity=self._policy.max_num_seqs, unit_sizes=unit_sizes)

    async def _step(self, rows: Sequence[Running]) -> None:
        began_at = self._now()
        for row in rows:
            if not row.begun:
                row.begun = True
                self._running.append(row.ticket)
                self._waiting.remove(row.ticket)
                row.ticket.start(began_at, len(rows))
                self._tell_places()
        ended: Ended = await self._call(self._stepper.step, [row.canvas for row in rows])
        took_s = self._now() - began_at
        self._progress()
        for row in rows:
            row.busy_s += took_s / len(rows)
            row.ticket.step(row.canvas.num_done, row.num_steps)
        self._measure_step(rows[0].size, took_s / len(rows))
        self._settle(ended)

    def _settle(self, ended: Ended) -> None:
        for canvas, outcome in ended:
            running = self._jobs.pop(canvas.job.id, None)
            if running is None or running.canvas is not canvas:
                continue  # it left while its pixels were on their way
            if isinstance(outcome, Picture):
                self._take_in(canvas.job.key, 1, running.busy_s)
            running.ticket.resolve(outcome)
            self._running.remove(running.ticket)

    def _measure_step(self, size: tuple[int, int], step_s: float) -> None:
        known_s = self._step_s.get(size, step_s)
        self._step_s[size] = known_s + SMOOTHING * (step_s - known_s)

    def _forget_resolved(self) -> None:
        """Drop who left: their place on the device is free from this step on."""
        for job_id, running in list(self._jobs.items()):
            if running.ticket.resolved:
                del self._jobs[job_id]
                if running.ticket in self._running:
                    self._running.remove(running.ticket)


class NoWaves:
    """A sampler for a queue that has none."""

    def sample(self, jobs: Sequence[Job], watch: object) -> list[Outcome]:
        raise AssertionError("step mode draws no waves")
