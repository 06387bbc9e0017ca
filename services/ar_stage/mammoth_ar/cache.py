"""Do: own the keys and values of every row, and who holds which row.

A row has room for `num_positions` tokens of all layers, allocated once at start. A window gives the decoder the past of
one row as a view of exactly its own length, or of several rows padded to the longest. What lies beyond a row's own
length belongs to nobody and is never read, not even multiplied by zero: a former owner may have left NaN there.

B rows of a window, L new tokens, S positions seen, K key/value heads, D head width.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mammoth_ar.model.config import LLMConfig

__all__ = ["KVCache", "PaddedWindow", "RowWindow"]

POSITION_QUANTUM = 64  # every row starts at the same alignment, which the bits of a CPU matrix product depend on


class KVCache:
    """`keys[layer]` and `values[layer]` are [num_slots,K,num_positions,D]."""

    def __init__(
        self, config: LLMConfig, *, num_slots: int, num_positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_slots = num_slots
        self.num_positions = -(-num_positions // POSITION_QUANTUM) * POSITION_QUANTUM
        shape = (num_slots, config.num_kv_heads, self.num_positions, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_slots: int) -> tuple[int, ...]:
        """Return the lowest free slots, which are the caller's until given back."""
        assert num_slots <= len(self._free), f"{num_slots} slots wanted, {len(self._free)} free"
        return tuple(heapq.heappop(self._free) for _ in range(num_slots))

    def give_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            assert slot not in self._free, f"slot {slot} is free already"
            heapq.heappush(self._free, slot)

    def copy_out(self, slot: int, num_tokens: int) -> list[Tensor]:
        """Return copies of a row's first tokens, a [K,num_tokens,D] for each layer's keys, then values."""
        return [stored[slot, :, :num_tokens].clone() for stored in (*self.keys, *self.values)]

    def copy_in(self, slot: int, tokens: Sequence[Tensor]) -> None:
        """Write what `copy_out` returned to the start of a row."""
        for stored, first in zip((*self.keys, *self.values), tokens, strict=True):
            stored[slot, :, : first.shape[1]] = first


@dataclass(frozen=True, slots=True)
class RowWindow:
    """One row that holds `start` tokens and is about to take `num_new` more."""

    cache: KVCache
    slot: int
    start: int
    num_new: int

    def positions(self) -> Tensor:
        """Return the new tokens' positions, [1,L]."""
        end = self.start + self.num_new
        return torch.arange(self.start, end, device=self.cache.keys[0].device).unsqueeze(0)

    def mask(self) -> Tensor:
        """Return the causal mask, bool [1,L,S]."""
        position_1L = self.positions()
        seen_S = torch.arange(self.start + self.num_new, device=position_1L.device)
        return seen_S <= position_1L.unsqueeze(-1)

    def extend(self, layer: int, k_BKLD: Tensor, v_BKLD: Tensor) -> tuple[Tensor, Tensor]:
        end = self.start + self.num_new
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot, :, self.start : end] = k_BKLD[0]
        values[self.slot, :, self.start : end] = v_BKLD[0]
        return keys[self.slot : self.slot + 1, :, :end], values[self.slot : self.slot + 1, :, :end]


class PaddedWindow:
    """Several rows, `starts` tokens each, about to take one token each."""

    def __init__(self, cache: KVCache, slots: Sequence[int], starts: Sequence[int]) -> None:
        device = cache.keys[0].device
        self.cache = cache
        self.slots_B = torch.tensor(slots, device=device)
        self.starts_B = torch.tensor(starts, device=device)
        self.num_seen = max(starts) + 1

    def positions(self) -> Tensor:
        """Return the new token's position in every row, [B,1]."""
        return self.starts_B.unsqueeze(-1)

    def mask(self) -> Tensor:
        """Return what each row's token sees, bool [B,1,S]: its own past and itself, none of the padding."""
        return torch.arange(self.num_seen, device=self.starts_B.device) <= self.starts_B[:, None, None]

    def extend(self, layer: int, k_BKLD: Tensor, v_BKLD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots_B, :, self.starts_B] = k_BKLD[:, :, 0]
        values[self.slots_B, :, self.starts_B] = v_BKLD[:, :, 0]
        beyond_B1S1 = ~self.mask().unsqueeze(-1)
        return (
            keys[self.slots_B, :, : self.num_seen].masked_fill(beyond_B1S1, 0),
            values[self.slots_B, :, : self.num_seen].masked_fill(beyond_B1S1, 0),
        )
