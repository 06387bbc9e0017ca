"""Do: turn the plain model's weights into those of the fast path: projections merged, widths padded, once at start.

q, k, v become one matrix with every head padded to a power of two; gate and up one matrix; both sides of every product are
padded to a multiple of 128, on which tensor cores and copies work best. Padding is zero, so nothing changes but the sums'
order. Norm weights leave the blocks: `modulation` folds them into its vectors.

D width, P padded width, E head width, F inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from mammoth_dit.fast.ops import Activation, HeadLayout, Quantized, quantized
from mammoth_dit.model.blocks import Attention, ModulatedBlock
from mammoth_dit.model.config import TransformerConfig
from mammoth_dit.model.layers import wide
from mammoth_dit.model.transformer import DiffusionTransformer

__all__ = ["Block", "Linear", "Product", "QuantizedLinear", "Weights", "aligned", "head_layout", "modulated"]

ALIGNMENT = 128
MIN_TOKENS = 512  # of a product over the inner width: with fewer, libraries split the sum and round in another order


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A product with a weight [out, in], both padded; of at least `min_tokens` tokens, the missing ones zero."""

    weight: Tensor
    bias: Tensor | None = None
    min_tokens: int = 0

    def __call__(self, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        missing = self.min_tokens - x.shape[0]
        if missing <= 0:
            return linear(x, self.weight, self.bias)
        return linear(pad(x, (0, 0, 0, missing)), self.weight, self.bias)[: x.shape[0]]

    def into(self, x: Activation, out_TP: Tensor) -> None:
        """Store the product in `out_TP`."""
        assert isinstance(x, Tensor)
        torch.mm(x, self.weight.t(), out=out_TP)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """The same with both sides in e4m3: a scale a token, a scale an output; the sum and the scales in float32."""

    values: Tensor
    scale_1N: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, plain: Linear) -> QuantizedLinear:
        assert plain.bias is None, "blocks have no biases"
        weight = quantized(plain.weight)
        return cls(weight.values, weight.scale.t().contiguous(), plain.weight.dtype)

    def __call__(self, x: Activation) -> Tensor:
        out_TN = self.scale_1N.new_empty((_values(x).shape[0], self.values.shape[0]), dtype=self.dtype)
        self.into(x, out_TN)
        return out_TN

    def into(self, x: Activation, out_TP: Tensor) -> None:
        """Store the product in `out_TP`."""
        assert isinstance(x, Quantized)
        if x.values.device.type == "cuda":
            scales = x.scale, self.scale_1N
            torch._scaled_mm(x.values, self.values.t(), *scales, out_dtype=self.dtype, use_fast_accum=True, out=out_TP)
        else:
            product = (x.values.float() @ self.values.float().t()) * x.scale * self.scale_1N
            out_TP.copy_(product)


Product = Linear | QuantizedLinear


def _quantized(product: Product) -> QuantizedLinear:
    return product if isinstance(product, QuantizedLinear) else QuantizedLinear.of(product)


def _values(x: Activation) -> Tensor:
    return x.values if isinstance(x, Quantized) else x


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One modulated block. `head_norms` [2, E] float32: of queries, of keys."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    head_norms: Tensor

    @classmethod
    def of(cls, block: ModulatedBlock, heads: HeadLayout, width: int) -> Block:
        """Merge the weights of `block`, whose matrices get `width` padded columns."""
        attn, ffn = block.attn, block.feed_forward
        to_out = attn.to_out[0].get_parameter("weight")
        norms = torch.stack((attn.norm_q.weight, attn.norm_k.weight))
        return cls(
            qkv=Linear(_columns(_merge_heads(attn, heads), width)),
            out=Linear(_rows(_pad_inputs(to_out, heads), width)),
            gate_up=Linear(_columns(torch.cat((ffn.linear_1.weight, ffn.linear_3.weight)), width)),
            down=Linear(_rows(ffn.linear_2.weight, width), min_tokens=MIN_TOKENS),
            head_norms=pad(wide(norms), (0, heads.padded - heads.width)),
        )

    def quantized(self) -> Block:
        return Block(
            qkv=_quantized(self.qkv),
            out=_quantized(self.out),
            gate_up=_quantized(self.gate_up),
            down=_quantized(self.down),
            head_norms=self.head_norms,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Everything that a step of the fast path reads but the modulation. `width` is the padded one."""

    width: int
    heads: HeadLayout
    embed: Linear
    refiner: Sequence[Block]
    layers: Sequence[Block]
    head: Linear

    def quantized(self) -> Weights:
        """Return the same with the blocks' products in e4m3; embedding, head and attention stay as they are."""
        refiner, layers = ([block.quantized() for block in blocks] for blocks in (self.refiner, self.layers))
        return replace(self, refiner=refiner, layers=layers)

    @classmethod
    def of(cls, model: DiffusionTransformer, config: TransformerConfig) -> Weights:
        heads, width = head_layout(config), aligned(config.hidden_size)
        embed, head = model.x_embedder, model.norm_out.linear_2
        return cls(
            width=width,
            heads=heads,
            embed=Linear(_rows(embed.weight, width), pad(embed.bias, (0, width - embed.out_features))),
            refiner=[Block.of(block, heads, width) for block in modulated(model.noise_refiner)],
            layers=[Block.of(block, heads, width) for block in modulated(model.layers)],
            head=Linear(_columns(head.weight, width), head.bias),
        )


def aligned(width: int) -> int:
    """Return `width` rounded up to what products like."""
    return -(-width // ALIGNMENT) * ALIGNMENT


def head_layout(config: TransformerConfig) -> HeadLayout:
    return HeadLayout(config.num_attention_heads, config.num_kv_heads, config.head_dim)


def modulated(modules: torch.nn.ModuleList) -> list[ModulatedBlock]:
    """Return the blocks of a list, by their type."""
    blocks = []
    for module in modules:
        assert isinstance(module, ModulatedBlock)
        blocks.append(module)
    return blocks


def _merge_heads(attn: Attention, heads: HeadLayout) -> Tensor:
    merged = torch.cat((attn.to_q.weight, attn.to_k.weight, attn.to_v.weight))
    by_head = merged.unflatten(0, (heads.num_heads, heads.width))
    return pad(by_head, (0, 0, 0, heads.padded - heads.width)).flatten(0, 1)


def _pad_inputs(weight: Tensor, heads: HeadLayout) -> Tensor:
    by_head = weight.unflatten(1, (heads.num_queries, heads.width))
    return pad(by_head, (0, heads.padded - heads.width)).flatten(1)


def _columns(weight: Tensor, width: int) -> Tensor:
    return pad(weight, (0, width - weight.shape[1])).contiguous()


def _rows(weight: Tensor, width: int) -> Tensor:
    return pad(weight, (0, 0, 0, width - weight.shape[0])).contiguous()
