"""Decide, row by row, whether a step may reuse what the main blocks added in an earlier one, and take it.

The first main block always runs. When what it adds has hardly changed since the last step, the other blocks are taken to add
what they added then. The test is a row's own, so a picture is the same in any company; both passes run in every step and
share the decision, also outside the guidance range, where the blend still follows it. It reads one number back a step.

**Source**: the residual test of cache-dit's dual block cache, with its defaults (one front block, 4 steps before the first
reuse, at most 3 in a row, threshold 0.24). Difference: per row, not averaged over a batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mammoth_dit.fast.layout import UnitShape
from mammoth_dit.fast.modulation import VECTORS
from mammoth_dit.fast.rows import Reuse, Row, inputs_of
from mammoth_dit.fast.step import Network
from mammoth_dit.sampling import euler_step, guide

__all__ = ["StepCache", "may_reuse"]

THRESHOLD = 0.24
NUM_WARM_UP = 4
MAX_REUSED = 3


def may_reuse(change: float, *, step: int, num_reused: int, threshold: float = THRESHOLD) -> bool:
    """Decide from the relative change of what the first block added. A change that is no number never reuses."""
    return step >= NUM_WARM_UP and num_reused < MAX_REUSED and change < threshold


class StepCache:
    """Steps single rows; counts the steps it looked at and those that reused."""

    def __init__(self, network: Network, device: torch.device, *, threshold: float = THRESHOLD) -> None:
        self._network, self._device, self._threshold = network, device, threshold
        self.num_steps = self.num_reused = 0

    @staticmethod
    def applies(row: Row) -> bool:
        """Tell whether a row takes part: one without guidance has one pass a step and stays as it is."""
        return any(row.guided)

    def step(self, row: Row) -> None:
        """Take the row's next step in its latents."""
        guided = row.guided[row.step]
        shape = _paired(row)
        inputs, network = inputs_of([row], shape), self._network
        rows_T = shape.rows_T(self._device)
        x_TP, vectors, places = network.enter(inputs, shape, rows_T, shape.image_rows_T(self._device))
        front_TP, branch_TP = network.blocks(network.weights.layers[:1], x_TP, vectors, places)
        front_TP = network.ops.add(front_TP, branch_TP, vectors[VECTORS - 1], rows_T)
        first_TP = front_TP - x_TP
        self.num_steps += 1
        if self._reuses(row, first_TP):
            assert row.reuse is not None, "the first step reuses nothing"
            self.num_reused += 1
            out_TP, rest_TP, num_reused = front_TP + row.reuse.rest_TP, row.reuse.rest_TP, row.reuse.num_reused + 1
        else:
            out_TP, branch_TP = network.blocks(network.weights.layers[1:], front_TP, vectors[VECTORS:], places)
            out_TP = network.ops.add(out_TP, branch_TP, vectors[-2], rows_T)
            rest_TP, num_reused = out_TP - front_TP, 0
        conditional, unconditional = network.leave(network.ops.layer_norm(out_TP, vectors[-1], rows_T), inputs, shape)
        velocity = guide(conditional, unconditional, inputs.scale_B11) if guided else conditional
        row.x_nF.copy_(euler_step(inputs.x_BnF, velocity, inputs.dt_B11)[0])
        row.reuse = Reuse(first_TP, rest_TP, num_reused)

    def _reuses(self, row: Row, first_TP: Tensor) -> bool:
        if row.reuse is None:
            return False
        before = row.reuse.first_TP.float()
        change = ((first_TP.float() - before).abs().mean() / before.abs().mean()).item()
        return may_reuse(change, step=row.step, num_reused=row.reuse.num_reused, threshold=self._threshold)


def _paired(row: Row) -> UnitShape:
    """Return the row's shape with both passes, whether this step is guided or not."""
    return replace(row.shape, guided=True, negative=row.unconditional.caption_CP.shape[0])
