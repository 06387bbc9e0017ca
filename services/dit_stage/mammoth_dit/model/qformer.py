"""The Q-Former: a fixed number of learned queries reads any number of image rows.

Axes: B rows, L image rows (padded), H input width, Q queries, D width, N heads, E head width.

**Source**: the condition refiner of bytedance/mammothmoda (branches qwen25vl and main). Its attention is torch's
`MultiheadAttention`, whose packed parameter names are kept; its mask means padding on one branch and valid on the other,
here `keep_BL` is True where a row is valid.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mammoth_dit.model.config import RefinerConfig, padded_width
from mammoth_dit.model.layers import FeedForward, RMSNorm, attend

__all__ = ["QFormer", "choose_num_heads", "propose_num_heads"]

HEAD_WIDTH = 128  # aimed at; the width decides
FFN_MULTIPLE = 256


def propose_num_heads(width: int) -> int:
    """Return the head count to try first for a refiner of `width` channels."""
    return max(1, width // HEAD_WIDTH)


def choose_num_heads(width: int, proposed: int) -> int:
    """Return `proposed` when it divides `width`, else the divisor (at most 128) nearest to width/128, larger on ties."""
    if proposed > 0 and width % proposed == 0:
        return proposed
    target = max(1, round(width / HEAD_WIDTH))
    divisors = (count for count in range(1, min(HEAD_WIDTH, width) + 1) if width % count == 0)
    return min(divisors, key=lambda count: (abs(count - target), -count))


class PackedAttention(nn.Module):
    """Multi-head attention with one packed input projection (query, key, value), biases everywhere, no rotary."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BQD: Tensor, source_BLD: Tensor, keep_BL: Tensor | None = None) -> Tensor:
        """Let x attend to `source_BLD`, which serves as keys and values."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        inputs = (x_BQD, source_BLD, source_BLD)
        q_BQNE, k_BLNE, v_BLNE = (
            linear(x, weight, bias).view(*x.shape[:2], self.num_heads, -1)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        out_BQD: Tensor = self.out_proj(attend(q_BQNE, k_BLNE, v_BLNE, keep_BL))
        return out_BQD


class RefinerBlock(nn.Module):
    """Queries look at each other, then at the rows, then think; every branch is pre-normed and added."""

    def __init__(self, width: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.ln_q1 = RMSNorm(width, eps)
        self.self_attn = PackedAttention(width, num_heads)
        self.ln_q2 = RMSNorm(width, eps)
        self.cross_attn = PackedAttention(width, num_heads)
        self.ln_ffn = RMSNorm(width, eps)
        self.ffn = FeedForward(width, padded_width(width, FFN_MULTIPLE))

    def forward(self, q_BQD: Tensor, rows_BLD: Tensor, keep_BL: Tensor | None) -> Tensor:
        normed_BQD = self.ln_q1(q_BQD)
        q_BQD = q_BQD + self.self_attn(normed_BQD, normed_BQD)
        q_BQD = q_BQD + self.cross_attn(self.ln_q2(q_BQD), rows_BLD, keep_BL)
        out_BQD: Tensor = q_BQD + self.ffn(self.ln_ffn(q_BQD))
        return out_BQD


class QFormer(nn.Module):
    """Map image rows [B, L, H] to [B, Q, D]: always Q tokens, whether L is smaller, equal or larger."""

    def __init__(self, in_width: int, width: int, config: RefinerConfig, num_heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(1, config.num_queries, width))
        self.input_proj = nn.Sequential(RMSNorm(in_width, config.norm_eps), nn.Linear(in_width, width))
        self.layers = nn.ModuleList(RefinerBlock(width, num_heads, config.norm_eps) for _ in range(config.num_layers))

    def forward(self, rows_BLH: Tensor, keep_BL: Tensor | None = None) -> Tensor:
        """Each row of the batch needs at least one valid image row; `keep_BL` None means that all are."""
        rows_BLD = self.input_proj(rows_BLH)
        q_BQD = self.query.expand(rows_BLH.shape[0], -1, -1)
        for layer in self.layers:
            q_BQD = layer(q_BQD, rows_BLD, keep_BL)
        return q_BQD
