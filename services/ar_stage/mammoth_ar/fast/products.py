"""Do: the products of one decode step, each a kernel that reads its weights once and ends with what comes after it.

A step has 32 rows at most, so a product costs what its weights cost to read. Every kernel computes a tile of outputs for
all rows, [BLOCK_N, ROWS], over one of SPLIT slices of the inner width. Slices meet in `_sum_of_slices`: the last program
of a tile to arrive adds all of them, always in the same order, so that nothing depends on who was last. A row's result
depends on its own row of `x` alone.

RMS norms need no kernel: `project_residual` stores the row's next input as x * weight, not yet divided by its root mean
square, with each tile's sum of squares beside it; whoever reads it divides its own result (a row's divisor is one number).

Weights in e4m3 come four to a word, from the four quarters of the inner width, so that a word's bytes meet four tiles of `x`
(`weights.Matrix`); they become bf16 on their way into the product, and a scale for each output follows it.

N outputs, K inner width, D head width, ROWS rows of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "embed",
    "finish",
    "project_gated",
    "project_heads",
    "project_logits",
    "project_residual",
]


# Two e4m3 numbers, byte {0} of two words, to a pair of bf16: sign, exponent and mantissa are moved to where bf16 has them, which
# leaves the value times 2 ** -120 (the biases are 7 and 127), subnormal numbers included. The compiler's own conversion goes by
# float16 and float32, one number at a time, and takes longer than reading the weights. NaN, which no finite weight becomes,
# would be read as 480.
_PAIR = """
{{
    .reg .b32 pair, bits, power;
    prmt.b32 pair, $1, $2, 0x{1}{1}{0}{0};
    shr.b32 bits, pair, 4;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 pair, pair, 0x80008000, bits, 0xea;
    mov.b32 power, 0x7b807b80;
    mul.rn.bf16x2 $0, pair, power;
}}
"""
_PAIRS = tl.constexpr(tuple(_PAIR.format(byte, 4 + byte) for byte in range(4)))


@triton.jit
def _widened(words, BYTE: tl.constexpr, like, PACKED: tl.constexpr):
    """Return byte BYTE of int32 `words`, e4m3 numbers, in the type of `like`. PACKED: bf16, in pairs."""
    if PACKED:
        wide = tl.inline_asm_elementwise(_PAIRS[BYTE], "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        bits = words >> (8 * BYTE)
        moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        wide = (moved.to(tl.float32, bitcast=True) * 2.0**120).to(like.dtype)
    return wide


@triton.jit
def _scaled(value, scales, n, n_mask, WORDS: tl.constexpr):
    """Return `value` [BLOCK_N, ROWS] times the scale of each output, where weights are words."""
    if WORDS:
        value *= tl.load(scales + n, mask=n_mask, other=0.0)[:, None]
    return value


@triton.jit
def _product(
    x, w, first, n_mask, k_start, k_stop, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WORDS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Return w[first : first + BLOCK_N, k_start:k_stop] @ x[:, k_start:k_stop].T, float32 [BLOCK_N, ROWS].

    K, BLOCK_K, k_start and k_stop count columns of `w`, words where it holds words.
    """
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(k_start, k_stop, BLOCK_K):
        w_tile = _weight_tile(w, first, n_mask, start, K, BLOCK_N, BLOCK_K)
        total = _add(total, w_tile, x, start, K, ROWS, BLOCK_K, WORDS, PACKED)
    return total


