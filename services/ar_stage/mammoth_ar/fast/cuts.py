"""Decide how the kernels of a decode step are cut, from measurements on an H200. Pure.

A row's bits depend on these numbers, so they are the same for every step of a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from mammoth_ar.fast.weights import Storage
from mammoth_ar.model.config import Family

__all__ = ["Cut", "Tiles", "best"]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: outputs and columns of a tile, slices of the columns, warps, loads in flight.

    A column is a weight of the inner width, or a word of four.
    """

    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How all kernels are cut.

    `rows` go through a step together: on an H200 32 cost what one costs. A context is cut every `piece` positions;
    `programs` share the pieces of one (row, key head), `block_s` positions at a time.
    """

    heads: Tiles
    out: Tiles
    gated: Tiles
    down: Tiles
    logits: Tiles = Tiles(128, 128, 1, 4, 4)
    rows: int = 32
    piece: int = 256
    programs: int = 16
    block_s: int = 64
    attend_stages: int = 2


BEST: dict[tuple[Family, Storage], Cut] = {
    ("preview", "bf16"): Cut(
        heads=Tiles(128, 64, 2, 4, 8),
        out=Tiles(64, 64, 2, 4, 8),
        gated=Tiles(64, 64, 1, 4, 3),
        down=Tiles(64, 128, 2, 4, 8),
    ),
    ("preview", "fp8"): Cut(
        heads=Tiles(128, 32, 7, 4, 4),
        out=Tiles(64, 64, 7, 4, 2),
        gated=Tiles(64, 32, 1, 4, 3),
        down=Tiles(64, 64, 4, 4, 3),
    ),
    ("dev", "bf16"): Cut(
        heads=Tiles(128, 64, 2, 4, 5),
        out=Tiles(64, 64, 2, 4, 8),
        gated=Tiles(128, 128, 1, 4, 3),
        down=Tiles(64, 64, 2, 4, 8),
    ),
    ("dev", "fp8"): Cut(
        heads=Tiles(128, 32, 5, 4, 4),
        out=Tiles(64, 64, 4, 4, 3),
        gated=Tiles(64, 32, 1, 4, 4),
        down=Tiles(64, 64, 4, 4, 3),
    ),
}


def best(family: Family, storage: Storage) -> Cut:
    """Return the best cut of those measured."""
    return BEST[family, storage]
