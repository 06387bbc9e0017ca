"""Do: prefill a row's first tokens as one graph: the plain decoder over a chunk padded to one of a few lengths.

Launching the plain path's thousand kernels takes the host longer than the device needs to run them, and running rows
would wait for it. Which length is used depends on the row's own tokens alone, and so do its bits.

C tokens of a padded chunk, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mammoth_ar.cache import KVCache
from mammoth_ar.fast.graph import recorded
from mammoth_ar.model.decoder import Decoder, Hidden

__all__ = ["LENGTHS", "PaddedPrefill"]

LENGTHS = (64, 256)


@dataclass(frozen=True, slots=True)
class _Window:
    """The first C tokens of the KV row that `slot_1` names. Padding is written too, where later tokens will be."""

    cache: KVCache
    slot_1: Tensor

    def extend(self, layer: int, k_BKLD: Tensor, v_BKLD: Tensor) -> tuple[Tensor, Tensor]:
        for stored, new in ((self.cache.keys[layer], k_BKLD), (self.cache.values[layer], v_BKLD)):
            stored[:, :, : new.shape[2]].index_copy_(0, self.slot_1, new)
        return k_BKLD, v_BKLD


@dataclass(frozen=True, slots=True)
class _Chunk:
    ids_1C: Tensor
    run: Callable[[], Hidden]


class PaddedPrefill:
    """Runs on the device thread. A row must have room for its chunk with padding."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._device = cache.keys[0].device
        self._slot_1 = torch.zeros(1, dtype=torch.int64, device=self._device)
        lengths = [length for length in LENGTHS if length <= cache.num_positions]
        self._chunks = {length: self._chunk(length) for length in lengths}

    def run(self, ids: Sequence[int], slot: int) -> Hidden | None:
        """Write the first tokens of row `slot`; return their states, [1, len(ids), H], or None for a chunk too long."""
        length = next((length for length in self._chunks if len(ids) <= length), None)
        if length is None:
            return None
        chunk = self._chunks[length]
        padded = [*ids, *[ids[-1]] * (length - len(ids))]
        chunk.ids_1C.copy_(torch.tensor([padded]))
        self._slot_1.fill_(slot)
        hidden = chunk.run()
        # copies: the graph's own output is overwritten by the next prefill
        return Hidden(hidden.normed_BLH[:, : len(ids)].clone(), hidden.condition_BLH[:, : len(ids)].clone())

    def _chunk(self, length: int) -> _Chunk:
        ids_1C = torch.zeros(1, length, dtype=torch.int64, device=self._device)
        position_1C = torch.arange(length, device=self._device).unsqueeze(0)
        mask_1CC = position_1C.unsqueeze(1) <= position_1C.unsqueeze(2)
        window = _Window(self._cache, self._slot_1)

        def run() -> Hidden:
            hidden: Hidden = self._decoder(ids_1C, position_1C, mask_1CC, window)
            return hidden

        return _Chunk(ids_1C, recorded(run, self._device))
