"""Layers that every block family shares: norm, feed-forward, attention product.

Axes: B rows, L tokens, D width, F inner width, N query heads, K key-value heads, E head width, S keys.

"float32" in the source means promote(float32, input dtype) here: bfloat16 is computed in float32 and rounded once,
float64 stays float64, so that tests can be sharp.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

__all__ = ["FeedForward", "RMSNorm", "attend", "wide"]


def wide(x: Tensor) -> Tensor:
    """Return `x` in promote(float32, its dtype)."""
    return x.to(torch.promote_types(torch.float32, x.dtype))


class RMSNorm(nn.Module):
    """Scale the last axis to unit mean square, round, then multiply by the weight (the order of Qwen's norm)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        scaled = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU without biases: linear_2(silu(linear_1 x) * linear_3 x), silu in float32."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, inner_width, bias=False)
        self.linear_2 = nn.Linear(inner_width, width, bias=False)
        self.linear_3 = nn.Linear(width, inner_width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate_BLF = self.linear_1(x_BLD)
        out_BLD: Tensor = self.linear_2(silu(wide(gate_BLF)).to(gate_BLF.dtype) * self.linear_3(x_BLD))
        return out_BLD


def attend(q_BLNE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, keep_BS: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v as [B, L, N*E]; query head i reads key-value head i // (N/K), no causal mask.

    `keep_BS` bool is False where a key is padding; None when nothing is.
    """
    mask = None if keep_BS is None else keep_BS[:, None, None, :]
    q_BNLE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BLNE, k_BSKE, v_BSKE))
    grouped = q_BLNE.shape[2] != k_BSKE.shape[2]
    out_BNLE = scaled_dot_product_attention(q_BNLE, k_BKSE, v_BKSE, mask, enable_gqa=grouped)
    return out_BNLE.transpose(1, 2).flatten(2)
