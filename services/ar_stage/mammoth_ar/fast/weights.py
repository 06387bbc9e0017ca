"""Do: lay the decoder's weights out for decoding: q, k, v in one matrix, gate and up in another, generation experts only.

The plain decoder keeps working: its parameters become views of the merged matrices, so that nothing is stored twice.
After prefill every token of a grid is a generation token, so the experts for text are never read here.

Stored as fp8, a matrix is e4m3 with a scale for each output, beside the bf16 one, which prefill keeps reading; products stay
bf16, embeddings and the head are not narrowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder

__all__ = ["LayerWeights", "Matrix", "StepWeights", "Storage", "merge", "narrowed", "read_back"]

Storage = Literal["bf16", "fp8"]
LARGEST = 448.0  # of e4m3
TINY = 1e-12  # a row of zeros has a scale too


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """`values` [N, K]; or words of four e4m3 numbers, int32 [N, K/4], times `scales` float32 [N].

    Byte j of word q is the number at j * K/4 + q: a tile of words meets four tiles of the input, each of neighbours.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def is_words(self) -> bool:
        return self.scales is not None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        num, columns = self.values.shape
        return num, columns * 4 if self.is_words else columns


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. `heads` yields q, k, v heads in this order; `gated` yields gate, then up; `norm`s are [H] or [D]."""

    input_norm: Tensor
    heads: Matrix
    heads_bias: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    post_norm: Tensor
    gated: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, eq=False)
class StepWeights:
    """All that a decode step reads. `embeddings` [num_ids, H] start at id `first_embedded`; `head` scores the scope's ids."""

    embeddings: Tensor
    first_embedded: int
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix


@torch.no_grad()
def merge(decoder: Decoder, start: int, end: int, storage: Storage = "bf16") -> StepWeights:
    """Return the weights of a step that scores ids in [start, end); changes `decoder`'s parameters into views of them."""
    config = decoder.config
    return StepWeights(
        embeddings=decoder.gen_embed_tokens.weight if config.extra_gen_vocab else decoder.embed_tokens.weight,
        first_embedded=config.gen_vocab_start_index if config.extra_gen_vocab else 0,
        layers=[_layer(decoder.layers[index], index, config, storage) for index in range(config.num_layers)],
        norm=decoder.norm.weight,
        head=Matrix(decoder.head_rows(start, end)),
    )


def narrowed(weight_NK: Tensor) -> Matrix:
    """Return `weight_NK` in words of e4m3, each output scaled so that its largest weight is the largest of e4m3.

    Raises ValueError where K is not a multiple of 4.
    """
    num, width = weight_NK.shape
    if width % 4:
        raise ValueError(f"an inner width of {width} is not a multiple of 4, which fp8 weights need")
    wide_NK = weight_NK.float()
    scales_N = wide_NK.abs().amax(1).clamp(min=TINY) / LARGEST
    bytes_NK = (wide_NK / scales_N[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    words_NQ = bytes_NK.view(num, 4, width // 4).transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)
    return Matrix(words_NQ, scales_N)


def read_back(matrix: Matrix) -> Tensor:
    """Return the weights [N, K] that words and scales stand for, float32."""
    assert matrix.scales is not None, "these are no words"
    bytes_NK = matrix.values.unsqueeze(-1).view(torch.uint8).transpose(1, 2).reshape(matrix.shape)
    return bytes_NK.view(torch.float8_e4m3fn).float() * matrix.scales[:, None]


def _layer(layer: nn.Module, index: int, config: LLMConfig, storage: Storage) -> LayerWeights:
    attention = layer.get_submodule("self_attn")
    prefix = "gen_" if index in config.attention_experts else ""
    inner = layer.get_submodule("gen_mlp" if index in config.ffn_experts else "mlp")
    q, k, v, out = (attention.get_submodule(f"{prefix}{name}_proj") for name in "qkvo")
    gate, up, down = (inner.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
    heads = _joined([q, k, v], "weight")
    has_norm = config.family == "dev"
    stored = narrowed if storage == "fp8" else Matrix
    return LayerWeights(
        input_norm=layer.get_parameter("input_layernorm.weight"),
        heads=stored(heads),
        heads_bias=_joined([q, k, v], "bias") if config.attention_bias else heads.new_zeros(len(heads)),
        q_norm=attention.get_parameter("q_norm.weight") if has_norm else None,
        k_norm=attention.get_parameter("k_norm.weight") if has_norm else None,
        out=stored(out.get_parameter("weight")),
        out_bias=dict(out.named_parameters()).get("bias"),
        post_norm=layer.get_parameter("post_attention_layernorm.weight"),
        gated=stored(_joined([gate, up], "weight")),
        down=stored(down.get_parameter("weight")),
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
