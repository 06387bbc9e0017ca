"""Decide how noise becomes latents: step times, guidance per step, initial noise, the Euler loop. Pure.

Axes: B rows of one group (equal height, width and step count), N steps; latents x are [B, channels, h, w].

**Source**: the flow-matching Euler scheduler of bytedance/mammothmoda (branch qwen25vl). Differences: no shared step index,
guidance that was off comes back on (the authors' loop keeps it off), guidance stays float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mammoth_dit.model.config import LATENT_FACTOR
from mammoth_dit.model.layers import wide

__all__ = [
    "Guidance",
    "Schedule",
    "Velocity",
    "advance",
    "denoise",
    "euler_step",
    "guide",
    "guided_steps",
    "initial_noise",
    "step_times",
]

SHIFT_UNIT = 40  # latent cells on a side where the schedule is not shifted: 320 pixels


class Velocity(Protocol):
    """A model bound to what its rows condition on: latents x and times t_B (in the dtype of x) to velocities like x."""

    def __call__(self, x: Tensor, t_B: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Guidance:
    """Guidance of one row: the scale, and the part of the steps (as i/N, both ends included) where it applies."""

    scale: float
    cfg_range: tuple[float, float]

    def active(self, step: int, num_steps: int) -> bool:
        start, end = self.cfg_range
        return self.scale > 1.0 and start <= step / num_steps <= end


def guided_steps(guidances: Sequence[Guidance], num_steps: int) -> list[list[bool]]:
    """Return, for every step, whether each row is guided: plain booleans, known before the first step."""
    return [[guidance.active(step, num_steps) for guidance in guidances] for step in range(num_steps)]


def step_times(num_steps: int, size_px: tuple[int, int] | None) -> Tensor:
    """Return the N + 1 times of a schedule, float32, from 0.0 (noise) to 1.0 (image).

    Larger pictures take smaller early steps: tau / (m - m*tau + tau), m = sqrt(h*w)/40 in latent cells, in float64, rounded
    once. `size_px` None gives the times without that shift.
    """
    tau = torch.linspace(0, 1, num_steps + 1)[:-1].double()
    if size_px is not None:
        height_px, width_px = size_px
        shift = math.sqrt((height_px // LATENT_FACTOR) * (width_px // LATENT_FACTOR)) / SHIFT_UNIT
        tau = tau / (shift - shift * tau + tau)
    return torch.cat((tau.float(), torch.ones(1)))


def initial_noise(seed: int, channels: int, size_px: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Draw [1, channels, h, w] standard normal on a CPU generator of its own: one seed, the same noise anywhere.

    Drawn in float32 and rounded to `dtype`: what torch 2.13 gives for a bfloat16 draw, where 2.11 gives another stream.
    """
    height_px, width_px = size_px
    shape = (1, channels, height_px // LATENT_FACTOR, width_px // LATENT_FACTOR)
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).to(dtype)


def euler_step(x: Tensor, velocity: Tensor, dt: Tensor) -> Tensor:
    """Return x + dt * velocity: `dt` (0-dim) and the product in the velocity's dtype, the sum in float32, rounded once."""
    return (wide(x) + dt.to(velocity.dtype) * velocity).to(velocity.dtype)


def guide(conditional: Tensor, unconditional: Tensor, scale_B111: Tensor) -> Tensor:
    """Return u + s * (c - u) by lerp, in float32, rounded once."""
    return torch.lerp(wide(unconditional), wide(conditional), scale_B111).to(conditional.dtype)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything a group's loop needs, decided before it starts.

    `times_N` and `dt_N` have the dtype of the latents and lie on the device, as do `scale_B111` (float32) and the masks;
    `any_guided` and `all_guided` are host booleans, one a step.
    """

    times_N: Tensor
    dt_N: Tensor
    scale_B111: Tensor
    guided_NB111: Tensor
    any_guided: tuple[bool, ...]
    all_guided: tuple[bool, ...]

    @classmethod
    def plan(cls, times: Tensor, guidances: Sequence[Guidance], dtype: torch.dtype, device: torch.device) -> Schedule:
        """`times` are the N + 1 float32 times of `step_times`; the model sees them rounded to its dtype, as in training."""
        guided = guided_steps(guidances, len(times) - 1)
        scale_dtype = torch.promote_types(torch.float32, dtype)
        return cls(
            times_N=times[:-1].to(device, dtype),
            dt_N=times.diff().to(device, dtype),
            scale_B111=torch.tensor([guidance.scale for guidance in guidances], dtype=scale_dtype).to(device)[
                :, None, None, None
            ],
            guided_NB111=torch.tensor(guided).to(device)[:, :, None, None, None],
            any_guided=tuple(any(step) for step in guided),
            all_guided=tuple(all(step) for step in guided),
        )

    @property
    def num_steps(self) -> int:
        return len(self.any_guided)


def denoise(
    x: Tensor,
    schedule: Schedule,
    conditional: Velocity,
    unconditional: Velocity,
    before_step: Callable[[int], bool] = lambda step: True,
) -> Tensor:
    """Integrate dx/dt = velocity from noise to latents, one Euler step between neighbouring times. Rows never mix.

    The unconditional pass runs in the steps where some row is guided; rows that are not take the conditional velocity
    bit for bit. `before_step(i)` is called on the host before step i; when it returns False the loop ends there. Nothing
    in the loop reads a tensor back.
    """
    for step in range(schedule.num_steps):
        if not before_step(step):
            break
        x = advance(x, schedule, step, conditional, unconditional)
    return x


def advance(x: Tensor, schedule: Schedule, step: int, conditional: Velocity, unconditional: Velocity) -> Tensor:
    """Return the latents after step `step`."""
    t_B = schedule.times_N[step].expand(x.shape[0])
    velocity = conditional(x, t_B)
    if schedule.any_guided[step]:
        guided = guide(velocity, unconditional(x, t_B), schedule.scale_B111)
        velocity = guided if schedule.all_guided[step] else torch.where(schedule.guided_NB111[step], guided, velocity)
    return euler_step(x, velocity, schedule.dt_N[step])
