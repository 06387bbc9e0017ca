"""Do: the image decoder with channels last and its norms fused with what follows them, on a GPU.

Convolutions on tensor cores want channels last; the stock group norm does not, and it gives each of its few groups to one
multiprocessor. Here a norm reads its input twice, in blocks of pixels, and applies the activation on the way.

B pictures, N pixels, C channels, G groups.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from mammoth_dit.fast.graphs import captured
from mammoth_dit.finishing import Finisher
from mammoth_dit.model.config import LATENT_FACTOR
from mammoth_dit.model.vae import ImageDecoder, SharesMoments
from mammoth_dit.tiling import Tiling

__all__ = ["FastFinisher", "FusedGroupNorm", "fused"]

BLOCK_VALUES = 8192
MAX_GRAPHED_PIXELS, MAX_GRAPHS = 1024 * 1024, 8
ACTIVATIONS = ("nonlinearity", "conv_act")  # a block's silu follows its norms, always; an attention has none


@triton.jit
def _moments(x, mean, spread, num_pixels, C: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr):
    """Mean and sum of squared distances from it, of each group in one block of pixels: [B, blocks, G]."""
    picture, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    pixel, channel = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    here = pixel[:, None] < num_pixels
    at = x + (picture * num_pixels + pixel[:, None]) * C + channel[None, :]
    values = tl.reshape(tl.load(at, mask=here, other=0.0).to(tl.float32), (BLOCK, G, C // G))
    count = tl.minimum(BLOCK, num_pixels - block * BLOCK) * (C // G)
    of_group = tl.sum(tl.sum(values, 2), 0) / count
    away = tl.where((pixel < num_pixels)[:, None, None], values - of_group[None, :, None], 0.0)
    to = (picture * tl.num_programs(0) + block) * G + tl.arange(0, G)
    tl.store(mean + to, of_group)
    tl.store(spread + to, tl.sum(tl.sum(away * away, 2), 0))


@triton.jit
def _apply(x, out, scale, shift, num_pixels, C: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """x * scale + shift of each picture's channels, then silu."""
    picture, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    pixel, channel = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C)
    here = pixel[:, None] < num_pixels
    at = (picture * num_pixels + pixel[:, None]) * C + channel[None, :]
    y = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    y = y * tl.load(scale + picture * C + channel)[None, :] + tl.load(shift + picture * C + channel)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=here)


class FusedGroupNorm(nn.Module, SharesMoments):
    """GroupNorm over [B, C, N] or [B, C, h, w] with channels last in memory, then silu where asked."""

    def __init__(self, norm: nn.GroupNorm, *, silu: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.num_groups, self.eps, self.silu = norm.num_groups, norm.eps, silu

    def forward(self, x: Tensor) -> Tensor:
        pixels_BNC = x.flatten(2).transpose(1, 2).contiguous()
        batch, num_pixels, channels = pixels_BNC.shape
        block = max(1, BLOCK_VALUES // channels)
        grid = (triton.cdiv(num_pixels, block), batch)
        if self.moments is None:
            mean_BG, variance_BG = self._measure(pixels_BNC)
        else:
            mean_BG, variance_BG = self.moments.of(self, lambda: self._measure(pixels_BNC))
        each = channels // self.num_groups
        scale_BC = torch.rsqrt(variance_BG + self.eps).repeat_interleave(each, 1) * self.weight.float()
        shift_BC = self.bias.float() - mean_BG.repeat_interleave(each, 1) * scale_BC
        out_BNC = torch.empty_like(pixels_BNC)
        _apply[grid](
            pixels_BNC, out_BNC, scale_BC, shift_BC, num_pixels, C=channels, SILU=self.silu, BLOCK=block, num_warps=8
        )
        return out_BNC.transpose(1, 2).unflatten(2, x.shape[2:]) if x.dim() > 3 else out_BNC.transpose(1, 2)

    def _measure(self, pixels_BNC: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each group, [B, G] float32: of blocks of pixels, then joined."""
        batch, num_pixels, channels = pixels_BNC.shape
        block = max(1, BLOCK_VALUES // channels)
        num_blocks = triton.cdiv(num_pixels, block)
        mean, spread = (
            pixels_BNC.new_empty((batch, num_blocks, self.num_groups), dtype=torch.float32) for _ in range(2)
        )
        _moments[(num_blocks, batch)](
            pixels_BNC, mean, spread, num_pixels, C=channels, G=self.num_groups, BLOCK=block, num_warps=8
        )
        each = channels // self.num_groups
        counts = torch.full((num_blocks, 1), float(block), device=mean.device)
        counts[-1] = num_pixels - block * (num_blocks - 1)
        mean_BG = (mean * (counts / num_pixels)).sum(1)
        variance_BG = (spread.sum(1) / each + ((mean - mean_BG[:, None]).square() * counts).sum(1)) / num_pixels
        return mean_BG, variance_BG


class FastFinisher(Finisher):
    """Decodes with the fused decoder; up to MAX_GRAPHED_PIXELS, where launches are what takes the time, as a graph a size."""

    def __init__(self, vae: ImageDecoder, device: torch.device, *, tiling: Tiling = Tiling()) -> None:
        super().__init__(fused(vae), device, tiling=tiling)
        self._graphs: OrderedDict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, Tensor]]] = (
            OrderedDict()
        )
        self._pool = torch.cuda.graph_pool_handle()  # not the steps': both run at the same time

    def pixels(self, latents_1Chw: Tensor) -> tuple[Tensor, Tensor]:
        shape = latents_1Chw.shape
        if shape[2] * shape[3] * LATENT_FACTOR**2 > MAX_GRAPHED_PIXELS:
            return super().pixels(latents_1Chw)
        if shape not in self._graphs:
            done = super().pixels(latents_1Chw)
            self._graphs[shape] = self._record(latents_1Chw.clone())
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
            return done
        self._graphs.move_to_end(shape)
        graph, latents, out = self._graphs[shape]
        latents.copy_(latents_1Chw)
        graph.replay()
        return out

    def _record(self, latents_1Chw: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, tuple[Tensor, Tensor]]:
        graph = torch.cuda.CUDAGraph()
        out = captured(graph, self._pool, lambda: super(FastFinisher, self).pixels(latents_1Chw))
        return graph, latents_1Chw, out


def fused(vae: ImageDecoder) -> ImageDecoder:
    """Return a copy of a decoder with channels last and fused norms; a block whose widths are no powers of two stays."""
    copied: ImageDecoder = copy.deepcopy(vae)
    copied.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stub misses it
    for parent in list(copied.modules()):
        norms = {name: child for name, child in parent.named_children() if isinstance(child, nn.GroupNorm)}
        if not all(_fits(norm) for norm in norms.values()):
            continue
        activations = (
            [name for name in ACTIVATIONS if isinstance(getattr(parent, name, None), nn.SiLU)] if norms else []
        )
        for name, norm in norms.items():
            setattr(parent, name, FusedGroupNorm(norm, silu=bool(activations)))
        for name in activations:
            setattr(parent, name, nn.Identity())
    return copied


def _fits(norm: nn.GroupNorm) -> bool:
    return all(count & (count - 1) == 0 for count in (norm.num_channels, norm.num_groups))
