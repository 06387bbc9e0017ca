"""Do: one step of whichever pictures are due, on the device thread. What to step is decided elsewhere (`mammoth_policy.steps`).

A canvas is a picture in the making. It may join any step and leave after any; its bits are those of a picture drawn alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from mammoth_dit.engine import Drawing, Engine
from mammoth_dit.finishing import Pending
from mammoth_dit.isolation import isolate
from mammoth_dit.jobs import Job, Outcome
from mammoth_wire.errors import MammothError

__all__ = ["Canvas", "Ended", "Stepper"]


class Canvas:
    """A job and how far it is. `drawing` None until its first step; dropped, it leaves nothing behind."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.drawing: Drawing | None = None
        self.began_s = 0.0

    @property
    def num_done(self) -> int:
        return 0 if self.drawing is None else self.drawing.step


Ended = list[tuple[Canvas, Outcome]]


class Stepper:
    """Steps canvases with an engine, and brings finished ones to pixels while the next steps run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pace = engine.pace()
        self._pending: deque[tuple[Canvas, Pending]] = deque()

    @property
    def num_pending(self) -> int:
        """Pictures whose steps are done and whose pixels are not here yet."""
        return len(self._pending)

    def unit_sizes(self, sizes: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], int]:
        """Return how many rows of each (height, width) should step together."""
        return {size: self._engine.unit_size(size) for size in sizes}

    @torch.inference_mode()
    def step(self, canvases: Sequence[Canvas]) -> Ended:
        """Take one step in each canvas, all of one size; return what has ended by now, these or earlier ones.

        A canvas that fails ends with its error and nobody else's. Raises DeviceLost when the device is unusable.
        """
        self._pace()
        goal = {canvas: canvas.num_done + 1 for canvas in canvases}
        height_px, width_px, _ = canvases[0].job.key
        outcomes = isolate(
            canvases,
            lambda part: self._advance(part, goal),
            limit=f"{width_px}x{height_px} pixels",
            usable=self._engine.usable,
            release=self._engine.release,
        )
        ended: Ended = []
        for canvas, outcome in zip(canvases, outcomes, strict=True):
            if isinstance(outcome, Pending):
                self._pending.append((canvas, outcome))
            elif outcome is not None:
                ended.append((canvas, outcome))
        return ended + self.collect(wait=False)

    def collect(self, *, wait: bool) -> Ended:
        """Return the pictures that are here; with `wait`, at least the oldest that is on its way."""
        ended: Ended = []
        while self._pending and ((wait and not ended) or self._pending[0][1].ready):
            canvas, pending = self._pending.popleft()
            ended.append((canvas, pending.outcome()))
        return ended

    def _advance(self, canvases: Sequence[Canvas], goal: Mapping[Canvas, int]) -> list[Pending | MammothError | None]:
        """Bring every canvas to its goal, also when a failed attempt brought some of them there; decode what is done."""
        drawings: dict[Canvas, Drawing] = {}
        for canvas in canvases:
            if canvas.drawing is None:
                canvas.began_s = time.perf_counter()
                canvas.drawing = self._engine.begin([self._engine.prepare(canvas.job)])
            drawings[canvas] = canvas.drawing
        self._engine.advance([drawing for canvas, drawing in drawings.items() if drawing.step < goal[canvas]])
        return [self._finished(canvas, drawing) for canvas, drawing in drawings.items()]

    def _finished(self, canvas: Canvas, drawing: Drawing) -> Pending | None:
        if drawing.step < drawing.num_steps:
            return None
        return self._engine.finish(drawing, 0, time.perf_counter() - canvas.began_s)
