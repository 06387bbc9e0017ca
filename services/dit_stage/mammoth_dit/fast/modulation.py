"""Decide every vector that a step multiplies with, for all steps of a schedule at once: they depend on the time alone.

The definition computes RMS(x; w) * (1 + s) and x + tanh(g) * RMS(y; w). Here w * (1 + s) and tanh(g) * w are one vector each,
so that a norm is one product. Difference from the definition: rounding, once instead of after every factor.

N steps, V vectors of a step, D width, T time width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from mammoth_dit.model.blocks import ModulatedBlock
from mammoth_dit.model.layers import wide
from mammoth_dit.model.transformer import DiffusionTransformer

__all__ = ["VECTORS", "num_vectors", "vectors_NVD"]

VECTORS = 4  # of a block: scale into attention, gate out of it, scale into the feed-forward, gate out of it


def num_vectors(num_blocks: int) -> int:
    """Return V: four a block, then the scale of the output norm."""
    return VECTORS * num_blocks + 1


def vectors_NVD(model: DiffusionTransformer, times_N: Tensor) -> Tensor:
    """Return [N, V, D] in float32 (float64 for a float64 model): noise refiner blocks, main blocks, output norm.

    `times_N` have the model's dtype: in bfloat16 they are rounded, as in training.
    """
    temb_NT = model.time_caption_embed.timestep_embedder(times_N)
    vectors: list[Tensor] = []
    for block in (*model.noise_refiner, *model.layers):
        assert isinstance(block, ModulatedBlock)
        scale_msa, gate_msa, scale_mlp, gate_mlp = (wide(part[:, 0]) for part in block.norm1(temb_NT))
        vectors += [
            wide(block.norm1.norm.weight) * (1 + scale_msa),
            wide(block.norm2.weight) * torch.tanh(gate_msa),
            wide(block.ffn_norm1.weight) * (1 + scale_mlp),
            wide(block.ffn_norm2.weight) * torch.tanh(gate_mlp),
        ]
    vectors.append(1 + wide(model.norm_out.linear_1(silu(temb_NT))))
    return torch.stack(vectors, dim=1)
