"""Decide the next visual token: the grid rule, the logit pipeline, and counter-based sampling. Pure tensor functions.

What differs between requests is data ([B,1] tensors in `Knobs`), never a branch, so that one graph can serve any mix
and a row's bits do not depend on its neighbours. Only the scope [visual_start, visual_end) is ever scored: ids outside
are impossible for a visual token, and the token at a row's end is known without scoring.

B requests, V ids in scope, W Philox words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mammoth_serving.checkpoint import CheckpointError

__all__ = ["Grid", "Knobs", "Sampling", "Scope", "guided", "gumbel", "philox4x32", "sample", "shaped", "signed64"]

MIN_KEPT = 3  # the fewest ids that top-k and top-p leave
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Grid:
    """`height` rows of `width` visual tokens, each row closed by an end-of-line token."""

    height: int
    width: int

    def __post_init__(self) -> None:
        assert min(self.height, self.width) >= 1, f"an empty grid: {self}"

    @property
    def num_tokens(self) -> int:
        return self.height * (self.width + 1)

    def is_row_end(self, index: int) -> bool:
        """Say whether grid token `index` (from 0) is an end-of-line token."""
        return index % (self.width + 1) == self.width


@dataclass(frozen=True, slots=True)
class Scope:
    """The ids a grid is made of: `eol_id` at row ends, ids in [visual_start, visual_end) elsewhere."""

    eol_id: int
    visual_start: int
    visual_end: int

    @classmethod
    def parse(cls, generation: Mapping[str, Any], fallback: Scope | None = None) -> Scope:
        """Read `t2i_generation_config.json`; a key that is not there comes from `fallback`.

        `visual_token_end_id` is absolute and exclusive. **Source** `ar_stage` 3.2: upstream adds the start to it, which
        leaves the scope without an upper end; that is a bug and not repeated here.
        """
        keys = ("eol_token_id", "visual_token_start_id", "visual_token_end_id")
        defaults = (fallback.eol_id, fallback.visual_start, fallback.visual_end) if fallback else (None,) * 3
        ids = [generation.get(key, default) for key, default in zip(keys, defaults, strict=True)]
        for key, value in zip(keys, ids, strict=True):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CheckpointError(f"t2i_generation_config.json: {key}: a token id is expected, not {value!r}")
        scope = cls(*ids)
        if scope.visual_start >= scope.visual_end:
            raise CheckpointError(f"t2i_generation_config.json: visual_token_end_id: {ids[2]} leaves no visual token")
        return scope


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request draws its tokens: `ar_guidance` up to 1, `top_k` 0, `top_p` 1 and `repetition_penalty` 1 are off.

    `temperature` 0 is greedy, which leaves `seed` without effect.
    """

    seed: int
    ar_guidance: float = 1.0
    temperature: float = 1.0
    top_k: int = 2048
    top_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Knobs:
    """Sampling parameters of B requests as [B,1] tensors."""

    guidance: Tensor
    penalty: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor

    @classmethod
    def of(cls, requests: Sequence[Sampling], device: torch.device | str = "cpu") -> Knobs:
        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)

        return cls(
            guidance=column([request.ar_guidance for request in requests], torch.float64),
            penalty=column([request.repetition_penalty for request in requests], torch.float64),
            temperature=column([request.temperature for request in requests], torch.float64),
            top_k=column([request.top_k for request in requests], torch.int64),
            top_p=column([request.top_p for request in requests], torch.float64),
            seed=column([signed64(request.seed) for request in requests], torch.int64),
        )


def guided(condition_BV: Tensor, uncondition_BV: Tensor, knobs: Knobs) -> Tensor:
    """Return u + s(c - u) on raw logits where guidance s > 1, c elsewhere; float32, float64 when the logits are."""
    c, u = _wide(condition_BV), _wide(uncondition_BV)
    return torch.where(knobs.guidance > 1, u + knobs.guidance.to(c.dtype) * (c - u), c)


