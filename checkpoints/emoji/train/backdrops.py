"""Decide what lies behind an emoji: a tint that no word names, so that the seed chooses it. Pure.

Without something left open, a picture known by heart would be the same for every seed.

B pictures, x in [-1, 1] as [B,3,H,W].
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["over", "tints"]

MAX_SATURATION, MIN_VALUE = 0.3, 0.9  # pale: the emoji stays what is looked at


def tints(num: int, generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Return colours [num,3] in [0, 1]: any hue, pale to white (HSV, hue and saturation uniform)."""
    draw_3B1 = torch.rand((3, num, 1), generator=generator, device=device)
    hue_B1, saturation_B1, value_B1 = draw_3B1[0], draw_3B1[1] * MAX_SATURATION, 1 - draw_3B1[2] * (1 - MIN_VALUE)
    offsets_3 = torch.tensor([0.0, 4.0, 2.0], device=device)
    pure_B3 = (((hue_B1 * 6 + offsets_3) % 6 - 3).abs() - 1).clamp(0, 1)
    return value_B1 * (1 - saturation_B1 * (1 - pure_B3))


def over(white: Tensor, alpha: Tensor, tint_B3: Tensor) -> Tensor:
    """Return pictures `white` (over white) with a tint there instead; `alpha` [B,1,H,W] in [0, 1] is the emoji's share."""
    return white - 2 * (1 - alpha) * (1 - tint_B3)[..., None, None]
