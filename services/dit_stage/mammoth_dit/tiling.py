"""Decide into which tiles a large picture is cut to be decoded, and decode it so.

The tiles depend on the picture's size alone, never on the memory that happens to be free: a picture has the same bits
wherever it is drawn. What sees the whole picture stays whole. The middle of the decoder, attention among it, runs once; it is
small. The norms behind it take their mean and variance from all tiles, which a first pass over tiles side by side
measures. So tiles have no colours of their own; the second pass blends overlapping ones, and no seam is left.

Why not a library: diffusers' tiles know nothing of each other, leave slivers at the far edges, and all stay until the end.

h, w latents; N spans of an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from mammoth_dit.model.config import LATENT_FACTOR
from mammoth_dit.model.layers import wide
from mammoth_dit.model.vae import ImageDecoder, Moments

__all__ = ["Span", "Tiling", "blended", "decode_tiled"]

Spans = Sequence["Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Latents [start, stop) of one axis, and their pixels."""

    start: int
    stop: int

    @property
    def latents(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def pixels(self) -> slice:
        return slice(self.start * LATENT_FACTOR, self.stop * LATENT_FACTOR)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How large a tile may be, and how much of it a neighbour covers at least; in latents."""

    max_latents: int = 24_576  # 1536 x 1024 pixels
    overlap: int = 16  # what is cut off shows about twelve latents deep

    def is_whole(self, height: int, width: int) -> bool:
        """Tell whether a picture of that many latents is decoded in one piece."""
        return height * width <= self.max_latents

    def spans(self, height: int, width: int) -> tuple[Spans, Spans]:
        """Return the rows and the columns of the tiles of [height, width] latents. All tiles have one size."""
        wholes, sides, counts = (height, width), [height, width], [1, 1]
        while sides[0] * sides[1] > self.max_latents:
            axis = 0 if sides[0] >= sides[1] else 1
            counts[axis] += 1
            sides[axis] = -(-(wholes[axis] + (counts[axis] - 1) * self.overlap) // counts[axis])
        rows, columns = (_spread(*axis) for axis in zip(wholes, sides, counts, strict=True))
        return rows, columns


def decode_tiled(vae: ImageDecoder, latents_1Chw: Tensor, tiling: Tiling) -> Tensor:
    """Return the image [3, H, W] of latents, in float32 (float64 for float64)."""
    middle_1Chw = vae.enter(latents_1Chw)
    moments = Moments()
    with vae.sharing(moments):
        for tile in _tiles(middle_1Chw, replace(tiling, overlap=0)):
            vae.leave(tile)
        moments.join()
        return blended(middle_1Chw, lambda tile: vae.leave(tile)[0], tiling)


def blended(x_1Chw: Tensor, decode: Callable[[Tensor], Tensor], tiling: Tiling) -> Tensor:
    """Return the weighted sum [3, H, W] of all tiles' images, one decoded after the other; the weights add up to one."""
    rows, columns = tiling.spans(*x_1Chw.shape[2:])
    down, across = (
        _weights(spans, whole, x_1Chw) for spans, whole in zip((rows, columns), x_1Chw.shape[2:], strict=True)
    )
    image = down.new_zeros((3, down.shape[1], across.shape[1]))
    places = product(zip(rows, down, strict=True), zip(columns, across, strict=True))
    for tile, ((row, down_H), (column, across_W)) in zip(_tiles(x_1Chw, tiling), places, strict=True):
        weights = down_H[row.pixels, None] * across_W[column.pixels]
        image[:, row.pixels, column.pixels].addcmul_(wide(decode(tile)), weights)
    return image


def _tiles(x_1Chw: Tensor, tiling: Tiling) -> Iterator[Tensor]:
    rows, columns = tiling.spans(*x_1Chw.shape[2:])
    for row, column in product(rows, columns):
        yield x_1Chw[:, :, row.latents, column.latents]


def _spread(whole: int, side: int, count: int) -> Spans:
    """Place `count` spans of `side` evenly over an axis of `whole`."""
    starts = [number * (whole - side) // max(1, count - 1) for number in range(count)]
    return [Span(start, start + side) for start in starts]


def _weights(spans: Spans, whole: int, like: Tensor) -> Tensor:
    """Return what each span counts at every pixel of its axis, [N, pixels]: its share of the distances to the spans' ends."""
    dtype = torch.promote_types(torch.float32, like.dtype)
    pixel = torch.arange(whole * LATENT_FACTOR, device=like.device, dtype=dtype) + 0.5
    far = 2.0 * len(pixel)  # no neighbour beyond an edge of the picture
    inside = []
    for span in spans:
        before = pixel - (span.pixels.start if span.start > 0 else -far)
        after = (span.pixels.stop if span.stop < whole else far) - pixel
        inside.append(torch.minimum(before, after).clamp(min=0))
    distances = torch.stack(inside)
    return distances / distances.sum(0)
