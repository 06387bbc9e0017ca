"""Do: attention of one new token per row over its own KV row, in one kernel.

A context is cut into pieces of PIECE tokens by position, never by batch; the last program of a row to arrive combines all
pieces, in order. So a row's bits depend on its own context alone.

D head width, GROUP query heads share a key head, PROGRAMS share the pieces of one (row, key head).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend"]

TOGETHER = tl.constexpr(4)  # pieces combined at a time


@triton.jit
def attend(q, keys, values, length, active, parts, maxima, sums, arrivals, mixed, scale, num_positions, num_pieces,
           D: tl.constexpr, BLOCK_D: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
           PIECE: tl.constexpr, BLOCK_S: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Store softmax(q k / sqrt(D)) v of every active row, [ROWS, NUM_KV * GROUP, D]. grid (PROGRAMS, NUM_KV, ROWS).

    The row's new token is in its KV row already, at `length`. `parts` float32 [ROWS, NUM_KV, num_pieces, BLOCK_G, BLOCK_D];
    `maxima`, `sums` [ROWS, NUM_KV, num_pieces, BLOCK_G]. `scale` is log2(e) / sqrt(D).
    """
    program, kv, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tokens = tl.load(length + row) + 1
    used = (num_tokens + PIECE - 1) // PIECE
    if (tl.load(active + row) != 0) & (program < used):
        g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        head = (row * NUM_KV + kv) * GROUP + g
        where, mask = head[:, None] * D + d[None, :], (g < GROUP)[:, None] & (d < D)[None, :]
        q_tile = tl.load(q + where, mask=mask, other=0.0)
        past = (row.to(tl.int64) * NUM_KV + kv) * num_positions * D
        first = (row * NUM_KV + kv) * num_pieces
        for piece in range(program, used, PROGRAMS):
            top, total, tile = _piece(q_tile, keys + past, values + past, piece, num_tokens, scale, D, BLOCK_D, BLOCK_G,
                                      PIECE, BLOCK_S)  # fmt: skip
            place = (first + piece) * BLOCK_G + g
            tl.store(parts + place[:, None] * BLOCK_D + d[None, :], tile, mask=(g < GROUP)[:, None])
            tl.store(maxima + place, top, mask=g < GROUP)
            tl.store(sums + place, total, mask=g < GROUP)
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + row * NUM_KV + kv, 1, sem="acq_rel")
        if before == tl.minimum(used, PROGRAMS) - 1:
            tl.store(arrivals + row * NUM_KV + kv, 0)
            value = _combined(parts, maxima, sums, first, used, GROUP, BLOCK_D, BLOCK_G)
            tl.store(mixed + where, value.to(mixed.dtype.element_ty), mask=mask)


@triton.jit
def _piece(q_tile, keys, values, piece, num_tokens, scale, D: tl.constexpr, BLOCK_D: tl.constexpr,
           BLOCK_G: tl.constexpr, PIECE: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Return of one piece the largest score, the sum of weights, [BLOCK_G], and the weighted values, [BLOCK_G, BLOCK_D]."""
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    tile = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, num_tokens), BLOCK_S):
        at = start + s
        mask = (at < num_tokens)[:, None] & (d < D)[None, :]
        where = at[:, None] * D + d[None, :]
        k_tile = tl.load(keys + where, mask=mask, other=0.0)
        v_tile = tl.load(values + where, mask=mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        scores = tl.where((at < num_tokens)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        tile = tl.dot(weights.to(v_tile.dtype), v_tile, tile * shrink[:, None], input_precision="ieee")
        top = new_top
    return top, total, tile


@triton.jit
def _combined(parts, maxima, sums, first, used, GROUP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return attention over pieces [first, first + used), float32 [BLOCK_G, BLOCK_D], read past L1, which is not coherent."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    top = tl.full((BLOCK_G,), -1e38, tl.float32)  # finite: a padded head has no piece
    total = tl.zeros((BLOCK_G,), tl.float32)
    tile = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for start in range(0, used, TOGETHER):
        for step in tl.static_range(TOGETHER):  # unrolled: several pieces are on their way at once
            mask = (g < GROUP) & (start + step < used)
            place = (first + start + step) * BLOCK_G + g
            piece_top = tl.load(maxima + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
            piece_sum = tl.load(sums + place, mask=mask, other=0.0, cache_modifier=".cg")
            where = parts + place[:, None] * BLOCK_D + d[None, :]
            piece_tile = tl.load(where, mask=mask[:, None], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, piece_top)
            shrink, grow = tl.exp2(top - new_top), tl.exp2(piece_top - new_top)
            tile = tile * shrink[:, None] + piece_tile * grow[:, None]
            total = total * shrink + piece_sum * grow
            top = new_top
    return tile / tl.maximum(total, 1e-30)[:, None]
