"""Do: lay the decoder's weights out for decoding: q, k, v in one matrix, gate and up in another, generation experts only.

The plain decoder keeps working: its parameters become views of the merged matrices, so that nothing is stored twice.
After prefill every token of a grid is a generation token, so the experts for text are never read here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder

__all__ = ["LayerWeights", "StepWeights", "merge"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. `heads` yields q, k, v heads in this order; `gated` yields gate, then up; `norm`s are [H] or [D]."""

    input_norm: Tensor
    heads: Tensor
    heads_bias: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gated: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepWeights:
    """All that a decode step reads. `embeddings` [num_ids, H] start at id `first_embedded`; `head` scores the scope's ids."""

    embeddings: Tensor
    first_embedded: int
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


@torch.no_grad()
def merge(decoder: Decoder, start: int, end: int) -> StepWeights:
    """Return the weights of a step that scores ids in [start, end); changes `decoder`'s parameters into views of them."""
    config = decoder.config
    return StepWeights(
        embeddings=decoder.gen_embed_tokens.weight if config.extra_gen_vocab else decoder.embed_tokens.weight,
        first_embedded=config.gen_vocab_start_index if config.extra_gen_vocab else 0,
        layers=[_layer(decoder.layers[index], index, config) for index in range(config.num_layers)],
        norm=decoder.norm.weight,
        head=decoder.head_rows(start, end),
    )


def _layer(layer: nn.Module, index: int, config: LLMConfig) -> LayerWeights:
    attention = layer.get_submodule("self_attn")
    prefix = "gen_" if index in config.attention_experts else ""
    inner = layer.get_submodule("gen_mlp" if index in config.ffn_experts else "mlp")
    q, k, v, out = (attention.get_submodule(f"{prefix}{name}_proj") for name in "qkvo")
    gate, up, down = (inner.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
    heads = _joined([q, k, v], "weight")
    has_norm = config.family == "dev"
    return LayerWeights(
        input_norm=layer.get_parameter("input_layernorm.weight"),
        heads=heads,
        heads_bias=_joined([q, k, v], "bias") if config.attention_bias else heads.new_zeros(len(heads)),
        q_norm=attention.get_parameter("q_norm.weight") if has_norm else None,
        k_norm=attention.get_parameter("k_norm.weight") if has_norm else None,
        out=out.get_parameter("weight"),
        out_bias=dict(out.named_parameters()).get("bias"),
        post_norm=layer.get_parameter("post_attention_layernorm.weight"),
        gated=_joined([gate, up], "weight"),
        down=down.get_parameter("weight"),
    )


def _joined(modules: list[nn.Module], name: str) -> Tensor:
    """Return the modules' parameters of this name in one tensor, which they view from now on."""
    joined = torch.cat([module.get_parameter(name) for module in modules])
    start = 0
    for module in modules:
        num = len(module.get_parameter(name))
        module.register_parameter(name, nn.Parameter(joined[start : start + num], requires_grad=False))
        start += num
    return joined
