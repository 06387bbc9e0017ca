"""What enters the transformer: the time of a step, caption rows of the LLM, patches of latents.

Axes: B rows, C caption tokens, H LLM width, D width, T time width, n image tokens; latents are [B, channels, rows, columns].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mammoth_dit.model.config import RefinerConfig, TransformerConfig
from mammoth_dit.model.layers import RMSNorm, wide
from mammoth_dit.model.qformer import QFormer, choose_num_heads, propose_num_heads

__all__ = ["TimeCaptionEmbed", "TimestepEmbedder", "patchify", "sinusoid", "unpatchify"]

NUM_FREQUENCIES = 128
CAPTION_EPS = 1e-5  # fixed upstream: the composite model replaces the configured embedder


def sinusoid(t_B: Tensor, scale: float) -> Tensor:
    """Return [B, 256]: cosines, then sines, of scale * t * 10000^(-k/128), in float32 (float64 for float64 times)."""
    t_wide = wide(t_B)
    k = torch.arange(NUM_FREQUENCIES, dtype=t_wide.dtype, device=t_B.device)
    angles = t_wide[:, None] * torch.exp(-math.log(10000) * k / NUM_FREQUENCIES) * scale
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedder(nn.Module):
    """Two linears over the sinusoid. `t_B` has the model's dtype: in bfloat16 the times are rounded, as in training."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(2 * NUM_FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)
        self.scale = scale

    def forward(self, t_B: Tensor) -> Tensor:
        hidden: Tensor = self.linear_1(sinusoid(t_B, self.scale).to(self.linear_1.weight.dtype))
        out_BT: Tensor = self.linear_2(silu(hidden))
        return out_BT


class TimeCaptionEmbed(nn.Module):
    """Embedder of times and of caption rows; Dev keeps its Q-Former here, and its queries skip the projection."""

    def __init__(self, config: TransformerConfig, refiner: RefinerConfig | None, llm_width: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.timestep_embedder = TimestepEmbedder(config.temb_width, config.timestep_scale)
        self.caption_embedder = nn.Sequential(RMSNorm(llm_width, CAPTION_EPS), nn.Linear(llm_width, width))
        self.image_embedder: QFormer | None = None
        if refiner is not None and refiner.nested:
            num_heads = choose_num_heads(width, propose_num_heads(width))
            self.image_embedder = QFormer(llm_width, width, refiner, num_heads)

    def caption(self, text_BCH: Tensor, image_BCH: Tensor | None) -> Tensor:
        """Return caption tokens [B, C, D]: projected rows, then Dev's queries when there are image rows. No padding."""
        tokens: Tensor = self.caption_embedder(text_BCH)
        if self.image_embedder is None or image_BCH is None:
            return tokens
        return torch.cat((tokens, self.image_embedder(image_BCH)), dim=1)


def patchify(x: Tensor, patch: int) -> Tensor:
    """Cut latents into tokens [B, n, patch*patch*channels]: patches row by row, in a token (row, column, channel)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch * patch * channels)


def unpatchify(tokens: Tensor, patch: int, num_rows: int, num_columns: int) -> Tensor:
    """Undo `patchify` for a grid of num_rows x num_columns patches."""
    x = tokens.reshape(tokens.shape[0], num_rows, num_columns, patch, patch, -1)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(tokens.shape[0], -1, num_rows * patch, num_columns * patch)
