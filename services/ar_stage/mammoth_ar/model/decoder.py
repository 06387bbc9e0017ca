"""Decide hidden states and logits: the plain decoder of both families, which defines the numerics for every fast path.

A token is routed by its id alone: ids from `gen_vocab_start_index` on take the generation experts, embeddings and head
rows. Rows of a batch never mix; what a token sees is said by an explicit mask, where it stands by explicit positions.
The plain path runs in any float dtype: float64 stays float64 throughout, norms and softmax are at least float32.

B rows, L new tokens, S positions seen, H width, N heads, K key/value heads, R = N/K, D head width, V ids scored.

**Source** MammothModa2 `modeling_mammothmoda2_qwen2_5_vl.py`, `modeling_mammothmoda2_qwen3_vl.py`. Known differences:
both experts are computed where a chunk mixes token kinds (upstream gathers), the condition mean is accumulated in
float32, and a query that sees nothing yields finite values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.rotary import rotary_tables, rotate

__all__ = ["Decoder", "Hidden", "Memory"]


class Memory(Protocol):
    """Where keys and values of earlier tokens live."""

    def extend(self, layer: int, k_BKLD: Tensor, v_BKLD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of `layer`; return all that the mask speaks about, [B,K,S,D]."""
        ...


@dataclass(frozen=True, slots=True)
class Hidden:
    """`normed_BLH` feeds the heads; `condition_BLH` is what the DiT is conditioned on (the same for Preview)."""

    normed_BLH: Tensor
    condition_BLH: Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    """What every layer of one forward pass shares. `gen_BL1` is None when all tokens are generation tokens."""

    cos_BL1D: Tensor
    sin_BL1D: Tensor
    mask_B11LS: Tensor
    gen_BL1: Tensor | None
    memory: Memory | None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(torch.float32, x.dtype))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLH: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BLH)) * self.up_proj(x_BLH))
        return down


class Attention(nn.Module):
    def __init__(self, config: LLMConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_kv_heads
        width, bias = config.hidden_size, config.attention_bias
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        out_bias = bias and config.family == "dev"
        for prefix in ("", "gen_") if layer in config.attention_experts else ("",):
            self.add_module(f"{prefix}q_proj", nn.Linear(width, q_width, bias=bias))
            self.add_module(f"{prefix}k_proj", nn.Linear(width, kv_width, bias=bias))
            self.add_module(f"{prefix}v_proj", nn.Linear(width, kv_width, bias=bias))
            self.add_module(f"{prefix}o_proj", nn.Linear(q_width, width, bias=out_bias))
        has_norm = config.family == "dev"
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if has_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if has_norm else nn.Identity()

    def forward(self, x_BLH: Tensor, shared: _Pass) -> Tensor:
        q_BLND = rotate(self.q_norm(self._heads("q_proj", x_BLH, shared)), shared.cos_BL1D, shared.sin_BL1D)
        k_BLKD = rotate(self.k_norm(self._heads("k_proj", x_BLH, shared)), shared.cos_BL1D, shared.sin_BL1D)
        k_BKSD, v_BKSD = k_BLKD.transpose(1, 2), self._heads("v_proj", x_BLH, shared).transpose(1, 2)
        if shared.memory is not None:
            k_BKSD, v_BKSD = shared.memory.extend(self.layer, k_BKSD, v_BKSD)
        num_rows, num_tokens = x_BLH.shape[:2]
        q_BKRLD = q_BLND.transpose(1, 2).view(num_rows, self.num_kv_heads, -1, num_tokens, self.head_dim)
        mixed_BKRLD = attend(q_BKRLD, k_BKSD.unsqueeze(2), v_BKSD.unsqueeze(2), shared.mask_B11LS)
        mixed_BLH = mixed_BKRLD.flatten(1, 2).transpose(1, 2).flatten(2)
        return routed(self, "o_proj", mixed_BLH, shared.gen_BL1)

    def _heads(self, name: str, x_BLH: Tensor, shared: _Pass) -> Tensor:
        return routed(self, name, x_BLH, shared.gen_BL1).view(*x_BLH.shape[:2], -1, self.head_dim)


class Layer(nn.Module):
    def __init__(self, config: LLMConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        if layer in config.ffn_experts:
            self.gen_mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x_BLH: Tensor, shared: _Pass) -> Tensor:
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), shared)
        return x_BLH + routed(self, "mlp", self.post_attention_layernorm(x_BLH), shared.gen_BL1)


