"""Decide nothing: the values that engine and batcher exchange: a sequence to run, its state, the rows it yields.

T rows, H width, V ids in scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mammoth_ar.conditioning import Grid, Knobs, Sampling

__all__ = ["Rows", "Running", "Sequence", "Text"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Everything that decides a request's bits.

    `tail_ids` is the whole prompt of the unconditional row and is needed when guidance is on; `negative_ids` is
    encoded for the DiT and plays no part in decoding.
    """

    prompt_ids: tuple[int, ...]
    grid: Grid
    sampling: Sampling
    tail_ids: tuple[int, ...] = ()
    negative_ids: tuple[int, ...] = ()

    @property
    def is_guided(self) -> bool:
        return self.sampling.ar_guidance > 1

    @property
    def num_slots(self) -> int:
        return 2 if self.is_guided else 1

    @property
    def num_positions(self) -> int:
        """The context that one of its KV rows needs, with a place for the closing token, which is never run."""
        return max(len(self.prompt_ids), len(self.tail_ids)) + self.grid.num_tokens + 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Condition rows in order: `ids` int32 [T] and `hidden` [T,H] in the model's dtype, both on the CPU."""

    kind: Literal["negative", "condition"]
    ids: Tensor
    hidden: Tensor


@dataclass(slots=True)
class Text:
    """A text to prefill into one slot from position 0; `start` tokens are done."""

    kind: Literal["negative", "tail", "prompt"]
    ids: tuple[int, ...]
    slot: int
    start: int = 0


@dataclass(slots=True, eq=False)
class Running:
    """A sequence that holds slots. The engine alone changes it; `grid_ids` are the tokens chosen so far."""

    sequence: Sequence
    slots: tuple[int, ...]
    knobs: Knobs
    texts: list[Text]
    seen_1V: Tensor
    grid_ids: list[int] = field(default_factory=list)
    num_decoded: int = 0
    last_1H: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_prefilled(self) -> bool:
        return not self.texts

    @property
    def is_done(self) -> bool:
        return self.num_decoded == self.sequence.grid.num_tokens

    def rows(self) -> list[tuple[int, int]]:
        """Return (slot, tokens held) of every row that the next token goes to; the last token concerns no guidance."""
        is_last = self.num_decoded + 1 == self.sequence.grid.num_tokens
        texts = (self.sequence.prompt_ids, self.sequence.tail_ids)[: 1 if is_last else len(self.slots)]
        return [(slot, len(ids) + self.num_decoded) for slot, ids in zip(self.slots, texts, strict=False)]
