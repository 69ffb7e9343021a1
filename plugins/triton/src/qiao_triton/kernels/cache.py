"""Writing keys and values into a paged cache, rotated before or as they are.

A program takes some rows: the heads of a token, then those of the next one.
"""

# The argument lists of kernels stand in rows.
# fmt: off

import triton
import triton.language as tl

from qiao_triton.kernels.numbers import exactly


@triton.jit
def _put(
    x, there, cache, scales, slot, head, c_block, c_token, c_head, s_block, s_token, s_head,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):
    """Vectors ``x`` [rows, WIDTH] float32 to their slots, where ``there``; codes and scales as ``KVCache`` has them.

    Rounding to the nearest, ties to even, is by adding 1.5 * 2^23, which leaves no place for a fraction.
    """
    d = tl.arange(0, WIDTH)
    row = slot // BLOCK * c_block + slot % BLOCK * c_token + head * c_head
    at = cache + row[:, None] + d[None, :]
    if CODES:
        bad = tl.max(tl.where((x != x) | (tl.abs(x) == float("inf")), 1.0, 0.0), 1)
        largest = tl.max(tl.abs(x), 1)
        scale = tl.div_rn(largest, largest * 0.0 + 127.0)
        divisor = tl.where(scale > 0, scale, 1.0)[:, None]
        code = (tl.div_rn(x, divisor + x * 0.0) + 12582912.0) - 12582912.0
        code = tl.where((bad[:, None] + x * 0.0) != 0.0, 0.0, code)  # NaN is not 0 either
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        tl.store(at, code.to(tl.int8), mask=there)
        beside = scales + slot // BLOCK * s_block + slot % BLOCK * s_token + head * s_head
        tl.store(beside, tl.where(bad > 0, float("nan"), scale), mask=tl.max(there.to(tl.int32), 1) > 0)
    elif cache.dtype.element_ty == tl.bfloat16:
        tl.store(at, exactly(x, tl.bfloat16), mask=there)
    else:
        tl.store(at, x.to(cache.dtype.element_ty), mask=there)


@triton.jit
def write(
    key, value, key_cache, value_cache, key_scale, value_scale, slots, tokens, kv_heads,
    k_token, k_head, v_token, v_head, c_block, c_token, c_head, s_block, s_token, s_head,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):
    """``ROWS`` of the T * K keys and values; grid (parts,). A negative slot is left out."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // kv_heads).to(tl.int64)
    head = row % kv_heads
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    d = tl.arange(0, WIDTH)
    there = (slot >= 0)[:, None] & (d < D)[None, :]
    k = tl.load(key + (token * k_token + head * k_head)[:, None] + d[None, :], mask=there, other=0).to(tl.float32)
    v = tl.load(value + (token * v_token + head * v_head)[:, None] + d[None, :], mask=there, other=0).to(tl.float32)
    _put(
        k, there, key_cache, key_scale, slot, head, c_block, c_token, c_head, s_block, s_token, s_head,
        WIDTH, BLOCK, CODES,
    )
    _put(
        v, there, value_cache, value_scale, slot, head, c_block, c_token, c_head, s_block, s_token, s_head,
        WIDTH, BLOCK, CODES,
    )


@triton.jit
def _turned(base, there, cos, sin, WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Vectors at ``base`` [rows] with their first 2 * PAIRS numbers rotated (arXiv 2104.09864, equation 34).

    ``cos`` and ``sin`` [rows] point to their angles. Each number is loaded with its partner, so that nothing has to be
    moved between lanes.
    """
    d = tl.arange(0, WIDTH)
    if INTERLEAVED:
        pair = d // 2
        second = d % 2 == 1
        partner = tl.where(second, d - 1, d + 1)
    else:
        second = d >= PAIRS
        pair = tl.where(second, d - PAIRS, d)
        partner = tl.where(second, d - PAIRS, d + PAIRS)
    inside = (d < 2 * PAIRS)[None, :]
    x = tl.load(base[:, None] + d[None, :], mask=there, other=0).to(tl.float32)
    y = tl.load(base[:, None] + partner[None, :], mask=there & inside, other=0).to(tl.float32)
    c = tl.load(cos[:, None] + pair[None, :], mask=there & inside, other=1.0)
    s = tl.load(sin[:, None] + pair[None, :], mask=there & inside, other=0.0)
    return tl.where(inside, x * c + y * tl.where(second[None, :], s, -s), x)


