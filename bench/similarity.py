"""Decide how near two pictures are: PSNR and SSIM over uint8 [H, W, 3]."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import conv2d

__all__ = ["LIMIT_DB", "Rgb", "psnr_db", "ssim"]

LIMIT_DB = 99.0  # of equal pictures
PEAK = 255.0
SIDE, SIGMA = 11, 1.5  # of SSIM's Gaussian window
LUMINANCE, CONTRAST = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2

Rgb = npt.NDArray[np.uint8]


def psnr_db(made: Rgb, expected: Rgb) -> float:
    """Return the peak signal-to-noise ratio in decibels, LIMIT_DB for equal pictures."""
    error = float(np.square(made.astype(float) - expected).mean())
    return LIMIT_DB if error == 0 else min(LIMIT_DB, 20 * math.log10(PEAK) - 10 * math.log10(error))


def ssim(made: Rgb, expected: Rgb) -> float:
    """Return the mean structural similarity of the three channels, 1 for equal pictures of at least 11 pixels a side.

    **Source**: Wang, Bovik, Sheikh, Simoncelli, Image Quality Assessment, IEEE TIP 13(4), 2004: equation 13, its window and
    constants; windows lie wholly inside the picture.
    """
    x, y = (torch.from_numpy(rgb).double().permute(2, 0, 1)[:, None] for rgb in (made, expected))
    mean_x, mean_y = _mean(x), _mean(y)
    variance_x, variance_y = _mean(x * x) - mean_x.square(), _mean(y * y) - mean_y.square()
    covariance = _mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + LUMINANCE) / (mean_x.square() + mean_y.square() + LUMINANCE)
    structure = (2 * covariance + CONTRAST) / (variance_x + variance_y + CONTRAST)
    return float((luminance * structure).mean())


def _mean(x: Tensor) -> Tensor:
    """Average every window, weighted by its distance from the middle."""
    line = torch.exp(-(torch.arange(SIDE).double() - SIDE // 2).square() / (2 * SIGMA**2))
    line /= line.sum()
    return conv2d(conv2d(x, line.view(1, 1, -1, 1)), line.view(1, 1, 1, -1))
