"""Own what is known about units of several rows: whether each row's bits are those it has alone.

A library picks a kernel by shape, so equality is a property of a shape. The first time a shape comes up its rows are stepped
together and alone; the results of the latter stand. From then on the rows of an exact shape are stepped together, those of
any other alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from mammoth_dit.fast.layout import UnitShape
from mammoth_dit.fast.rows import Row

__all__ = ["Exact", "StepUnit"]

StepUnit = Callable[[Sequence[Row], UnitShape], Tensor]


class Exact:
    """Steps units so that a row's bits never depend on its company. `tolerant` trusts every shape."""

    def __init__(self, step: StepUnit, mode: Literal["strict", "tolerant"]) -> None:
        self._step, self._mode = step, mode
        self._known: dict[UnitShape, bool] = {}

    @property
    def known(self) -> dict[UnitShape, bool]:
        """The shapes of several rows seen so far, and whether they are exact."""
        return dict(self._known)

    def step(self, rows: Sequence[Row], shape: UnitShape) -> None:
        """Advance the latents of `rows`, which stay untouched when anything raises."""
        if len(rows) == 1 or self._mode == "tolerant" or self._known.get(shape):
            together_BnF = self._step(rows, shape)
            for row, x_nF in zip(rows, together_BnF, strict=True):
                row.x_nF.copy_(x_nF)
            return
        alone = [self._step([row], replace(shape, batch=1))[0].clone() for row in rows]
        if shape not in self._known:
            together_BnF = self._step(rows, shape)
            self._known[shape] = all(
                torch.equal(_bits(x_nF), _bits(one_nF)) for x_nF, one_nF in zip(together_BnF, alone, strict=True)
            )
        for row, one_nF in zip(rows, alone, strict=True):
            row.x_nF.copy_(one_nF)


def _bits(x: Tensor) -> Tensor:
    """View a tensor as whole numbers: a NaN equals itself, -0.0 is not 0.0."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
