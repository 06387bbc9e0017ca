"""Do: launch one decode step: five kernels a layer, from every row's token to every row's next one.

Nothing here looks at a value on the device, so that the same launches, captured in a graph, serve any mix of rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mammoth_ar.cache import KVCache
from mammoth_ar.conditioning import Scope
from mammoth_ar.fast import attention, choice, products
from mammoth_ar.fast.cuts import Cut, Tiles
from mammoth_ar.fast.state import RowState
from mammoth_ar.fast.weights import Matrix, StepWeights
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.rotary import rotary_tables

__all__ = ["Step"]

# In a program that holds several rows the compiler may contract a multiplication and an addition for one row and not for
# the next, so that the bits of a row would depend on its place: seen on an H200, every fourth row of the Dev family.
UNFUSED = {"enable_fp_fusion": False}


class Step:
    """The launches of a step over `state` and `cache`."""

    def __init__(
        self,
        config: LLMConfig,
        weights: StepWeights,
        scope: Scope,
        cache: KVCache,
        state: RowState,
        cut: Cut,
    ) -> None:
        self.config, self.weights, self.scope, self.cache, self.state = config, weights, scope, cache, state
        self.cut = cut = replace(cut, heads=replace(cut.heads, block_n=_power_of_2(config.head_dim)))
        assert cut.out.block_n == cut.down.block_n, "both write the sums of squares that the next product reads"
        device, dtype = weights.norm.device, weights.norm.dtype
        self.width, inner = config.hidden_size, weights.layers[0].down.shape[1]
        width, q_width = self.width, config.num_heads * config.head_dim
        self.num_rows = num_rows = cut.rows
        self.num_tiles = -(-width // cut.out.block_n)
        self.num_pieces = -(-cache.num_positions // cut.piece)

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.residual, self.x = empty(num_rows, width), empty(num_rows, width)
        self.squares = empty(self.num_tiles, num_rows, dtype=torch.float32)
        self.mean = empty(num_rows, width, dtype=torch.float32)
        self.q, self.mixed, self.gated = empty(num_rows, q_width), empty(num_rows, q_width), empty(num_rows, inner)
        widest = max(
            self.cut.heads.split * len(weights.layers[0].heads_bias),
            max(self.cut.out.split, self.cut.down.split) * width,
        )
        self.parts = empty(widest, num_rows, dtype=torch.float32)
        self.arrivals = empty(max(self.num_tiles, config.num_heads + 2 * config.num_kv_heads), dtype=torch.int32)
        pieces = (num_rows, config.num_kv_heads, self.num_pieces, _power_of_2(config.num_heads // config.num_kv_heads))
        self.piece_parts = empty(*pieces, cut.heads.block_n, dtype=torch.float32)
        self.piece_maxima, self.piece_sums = empty(*pieces, dtype=torch.float32), empty(*pieces, dtype=torch.float32)
        self.piece_arrivals = empty(num_rows, config.num_kv_heads, dtype=torch.int32)
        positions_3BL = torch.arange(cache.num_positions + 1, device=device).expand(3, 1, -1)
        cos_BL1D, sin_BL1D = rotary_tables(config, positions_3BL, dtype)
        half = config.head_dim // 2
        self.cosine, self.sine = (table[0, :, 0, :half].contiguous() for table in (cos_BL1D, sin_BL1D))

    def forward(self, group: int) -> None:
        """Feed the rows of `group` their tokens: KV rows, condition rows and logits."""
        rows = self._rows(group)
        weights, cut, shares = self.weights, self.cut, self._shares()
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        self.embed(rows, shares[0])
        for index, layer in enumerate(weights.layers):
            self.heads(index, rows)
            self.attend(index, rows)
            self.back(self.mixed, layer.out, layer.out_bias, layer.post_norm, cut.out)
            self.gate(layer.gated)
            self.back(self.gated, layer.down, None, next_norms[index], cut.down, shares[index + 1])
        self.finish(rows)
        self.logits(group)

    def embed(self, rows: slice, share: int = 0) -> None:
        state, weights = self.state, self.weights
        products.embed[(self.num_tiles,)](
            state.token[rows], weights.embeddings, weights.layers[0].input_norm, self.residual, self.x, self.squares,
            self.mean, weights.first_embedded, K=self.width, ROWS=self.num_rows, BLOCK_N=self.cut.out.block_n, MEAN_TIMES=share,
            num_warps=4, **UNFUSED,
        )  # fmt: skip

    def heads(self, index: int, rows: slice) -> None:
        config, layer, state, cut = self.config, self.weights.layers[index], self.state, self.cut.heads
        q_norm, k_norm = (layer.post_norm if norm is None else norm for norm in (layer.q_norm, layer.k_norm))
        products.project_heads[(config.num_heads + 2 * config.num_kv_heads, cut.split)](
            *_operands(self.x, layer.heads), self.squares, layer.heads_bias, q_norm, k_norm, self.cosine,
            self.sine, state.length[rows], state.active[rows], self.parts, self.arrivals, self.q,
            self.cache.keys[index][rows], self.cache.values[index][rows], config.norm_eps, self.cache.num_positions,
            K=self.width, D=config.head_dim, BLOCK_D=cut.block_n, NUM_Q=config.num_heads,
            NUM_KV=config.num_kv_heads, ROWS=self.num_rows, BLOCK_K=cut.block_k, SPLIT=cut.split, NUM_SQUARES=self.num_tiles,
            HAS_NORM=layer.q_norm is not None, **_options(self.x, layer.heads, cut),
        )  # fmt: skip

    def attend(self, index: int, rows: slice) -> None:
        config, state, cut = self.config, self.state, self.cut
        attention.attend[(cut.programs, config.num_kv_heads, self.num_rows)](
            self.q, self.cache.keys[index][rows], self.cache.values[index][rows], state.length[rows],
            state.active[rows], self.piece_parts, self.piece_maxima, self.piece_sums, self.piece_arrivals, self.mixed,
            math.log2(math.e) * config.head_dim**-0.5, self.cache.num_positions, self.num_pieces,
            D=config.head_dim, BLOCK_D=cut.heads.block_n, NUM_KV=config.num_kv_heads,
            GROUP=config.num_heads // config.num_kv_heads, BLOCK_G=self.piece_maxima.shape[-1], PIECE=cut.piece,
            BLOCK_S=cut.block_s, PROGRAMS=cut.programs, num_warps=4, num_stages=cut.attend_stages,
        )  # fmt: skip

    def back(self, a: Tensor, weight_NK: Matrix, bias: Tensor | None, norm: Tensor, cut: Tiles, share: int = 0) -> None:
        """Project back to the width and add to the residual stream, whose next norm has the weight `norm`."""
        width, inner = weight_NK.shape
        products.project_residual[(self.num_tiles, cut.split)](
            *_operands(a, weight_NK), norm if bias is None else bias, norm, self.residual, self.x, self.squares,
            self.mean, self.parts, self.arrivals, N=width, K=inner, ROWS=self.num_rows, BLOCK_N=cut.block_n,
            BLOCK_K=cut.block_k, SPLIT=cut.split, HAS_BIAS=bias is not None, MEAN_TIMES=share, **_options(a, weight_NK, cut),
        )  # fmt: skip

    def gate(self, weight_NK: Matrix) -> None:
        inner, width, cut = weight_NK.shape[0] // 2, weight_NK.shape[1], self.cut.gated
        products.project_gated[(-(-inner // cut.block_n),)](
            *_operands(self.x, weight_NK), self.squares, self.gated, self.config.norm_eps, N=inner, K=width,
            ROWS=self.num_rows, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, NUM_SQUARES=self.num_tiles, **_options(self.x, weight_NK, cut),
        )  # fmt: skip

    def finish(self, rows: slice) -> None:
        state, config = self.state, self.config
        products.finish[(self.num_rows,)](
            self.residual, self.squares, self.weights.norm, self.mean, state.index[rows], state.token[rows],
            state.active[rows], state.normed[rows], state.ring[rows], state.ring_ids[rows], state.bad[rows],
            config.norm_eps, state.num_kept, K=self.width, ROWS=self.num_rows, BLOCK_K=1024, NUM_SQUARES=self.num_tiles,
            NUM_MEAN=len(config.condition_layers), num_warps=4,
        )  # fmt: skip

    def logits(self, group: int) -> None:
        """Score the scope's ids from the `normed` states of the rows of `group`."""
        rows = self._rows(group)
        head, cut = self.weights.head, self.cut.logits
        num_ids, width = head.shape
        products.project_logits[(-(-num_ids // cut.block_n),)](
            *_operands(self.state.normed[rows], head), self.state.logits[rows], N=num_ids, K=width, ROWS=self.num_rows,
            BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, **_options(self.state.normed, head, cut),
        )  # fmt: skip

    def choose(self, drawing: Tensor) -> None:
        """Give every row that `drawing` flags its next token, or an end."""
        s, num_ids = self.state, self.state.seen.shape[1]
        block = _power_of_2(num_ids)
        choice.choose[(s.num_rows,)](
            s.logits, drawing, s.leader, s.partner, s.token, s.index, s.length, s.active, s.columns, s.total, s.guidance,
            s.penalty, s.temperature, s.top_k, s.top_p, s.seed, s.seen, self.scope.eol_id, self.scope.visual_start,
            V=num_ids, BLOCK_V=block, TILE=min(block, 4096), num_warps=16,
        )  # fmt: skip

    def _rows(self, group: int) -> slice:
        return slice(group * self.num_rows, (group + 1) * self.num_rows)

    def _shares(self) -> list[int]:
        """Return how often each entry of the hidden-state tuple counts in the mean; the first share is negative."""
        chosen = self.config.condition_layers
        shares = [chosen.count(index) for index in range(self.config.num_layers + 1)]
        first = next((index for index, times in enumerate(shares) if times), None)
        return shares if first is None else [*shares[:first], -shares[first], *shares[first + 1 :]]


def _operands(x: Tensor, weight_NK: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    return x, weight_NK.values, x if weight_NK.scales is None else weight_NK.scales  # x: never read as scales


def _options(x: Tensor, weight_NK: Matrix, cut: Tiles) -> dict[str, Any]:
    is_packed = weight_NK.is_words and x.is_cuda and x.dtype is torch.bfloat16
    return {"WORDS": weight_NK.is_words, "PACKED": is_packed,
            "num_warps": cut.num_warps, "num_stages": cut.num_stages, **UNFUSED}  # fmt: skip


def _power_of_2(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())