@triton.jit
def _rotate_rows(
    x, cos, sin, row, tokens, heads, x_token, x_head, a_token,
    D: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Rows of T * ``heads`` vectors in place. All are read before one is written."""
    token = (row // heads).to(tl.int64)
    d = tl.arange(0, WIDTH)
    there = (token < tokens)[:, None] & (d < D)[None, :]
    at = x + token * x_token + row % heads * x_head
    found = _turned(at, there, cos + token * a_token, sin + token * a_token, WIDTH, PAIRS, INTERLEAVED)
    tl.debug_barrier()
    tl.store(at[:, None] + d[None, :], found.to(x.dtype.element_ty), mask=there & (d < 2 * PAIRS)[None, :])


@triton.jit
def rotate(
    query, key, cos, sin, tokens, heads, kv_heads, q_token, q_head, k_token, k_head, a_token, query_parts,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Queries and keys in place; grid (parts of T * H, ``query_parts`` of them, and then of T * K,)."""
    part = tl.program_id(0)
    row = tl.arange(0, ROWS)
    if part < query_parts:
        _rotate_rows(
            query, cos, sin, part * ROWS + row, tokens, heads, q_token, q_head, a_token, D, WIDTH, PAIRS, INTERLEAVED
        )
    else:
        _rotate_rows(
            key, cos, sin, (part - query_parts) * ROWS + row, tokens, kv_heads, k_token, k_head, a_token,
            D, WIDTH, PAIRS, INTERLEAVED,
        )


@triton.jit
def rotate_write(
    query, key, value, cos, sin, key_cache, value_cache, key_scale, value_scale, slots,
    tokens, heads, kv_heads, q_token, q_head, k_token, k_head, v_token, v_head, a_token, query_parts,
    c_block, c_token, c_head, s_block, s_token, s_head,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Queries in place, keys rotated and values as they are into the cache; grid as for ``rotate``."""
    part = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    if part < query_parts:
        _rotate_rows(
            query, cos, sin, part * ROWS + tl.arange(0, ROWS), tokens, heads, q_token, q_head, a_token,
            D, WIDTH, PAIRS, INTERLEAVED,
        )
    else:
        row = (part - query_parts) * ROWS + tl.arange(0, ROWS)
        token = (row // kv_heads).to(tl.int64)
        head = row % kv_heads
        slot = tl.load(slots + token, mask=token < tokens, other=-1)
        there = (slot >= 0)[:, None] & (d < D)[None, :]
        at = key + token * k_token + head * k_head
        k = _turned(at, there, cos + token * a_token, sin + token * a_token, WIDTH, PAIRS, INTERLEAVED)
        if key.dtype.element_ty == tl.bfloat16:  # the sequence that this replaces rounds it here as well
            k = exactly(k, tl.bfloat16).to(tl.float32)
        else:
            k = k.to(key.dtype.element_ty).to(tl.float32)
        v = tl.load(value + (token * v_token + head * v_head)[:, None] + d[None, :], mask=there, other=0)
        _put(
            k, there, key_cache, key_scale, slot, head, c_block, c_token, c_head, s_block, s_token, s_head,
            WIDTH, BLOCK, CODES,
        )
        _put(
            v.to(tl.float32), there, value_cache, value_scale, slot, head, c_block, c_token, c_head,
            s_block, s_token, s_head, WIDTH, BLOCK, CODES,
        )
