"""Do: bring condition rows from the device to the host, CHUNK at a time, beside the steps that make the next ones.

Every KV row has two halves of CHUNK rows on the device (`RowState.ring`) and the same in pinned memory. A half is written
again only after it was copied, and copied over only after it was collected.

T rows of a copy, H width.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mammoth_ar.fast.state import RowState
from mammoth_ar.sequence import Rows
from mammoth_wire.tensors import CHUNK_ROWS

__all__ = ["CHUNK", "NUM_KEPT", "Copies", "Delivery"]

CHUNK = CHUNK_ROWS
NUM_KEPT = 2 * CHUNK


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Rows of KV row `slot` on their way: places [start, stop) of its ring; `done` is None where copies do not overlap."""

    slot: int
    start: int
    stop: int
    done: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.done is None or self.done.query()


@dataclass(slots=True)
class Copies:
    """One sequence's copies in order, and the rows that arrived and nobody has taken; `is_bad` when one was not finite."""

    under_way: deque[_Copy] = field(default_factory=deque)
    arrived: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    is_bad: bool = False


class Delivery:
    """Copies on a stream of its own. Everything runs on the device thread."""

    def __init__(self, state: RowState) -> None:
        self._state = state
        pinned = state.ring.is_cuda
        self._stream = torch.cuda.Stream() if pinned else None
        self._rows = torch.zeros(state.ring.shape, dtype=state.ring.dtype, pin_memory=pinned)
        self._ids = torch.zeros(state.ring_ids.shape, dtype=torch.int32, pin_memory=pinned)
        self._bad = torch.zeros(state.num_rows, 2, dtype=torch.int32, pin_memory=pinned)
        self._nothing = Rows("condition", self._ids[0, :0], self._rows[0, :0])

    def send(self, copies: Copies, slot: int, num_made: int) -> None:
        """Start to copy the rows since the last chunk boundary; `num_made` rows of the sequence exist by now."""
        first = (num_made - 1) // CHUNK * CHUNK
        start = first % NUM_KEPT
        stop = start + num_made - first
        while any(copy.start == start for copy in copies.under_way):  # nobody collected it: do so before it is lost
            self._collect(copies)
        done = None
        if self._stream is None:
            self._copy(slot, start, stop)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._copy(slot, start, stop)
                done = self._stream.record_event()
        copies.under_way.append(_Copy(slot, start, stop, done))

    def before_step(self, copies: Copies, num_made: int) -> None:
        """Let the device wait, if need be, until the place of row `num_made` has been copied."""
        for copy in copies.under_way:
            if copy.start == num_made % NUM_KEPT and copy.done is not None:
                torch.cuda.current_stream().wait_event(copy.done)

    def collect(self, copies: Copies, *, wait: bool) -> Rows:
        """Return the rows that have arrived and were not yet taken; `wait` for at least one copy under way."""
        while copies.under_way and (copies.under_way[0].is_done or (wait and not copies.arrived)):
            self._collect(copies)
        if not copies.arrived:
            return self._nothing
        ids, rows = (torch.cat(parts) for parts in zip(*copies.arrived, strict=True))
        copies.arrived.clear()
        return Rows("condition", ids, rows)

    def _copy(self, slot: int, start: int, stop: int) -> None:
        self._rows[slot, start:stop].copy_(self._state.ring[slot, start:stop], non_blocking=True)
        self._ids[slot, start:stop].copy_(self._state.ring_ids[slot, start:stop], non_blocking=True)
        self._bad[slot, start // CHUNK].copy_(self._state.bad[slot], non_blocking=True)

    def _collect(self, copies: Copies) -> None:
        copy = copies.under_way.popleft()
        if copy.done is not None:
            copy.done.synchronize()
        place = slice(copy.start, copy.stop)
        copies.arrived.append((self._ids[copy.slot, place].clone(), self._rows[copy.slot, place].clone()))
        copies.is_bad = copies.is_bad or bool(self._bad[copy.slot, copy.start // CHUNK])
