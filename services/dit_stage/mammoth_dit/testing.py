"""Tools for tests: the real engine at toy width on the CPU, and a simulated device for tests of time.

`TinyEngine` is this project's code on a tiny random checkpoint; `SimulatedDevice` takes loop time instead of computing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mammoth_dit import tiny
from mammoth_dit.engine import Drawing, Engine, Exactness
from mammoth_dit.jobs import Job, Outcome, Picture, Watch
from mammoth_dit.model.weights import load
from mammoth_dit.stepper import Canvas, Ended
from mammoth_dit.tickets import Event, Ticket
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.tiny import Family, checkpoint_files
from mammoth_wire.errors import Cancelled, MammothError
from mammoth_wire.params import Diffusion

__all__ = [
    "SimulatedDevice",
    "SimulatedSteps",
    "TinyEngine",
    "outcome_of",
    "simulated_job",
    "story",
    "tiny_checkpoint",
]


def tiny_checkpoint(path: Path, family: Family = "preview") -> Checkpoint:
    """Write a tiny checkpoint with only this stage's shard into the folder `path` and open it."""
    for name, text in checkpoint_files(family).items():
        (path / name).write_text(text)
    tiny.write(path)
    return Checkpoint.open(path)


class TinyEngine(Engine):
    """The real engine over a tiny checkpoint, float64 unless told otherwise, plus jobs that fit it."""

    def __init__(
        self,
        path: Path,
        family: Family = "preview",
        *,
        dtype: torch.dtype = torch.float64,
        exactness: Exactness = "strict",
    ) -> None:
        super().__init__(load(tiny_checkpoint(path, family), dtype=dtype), exactness=exactness)

    def job(
        self,
        name: str,
        *,
        num_text: int = 5,
        num_image: int = 9,
        num_negative: int = 0,
        seed: int = 1,
        size_px: tuple[int, int] = (32, 48),
        steps: int = 3,
        guidance: float = 4.0,
        cfg_range: tuple[float, float] = (0.0, 1.0),
    ) -> Job:
        """Return a job with random rows that depend on `seed` alone: text tokens, then generation tokens."""
        generator = torch.Generator().manual_seed(seed)
        width, start = self.config.llm_width, self.config.tokens.gen_vocab_start
        rows = torch.randn(num_text + num_image + num_negative, width, generator=generator, dtype=self.dtype)
        condition, negative = rows[: num_text + num_image], rows[num_text + num_image :]
        return Job(
            id=name,
            params=Diffusion(*size_px, guidance=guidance, cfg_range=cfg_range, steps=steps),
            seed=seed,
            hidden_TH=condition,
            token_ids_T=torch.tensor([1] * num_text + [start] * num_image),
            answer_start=num_text,
            negative_LH=negative if num_negative else None,
        )


def simulated_job(name: str, *, steps: int = 3, side: int = 32) -> Job:
    """Return a job that only a simulated device draws."""
    params = Diffusion(side, side, guidance=4.0, cfg_range=(0.0, 1.0), steps=steps)
    return Job(name, params, 0, torch.zeros(2, 4), torch.tensor([0, 9]), 1)


async def story(ticket: Ticket) -> list[Event]:
    """Return everything that a job is told."""
    return [event async for event in ticket.events()]


async def outcome_of(ticket: Ticket) -> Picture | MammothError:
    """Return what becomes of a job: its picture, or the error as a value."""
    try:
        return await ticket.result()
    except MammothError as err:
        return err


class SimulatedDevice:
    """An engine and its thread in one, on the loop's clock: every step of a wave takes `step_s`, pictures are black.

    `run` stands in for the device worker's; `fail` maps job ids to the error that takes the picture's place, and `waves`
    keeps the ids of every wave that began.
    """

    def __init__(self, step_s: float, fail: dict[str, MammothError] | None = None) -> None:
        self.step_s = step_s
        self.fail = fail or {}
        self.broken: BaseException | None = None
        self.waves: list[list[str]] = []

    def sample(self, jobs: Sequence[Job], watch: Watch) -> list[Outcome]:
        """Draw at once, for a device worker with a real thread."""
        outcomes = [self._outcome(place, job, watch) for place, job in enumerate(jobs)]
        for place, outcome in enumerate(outcomes):
            watch.on_done(place, outcome)
        return outcomes

    async def run(self, _fn: object, jobs: Sequence[Job], watch: Watch) -> list[Outcome]:
        """Draw a wave in loop time, stopping at the step after everybody has left."""
        self.waves.append([job.id for job in jobs])
        total = jobs[0].params.steps
        for step in range(total):
            if all(watch.cancelled(place) for place in range(len(jobs))):
                break
            await asyncio.sleep(self.step_s)
            if self.broken is not None:
                raise self.broken
            for place in range(len(jobs)):
                watch.on_step(place, step + 1, total)
        outcomes = self.sample(jobs, watch)
        await asyncio.sleep(0)  # as from a thread: the result comes behind the reports
        return outcomes

    def _outcome(self, place: int, job: Job, watch: Watch) -> Outcome:
        if watch.cancelled(place):
            return Cancelled("the caller left")
        return self.fail.get(job.id) or _black(job)


class SimulatedSteps:
    """A stepper and its thread in one, on the loop's clock: a step of B rows of a size takes `step_s(size, B)`.

    `order` keeps the ids of every step. `fail` maps job ids to the error that ends them at their first step.
    """

    def __init__(
        self,
        step_s: Callable[[tuple[int, int], int], float],
        unit_sizes: Mapping[tuple[int, int], int] | None = None,
        fail: Mapping[str, MammothError] | None = None,
    ) -> None:
        self._step_s, self._unit_sizes, self._fail = step_s, unit_sizes or {}, fail or {}
        self.order: list[list[str]] = []

    @property
    def num_pending(self) -> int:
        return 0

    def unit_sizes(self, sizes: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], int]:
        return self._unit_sizes

    def step(self, canvases: Sequence[Canvas]) -> Ended:
        ended: Ended = []
        for canvas in canvases:
            if (err := self._fail.get(canvas.job.id)) is not None:
                ended.append((canvas, err))
                continue
            if canvas.drawing is None:
                canvas.drawing = SimulatedDrawing(num_steps=canvas.job.params.steps)
            canvas.drawing.step += 1
            if canvas.drawing.step == canvas.drawing.num_steps:
                ended.append((canvas, _black(canvas.job)))
        return ended

    def collect(self, *, wait: bool) -> Ended:
        return []

    async def run(self, fn: Callable[[Sequence[Canvas]], Ended], canvases: Sequence[Canvas]) -> Ended:
        """Take a step in loop time."""
        self.order.append([canvas.job.id for canvas in canvases])
        await asyncio.sleep(self._step_s(canvases[0].job.key[:2], len(canvases)))
        return fn(canvases)


@dataclass(slots=True)
class SimulatedDrawing(Drawing):
    """Steps without a picture."""

    num_steps: int
    step: int = 0


def _black(job: Job) -> Picture:
    black = np.zeros((job.params.height, job.params.width, 3), np.uint8)
    return Picture(black, rgb_sha256="0" * 64, denoise_s=0.0, decode_s=0.0)
