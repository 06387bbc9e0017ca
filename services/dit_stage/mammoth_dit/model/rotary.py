"""Rotary positions on three axes (caption, row, column), in real form.

Axes: B rows, L tokens, N heads, E head width, P = E/2 rotated pairs.

**Source**: the real-valued rotary embedding of bytedance/mammothmoda (branch qwen25vl), which looks angles up in tables of
fixed length; here they are computed from the positions, to the same values, and admission checks the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mammoth_dit.model.layers import wide

__all__ = ["Rotation", "caption_positions", "image_positions", "rotate", "rotation"]

THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of every token, one a pair: [L, P] or [B, L, P], float32 (float64 in a float64 model)."""

    cos: Tensor
    sin: Tensor


def caption_positions(num_tokens: int) -> Tensor:
    """Return int64 [C, 3]: caption token j sits at (j, j, j)."""
    return torch.arange(num_tokens)[:, None].expand(-1, 3)


def image_positions(num_rows: int, num_columns: int, shift: int) -> Tensor:
    """Return int64 [rows*columns, 3]: token (r, c) sits at (shift, r, c), rows first; shift is the caption length."""
    row, column = torch.meshgrid(torch.arange(num_rows), torch.arange(num_columns), indexing="ij")
    return torch.stack((torch.full_like(row, shift), row, column), dim=-1).flatten(0, 1)


def rotation(positions: Tensor, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Rotation:
    """Turn positions [..., 3] into a rotation of sum(widths) channels: angle = position * 10000^(-2k/width), in float64."""
    angles = [
        positions[..., axis, None] * THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        for axis, width in enumerate(widths)
    ]
    angles_P = torch.cat(angles, dim=-1)
    dtype = torch.promote_types(torch.float32, dtype)
    return Rotation(cos=angles_P.cos().to(device, dtype), sin=angles_P.sin().to(device, dtype))


def rotate(x_BLNE: Tensor, by: Rotation) -> Tensor:
    """Rotate adjacent channel pairs in float32; every head alike; the result has the dtype of `x_BLNE`."""
    even, odd = wide(x_BLNE)[..., 0::2], wide(x_BLNE)[..., 1::2]
    cos, sin = by.cos.unsqueeze(-2), by.sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BLNE.dtype)
