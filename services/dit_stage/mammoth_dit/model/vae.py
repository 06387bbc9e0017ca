"""The image decoder: diffusers' AutoencoderKL decoder under the checkpoint's names; the encoder is never built.

Latents are [B, channels, h, w]; images [B, 3, H, W], nominally in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from mammoth_serving.checkpoint import CheckpointError

__all__ = ["ImageDecoder", "to_rgb"]


class ImageDecoder(nn.Module):
    """Undo the latent scaling and decode. The weights may have another dtype than the latents."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raise CheckpointError when diffusers cannot build a decoder from `gen_vae_config`."""
        super().__init__()
        try:
            vae = AutoencoderKL.from_config(dict(config))
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as err:
            raise CheckpointError(f"gen_vae_config: diffusers builds no AutoencoderKL from it: {err}") from err
        self.decoder = vae.decoder
        if vae.post_quant_conv is not None:
            self.post_quant_conv = vae.post_quant_conv
        self.scaling_factor: float | None = vae.config.get("scaling_factor")
        self.shift_factor: float | None = vae.config.get("shift_factor")

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, latents: Tensor) -> Tensor:
        """Return the images of final latents; they are cast to the decoder's dtype first."""
        z = latents.to(self.dtype)
        if self.scaling_factor is not None:
            z = z / self.scaling_factor
        if self.shift_factor is not None:
            z = z + self.shift_factor
        if hasattr(self, "post_quant_conv"):
            z = self.post_quant_conv(z)
        image: Tensor = self.decoder(z)
        return image


def to_rgb(image: Tensor) -> Tensor:
    """Map an image [3, H, W] from [-1, 1] to uint8 [H, W, 3], clamped, rounded half to even (0 becomes 128)."""
    unit = (image.float() * 0.5 + 0.5).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
