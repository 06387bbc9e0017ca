"""Do: own the weights and the device; turn jobs into pictures, one outcome each. Plain path.

Calls run on one thread at a time and block it. What depends only on a job is computed once (`prepare`), what depends
on a group once a group (`Group`), the rest once a step. `begin`, `advance` and `finish` are a picture's life; `sample` runs
it for a wave of jobs.

Axes: B rows of a group, C caption tokens, U tokens of the unconditional stream, D transformer width, L rows, H LLM width.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from mammoth_dit import sampling
from mammoth_dit.finishing import Finisher, Pending
from mammoth_dit.isolation import isolate
from mammoth_dit.jobs import SILENT, Job, Outcome, Watch, groups, synthetic_job
from mammoth_dit.memory import Memory
from mammoth_dit.model.config import ModelConfig
from mammoth_dit.model.vae import ImageDecoder
from mammoth_dit.model.weights import Model
from mammoth_dit.sampling import Guidance, Schedule, Velocity, initial_noise, step_times
from mammoth_dit.selection import select
from mammoth_wire.errors import Cancelled, MammothError, ShapeTooLarge
from mammoth_wire.params import Diffusion

__all__ = ["Drawing", "Engine", "Exactness", "Group", "Prepared"]

Exactness = Literal["strict", "tolerant"]
Item = TypeVar("Item")
NUM_STEPS_AHEAD = 2  # how far the host may run before a GPU: the queue never drains, progress and cancels stay true
TYPICAL_TEXT_TOKENS = 77
GRID_CELL_PX = 16  # of the default grid: a visual token a cell, an end-of-line token a row
SYNTHETIC_GUIDANCE = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A job's captions [C, D] and [U, D], on the device: nothing in them depends on a step."""

    job: Job
    caption_CD: Tensor
    unconditional_UD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows of one (height, width, steps), ready for the loop."""

    x: Tensor
    schedule: Schedule
    conditional: Velocity
    unconditional: Velocity


class Drawing:
    """Rows between two steps, as an engine holds them. `step` counts the steps done."""

    num_steps: int
    step: int


@dataclass(slots=True, eq=False)
class PlainDrawing(Drawing):
    """A group and its latents."""

    group: Group
    x: Tensor
    num_steps: int
    step: int = 0


class Engine:
    """Owns a model on a device.

    **strict**: rows of a wave run one by one, so a picture's bits depend on nothing but its job. **tolerant**: one batched
    product per group; rows never see each other, but kernels may round differently for another batch size.
    """

    def __init__(self, model: Model, *, exactness: Exactness = "strict") -> None:
        """Raise ValueError when the model was loaded without its transformer."""
        if model.transformer is None:
            raise ValueError("the model was loaded without its transformer")
        self._model = model
        self._transformer = model.transformer
        self._exactness = exactness
        self._finisher = None if model.vae is None else self._finishing(model.vae)

    @property
    def kernels(self) -> str:
        """What computes a step: bits depend on it."""
        return "plain"

    @property
    def packages(self) -> Sequence[str]:
        """Packages whose numerics the kernels use, beside those of every engine."""
        return ()

    @property
    def exact_units(self) -> Mapping[Hashable, bool]:
        """Shapes of several rows that stepped together, and whether their rows have the bits that they have alone."""
        return {}

    def facts(self) -> dict[str, str]:
        """Return what an operator may want to know of the kernels."""
        return {}

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def device(self) -> torch.device:
        return self._transformer.device

    @property
    def dtype(self) -> torch.dtype:
        return self._transformer.dtype

    @property
    def exactness(self) -> Exactness:
        return self._exactness

    @torch.inference_mode()
    def sample(self, jobs: Sequence[Job], watch: Watch = SILENT) -> list[Outcome]:
        """Draw every job and return one outcome each, in order; jobs of unequal key run apart, first seen first.

        A job that fails, alone or in company, is a MammothError in its place and nobody else's. Raises DeviceLost when
        the device is unusable.
        """
        outcomes: dict[int, Outcome] = {}

        def settle(place: int, outcome: Outcome) -> None:
            outcomes[place] = outcome
            watch.on_done(place, outcome)

        def collect(*, wait: bool = False) -> None:
            while pending and (wait or pending[0][1].ready):
                place, picture = pending.popleft()
                settle(place, picture.outcome())

        pending: deque[tuple[int, Pending]] = deque()
        for places in groups([job.key for job in jobs]):
            for unit in self._split(places, jobs[places[0]].key[:2]):
                drawn = isolate(
                    unit,
                    lambda part: self._draw([(place, jobs[place]) for place in part], watch, collect),
                    limit="{1}x{0} pixels".format(*jobs[unit[0]].key),
                    usable=self.usable,
                    release=self.release,
                )
                for place, outcome in zip(unit, drawn, strict=True):
                    if isinstance(outcome, Pending):
                        pending.append((place, outcome))
                    else:
                        settle(place, outcome)
                collect()
        collect(wait=True)
        return [outcomes[place] for place in range(len(jobs))]

    @torch.inference_mode()
    def prepare(self, job: Job) -> Prepared:
        """Select a job's rows and turn them into captions: refiner, projection and context refiner, once a job.

        Rows keep the dtype they arrived in until the one cast to the model's.
        """
        rows = select(job.hidden_TH, job.token_ids_T, job.answer_start, self.config.tokens)
        text_LH, image_LH = self._to_model(rows.text_LH), self._to_model(rows.image_LH)
        refiner = self.config.refiner
        if refiner is None:
            caption_CD = self._transformer.caption(torch.cat((text_LH, image_LH)))
        elif refiner.nested:
            caption_CD = self._transformer.caption(text_LH, image_LH)
        else:
            assert self._model.refiner is not None, "the model was loaded without its refiner"
            caption_CD = self._transformer.caption(torch.cat((text_LH, self._model.refiner(image_LH[None])[0])))
        negative_LH = job.hidden_TH[:0] if job.negative_LH is None else job.negative_LH
        return Prepared(job, caption_CD, self._transformer.caption(self._to_model(negative_LH)))

    @torch.inference_mode()
    def group(self, rows: Sequence[Prepared]) -> Group:
        """Lay out prepared rows of equal key: noise, schedule, and the two velocities bound to their captions."""
        params = rows[0].job.params
        size_px = (params.height, params.width)
        channels = self.config.transformer.in_channels
        noise = [initial_noise(row.job.seed, channels, size_px, self.dtype).to(self.device) for row in rows]
        guidances = [Guidance(row.job.params.guidance, row.job.params.cfg_range) for row in rows]
        return Group(
            x=torch.cat(noise),
            schedule=Schedule.plan(step_times(params.steps, size_px), guidances, self.dtype, self.device),
            conditional=self._velocity([row.caption_CD for row in rows], size_px),
            unconditional=self._velocity([row.unconditional_UD for row in rows], size_px),
        )

    @torch.inference_mode()
    def denoise(self, group: Group, before_step: Callable[[int], bool] = lambda step: True) -> Tensor:
        """Return the final latents of a group; see `sampling.denoise`."""
        return sampling.denoise(group.x, group.schedule, group.conditional, group.unconditional, before_step)

    @torch.inference_mode()
    def begin(self, rows: Sequence[Prepared]) -> Drawing:
        """Start to draw prepared rows of equal key."""
        group = self.group(rows)
        return PlainDrawing(group, group.x, group.schedule.num_steps)

    @torch.inference_mode()
    def advance(self, drawings: Sequence[Drawing]) -> None:
        """Take one step in each drawing, every row at its own time. A drawing whose step raises stays where it was."""
        for drawing in drawings:
            assert isinstance(drawing, PlainDrawing)
            group = drawing.group
            passes = group.conditional, group.unconditional
            drawing.x = sampling.advance(drawing.x, group.schedule, drawing.step, *passes)
            drawing.step += 1

    def latents(self, drawing: Drawing) -> Tensor:
        """Return the latents [B, channels, h, w] of a drawing."""
        assert isinstance(drawing, PlainDrawing)
        return drawing.x

    @torch.inference_mode()
    def finish(self, drawing: Drawing, row: int, denoise_s: float) -> Pending:
        """Start to decode the latents of one row of a drawing."""
        assert self._finisher is not None, "the model was loaded without its decoder"
        return self._finisher.begin(self.latents(drawing)[row : row + 1], denoise_s)

    @torch.inference_mode()
    def decode(self, latents_1Chw: Tensor) -> Tensor:
        """Return the image [3, H, W] of one row's final latents."""
        assert self._finisher is not None, "the model was loaded without its decoder"
        return self._finisher.decode(latents_1Chw)

    def unit_size(self, size_px: tuple[int, int]) -> int:
        """Return how many rows of (height, width) should step together; the plain path has nothing to gain."""
        return 1

    def warm_up(self, sizes_px: Sequence[tuple[int, int]]) -> None:
        """Draw a synthetic picture of each (height, width) in one guided step; raise the error of the first that fails."""
        for height_px, width_px in sizes_px:
            self.draw_synthetic(height_px, width_px)

    def draw_synthetic(self, height_px: int, width_px: int) -> None:
        """Draw a synthetic picture in one guided step; raise the error that took its place."""
        [outcome] = self.sample([self._synthetic(height_px, width_px, num_steps=1)])
        if isinstance(outcome, MammothError):
            raise outcome

    @torch.inference_mode()
    def measure(self, height_px: int, width_px: int, batch_size: int, num_steps: int = 3) -> list[float]:
        """Return the milliseconds of each of `num_steps` guided steps of a wave of synthetic jobs, after one untimed step.

        Raises ShapeTooLarge when the wave does not fit in memory.
        """
        try:
            return self._measure(height_px, width_px, batch_size, num_steps)
        except torch.OutOfMemoryError as err:
            limit = f"{batch_size} of {width_px}x{height_px} pixels"
            raise ShapeTooLarge(f"{limit} do not fit in this device's memory", limit=limit) from err

    def _measure(self, height_px: int, width_px: int, batch_size: int, num_steps: int) -> list[float]:
        num_grid = (height_px // GRID_CELL_PX) * (width_px // GRID_CELL_PX + 1)
        job = self._synthetic(height_px, width_px, num_steps + 1, num_text=TYPICAL_TEXT_TOKENS, num_image=num_grid)
        rows = [self.prepare(job)] * batch_size
        units = self._split(rows, (height_px, width_px))
        marks: list[list[float]] = [[] for _ in units]
        for unit, marks_s in zip(units, marks, strict=True):
            self._run(self.begin(unit), partial(self._mark, marks_s))
            self._mark(marks_s, num_steps + 1)
        unit_ms = [[1000 * (later - now) for now, later in pairwise(marks_s[1:])] for marks_s in marks]
        return [sum(step_ms) for step_ms in zip(*unit_ms, strict=True)]

    def _finishing(self, vae: ImageDecoder) -> Finisher:
        """Return what brings latents to pixels."""
        return Finisher(vae, self.device)

    def _split(self, items: Sequence[Item], size_px: tuple[int, int]) -> list[list[Item]]:
        """Cut what has one (height, width) into what runs together from the first step to the last."""
        return [[item] for item in items] if self._exactness == "strict" else [list(items)]

    def _draw(
        self, rows: Sequence[tuple[int, Job]], watch: Watch, collect: Callable[[], None]
    ) -> list[Pending | MammothError]:
        """Draw rows of one key; `collect` is called before every step."""
        if all(watch.cancelled(place) for place, _ in rows):
            return [Cancelled("the caller left") for _ in rows]
        began_s = time.perf_counter()
        drawing = self.begin([self.prepare(job) for _, job in rows])
        before_step = self._before_step([place for place, _ in rows], drawing.num_steps, watch, collect)
        self._run(drawing, before_step)
        self._wait()
        before_step(drawing.num_steps)
        denoise_s = time.perf_counter() - began_s
        return [
            Cancelled("the caller left") if watch.cancelled(place) else self.finish(drawing, row, denoise_s)
            for row, (place, _) in enumerate(rows)
        ]

    def _run(self, drawing: Drawing, before_step: Callable[[int], bool]) -> None:
        """Step to the end, or until `before_step` says that nobody waits any more."""
        while drawing.step < drawing.num_steps and before_step(drawing.step):
            self.advance([drawing])

    def _before_step(
        self, places: Sequence[int], num_steps: int, watch: Watch, collect: Callable[[], None]
    ) -> Callable[[int], bool]:
        """Report the steps done and go on while somebody waits for the group; a row that left keeps its place till then."""
        pace = self.pace()

        def before_step(step: int) -> bool:
            pace()
            collect()
            staying = [place for place in places if not watch.cancelled(place)]
            for place in staying if step else ():
                watch.on_step(place, step, num_steps)
            return not all(watch.cancelled(place) for place in staying)

        return before_step

    def memory(self) -> Memory | None:
        """Return what the device has for pictures beside the weights; None where it is the host's, which may swap."""
        if self.device.type != "cuda":
            return None
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        cached_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return Memory(self.config, free_bytes + cached_bytes, self.dtype.itemsize)

    def pace(self) -> Callable[[], None]:
        """Return what to call before every step: it waits when the host is too far ahead of the device."""
        if self.device.type != "cuda":
            return lambda: None
        stream, launched = torch.cuda.current_stream(self.device), deque[torch.cuda.Event]()

        def pace() -> None:
            launched.append(stream.record_event())
            if len(launched) > NUM_STEPS_AHEAD:
                launched.popleft().synchronize()

        return pace

    def _velocity(self, captions: Sequence[Tensor], size_px: tuple[int, int]) -> Velocity:
        side_px = self.config.transformer.side_multiple_px
        context = self._transformer.pack(captions, size_px[0] // side_px, size_px[1] // side_px)
        return lambda x, t_B: self._transformer(x, t_B, context)

    def _synthetic(
        self, height_px: int, width_px: int, num_steps: int, *, num_text: int = 1, num_image: int = 1
    ) -> Job:
        params = Diffusion(height_px, width_px, guidance=SYNTHETIC_GUIDANCE, cfg_range=(0.0, 1.0), steps=num_steps)
        width, gen_id = self.config.llm_width, self.config.tokens.gen_vocab_start
        return synthetic_job(params, llm_width=width, gen_id=gen_id, num_text=num_text, num_image=num_image)

    def _to_model(self, rows_LH: Tensor) -> Tensor:
        return rows_LH.to(self.device, self.dtype)

    def _mark(self, marks_s: list[float], step: int) -> bool:
        self._wait()
        marks_s.append(time.perf_counter())
        return True

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def usable(self) -> bool:
        """Probe the device: a sticky error shows in any later call."""
        try:
            return bool((torch.ones(1, device=self.device) + 1).item() == 2)
        except RuntimeError:
            return False
