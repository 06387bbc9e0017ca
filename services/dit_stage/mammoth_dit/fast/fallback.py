"""Do: keep the plain path beside the fast one without a second copy of the blocks' matrices.

The plain path hardly ever runs here: it cuts each matrix out of the merged and padded one when it needs it, into the very
matrix that was loaded. So its bits are those of the plain engine.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from mammoth_dit.fast.ops import HeadLayout
from mammoth_dit.fast.weights import Block, Linear, Product, Weights, modulated
from mammoth_dit.model.blocks import ModulatedBlock
from mammoth_dit.model.transformer import DiffusionTransformer

__all__ = ["Cut", "sharing"]


class Cut(nn.Linear):
    """A linear layer without bias whose weight is a part of a tensor that somebody else holds."""

    def __init__(self, part: Tensor, out_features: int) -> None:
        """`part` is a view with the elements of a weight [out, in], in their order."""
        nn.Module.__init__(self)
        self._part, self.out_features, self.in_features = part, out_features, part.numel() // out_features
        self.register_parameter("bias", None)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A new matrix, as it was loaded."""
        return self._part.reshape(self.out_features, self.in_features).contiguous()


def sharing(model: DiffusionTransformer, weights: Weights) -> DiffusionTransformer:
    """Return the same model over the matrices of `weights`, which are not quantized; the rest it shares with `model`."""
    shared = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    width = model.x_embedder.out_features
    for modules, blocks in ((shared.noise_refiner, weights.refiner), (shared.layers, weights.layers)):
        for module, block in zip(modulated(modules), blocks, strict=True):
            _share(module, block, weights.heads, width)
    return shared


def _share(module: ModulatedBlock, block: Block, heads: HeadLayout, width: int) -> None:
    qkv, out, gate_up, down = (_matrix(each) for each in (block.qkv, block.out, block.gate_up, block.down))
    attn, ffn = module.attn, module.feed_forward
    by_head = qkv.unflatten(0, (heads.num_heads, heads.padded))[:, : heads.width, :width]
    parts = by_head.split([heads.num_queries, heads.num_keys, heads.num_keys])
    attn.to_q, attn.to_k, attn.to_v = (Cut(part, len(part) * heads.width) for part in parts)
    attn.to_out[0] = Cut(out[:width].unflatten(1, (heads.num_queries, heads.padded))[:, :, : heads.width], width)
    ffn.linear_1, ffn.linear_3 = (Cut(part[:, :width], len(part)) for part in gate_up.chunk(2))
    ffn.linear_2 = Cut(down[:width], width)


def _matrix(product: Product) -> Tensor:
    assert isinstance(product, Linear)
    return product.weight
