"""Decide what the device does next, and how long that will take. Pure functions over counts.

Joining is first come, first served by KV rows (guidance takes two). Prefill goes in between decode steps, one chunk at a
time, so that running rows never wait for more than one chunk.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Load", "Work", "plan", "steps_until_done"]

Action = Literal["admit", "prefill", "decode", "wait"]


@dataclass(frozen=True, slots=True)
class Load:
    """What is there to do. `waiting_rows` are the rows each waiting sequence needs, oldest first."""

    waiting_rows: tuple[int, ...] = ()
    rows_in_use: int = 0
    num_prefilling: int = 0
    num_decoding: int = 0
    last: Action = "wait"


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence as the estimate sees it: the rows it holds or needs, the tokens it still has to write."""

    num_rows: int
    num_tokens: int


def plan(load: Load, *, max_num_seqs: int, num_slots: int) -> Action:
    """Return the next action: admit the oldest if it fits, else alternate prefill chunks with decode steps.

    Nobody overtakes. The live cap `max_num_seqs` yields to one sequence alone: a guided one still runs, by itself,
    where the cap is one row.
    """
    limit = min(max_num_seqs, num_slots) if load.rows_in_use else num_slots
    if load.waiting_rows and load.rows_in_use + load.waiting_rows[0] <= limit:
        return "admit"
    if load.num_prefilling and (load.last != "prefill" or not load.num_decoding):
        return "prefill"
    return "decode" if load.num_decoding else "wait"


def steps_until_done(running: Sequence[Work], waiting: Sequence[Work], *, max_num_seqs: int) -> int:
    """Return the decode steps until the last of `waiting` is done, all of them joining in order as rows come free.

    Exact for the policy above apart from prefill, which it leaves out.
    """
    ends = [(work.num_tokens, work.num_rows) for work in running]
    heapq.heapify(ends)
    rows_in_use, now, last_end = sum(work.num_rows for work in running), 0, 0
    for work in waiting:
        while ends and rows_in_use + work.num_rows > max_num_seqs:
            now, freed = heapq.heappop(ends)
            rows_in_use -= freed
        rows_in_use += work.num_rows
        last_end = now + work.num_tokens
        heapq.heappush(ends, (last_end, work.num_rows))
    return last_end
