"""Decide what the fused operations compute: each in a few lines of torch. `kernels` does the same in one pass over memory.

Every operation works on a matrix of tokens, each of which belongs to a row of the unit (`rows_T`); scales and gates are vectors
a row. Weights of norms are part of the vectors (`modulation`), so a norm rounds once, after everything. Matrices may be wider
than the model's width D: what lies beyond is zero, so that products run on aligned widths.

T tokens, D width, P padded width, B rows, H heads (queries, then keys, then values), E padded head width, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad, silu

from mammoth_dit.model.blocks import HEAD_NORM_EPS, OUTPUT_NORM_EPS
from mammoth_dit.model.layers import wide

__all__ = ["E4M3", "MASKED", "Activation", "HeadLayout", "Ops", "Quantized", "ReferenceOps", "quantized"]

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3, SMALLEST = 448.0, 1e-12
MASKED = -30_000.0  # times 1/sqrt(head width): far below what a softmax over float32 can see


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix in e4m3 with a float32 scale a row, [T, 1]: values * scale."""

    values: Tensor
    scale: Tensor


Activation = Tensor | Quantized


def quantized(x_TP: Tensor) -> Quantized:
    """Bring the largest value of every row to the end of e4m3, and round."""
    x_TP = wide(x_TP)
    scale_T1 = x_TP.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST_E4M3
    return Quantized((x_TP / scale_T1).to(E4M3), scale_T1.float())


class HeadLayout:
    """How the merged projection lies: query heads, key heads, value heads, each `width` channels padded to `padded`.

    The first channel beyond `width`, where there is one, carries the padding mask: 1 in every query, 0 or MASKED in a key.
    So padding tokens have weight zero in any attention kernel, without a mask that it would have to read.
    """

    def __init__(self, num_queries: int, num_keys: int, width: int) -> None:
        self.num_queries, self.num_keys, self.width = num_queries, num_keys, width
        self.padded = 1 << (width - 1).bit_length()

    @property
    def has_spare(self) -> bool:
        return self.padded > self.width

    @property
    def num_rotated(self) -> int:
        return self.num_queries + self.num_keys

    @property
    def num_heads(self) -> int:
        return self.num_queries + 2 * self.num_keys


class Ops(Protocol):
    """The fused operations of a step. `eps` is that of the block norms; inputs of block products are quantized, or not."""

    eps: float
    quantizes: bool

    def norm(self, x_TP: Tensor, scale_BD: Tensor, rows_T: Tensor) -> Activation:
        """Return RMS(x) * scale."""

    def add_norm(
        self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor
    ) -> tuple[Tensor, Activation]:
        """Return x + gate * RMS(branch), and the RMS of that sum times scale."""

    def add(self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, rows_T: Tensor) -> Tensor:
        """Return x + gate * RMS(branch)."""

    def add_layer_norm(
        self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor
    ) -> Tensor:
        """Return LayerNorm(x + gate * RMS(branch)) * scale."""

    def layer_norm(self, x_TP: Tensor, scale_BD: Tensor, rows_T: Tensor) -> Tensor:
        """Return LayerNorm(x) * scale."""

    def rotate(self, heads_THE: Tensor, weights_2E: Tensor, angles_T2P: Tensor, mask_T: Tensor, by: HeadLayout) -> None:
        """Norm queries and keys a head, rotate them, and set the mask channel, in place. `angles` are cosines and sines."""

    def silu_mul(self, gate_up_T2F: Tensor) -> Activation:
        """Return silu(first half) * second half."""

    def quantize(self, x_TP: Tensor) -> Activation:
        """Return the input of a product."""


class ReferenceOps:
    """The operations in plain torch: float32 inside (float64 for float64), rounded where a kernel stores."""

    def __init__(self, eps: float, *, quantizes: bool = False) -> None:
        self.eps, self.quantizes = eps, quantizes

    def norm(self, x_TP: Tensor, scale_BD: Tensor, rows_T: Tensor) -> Activation:
        h_TP = _padded(self._rms(x_TP, scale_BD) * scale_BD[rows_T], x_TP)
        return quantized(h_TP) if self.quantizes else h_TP.to(x_TP.dtype)

    def add(self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, rows_T: Tensor) -> Tensor:
        width = gate_BD.shape[-1]
        sum_TD = wide(x_TP[:, :width]) + gate_BD[rows_T] * self._rms(branch_TP, gate_BD)
        return _padded(sum_TD, x_TP).to(x_TP.dtype)

    def add_norm(
        self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor
    ) -> tuple[Tensor, Activation]:
        x_TP = self.add(x_TP, branch_TP, gate_BD, rows_T)
        return x_TP, self.norm(x_TP, scale_BD, rows_T)

    def add_layer_norm(
        self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor
    ) -> Tensor:
        return self.layer_norm(self.add(x_TP, branch_TP, gate_BD, rows_T), scale_BD, rows_T)

    def layer_norm(self, x_TP: Tensor, scale_BD: Tensor, rows_T: Tensor) -> Tensor:
        width = scale_BD.shape[-1]
        normed_TD = layer_norm(wide(x_TP[:, :width]), (width,), eps=OUTPUT_NORM_EPS)
        return _padded(normed_TD * scale_BD[rows_T], x_TP).to(x_TP.dtype)

    def rotate(self, heads_THE: Tensor, weights_2E: Tensor, angles_T2P: Tensor, mask_T: Tensor, by: HeadLayout) -> None:
        rotated = wide(heads_THE[:, : by.num_rotated, : by.width])
        normed = rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True) + HEAD_NORM_EPS)
        of_query, of_key = weights_2E
        weights_HE = torch.cat((of_query.expand(by.num_queries, -1), of_key.expand(by.num_keys, -1)))
        even, odd = (normed * weights_HE[:, : by.width]).unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles_T2P[:, None, :, : by.width // 2].unbind(2)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        heads_THE[:, : by.num_rotated, : by.width] = turned.to(heads_THE.dtype)
        if by.has_spare:
            heads_THE[:, : by.num_queries, by.width] = 1.0
            heads_THE[:, by.num_queries : by.num_rotated, by.width] = mask_T[:, None].to(heads_THE.dtype)

    def silu_mul(self, gate_up_T2F: Tensor) -> Activation:
        gate, up = wide(gate_up_T2F).chunk(2, dim=-1)
        h_TF = silu(gate) * up
        return quantized(h_TF) if self.quantizes else h_TF.to(gate_up_T2F.dtype)

    def quantize(self, x_TP: Tensor) -> Activation:
        return quantized(x_TP) if self.quantizes else x_TP

    def _rms(self, x_TP: Tensor, like_BD: Tensor) -> Tensor:
        x_TD = wide(x_TP[:, : like_BD.shape[-1]])
        return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + self.eps)


def _padded(x_TD: Tensor, like_TP: Tensor) -> Tensor:
    return pad(x_TD, (0, like_TP.shape[-1] - x_TD.shape[-1]))