@triton.jit
def _add(total, w_tile, x, start, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
         WORDS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Return `total` plus the product of a tile of weights with the rows of `x` that it meets."""
    if WORDS:
        for byte in tl.static_range(4):
            x_tile = _input_tile(x, byte * K, start, K, 4 * K, ROWS, BLOCK_K)
            total = tl.dot(_widened(w_tile, byte, x_tile, PACKED), x_tile, total, input_precision="ieee")
    else:
        x_tile = _input_tile(x, 0, start, K, K, ROWS, BLOCK_K)
        total = tl.dot(w_tile.to(x_tile.dtype), x_tile, total, input_precision="ieee")
    return total


@triton.jit
def _weight_tile(w, first, n_mask, start, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    n, k = first + tl.arange(0, BLOCK_N), start + tl.arange(0, BLOCK_K)
    if K % BLOCK_K == 0:
        tile = tl.load(w + n[:, None] * K + k[None, :], mask=n_mask[:, None], other=0.0)
    else:
        tile = tl.load(w + n[:, None] * K + k[None, :], mask=n_mask[:, None] & (k < K)[None, :], other=0.0)
    return tile


@triton.jit
def _input_tile(x, first, start, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return columns `start` on of the K that begin at `first`, of rows of WIDTH; [BLOCK_K, ROWS]."""
    row, k = tl.arange(0, ROWS), start + tl.arange(0, BLOCK_K)
    where = row[None, :] * WIDTH + first + k[:, None]
    mask = (k < K)[:, None]
    return tl.load(x + where) if K % BLOCK_K == 0 else tl.load(x + where, mask=mask, other=0.0)


@triton.jit
def _slice(part, K: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr):
    """Return where slice `part` of the inner width starts and stops."""
    WIDTH: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K
    return part * WIDTH, tl.minimum((part + 1) * WIDTH, K)


@triton.jit
def _all_arrived(arrivals, tile, NUM: tl.constexpr):
    """Say whether all NUM programs of `tile` have stored their part, after this one did; true for the last alone."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
    is_last = before == NUM - 1
    if is_last:
        tl.store(arrivals + tile, 0)  # as the next step finds it
    return is_last


@triton.jit
def _keep(parts, part, n, n_mask, total, N: tl.constexpr, ROWS: tl.constexpr):
    where = parts + (part * N + n[:, None]) * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(where, total, mask=n_mask[:, None])


@triton.jit
def _sum_of_slices(parts, n, n_mask, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Return the sum over slices of parts[:, n], float32 [BLOCK_N, ROWS], read past L1, which is not coherent."""
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for part in tl.static_range(SPLIT):  # unrolled: all slices are on their way at once
        where = parts + (part * N + n[:, None]) * ROWS + tl.arange(0, ROWS)[None, :]
        total += tl.load(where, mask=n_mask[:, None], other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _inverse_rms(squares, eps, K: tl.constexpr, ROWS: tl.constexpr, NUM_SQUARES: tl.constexpr):
    """Return 1 / rms of every row, float32 [ROWS], from the sums of squares that each tile left, [NUM_SQUARES, ROWS]."""
    BLOCK: tl.constexpr = triton.next_power_of_2(NUM_SQUARES)
    tile, row = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    mask = (tile < NUM_SQUARES)[:, None]
    each = tl.load(squares + tile[:, None] * ROWS + row[None, :], mask=mask, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(each, 0) / K + eps)


@triton.jit
def embed(token, table, norm, residual, x, squares, mean, start_id, K: tl.constexpr, ROWS: tl.constexpr,
          BLOCK_N: tl.constexpr, MEAN_TIMES: tl.constexpr):  # fmt: skip
    """Begin a step: `residual` becomes the embeddings of `token`, `x` the first layer's input, `mean` the first share."""
    tile = tl.program_id(0)
    row, n = tl.arange(0, ROWS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = tl.load(token + row) - start_id
    mask = (n < K)[None, :] & (ids >= 0)[:, None]
    value = tl.load(table + ids[:, None].to(tl.int64) * K + n[None, :], mask=mask, other=0.0).to(tl.float32)
    _hand_on(value, norm, residual, x, squares, mean, tile, n, K, ROWS, MEAN_TIMES)


@triton.jit
def _hand_on(value, norm, residual, x, squares, mean, tile, n, K: tl.constexpr, ROWS: tl.constexpr,
             MEAN_TIMES: tl.constexpr):  # fmt: skip
    """Store a tile of the residual stream, float32 [ROWS, BLOCK_N], and what the next norm and the Dev mean need of it."""
    row = tl.arange(0, ROWS)
    n_mask = (n < K)[None, :]
    where = row[:, None] * K + n[None, :]
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + where, rounded, mask=n_mask)
    wide = rounded.to(tl.float32)
    tl.store(squares + tile * ROWS + row, tl.sum(wide * wide, 1))
    weight = tl.load(norm + n, mask=n < K, other=0.0).to(tl.float32)
    tl.store(x + where, (wide * weight[None, :]).to(x.dtype.element_ty), mask=n_mask)
    if MEAN_TIMES > 0:
        tl.store(mean + where, tl.load(mean + where, mask=n_mask, other=0.0) + wide * MEAN_TIMES, mask=n_mask)
    elif MEAN_TIMES < 0:  # the first share of a step
        tl.store(mean + where, -wide * MEAN_TIMES, mask=n_mask)


@triton.jit
def project_heads(x, w, scales, squares, bias, q_norm, k_norm, cosine, sine, length, active, parts, arrivals, q, keys,
                  values, eps, num_positions, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                  NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
                  SPLIT: tl.constexpr, NUM_SQUARES: tl.constexpr, HAS_NORM: tl.constexpr,
                  WORDS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Project to one head of q, k or v: bias, norm, rotation; q is stored for `attend`, k and v in their KV row.

    grid (NUM_Q + 2 NUM_KV, SPLIT). `length` tokens are held by a row, which is where the new one goes.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    N: tl.constexpr = (NUM_Q + 2 * NUM_KV) * D
    HALF: tl.constexpr = D // 2
    BLOCK_HALF: tl.constexpr = BLOCK_D // 2
    # what the end needs is asked for before the product, which hides the wait
    row, i = tl.arange(0, ROWS), tl.arange(0, BLOCK_HALF)
    i_mask = i < HALF
    low_n, high_n = head * D + i, head * D + HALF + i
    at = tl.load(length + row)
    angle = at[None, :] * HALF + i[:, None]
    cos = tl.load(cosine + angle, mask=i_mask[:, None], other=0.0).to(tl.float32)
    sin = tl.load(sine + angle, mask=i_mask[:, None], other=0.0).to(tl.float32)
    low_bias = tl.load(bias + low_n, mask=i_mask, other=0.0).to(tl.float32)
    high_bias = tl.load(bias + high_n, mask=i_mask, other=0.0).to(tl.float32)
    inverse = _inverse_rms(squares, eps, K, ROWS, NUM_SQUARES)

    n, n_mask = head * D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D) < D
    COLUMNS: tl.constexpr = K // (4 if WORDS else 1)
    k_start, k_stop = _slice(part, COLUMNS, BLOCK_K, SPLIT)
    total = _product(x, w, head * D, n_mask, k_start, k_stop, COLUMNS, ROWS, BLOCK_D, BLOCK_K, WORDS, PACKED)
    _keep(parts, part, n, n_mask, total, N, ROWS)
    if _all_arrived(arrivals, head, SPLIT):
        low = _sum_of_slices(parts, low_n, i_mask, N, ROWS, BLOCK_HALF, SPLIT) * inverse[None, :]
        high = _sum_of_slices(parts, high_n, i_mask, N, ROWS, BLOCK_HALF, SPLIT) * inverse[None, :]
        low = _scaled(low, scales, low_n, i_mask, WORDS) + low_bias[:, None]
        high = _scaled(high, scales, high_n, i_mask, WORDS) + high_bias[:, None]
        if head < NUM_Q + NUM_KV:
            if HAS_NORM:
                norm = q_norm if head < NUM_Q else k_norm
                rms = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
                low *= rms[None, :] * tl.load(norm + i, mask=i_mask, other=0.0).to(tl.float32)[:, None]
                high *= rms[None, :] * tl.load(norm + HALF + i, mask=i_mask, other=0.0).to(tl.float32)[:, None]
            low, high = low * cos - high * sin, high * cos + low * sin
        if head < NUM_Q:
            where = q + (row[None, :] * NUM_Q + head) * D + i[:, None]
            tl.store(where, low.to(q.dtype.element_ty), mask=i_mask[:, None])
            tl.store(where + HALF, high.to(q.dtype.element_ty), mask=i_mask[:, None])
        else:
            kv = (head - NUM_Q) % NUM_KV
            cache = keys if head < NUM_Q + NUM_KV else values
            place = ((row.to(tl.int64) * NUM_KV + kv) * num_positions + at) * D
            where = cache + place[None, :] + i[:, None]
            mask = i_mask[:, None] & (tl.load(active + row) != 0)[None, :]
            tl.store(where, low.to(cache.dtype.element_ty), mask=mask)
            tl.store(where + HALF, high.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def project_residual(a, w, scales, bias, norm, residual, x, squares, mean, parts, arrivals, N: tl.constexpr,
                     K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                     SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, MEAN_TIMES: tl.constexpr,
                     WORDS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Project `a` [ROWS, K] back to the width and add it to the residual stream. grid (N / BLOCK_N, SPLIT)."""
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    COLUMNS: tl.constexpr = K // (4 if WORDS else 1)
    k_start, k_stop = _slice(part, COLUMNS, BLOCK_K, SPLIT)
    where = residual + tl.arange(0, ROWS)[:, None] * N + n[None, :]
    held = tl.load(where, mask=n_mask[None, :], other=0.0).to(tl.float32)  # asked for early, as in project_heads
    total = _product(a, w, tile * BLOCK_N, n_mask, k_start, k_stop, COLUMNS, ROWS, BLOCK_N, BLOCK_K, WORDS, PACKED)
    _keep(parts, part, n, n_mask, total, N, ROWS)
    if _all_arrived(arrivals, tile, SPLIT):
        value = _scaled(_sum_of_slices(parts, n, n_mask, N, ROWS, BLOCK_N, SPLIT), scales, n, n_mask, WORDS)
        if HAS_BIAS:
            value += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
        _hand_on(tl.trans(value) + held, norm, residual, x, squares, mean, tile, n, N, ROWS, MEAN_TIMES)


@triton.jit
def project_gated(x, w, scales, squares, gated, eps, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SQUARES: tl.constexpr,
                  WORDS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Store silu(gate x) * (up x), [ROWS, N]; `w` holds the N rows of gate, then those of up. grid (N / BLOCK_N,)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    first = tl.program_id(0) * BLOCK_N
    COLUMNS: tl.constexpr = K // (4 if WORDS else 1)
    inverse = _inverse_rms(squares, eps, K, ROWS, NUM_SQUARES)[None, :]
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, COLUMNS, BLOCK_K):
        gate_tile = _weight_tile(w, first, n_mask, start, COLUMNS, BLOCK_N, BLOCK_K)
        up_tile = _weight_tile(w, N + first, n_mask, start, COLUMNS, BLOCK_N, BLOCK_K)
        gate = _add(gate, gate_tile, x, start, COLUMNS, ROWS, BLOCK_K, WORDS, PACKED)
        up = _add(up, up_tile, x, start, COLUMNS, ROWS, BLOCK_K, WORDS, PACKED)
    gate = _scaled(gate, scales, n, n_mask, WORDS) * inverse
    up = _scaled(up, scales, N + n, n_mask, WORDS) * inverse
    value = gate / (1.0 + tl.exp(-gate)) * up
    where = gated + tl.arange(0, ROWS)[None, :] * N + n[:, None]
    tl.store(where, value.to(gated.dtype.element_ty), mask=n_mask[:, None])


@triton.jit
def finish(residual, squares, norm, mean, index, token, active, normed, ring, ring_ids, bad, eps, num_kept,
           K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SQUARES: tl.constexpr,
           NUM_MEAN: tl.constexpr):  # fmt: skip
    """End the layers: the heads' input, and the condition row of the token that was fed. grid (ROWS,).

    The row of grid token i goes to ring[row, i % num_kept] with its id; `bad` is raised by a value that is not finite.
    NUM_MEAN layers make a Dev condition, 0 means that it is the normed row.
    """
    row = tl.program_id(0)
    BLOCK: tl.constexpr = triton.next_power_of_2(NUM_SQUARES)
    tile = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(squares + tile * ROWS + row, mask=tile < NUM_SQUARES, other=0.0), 0)
    inverse = 1.0 / tl.sqrt(total / K + eps)
    place = tl.load(index + row) % num_kept
    is_active = tl.load(active + row) != 0
    num_bad = 0
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = k < K
        x = tl.load(residual + row * K + k, mask=mask, other=0.0).to(tl.float32) * inverse
        weight = tl.load(norm + k, mask=mask, other=0.0).to(tl.float32)
        value = (x.to(normed.dtype.element_ty).to(tl.float32) * weight).to(normed.dtype.element_ty)
        tl.store(normed + row * K + k, value, mask=mask & is_active)
        condition = value
        if NUM_MEAN > 0:
            condition = (tl.load(mean + row * K + k, mask=mask, other=0.0) / NUM_MEAN).to(normed.dtype.element_ty)
        where = ring + (row.to(tl.int64) * num_kept + place) * K + k
        tl.store(where, condition, mask=mask & is_active)
        sound = (tl.abs(value.to(tl.float32)) < float("inf")) & (tl.abs(condition.to(tl.float32)) < float("inf"))
        num_bad += tl.sum((mask & (sound == 0)).to(tl.int32), 0)
    if is_active:
        tl.store(ring_ids + row * num_kept + place, tl.load(token + row))
        if num_bad > 0:
            tl.store(bad + row, 1)


@triton.jit
def project_logits(x, w, scales, logits, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
                   PACKED: tl.constexpr):  # fmt: skip
    """Store the logits of the N visual ids, float32 [ROWS, N]. grid (N / BLOCK_N,)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    COLUMNS: tl.constexpr = K // (4 if WORDS else 1)
    total = _product(
        x, w, tl.program_id(0) * BLOCK_N, n_mask, 0, COLUMNS, COLUMNS, ROWS, BLOCK_N, BLOCK_K, WORDS, PACKED
    )
    total = _scaled(total, scales, n, n_mask, WORDS)
    tl.store(logits + tl.arange(0, ROWS)[None, :] * N + n[:, None], total, mask=n_mask[:, None])
