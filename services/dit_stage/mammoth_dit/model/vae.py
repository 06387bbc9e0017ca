"""The image decoder: diffusers' AutoencoderKL decoder under the checkpoint's names; the encoder is never built.

Latents are [B, channels, h, w]; images [B, 3, H, W], nominally in [-1, 1]. G groups of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from mammoth_dit.model.layers import wide
from mammoth_serving.checkpoint import CheckpointError

__all__ = ["GroupNorm", "ImageDecoder", "Moments", "SharesMoments", "to_rgb"]


class Moments:
    """Mean and variance [B, G] of every norm over a whole picture, from those of tiles that cover it once."""

    def __init__(self) -> None:
        self._of_tiles: dict[SharesMoments, list[tuple[Tensor, Tensor]]] = {}
        self._of_picture: dict[SharesMoments, tuple[Tensor, Tensor]] = {}

    def of(self, norm: SharesMoments, measure: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the picture's moments; before `join`, those of the tile at hand, which are kept."""
        if norm in self._of_picture:
            return self._of_picture[norm]
        moments = measure()
        self._of_tiles.setdefault(norm, []).append(moments)
        return moments

    def join(self) -> None:
        """Take the picture's moments from those of its tiles, all of one size."""
        for norm, seen in self._of_tiles.items():
            means, variances = (torch.stack(each) for each in zip(*seen, strict=True))
            self._of_picture[norm] = means.mean(0), variances.mean(0) + means.var(0, correction=0)


class SharesMoments:
    """A norm that takes its moments from `moments` while there are any."""

    moments: Moments | None = None


class GroupNorm(nn.GroupNorm, SharesMoments):
    """The stock norm, but for shared moments."""

    def forward(self, x: Tensor) -> Tensor:
        if self.moments is None:
            return super().forward(x)
        x_BGN = wide(x.flatten(2).unflatten(1, (self.num_groups, -1)).flatten(2))
        mean_BG, variance_BG = self.moments.of(self, lambda: _moments(x_BGN))
        normed_BGN = (x_BGN - mean_BG[..., None]) * torch.rsqrt(variance_BG + self.eps)[..., None]
        weight, bias = (wide(each)[:, None] for each in (self.weight, self.bias))
        return (normed_BGN.reshape(*x.shape[:2], -1) * weight + bias).to(x.dtype).view(x.shape)


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
        for parent in list(self.decoder.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.GroupNorm):
                    setattr(parent, name, GroupNorm(child.num_groups, child.num_channels, child.eps))
        if vae.post_quant_conv is not None:
            self.post_quant_conv = vae.post_quant_conv
        self.scaling_factor: float | None = vae.config.get("scaling_factor")
        self.shift_factor: float | None = vae.config.get("shift_factor")

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def forward(self, latents: Tensor) -> Tensor:
        """Return the images of final latents; they are cast to the decoder's dtype first."""
        return self.leave(self.enter(latents))

    def enter(self, latents: Tensor) -> Tensor:
        """Return what the middle of the decoder makes of latents, [B, C, h, w]: the part where each sees all others."""
        z = latents.to(self.dtype)
        if self.scaling_factor is not None:
            z = z / self.scaling_factor
        if self.shift_factor is not None:
            z = z + self.shift_factor
        if hasattr(self, "post_quant_conv"):
            z = self.post_quant_conv(z)
        middle: Tensor = self.decoder.mid_block(self.decoder.conv_in(z))
        return middle

    def leave(self, middle: Tensor) -> Tensor:
        """Return the images of what `enter` made, or a tile's of its tile: here only norms look further than a few pixels."""
        decoder = self.decoder
        for block in decoder.up_blocks:
            middle = block(middle)
        image: Tensor = decoder.conv_out(decoder.conv_act(decoder.conv_norm_out(middle)))
        return image

    @contextmanager
    def sharing(self, moments: Moments) -> Iterator[None]:
        """Let every norm take its moments from `moments`."""
        norms = [module for module in self.modules() if isinstance(module, SharesMoments)]
        try:
            for norm in norms:
                norm.moments = moments
            yield
        finally:
            for norm in norms:
                norm.moments = None


def to_rgb(image: Tensor) -> Tensor:
    """Map an image [3, H, W] from [-1, 1] to uint8 [H, W, 3], clamped, rounded half to even (0 becomes 128)."""
    unit = (image.float() * 0.5).add_(0.5).clamp_(0, 1)
    return unit.mul_(255).round_().to(torch.uint8).permute(1, 2, 0).contiguous()


def _moments(x_BGN: Tensor) -> tuple[Tensor, Tensor]:
    variance_BG, mean_BG = torch.var_mean(x_BGN, dim=2, correction=0)
    return mean_BG, variance_BG
