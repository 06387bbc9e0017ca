"""Transformer blocks: attention with rotary and grouped heads, modulated and plain residual blocks, the output head.

Axes: B rows, L tokens, D width, T time width, N query heads, K key-value heads, E head width.

**Source**: `Transformer2DModel` of bytedance/mammothmoda (branch qwen25vl).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from mammoth_dit.model.config import TransformerConfig
from mammoth_dit.model.layers import FeedForward, RMSNorm, attend
from mammoth_dit.model.rotary import Rotation, rotate

__all__ = ["ContextBlock", "ModulatedBlock", "OutputHead"]

HEAD_NORM_EPS = 1e-5
OUTPUT_NORM_EPS = 1e-6


class Attention(nn.Module):
    """Self-attention without biases; queries and keys are normed per head, then rotated."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.to_q = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.to_k = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.to_v = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.norm_q = RMSNorm(head_dim, HEAD_NORM_EPS)
        self.norm_k = RMSNorm(head_dim, HEAD_NORM_EPS)
        self.to_out = nn.ModuleList([nn.Linear(width, width, bias=False)])

    def forward(self, x_BLD: Tensor, by: Rotation, keep_BL: Tensor | None) -> Tensor:
        heads = (*x_BLD.shape[:2], -1, self.head_dim)
        q_BLNE = rotate(self.norm_q(self.to_q(x_BLD).view(heads)), by)
        k_BLKE = rotate(self.norm_k(self.to_k(x_BLD).view(heads)), by)
        out_BLD: Tensor = self.to_out[0](attend(q_BLNE, k_BLKE, self.to_v(x_BLD).view(heads), keep_BL))
        return out_BLD


class Modulation(nn.Module):
    """Norm of a block's input, and the block's four modulation vectors of a step, in the order of the split."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.temb_width, 4 * config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, temb_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return attention scale, attention gate, feed-forward scale, feed-forward gate, each [B, 1, D]."""
        scale_msa, gate_msa, scale_mlp, gate_mlp = self.linear(silu(temb_BT)).unsqueeze(1).chunk(4, dim=-1)
        return scale_msa, gate_msa, scale_mlp, gate_mlp


class ModulatedBlock(nn.Module):
    """Residual block scaled and gated by the time; both branch outputs are normed before they are added."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.feed_forward = FeedForward(config.hidden_size, config.ffn_width)
        self.norm1 = Modulation(config)
        self.norm2, self.ffn_norm1, self.ffn_norm2 = _norms(config)

    def forward(self, x_BLD: Tensor, by: Rotation, keep_BL: Tensor | None, temb_BT: Tensor) -> Tensor:
        scale_msa, gate_msa, scale_mlp, gate_mlp = self.norm1(temb_BT)
        attended = self.attn(self.norm1.norm(x_BLD) * (1 + scale_msa), by, keep_BL)
        x_BLD = x_BLD + torch.tanh(gate_msa) * self.norm2(attended)
        fed = self.feed_forward(self.ffn_norm1(x_BLD) * (1 + scale_mlp))
        out_BLD: Tensor = x_BLD + torch.tanh(gate_mlp) * self.ffn_norm2(fed)
        return out_BLD


class ContextBlock(nn.Module):
    """The same block for caption tokens: no time, so neither scale nor gate."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.feed_forward = FeedForward(config.hidden_size, config.ffn_width)
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.norm2, self.ffn_norm1, self.ffn_norm2 = _norms(config)

    def forward(self, x_BLD: Tensor, by: Rotation) -> Tensor:
        """`x_BLD` carries no padding."""
        x_BLD = x_BLD + self.norm2(self.attn(self.norm1(x_BLD), by, None))
        out_BLD: Tensor = x_BLD + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x_BLD)))
        return out_BLD


class OutputHead(nn.Module):
    """Norm without weights, scaled by the time, then a projection to patches."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.temb_width, config.hidden_size)
        self.linear_2 = nn.Linear(config.hidden_size, config.patch_size**2 * config.out_channels)

    def forward(self, x_BLD: Tensor, temb_BT: Tensor) -> Tensor:
        scale_B1D = self.linear_1(silu(temb_BT)).unsqueeze(1)
        normed_BLD = layer_norm(x_BLD, x_BLD.shape[-1:], eps=OUTPUT_NORM_EPS)
        out: Tensor = self.linear_2(normed_BLD * (1 + scale_B1D))
        return out


def _norms(config: TransformerConfig) -> tuple[RMSNorm, RMSNorm, RMSNorm]:
    first, second, third = (RMSNorm(config.hidden_size, config.norm_eps) for _ in range(3))
    return first, second, third
