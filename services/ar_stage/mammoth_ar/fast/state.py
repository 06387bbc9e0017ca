"""Do: own what a decode step knows of its rows, on the device, so that nobody has to tell it anything between steps.

Row i of a step is KV row i. A row that is not active is carried along: it computes nothing that anybody reads.

R rows, H width, V ids in scope.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mammoth_ar.conditioning import Grid, Sampling, signed64

__all__ = ["RowState"]


class RowState:
    """Tensors [R] unless noted. `length` tokens are in the KV row before the token being fed, which is grid token `index`.

    `leader` rows choose tokens, for themselves and their `partner`, the unconditional row of a guided request.
    `ring` [R, num_kept, H] and `ring_ids` hold the latest condition rows; `bad` is set once a row is not finite.
    """

    def __init__(
        self, num_rows: int, num_ids: int, width: int, num_kept: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_rows = num_rows
        self.num_kept = num_kept

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.active, self.starting, self.leader, self.bad = (zeros(num_rows) for _ in range(4))
        self.token, self.length, self.index = (zeros(num_rows) for _ in range(3))
        self.partner = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.columns, self.total, self.top_k = (zeros(num_rows) for _ in range(3))
        self.guidance, self.penalty, self.temperature = (zeros(num_rows, dtype=torch.float32) for _ in range(3))
        self.top_p = zeros(num_rows, dtype=torch.float64)
        self.seed = zeros(num_rows, dtype=torch.int64)
        self.seen = zeros(num_rows, num_ids, dtype=torch.uint8)
        self.normed = zeros(num_rows, width, dtype=dtype)
        self.logits = zeros(num_rows, num_ids, dtype=torch.float32)
        self.ring = zeros(num_rows, num_kept, width, dtype=dtype)
        self.ring_ids = zeros(num_rows, num_kept)

    def join(self, slots: tuple[int, ...], lengths: tuple[int, ...], grid: Grid, sampling: Sampling) -> None:
        """Let the rows `slots` ([conditional] or [conditional, unconditional]) start a grid after `lengths` tokens.

        Their tokens so far are in their KV rows, their last hidden rows in `normed`; `starting` asks for a first choice.
        """
        leader, partner = slots[0], slots[-1]
        for slot, held in zip(slots, lengths, strict=True):
            self.token[slot] = 0
            self.length[slot] = held - 1  # as if the prompt's last token had just been fed
            self.index[slot] = -1
            self.bad[slot] = 0
            self.leader[slot] = int(slot == leader)
        self.partner[leader] = partner
        self.columns[leader] = grid.width
        self.total[leader] = grid.num_tokens
        self.guidance[leader] = sampling.ar_guidance
        self.penalty[leader] = sampling.repetition_penalty
        self.temperature[leader] = sampling.temperature
        self.top_k[leader] = sampling.top_k
        self.top_p[leader] = sampling.top_p
        self.seed[leader] = signed64(sampling.seed)
        self.starting[leader] = 1

    def leave(self, slots: tuple[int, ...]) -> None:
        """Let the rows rest, whatever they are doing."""
        for slot in slots:
            self.active[slot] = 0
