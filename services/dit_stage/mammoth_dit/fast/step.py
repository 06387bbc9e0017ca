"""Decide one Euler step of a unit: both guidance passes in one run through the blocks. The fast path's whole arithmetic.

What differs from the definition (`model.transformer`, `sampling`): projections are merged, the noise refiner runs once for
both passes (its rotary angles on the caption axis cancel), every product sees the tokens of both passes at once, latents
stay tokens from the first step to the last.

B rows, T tokens, n image tokens, F channels of a latent token, C caption bucket, P padded width, V vectors of a step, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mammoth_dit.fast.attention import Attention
from mammoth_dit.fast.layout import Span, UnitShape
from mammoth_dit.fast.modulation import VECTORS
from mammoth_dit.fast.ops import Activation, Ops
from mammoth_dit.fast.weights import Block, Weights
from mammoth_dit.sampling import euler_step, guide

__all__ = ["Inputs", "Network", "Places"]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a step of a unit reads, row by row; a graph reads it from fixed places.

    `x_BnF` latents as tokens; `captions` [B, C, P] of each stream; `angles` [B, n + C, 2, E/2] and `masks` [B, n + C] of each
    stream, float32; `vectors_BVD` this step's modulation; `dt_B11` in the latents' dtype; `scale_B11` float32.
    """

    x_BnF: Tensor
    captions: Sequence[Tensor]
    angles: Sequence[Tensor]
    masks: Sequence[Tensor]
    vectors_BVD: Tensor
    dt_B11: Tensor
    scale_B11: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where each token of a matrix stands: its angles [T, 2, E/2], its mask [T], its row [T]; the streams it is made of."""

    angles: Tensor
    mask: Tensor
    rows: Tensor
    spans: Sequence[Span]


class Network:
    """The weights, the operations, and a step over them."""

    def __init__(self, weights: Weights, ops: Ops, attention: Attention) -> None:
        self.weights, self.ops, self.attention = weights, ops, attention

    def step(self, inputs: Inputs, shape: UnitShape, rows_T: Tensor, image_rows_T: Tensor) -> Tensor:
        """Return the latents [B, n, F] after one step. `rows_T`, `image_rows_T` are those of `shape`."""
        velocities = self.velocities(inputs, shape, rows_T, image_rows_T)
        velocity = guide(velocities[0], velocities[1], inputs.scale_B11) if shape.guided else velocities[0]
        return euler_step(inputs.x_BnF, velocity, inputs.dt_B11)

    def velocities(self, inputs: Inputs, shape: UnitShape, rows_T: Tensor, image_rows_T: Tensor) -> list[Tensor]:
        """Return the velocity [B, n, F] of each pass."""
        x_TP, vectors, places = self.enter(inputs, shape, rows_T, image_rows_T)
        x_TP, branch_TP = self.blocks(self.weights.layers, x_TP, vectors, places)
        h_TP = self.ops.add_layer_norm(x_TP, branch_TP, vectors[-2], vectors[-1], rows_T)
        return self.leave(h_TP, inputs, shape)

    def enter(
        self, inputs: Inputs, shape: UnitShape, rows_T: Tensor, image_rows_T: Tensor
    ) -> tuple[Tensor, Sequence[Tensor], Places]:
        """Return the tokens [T, P] of all passes before the main blocks, the vectors of those, and the tokens' places."""
        image_TP = self.weights.embed(inputs.x_BnF.flatten(0, 1))
        image_TP = self._refine(image_TP, inputs, shape, image_rows_T)
        places = Places(
            angles=torch.cat([angles.flatten(0, 1) for angles in inputs.angles]),
            mask=torch.cat([mask.flatten() for mask in inputs.masks]),
            rows=rows_T,
            spans=shape.spans,
        )
        vectors = inputs.vectors_BVD[:, VECTORS * len(self.weights.refiner) :].unbind(1)
        return _join(image_TP, inputs.captions, shape), vectors, places

    def leave(self, h_TP: Tensor, inputs: Inputs, shape: UnitShape) -> list[Tensor]:
        """Return the velocity of each pass from normed and scaled tokens."""
        return [self.weights.head(_image_of(h_TP, span, shape)).view_as(inputs.x_BnF) for span in shape.spans]

    def _refine(self, x_TP: Tensor, inputs: Inputs, shape: UnitShape, rows_T: Tensor) -> Tensor:
        refiner = self.weights.refiner
        if not refiner:
            return x_TP
        num_image = shape.num_image
        places = Places(
            angles=inputs.angles[0][:, :num_image].flatten(0, 1),
            mask=inputs.masks[0][:, :num_image].flatten(),
            rows=rows_T,
            spans=[shape.image],
        )
        vectors = inputs.vectors_BVD[:, : VECTORS * len(refiner)].unbind(1)
        x_TP, branch_TP = self.blocks(refiner, x_TP, vectors, places)
        return self.ops.add(x_TP, branch_TP, vectors[-1], rows_T)

    def blocks(
        self, blocks: Sequence[Block], x_TP: Tensor, vectors: Sequence[Tensor], places: Places
    ) -> tuple[Tensor, Tensor]:
        """Run blocks; return the stream and the last feed-forward branch, not yet gated and added."""
        ops, rows_T = self.ops, places.rows
        h_TP = ops.norm(x_TP, vectors[0], rows_T)
        for number, block in enumerate(blocks):
            _, attention_gate, feed_forward_scale, feed_forward_gate = vectors[VECTORS * number :][:VECTORS]
            x_TP, h_TP = ops.add_norm(
                x_TP, self._attend(block, h_TP, places), attention_gate, feed_forward_scale, rows_T
            )
            branch_TP = block.down(ops.silu_mul(block.gate_up(h_TP)))
            if number + 1 < len(blocks):
                next_scale = vectors[VECTORS * (number + 1)]
                x_TP, h_TP = ops.add_norm(x_TP, branch_TP, feed_forward_gate, next_scale, rows_T)
        return x_TP, branch_TP

    def _attend(self, block: Block, h_TP: Activation, places: Places) -> Tensor:
        heads = self.weights.heads
        heads_THE = block.qkv(h_TP).view(-1, heads.num_heads, heads.padded)
        self.ops.rotate(heads_THE, block.head_norms, places.angles, places.mask, heads)
        out_TP = heads_THE.new_empty((heads_THE.shape[0], self.weights.width))
        for span in places.spans:
            mixed = self.attention(heads_THE[span.start : span.stop].unflatten(0, (span.batch, span.length)))
            block.out.into(self.ops.quantize(mixed), out_TP[span.start : span.stop])
        return out_TP


def _join(image_TP: Tensor, captions: Sequence[Tensor], shape: UnitShape) -> Tensor:
    """Lay out [T, P]: each row's image tokens before its caption, stream after stream."""
    image_BnP = image_TP.unflatten(0, (shape.batch, shape.num_image))
    x_TP = image_TP.new_empty((shape.num_tokens, image_TP.shape[1]))
    for span, caption_BCP in zip(shape.spans, captions, strict=False):
        stream = x_TP[span.start : span.stop].unflatten(0, (span.batch, span.length))
        stream[:, : shape.num_image] = image_BnP
        stream[:, shape.num_image :] = caption_BCP
    return x_TP


def _image_of(h_TP: Tensor, span: Span, shape: UnitShape) -> Tensor:
    """Return the image tokens [B * n, P] of a stream, contiguous: a product over strided rows rounds differently."""
    return h_TP[span.start : span.stop].view(span.batch, span.length, -1)[:, : shape.num_image].flatten(0, 1)
