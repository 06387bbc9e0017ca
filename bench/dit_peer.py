"""Do: time what a user would pick instead: diffusers' Lumina2 transformer at the same widths, eager and with compiled blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import Lumina2Transformer2DModel

from bench.dit_model import CAPTION_TOKENS

__all__ = ["peer", "peer_step"]


def peer() -> Lumina2Transformer2DModel:
    """Return the peer with random weights on the GPU."""
    with torch.device("cuda"):
        model = Lumina2Transformer2DModel(
            sample_size=128, patch_size=2, in_channels=16, hidden_size=2520, num_layers=16, num_refiner_layers=2,
            num_attention_heads=21, num_kv_heads=7, multiple_of=256, cap_feat_dim=3584, axes_dim_rope=(40, 40, 40),
            axes_lens=(300, 512, 512),
        )  # fmt: skip
    return model.to(torch.bfloat16).requires_grad_(False).eval()


def peer_step(model: Lumina2Transformer2DModel, size_px: int, batch: int) -> Callable[[], object]:
    """Return a guided step of `batch` square pictures: both passes, one after the other, as its pipeline runs them."""
    side = size_px // 8
    x = torch.randn(batch, 16, side, side, device="cuda", dtype=torch.bfloat16)
    t = torch.full((batch,), 0.5, device="cuda", dtype=torch.bfloat16)
    caption = torch.randn(batch, CAPTION_TOKENS, 3584, device="cuda", dtype=torch.bfloat16)
    mask = torch.ones(batch, CAPTION_TOKENS, device="cuda", dtype=torch.bool)

    def step() -> object:
        for length in (CAPTION_TOKENS, 1):
            model(x, t, caption[:, :length], mask[:, :length], return_dict=False)
        return x

    return step
