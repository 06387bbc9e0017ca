"""Do: choose the next grid token of every row on the device: the fused form of `conditioning`, which defines it.

One program per row. Nothing is sorted: the k-th largest score is found bit by bit in the order of its float's bits, the
edge of the nucleus likewise, so that ties are all seen. Noise is Philox4x32-10(key = seed, counter = (token index, id)).

V ids in scope.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["choose"]

MIN_KEPT = tl.constexpr(3)


@triton.jit
def _ordered(score):
    """Return uint32 keys in the order of the float32 scores; equal scores have equal keys."""
    bits = (score + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _guided_scores(logits, row, partner, guidance, penalty, temperature, seen, v, mask, V: tl.constexpr):
    """Return the row's scores up to temperature, float32; -inf outside `mask`."""
    score = tl.load(logits + row * V + v, mask=mask, other=float("-inf"))
    if guidance > 1.0:
        other = tl.load(logits + partner * V + v, mask=mask, other=0.0)
        score = other + guidance * (score - other)
    if penalty != 1.0:
        was_seen = tl.load(seen + row * V + v, mask=mask, other=0) != 0
        score = tl.where(was_seen, tl.where(score > 0, score / penalty, score * penalty), score)
    return tl.where(mask, score / temperature, float("-inf"))


@triton.jit
def _kth_largest(key, k):
    """Return the k-th largest of `key` (uint32), k from 1."""
    found = (k * 0).to(tl.uint32)
    bit = found | 0x80000000
    for _ in range(32):
        guess = found | bit
        found = tl.where(tl.sum((key >= guess).to(tl.int32), 0) >= k, guess, found)
        bit = bit >> 1
    return found


@triton.jit
def _nucleus_edge(key, mass, top_p):
    """Return the lowest key whose strictly greater keys weigh less than `top_p`: its holders are the last in the nucleus."""
    found = (top_p * 0).to(tl.uint32)
    bit = found | 0x80000000
    for _ in range(32):
        guess = found | bit
        found = tl.where(tl.sum(tl.where(key >= guess, mass, 0.0), 0) >= top_p, guess, found)
        bit = bit >> 1
    return found


