"""Decide which of many pictures a picture is most like, in features that no model of ours has seen.

Colour layout (CIE Lab averaged over 16 x 16 cells) and shape (histograms of gradient orientations on two cell sizes), each
block at unit size, then whitened over the gallery: what all its pictures share counts little, what tells them apart counts
much. Pictures are compared by cosine.

N pictures of a gallery, M pictures asked for, F features, K components.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Gallery", "features"]

NUM_LAYOUT_CELLS = 16
NUM_ORIENTATIONS = 9
CELL_SIZES_PX = (8, 16)
NUM_COMPONENTS = 256
SMOOTHING = 0.05  # of the largest component's variance, added to all: tiny directions are noise
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])  # D65

Floats = npt.NDArray[np.float64]
Pictures = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """The pictures that an answer is chosen from, as whitened unit vectors [N,K]."""

    mean_F: Floats
    whitening_FK: Floats
    members_NK: Floats

    @classmethod
    def of(cls, pictures: Pictures) -> Gallery:
        """Hang `pictures` uint8 [N,H,W,3]."""
        found_NF = features(pictures)
        mean_F = found_NF.mean(0)
        _, sizes_K, rows_KF = np.linalg.svd(found_NF - mean_F, full_matrices=False)
        kept = slice(min(NUM_COMPONENTS, len(sizes_K)))
        variance_K = sizes_K[kept] ** 2 / len(pictures)
        whitening_FK = (rows_KF[kept] / np.sqrt(variance_K + SMOOTHING * variance_K[0])[:, None]).T
        return cls(mean_F, whitening_FK, _unit((found_NF - mean_F) @ whitening_FK))

    def ranks(self, pictures: Pictures, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many of the gallery are nearer to each of `pictures` than its own, at `places` [M]; 0 is a hit."""
        asked_MK = _unit((features(pictures) - self.mean_F) @ self.whitening_FK)
        likeness_MN = asked_MK @ self.members_NK.T
        own_M1 = likeness_MN[np.arange(len(places)), places][:, None]
        nearer: npt.NDArray[np.int64] = (likeness_MN > own_M1 + 1e-9).sum(1)  # an exact twin is no nearer
        return nearer


def features(pictures: Pictures) -> Floats:
    """Return [N,F] for uint8 pictures [N,H,W,3] whose sides are multiples of 16."""
    halved = _cell_means(pictures.astype(np.float64) / 255, 2)  # single pixels are noise
    lightness = _lab(halved)[..., 0] / 100
    blocks = [_layout(halved), *(_orientations(lightness, cell_px // 2) for cell_px in CELL_SIZES_PX)]
    return np.concatenate([_unit(block) for block in blocks], axis=1)


def _layout(rgb: Floats) -> Floats:
    lab = _lab(_cell_means(rgb, rgb.shape[1] // NUM_LAYOUT_CELLS)) - (100.0, 0.0, 0.0)  # white counts as nothing
    return lab.reshape(len(rgb), -1)


def _orientations(lightness: Floats, cell_px: int) -> Floats:
    """Return gradient magnitudes averaged over cells and orientations (of lines: modulo 180 degrees), square-rooted."""
    dy, dx = np.gradient(lightness, axis=(1, 2))
    angle = np.mod(np.arctan2(dy, dx), np.pi) * (NUM_ORIENTATIONS / np.pi)
    lower = np.floor(angle)
    share, magnitude = angle - lower, np.hypot(dx, dy)
    maps = np.zeros((*lightness.shape, NUM_ORIENTATIONS))
    for offset, weight in ((0, magnitude * (1 - share)), (1, magnitude * share)):
        index = np.mod(lower.astype(int) + offset, NUM_ORIENTATIONS)[..., None]
        np.put_along_axis(maps, index, np.take_along_axis(maps, index, -1) + weight[..., None], -1)
    return np.sqrt(_cell_means(maps, cell_px)).reshape(len(maps), -1)


def _cell_means(x: Floats, cell: int) -> Floats:
    num, height, width, depth = x.shape
    means: Floats = x.reshape(num, height // cell, cell, width // cell, cell, depth).mean((2, 4))
    return means


def _lab(srgb: Floats) -> Floats:
    """Return CIE Lab of sRGB values in [0, 1]."""
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    ratio = linear @ TO_XYZ.T / WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), axis=-1)


def _unit(x: Floats) -> Floats:
    return x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-12)