def shaped(scores_BV: Tensor, seen_BV: Tensor, knobs: Knobs) -> Tensor:
    """Apply repetition penalty, temperature, top-k and top-p in this order; what may not be drawn becomes -inf.

    `scores_BV` are guided scores, `seen_BV` (bool) marks ids of the prompt or generated before. Top-k keeps every id
    that ties with the k-th. Top-p keeps an id while the mass ahead of it is below p; among equals the lower id is
    ahead. Both keep at least three ids.

    **Source** transformers `RepetitionPenaltyLogitsProcessor`, `TemperatureLogitsWarper`, `TopKLogitsWarper`,
    `TopPLogitsWarper(min_tokens_to_keep=3)` as MammothModa2 stacks them. Known difference: the nucleus is summed in
    float64, and its ties are defined.
    """
    scores_BV = _wide(scores_BV)
    penalty = knobs.penalty.to(scores_BV.dtype)
    penalised_BV = torch.where(scores_BV > 0, scores_BV / penalty, scores_BV * penalty)
    scores_BV = torch.where(seen_BV, penalised_BV, scores_BV)
    scores_BV = scores_BV / torch.where(knobs.temperature > 0, knobs.temperature, 1.0).to(scores_BV.dtype)
    ranked_BV, order_BV = scores_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = _nucleus(ranked_BV, _top_k(ranked_BV, knobs), knobs)
    return scores_BV.masked_fill(~torch.zeros_like(keep_BV).scatter(-1, order_BV, keep_BV), -torch.inf)


def sample(scores_BV: Tensor, knobs: Knobs, token_index_B1: Tensor, first_id: int) -> Tensor:
    """Draw one column per row, int64 [B], by Gumbel-max; greedy where temperature is 0. Ties go to the lower id.

    The noise of an id is a function of (seed, token index, id) alone, so that neither batch nor order can change it.
    """
    ids_V = torch.arange(first_id, first_id + scores_BV.shape[-1], device=scores_BV.device)
    noise_BV = torch.where(knobs.temperature > 0, gumbel(knobs.seed, token_index_B1, ids_V), 0.0)
    return (scores_BV.double() + noise_BV).argmax(dim=-1)


def gumbel(seed_B1: Tensor, token_index_B1: Tensor, ids_V: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64 [B,V]: 52 bits of Philox words 0 and 1 at counter (token index, id, 0, 0)."""
    counter, key = (token_index_B1, ids_V, 0, 0), (seed_B1 & WORD, (seed_B1 >> 32) & WORD)
    high, low, _, _ = philox4x32(counter, key)
    uniform_BV = ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform_BV))


def philox4x32(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: tuple[Tensor | int, Tensor | int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of Philox4x32-10, as int64 of the broadcast shape.

    **Source** Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3, k0, k1 = (torch.as_tensor(word, dtype=torch.int64) for word in (*counter, *key))
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_WEYL[0]) & WORD, (k1 + PHILOX_WEYL[1]) & WORD
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    product = word * multiplier  # wraps into the sign, which leaves all 64 bits as they should be
    return (product >> 32) & WORD, product & WORD


def _top_k(ranked_BV: Tensor, knobs: Knobs) -> Tensor:
    num_ids = ranked_BV.shape[-1]
    k_B1 = torch.where(knobs.top_k > 0, knobs.top_k.clamp(min=MIN_KEPT), num_ids).clamp(max=num_ids)
    return ranked_BV >= ranked_BV.gather(-1, k_B1 - 1)


def _nucleus(ranked_BV: Tensor, keep_BV: Tensor, knobs: Knobs) -> Tensor:
    mass_BV = ranked_BV.double().masked_fill(~keep_BV, -torch.inf).softmax(dim=-1)
    ahead_BV = mass_BV.cumsum(dim=-1) - mass_BV
    rank_V = torch.arange(ranked_BV.shape[-1], device=ranked_BV.device)
    return keep_BV & ((ahead_BV < knobs.top_p) | (knobs.top_p >= 1) | (rank_V < MIN_KEPT))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.float32, x.dtype))


def signed64(seed: int) -> int:
    """Return the int64 with the low 64 bits of `seed`."""
    return (seed + 2**63) % 2**64 - 2**63