@triton.jit
def _philox(index, v, seed_low, seed_high):
    """Return words 0 and 1 of Philox4x32-10 at counter (index, v, 0, 0), uint32."""
    zero = v.to(tl.uint32) * 0
    c0, c1, c2, c3 = zero + index.to(tl.uint32), v.to(tl.uint32), zero, zero
    k0, k1 = seed_low, seed_high
    for _ in range(10):
        high0, low0 = tl.umulhi(c0, zero + 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, zero + 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1


@triton.jit
def choose(logits, drawing, leader, partner, token, index, length, active, width, total, guidance, penalty, temperature,
           top_k, top_p, seed, seen, eol_id, first_id, V: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Advance every row of `drawing` that leads itself: its next token, index and length, and its partner's. grid (rows,).

    The token after `index` is an end of line where the grid says so, else drawn from the scope. A row whose grid is
    complete becomes inactive. `partner` is the unconditional row of a guided request, the row itself otherwise.
    """
    row = tl.program_id(0)
    if (tl.load(drawing + row) != 0) & (tl.load(leader + row) != 0):
        other = tl.load(partner + row)
        following = tl.load(index + row) + 1
        if following >= tl.load(total + row):
            tl.store(active + row, 0)
            tl.store(active + other, 0)
        else:
            columns = tl.load(width + row)
            chosen = following * 0 + eol_id
            if following % (columns + 1) != columns:
                chosen = first_id + _draw(logits, row, other, following, guidance, penalty, temperature, top_k, top_p,
                                          seed, seen, first_id, V, BLOCK_V, TILE)  # fmt: skip
                tl.store(seen + row * V + (chosen - first_id), 1)
            held, other_held = tl.load(length + row) + 1, tl.load(length + other) + 1
            tl.store(token + row, chosen)
            tl.store(index + row, following)
            tl.store(length + row, held)
            tl.store(active + row, 1)
            if other != row:
                tl.store(token + other, chosen)
                tl.store(index + other, following)
                tl.store(length + other, other_held)
                tl.store(active + other, 1)


@triton.jit
def _draw(logits, row, other, following, guidance, penalty, temperature, top_k, top_p, seed, seen, first_id,
          V: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Return the column drawn for `row`."""
    s, p = tl.load(guidance + row), tl.load(penalty + row)
    heat = tl.load(temperature + row)
    warmth = tl.where(heat > 0, heat, 1.0)
    v = tl.arange(0, BLOCK_V)
    score = _guided_scores(logits, row, other, s, p, warmth, seen, v, v < V, V)
    key = _ordered(score)
    k, share = tl.load(top_k + row), tl.load(top_p + row)
    lowest = (k * 0).to(tl.uint32)
    if (k > 0) & (k < V):
        lowest = _kth_largest(key, tl.minimum(tl.maximum(k, MIN_KEPT), V))
    ties_kept = V + k * 0
    if share < 1.0:
        mass = tl.where(key >= lowest, tl.exp(score.to(tl.float64) - tl.max(score, 0).to(tl.float64)), 0.0)
        mass = mass / tl.sum(mass, 0)
        edge = _nucleus_edge(key, mass, share)
        third = _kth_largest(key, k * 0 + MIN_KEPT)
        lowest, ties_kept = _with_ties(key, mass, edge, third, lowest, share, V)
    best, chosen = -float("inf") + s * 0, k * 0
    best = best.to(tl.float64)
    for start in range(0, BLOCK_V, TILE):
        id_ = start + tl.arange(0, TILE)
        part = _guided_scores(logits, row, other, s, p, warmth, seen, id_, id_ < V, V)
        noisy = part.to(tl.float64)
        if heat > 0:
            noisy += _gumbel(following, first_id + id_, tl.load(seed + row))
        part_key = _ordered(part)
        tied = part_key == lowest
        place = tl.cumsum(tied.to(tl.int32), 0) - 1
        kept = ((part_key > lowest) | (tied & (place < ties_kept))) & (id_ < V)
        noisy = tl.where(kept, noisy, -float("inf"))
        top = tl.max(noisy, 0)
        where = tl.min(tl.where(noisy == top, id_, BLOCK_V), 0)
        chosen = tl.where(top > best, where, chosen)
        best = tl.maximum(top, best)
        ties_kept -= tl.sum(tied.to(tl.int32), 0)
    return chosen


@triton.jit
def _with_ties(key, mass, edge, third, lowest, share, V: tl.constexpr):
    """Return the lowest key kept by top-k, nucleus and the least number, and how many of its holders are kept."""
    above = tl.sum(tl.where(key > edge, mass, 0.0), 0)
    each = tl.max(tl.where(key == edge, mass, 0.0), 0)
    # of n equal masses the j-th (from 0) is kept while above + j * each < share
    num_kept = tl.where(each > 0, tl.ceil((share - above) / each), 0.0).to(tl.int32)
    num_above = tl.sum((key > edge).to(tl.int32), 0)
    num_kept = tl.maximum(num_kept + num_above, MIN_KEPT) - num_above
    if third < edge:  # the nucleus alone would leave fewer than the least number
        edge = third
        num_kept = -tl.sum((key > edge).to(tl.int32), 0) + MIN_KEPT
    if edge < lowest:  # top-k is stricter: all of its ties stay
        edge = lowest
        num_kept = V + num_kept * 0
    return edge, num_kept


@triton.jit
def _gumbel(following, id_, seed):
    """Return standard Gumbel noise of (seed, token index, id), float64: 52 bits of words 0 and 1."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word0, word1 = _philox(following, id_, low, high)
    bits = (word0.to(tl.int64) << 20) | (word1.to(tl.int64) >> 12)
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))
