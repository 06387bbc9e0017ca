"""Decide how the tokens of a unit of rows lie in one matrix, so that every product of a step runs once. Pure.

A unit is what one CUDA graph steps: rows of one grid and one caption bucket, all guided or none. Its tokens are [T, D]: first
each row's conditional stream [n image | caption, padded to its bucket], then, if guided, each row's unconditional one. The
image comes first, so that it lies at the same place whatever the caption.

A bucket is a function of a row's own caption length. So a row's arithmetic, padding included, never depends on its company.

B rows of a unit, T tokens, n image tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["BUCKET_TOKENS", "Span", "UnitShape", "bucket", "units"]

BUCKET_TOKENS = 16

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one stream of every row: rows [start, start + batch * length) of the matrix, row after row."""

    start: int
    batch: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.batch * self.length


@dataclass(frozen=True, slots=True)
class UnitShape:
    """What a graph is captured for: the grid in patches, the buckets of both captions, guidance, and the number of rows."""

    num_rows: int
    num_columns: int
    caption: int
    negative: int
    guided: bool
    batch: int

    def __str__(self) -> str:
        passes = f"caption {self.caption}" + (f" and {self.negative}" if self.guided else ", unguided")
        return f"{self.num_columns}x{self.num_rows} patches, {passes}, x{self.batch}"

    @property
    def num_image(self) -> int:
        return self.num_rows * self.num_columns

    @property
    def image(self) -> Span:
        """The image tokens alone, which the noise refiner sees once for both passes."""
        return Span(0, self.batch, self.num_image)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The conditional stream, then the unconditional one of a guided unit."""
        first = Span(0, self.batch, self.num_image + self.caption)
        if not self.guided:
            return (first,)
        return (first, Span(first.stop, self.batch, self.num_image + self.negative))

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].stop

    def rows_T(self, device: torch.device) -> Tensor:
        """Return int32 [T]: the row of the unit that each token belongs to."""
        return _rows(self.spans, device)

    def image_rows_T(self, device: torch.device) -> Tensor:
        """Return the same for the image tokens alone, int32 [B * n]."""
        return _rows((self.image,), device)


def bucket(num_tokens: int, multiple: int) -> int:
    """Return the padded length of a caption: a function of its own length alone. Nothing stays nothing."""
    return -(-num_tokens // multiple) * multiple


def units(rows: Sequence[R], keys: Sequence[K], largest: int) -> list[tuple[K, list[R]]]:
    """Cut rows into units of equal key, in first-seen order, each of a power of two and at most `largest` rows.

    Batch sizes are powers of two, so that a few graphs serve every number of rows.
    """
    if largest < 1:
        raise ValueError(f"a unit of at most {largest} rows")
    alike: dict[K, list[R]] = {}
    for row, key in zip(rows, keys, strict=True):
        alike.setdefault(key, []).append(row)
    cut: list[tuple[K, list[R]]] = []
    for key, members in alike.items():
        start = 0
        while start < len(members):
            size = 1 << (min(len(members) - start, largest).bit_length() - 1)
            cut.append((key, members[start : start + size]))
            start += size
    return cut


def _rows(spans: Sequence[Span], device: torch.device) -> Tensor:
    each = [torch.arange(span.batch, dtype=torch.int32).repeat_interleave(span.length) for span in spans]
    return torch.cat(each).to(device)