class Decoder(nn.Module):
    """The whole LLM without its vision tower. Parameters carry the checkpoint's names, see `weights.py`."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(width, config.norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        if config.extra_gen_vocab:
            self.gen_embed_tokens = nn.Embedding(config.gen_vocab_size, width)
            self.gen_head = nn.Linear(width, config.gen_vocab_size, bias=False)

    def forward(
        self,
        ids_BL: Tensor,
        position: Tensor,
        mask_BLS: Tensor,
        memory: Memory | None = None,
        *,
        all_generation: bool = False,
    ) -> Hidden:
        """Run `ids_BL` (int64) at `position` ([B,L] or [3,B,L]) seeing what `mask_BLS` (bool, True = sees) allows.

        `all_generation` promises that every id is a generation token, so that no text expert is touched.
        """
        gen_BL1 = None if all_generation else (ids_BL >= self.config.gen_vocab_start_index).unsqueeze(-1)
        x_BLH = self._embed(ids_BL, gen_BL1)
        position_3BL = position if position.dim() == 3 else position.expand(3, -1, -1)
        cos_BL1D, sin_BL1D = rotary_tables(self.config, position_3BL, x_BLH.dtype)
        shared = _Pass(cos_BL1D, sin_BL1D, mask_BLS[:, None, None], gen_BL1, memory)
        mean = _Mean(self.config.condition_layers)
        mean.add(0, x_BLH)
        for index, layer in enumerate(self.layers, start=1):
            x_BLH = layer(x_BLH, shared)
            mean.add(index, x_BLH)
        normed_BLH = self.norm(x_BLH)
        return Hidden(normed_BLH, normed_BLH if mean.total is None else mean.value(x_BLH.dtype))

    def logits(self, normed_BLH: Tensor) -> Tensor:
        """Return the logits of every id; `aligned` leaves zeros between the text vocabulary and the generation one."""
        text: Tensor = self.lm_head(normed_BLH)
        if not self.config.extra_gen_vocab:
            return text
        gap = self.config.gen_head_offset - self.config.vocab_size
        return torch.cat((functional.pad(text, (0, gap)), self.gen_head(normed_BLH)), dim=-1)

    def visual_logits(self, normed_BLH: Tensor, start: int, end: int) -> Tensor:
        """Return logits [B,L,end-start] of the ids in [start, end), reading only their rows of the heads."""
        return functional.linear(normed_BLH, self.head_rows(start, end))

    def head_rows(self, start: int, end: int) -> Tensor:
        if not self.config.extra_gen_vocab:
            return self.lm_head.weight[start:end]
        offset = self.config.gen_head_offset
        rows = self.gen_head.weight[max(start - offset, 0) : max(end - offset, 0)]
        return rows if start >= offset else torch.cat((self.lm_head.weight[start:end], rows))

    def _embed(self, ids_BL: Tensor, gen_BL1: Tensor | None) -> Tensor:
        start = self.config.gen_vocab_start_index
        if not self.config.extra_gen_vocab:
            return functional.embedding(ids_BL, self.embed_tokens.weight)
        if gen_BL1 is None:
            return functional.embedding(ids_BL - start, self.gen_embed_tokens.weight)
        is_gen_BL = gen_BL1.squeeze(-1)
        text_BLH = functional.embedding(ids_BL.masked_fill(is_gen_BL, 0), self.embed_tokens.weight)
        gen_BLH = functional.embedding((ids_BL - start).clamp(min=0), self.gen_embed_tokens.weight)
        return torch.where(gen_BL1, gen_BLH, text_BLH)


class _Mean:
    """Running mean of the chosen entries of the hidden-state tuple; an index given twice counts twice."""

    def __init__(self, chosen: tuple[int, ...]) -> None:
        self.chosen = chosen
        self.total: Tensor | None = None

    def add(self, index: int, x_BLH: Tensor) -> None:
        if times := self.chosen.count(index):
            wide_BLH = x_BLH.to(torch.promote_types(torch.float32, x_BLH.dtype)) * times
            self.total = wide_BLH if self.total is None else self.total + wide_BLH

    def value(self, dtype: torch.dtype) -> Tensor:
        assert self.total is not None
        return (self.total / len(self.chosen)).to(dtype)


def routed(owner: nn.Module, name: str, x_BLH: Tensor, gen_BL1: Tensor | None) -> Tensor:
    """Apply `owner.name` to text tokens and `owner.gen_name`, where there is one, to generation tokens."""
    text = owner.get_submodule(name)
    generation = getattr(owner, f"gen_{name}", None)
    if generation is None:
        plain: Tensor = text(x_BLH)
        return plain
    if gen_BL1 is None:
        expert: Tensor = generation(x_BLH)
        return expert
    return torch.where(gen_BL1, generation(x_BLH), text(x_BLH))


def attend(q_BKRLD: Tensor, k_BK1SD: Tensor, v_BK1SD: Tensor, mask_B11LS: Tensor) -> Tensor:
    """Softmax attention, scale D^-0.5, [B,K,R,L,D]. The lowest finite score stands for "hidden": no row becomes NaN."""
    scores: Tensor = q_BKRLD @ k_BK1SD.transpose(-1, -2) * q_BKRLD.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask_B11LS, torch.finfo(scores.dtype).min)
    weights: Tensor = scores.softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(scores.dtype)
    return torch.matmul(weights, v_BK1SD)
