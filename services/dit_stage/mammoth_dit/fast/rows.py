"""Own what the device holds of one picture between two steps. Rows come and go at any step; a unit only borrows them.

n image tokens, F channels of a latent token, C caption bucket, P padded width, N steps, V vectors of a step, D width,
E padded head width.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import pad

from mammoth_dit.engine import Group, Prepared
from mammoth_dit.fast.layout import UnitShape, bucket
from mammoth_dit.fast.ops import MASKED, HeadLayout
from mammoth_dit.fast.step import Inputs
from mammoth_dit.model.config import RotaryConfig
from mammoth_dit.model.rotary import caption_positions, image_positions, rotation

__all__ = ["Angles", "Reuse", "Row", "Stream", "inputs_of", "stream_of"]

MAX_TABLES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One pass's constant part: the padded caption [C, P], angles [n + C, 2, E/2] and masks [n + C] of all its tokens."""

    caption_CP: Tensor
    angles: Tensor
    mask: Tensor


@dataclass(slots=True, eq=False)
class Reuse:
    """What the step cache knows of a row: what the first main block added in the last step it looked at, what the others
    added when they last ran, and for how many steps in a row that has been reused."""

    first_TP: Tensor
    rest_TP: Tensor
    num_reused: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """A picture in the making. `step` counts the steps done; `guided` says for every step whether both passes run.

    `plain` is set once a step had to be taken by the plain path.
    """

    prepared: Prepared
    grid: tuple[int, int]
    x_nF: Tensor
    conditional: Stream
    unconditional: Stream
    vectors_NVD: Tensor
    dt_N: Tensor
    scale: Tensor
    guided: tuple[bool, ...]
    step: int = 0
    plain: Group | None = None
    reuse: Reuse | None = None
    serial: int = field(default_factory=count().__next__)

    @property
    def num_steps(self) -> int:
        return len(self.guided)

    @property
    def shape(self) -> UnitShape:
        """The unit of one that its next step is. An unguided step is the same whatever the negative prompt."""
        guided = self.guided[self.step]
        negative = self.unconditional.caption_CP.shape[0] if guided else 0
        return UnitShape(*self.grid, self.conditional.caption_CP.shape[0], negative, guided, batch=1)


class Angles:
    """Rotary tables of (grid, caption length), the most recent ones kept on the device."""

    def __init__(self, rotary: RotaryConfig, heads: HeadLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary, self._heads, self._dtype, self._device = rotary, heads, dtype, device
        self._tables: OrderedDict[tuple[int, int, int, int], Tensor] = OrderedDict()

    def table(self, grid: tuple[int, int], num_caption: int, num_padded: int) -> Tensor:
        """Return [n + num_padded, 2, E/2]: cosines and sines of image, caption, padding; zero where nothing is rotated."""
        key = (*grid, num_caption, num_padded)
        table = self._tables.pop(key, None)
        if table is None:
            positions = torch.cat((image_positions(*grid, shift=num_caption), caption_positions(num_padded)))
            by = rotation(positions, self._rotary.widths, self._dtype, self._device)
            table = pad(torch.stack((by.cos, by.sin), dim=1), (0, (self._heads.padded - self._heads.width) // 2))
        self._tables[key] = table
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        return table


def stream_of(caption_CD: Tensor, grid: tuple[int, int], angles: Angles, *, width: int, multiple: int) -> Stream:
    """Pad a caption [C, D] to its bucket and `width`; the mask closes the padding."""
    num_caption, num_image = caption_CD.shape[0], grid[0] * grid[1]
    num_padded = bucket(num_caption, multiple)
    table = angles.table(grid, num_caption, num_padded)
    mask = table.new_zeros(num_image + num_padded)
    mask[num_image + num_caption :] = MASKED
    missing = (0, width - caption_CD.shape[1], 0, num_padded - num_caption)
    return Stream(caption_CP=pad(caption_CD, missing), angles=table, mask=mask)


def inputs_of(rows: list[Row], shape: UnitShape) -> Inputs:
    """Stack what the next step of `rows` reads; all of them have `shape`, up to the batch."""
    streams = [[row.conditional for row in rows]]
    if shape.guided:
        streams.append([row.unconditional for row in rows])
    return Inputs(
        x_BnF=torch.stack([row.x_nF for row in rows]),
        captions=[torch.stack([stream.caption_CP for stream in each]) for each in streams],
        angles=[torch.stack([stream.angles for stream in each]) for each in streams],
        masks=[torch.stack([stream.mask for stream in each]) for each in streams],
        vectors_BVD=torch.stack([row.vectors_NVD[row.step] for row in rows]),
        dt_B11=torch.stack([row.dt_N[row.step] for row in rows])[:, None, None],
        scale_B11=torch.stack([row.scale for row in rows])[:, None, None],
    )
