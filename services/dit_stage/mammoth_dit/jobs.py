"""Values that pass between admission, batcher and engine: a job with complete rows, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mammoth_wire.errors import MammothError
from mammoth_wire.params import Diffusion

__all__ = ["SILENT", "Job", "Outcome", "Picture", "Watch", "groups", "synthetic_job"]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One picture to draw, admitted and with all its rows.

    `hidden_TH` CPU, any float dtype, row i belongs to `token_ids_T`[i] (CPU, integer); `answer_start` is the prompt's length.
    `negative_LH` are the rows of a negative prompt for the unconditional stream, None for a stream of zero tokens.
    """

    id: str
    params: Diffusion
    seed: int
    hidden_TH: Tensor
    token_ids_T: Tensor
    answer_start: int
    negative_LH: Tensor | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Height, width, steps: jobs of equal key may share a wave. Guidance, range, seed and lengths are a row's own."""
        return self.params.key


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A drawn picture: uint8 [H, W, 3], the SHA-256 (hex) of its bytes, and what drawing it took.

    `kernels` names those that drew it where they are not the engine's own.
    """

    rgb: npt.NDArray[np.uint8]
    rgb_sha256: str
    denoise_s: float
    decode_s: float
    kernels: str | None = None


Outcome = Picture | MammothError


@dataclass(frozen=True, slots=True)
class Watch:
    """How a wave tells of its progress; all three are called on the device thread and take the job's place in the wave.

    `on_step(place, steps_done, total)`; `on_done(place, outcome)` as soon as a job's outcome stands; `cancelled(place)` is
    asked before every step.
    """

    on_step: Callable[[int, int, int], None]
    on_done: Callable[[int, Outcome], None]
    cancelled: Callable[[int], bool]


SILENT = Watch(on_step=lambda *_: None, on_done=lambda *_: None, cancelled=lambda _: False)


def groups(keys: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Return the places of equal keys, in first-seen order."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.values())


def synthetic_job(params: Diffusion, *, llm_width: int, gen_id: int, num_text: int = 1, num_image: int = 1) -> Job:
    """Return a job with zero rows that passes every check: text tokens of id 0, then generation tokens.

    Warm-up and measurements use it, so that selection, refiner, loop and decoder run for real.
    """
    ids = [0] * num_text + [gen_id] * num_image
    return Job(
        id="synthetic",
        params=params,
        seed=0,
        hidden_TH=torch.zeros(len(ids), llm_width),
        token_ids_T=torch.tensor(ids),
        answer_start=num_text,
    )
