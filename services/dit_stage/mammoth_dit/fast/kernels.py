"""Do: the operations of `ops` as Triton kernels, one pass over memory each. A program handles one token.

A width that is no power of two is covered by two blocks, the largest power of two and what is left: 2520 is 2048 + 512, not
4096. D width, P padded width (the pitch of every matrix), E padded head width, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mammoth_dit.fast.ops import Activation, HeadLayout, Quantized
from mammoth_dit.model.blocks import HEAD_NORM_EPS, OUTPUT_NORM_EPS

__all__ = ["TritonOps"]

SILU_BLOCK = 1024
LARGEST_E4M3, SMALLEST = tl.constexpr(448.0), tl.constexpr(1e-12)
SMALLEST_BLOCK = 16


@triton.jit
def _load(base, at, width):
    return tl.load(base + at, mask=at < width, other=0.0).to(tl.float32)


@triton.jit
def _put(x_a, x_b, out, scale, token, a, b, P: tl.constexpr, QUANTIZE: tl.constexpr):
    """Store a token in two blocks: as it is, or divided by the scale that brings its largest value to the end of e4m3."""
    if QUANTIZE:
        top = tl.maximum(tl.max(tl.abs(x_a), 0), tl.max(tl.abs(x_b), 0))
        by = tl.maximum(top, SMALLEST) / LARGEST_E4M3
        tl.store(scale + token, by)
        x_a, x_b = x_a / by, x_b / by
    tl.store(out + token * P + a, x_a.to(out.dtype.element_ty), mask=a < P)
    tl.store(out + token * P + b, x_b.to(out.dtype.element_ty), mask=b < P)


@triton.jit
def _token(x, branch, gate, scale, rows, x_out, h_out, h_scale, eps, final_eps, D: tl.constexpr, P: tl.constexpr,
           GATE_PITCH: tl.constexpr, SCALE_PITCH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr,
           NORM: tl.constexpr, STORE: tl.constexpr, QUANTIZE: tl.constexpr):  # fmt: skip
    """x + gate * RMS(branch) where ADD, stored where STORE; then its NORM ("rms", "layer" or "none") times scale."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    a = tl.arange(0, A)
    b = A + tl.arange(0, B)
    x_a, x_b = _load(x + token * P, a, D), _load(x + token * P, b, D)
    if ADD:
        y_a, y_b = _load(branch + token * P, a, D), _load(branch + token * P, b, D)
        by = tl.rsqrt((tl.sum(y_a * y_a, 0) + tl.sum(y_b * y_b, 0)) / D + eps)
        g_a, g_b = _load(gate + row * GATE_PITCH, a, D), _load(gate + row * GATE_PITCH, b, D)
        x_a = (x_a + g_a * (y_a * by)).to(x_out.dtype.element_ty).to(tl.float32)
        x_b = (x_b + g_b * (y_b * by)).to(x_out.dtype.element_ty).to(tl.float32)
        if STORE:
            tl.store(x_out + token * P + a, x_a.to(x_out.dtype.element_ty), mask=a < P)
            tl.store(x_out + token * P + b, x_b.to(x_out.dtype.element_ty), mask=b < P)
    if NORM != "none":
        if NORM == "layer":
            mean = (tl.sum(x_a, 0) + tl.sum(x_b, 0)) / D
            x_a, x_b = tl.where(a < D, x_a - mean, 0.0), tl.where(b < D, x_b - mean, 0.0)
        by = tl.rsqrt((tl.sum(x_a * x_a, 0) + tl.sum(x_b * x_b, 0)) / D + final_eps)
        h_a = x_a * by * _load(scale + row * SCALE_PITCH, a, D)
        h_b = x_b * by * _load(scale + row * SCALE_PITCH, b, D)
        _put(h_a, h_b, h_out, h_scale, token, a, b, P, QUANTIZE)


