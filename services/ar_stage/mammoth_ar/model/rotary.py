"""Decide rotary angles: three position axes (time, height, width) share the frequencies of one head.

Text and generated tokens hold the same number on all axes, so that the split between axes only matters around images.

B rows, L tokens, N heads, D head width, F = D/2 frequencies, 3 axes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mammoth_ar.model.config import LLMConfig

__all__ = ["axis_of_frequency", "rotary_tables", "rotate"]


def axis_of_frequency(config: LLMConfig) -> list[int]:
    """Return the position axis (0, 1, 2 = t, h, w) of every frequency: chunked for Preview, interleaved for Dev.

    **Source** transformers 5.24 `apply_multimodal_rotary_pos_emb` (Qwen2.5-VL), `apply_interleaved_mrope` (Qwen3-VL).
    """
    num_frequencies = config.head_dim // 2
    section_t, section_h, section_w = config.mrope_section
    if config.family == "preview":
        return [0] * section_t + [1] * section_h + [2] * section_w
    axes = [0] * num_frequencies
    for axis, section in ((1, section_h), (2, section_w)):
        for index in range(axis, min(3 * section, num_frequencies), 3):
            axes[index] = axis
    return axes


def rotary_tables(config: LLMConfig, position_3BL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos_BL1D and sin_BL1D in `dtype`; angles are float32, or float64 when `dtype` is."""
    wide = torch.promote_types(torch.float32, dtype)
    inverse_F, axis_F = _constants(config, wide, position_3BL.device)
    angle_BLF = position_3BL.to(wide)[axis_F].permute(1, 2, 0) * inverse_F
    angle_BL1D = torch.cat((angle_BLF, angle_BLF), dim=-1).unsqueeze(2)
    return angle_BL1D.cos().to(dtype), angle_BL1D.sin().to(dtype)


@lru_cache(maxsize=16)
def _constants(config: LLMConfig, wide: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return frequencies and axes, [F]. Kept, since a graph may not fetch them from the host."""
    exponent_F = torch.arange(0, config.head_dim, 2, device=device, dtype=wide) / config.head_dim
    inverse_F = 1.0 / torch.pow(torch.tensor(config.rope_theta, dtype=wide, device=device), exponent_F)
    return inverse_F, torch.tensor(axis_of_frequency(config), device=device)


def rotate(x_BLND: Tensor, cos_BL1D: Tensor, sin_BL1D: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head by their angles."""
    first, second = x_BLND.chunk(2, dim=-1)
    return x_BLND * cos_BL1D + torch.cat((-second, first), dim=-1) * sin_BL1D