@triton.jit
def _rotate(heads, weights, angles, mask, eps, HEADS: tl.constexpr, QUERIES: tl.constexpr, ROTATED: tl.constexpr,
            WIDTH: tl.constexpr, E: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """RMS norm, weight, rotation of adjacent pairs, mask channel: the query and key heads of one token, in place."""
    token = tl.program_id(0).to(tl.int64)
    head, channel, pair = tl.arange(0, BLOCK_H), tl.arange(0, E), tl.arange(0, E // 2)
    at = heads + (token * HEADS + head[:, None]) * E + channel[None, :]
    here = head[:, None] < ROTATED
    x = tl.load(at, mask=here & (channel[None, :] < WIDTH), other=0.0).to(tl.float32)
    by = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    is_query = head[:, None] < QUERIES
    of_query = tl.load(weights + channel)[None, :]
    of_key = tl.load(weights + E + channel)[None, :]
    x = x * by[:, None] * tl.where(is_query, of_query, of_key)
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, E // 2, 2)))
    cos = tl.load(angles + token * E + pair)[None, :]
    sin = tl.load(angles + token * E + E // 2 + pair)[None, :]
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_H, E))
    spare = tl.where(is_query, 1.0, tl.load(mask + token))
    turned = tl.where(channel[None, :] == WIDTH, spare, turned)
    tl.store(at, turned.to(heads.dtype.element_ty), mask=here)


@triton.jit
def _silu_mul_at(gate_up, token, at, F: tl.constexpr):
    gate, up = _load(gate_up + token * 2 * F, at, F), _load(gate_up + token * 2 * F + F, at, F)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_mul(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + token * F + at, _silu_mul_at(gate_up, token, at, F).to(out.dtype.element_ty), mask=at < F)


@triton.jit
def _silu_mul_quantized(gate_up, out, scale, F: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """One whole token: its scale is that of all its channels."""
    token = tl.program_id(0).to(tl.int64)
    a, b = tl.arange(0, A), A + tl.arange(0, B)
    _put(_silu_mul_at(gate_up, token, a, F), _silu_mul_at(gate_up, token, b, F), out, scale, token, a, b, F, True)


@triton.jit
def _quantize(x, out, scale, P: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    a, b = tl.arange(0, A), A + tl.arange(0, B)
    _put(_load(x + token * P, a, P), _load(x + token * P, b, P), out, scale, token, a, b, P, True)


class TritonOps:
    """`ops.Ops` on a GPU. Vectors of scales and gates are float32, contiguous along D."""

    def __init__(self, eps: float, *, quantizes: bool = False) -> None:
        self.eps, self.quantizes = eps, quantizes

    def norm(self, x_TP: Tensor, scale_BD: Tensor, rows_T: Tensor) -> Activation:
        h, out, by = self._new(x_TP)
        self._launch(x_TP, x_TP, scale_BD, scale_BD, rows_T, x_TP, out, by, ADD=False, NORM="rms", STORE=False)
        return h

    def add_norm(
        self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor
    ) -> tuple[Tensor, Activation]:
        sum_TP, (h, out, by) = torch.empty_like(x_TP), self._new(x_TP)
        self._launch(x_TP, branch_TP, gate_BD, scale_BD, rows_T, sum_TP, out, by, ADD=True, NORM="rms", STORE=True)
        return sum_TP, h

    def add(self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, rows_T: Tensor) -> Tensor:
        out = torch.empty_like(x_TP)
        self._launch(x_TP, branch_TP, gate_BD, gate_BD, rows_T, out, out, None, ADD=True, NORM="none", STORE=True)
        return out

    def add_layer_norm(
        self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor
    ) -> Tensor:
        h = torch.empty_like(x_TP)
        self._launch(x_TP, branch_TP, gate_BD, scale_BD, rows_T, h, h, None, ADD=True, NORM="layer", STORE=False)
        return h

    def layer_norm(self, x_TP: Tensor, scale_BD: Tensor, rows_T: Tensor) -> Tensor:
        h = torch.empty_like(x_TP)
        self._launch(x_TP, x_TP, scale_BD, scale_BD, rows_T, x_TP, h, None, ADD=False, NORM="layer", STORE=False)
        return h

    def rotate(self, heads_THE: Tensor, weights_2E: Tensor, angles_T2P: Tensor, mask_T: Tensor, by: HeadLayout) -> None:
        _rotate[(heads_THE.shape[0],)](
            heads_THE, weights_2E, angles_T2P, mask_T, HEAD_NORM_EPS, HEADS=by.num_heads, QUERIES=by.num_queries,
            ROTATED=by.num_rotated, WIDTH=by.width, E=by.padded, BLOCK_H=triton.next_power_of_2(by.num_rotated),
            num_warps=4,
        )  # fmt: skip

    def silu_mul(self, gate_up_T2F: Tensor) -> Activation:
        num_tokens, inner = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        h, out, by = self._new(gate_up_T2F[:, :inner])
        if by is None:
            _silu_mul[(num_tokens, triton.cdiv(inner, SILU_BLOCK))](
                gate_up_T2F, out, F=inner, BLOCK=SILU_BLOCK, num_warps=4
            )
        else:
            first, rest = _blocks(inner)
            _silu_mul_quantized[(num_tokens,)](gate_up_T2F, out, by, F=inner, A=first, B=rest, num_warps=8)
        return h

    def quantize(self, x_TP: Tensor) -> Activation:
        h, out, by = self._new(x_TP)
        if by is None:
            return x_TP
        first, rest = _blocks(x_TP.shape[1])
        _quantize[(x_TP.shape[0],)](x_TP, out, by, P=x_TP.shape[1], A=first, B=rest, num_warps=4)
        return h

    def _new(self, like_TP: Tensor) -> tuple[Activation, Tensor, Tensor | None]:
        """Return room for a product's input: the activation, its values, its scales where there are any."""
        if not self.quantizes:
            out = like_TP.new_empty(like_TP.shape)
            return out, out, None
        values = like_TP.new_empty(like_TP.shape, dtype=torch.float8_e4m3fn)
        by = like_TP.new_empty((like_TP.shape[0], 1), dtype=torch.float32)
        return Quantized(values, by), values, by

    def _launch(self, x_TP: Tensor, branch_TP: Tensor, gate_BD: Tensor, scale_BD: Tensor, rows_T: Tensor,
                x_out: Tensor, h_out: Tensor, h_scale: Tensor | None, **flags: Any) -> None:  # fmt: skip
        width, pitch = scale_BD.shape[-1], x_TP.shape[-1]
        first, rest = _blocks(pitch)
        final_eps = OUTPUT_NORM_EPS if flags["NORM"] == "layer" else self.eps
        _token[(x_TP.shape[0],)](
            x_TP, branch_TP, gate_BD, scale_BD, rows_T, x_out, h_out, h_scale, self.eps, final_eps, D=width, P=pitch,
            GATE_PITCH=gate_BD.stride(0), SCALE_PITCH=scale_BD.stride(0), A=first, B=rest,
            QUANTIZE=h_scale is not None, num_warps=4, **flags,
        )  # fmt: skip


def _blocks(width: int) -> tuple[int, int]:
    """Return the two powers of two that cover `width`."""
    first = 1 << (width.bit_length() - 1)
    return first, max(SMALLEST_BLOCK, triton.next_power_of_2(width - first))
