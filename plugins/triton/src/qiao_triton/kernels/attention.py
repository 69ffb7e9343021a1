"""Attention over block tables: one kernel for ragged batches, one for decodes cut into parts, one that joins the parts.

The rows of a program are queries times the query heads that share a key head, so that keys are read once for all.
"""

# The argument lists of kernels stand in rows.
# fmt: off

import triton
import triton.language as tl

from qiao_triton.kernels.numbers import owner, tanh


@triton.jit
def _walk(
    q, position, first, last, head, key, value, key_scale, value_scale, table, scale, window, cap,
    c_block, c_token, c_head, s_block, s_token, s_head,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CODES: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr,
):
    """Keys ``first`` to ``last`` of one sequence: weighted sum of values, largest score and sum of weights."""
    d = tl.arange(0, WIDTH)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, WIDTH], tl.float32)
    for start in range(first, last, N):
        n = start + tl.arange(0, N)
        inside = n < last
        block = tl.load(table + n // BLOCK, mask=inside, other=0).to(tl.int64)
        offset = block * c_block + (n % BLOCK) * c_token + head * c_head
        k = tl.load(key + offset[None, :] + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0)
        k = k.to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * scale
        if CODES:
            beside = block * s_block + (n % BLOCK) * s_token + head * s_head
            s = s * tl.load(key_scale + beside, mask=inside, other=0)[None, :]
        if CAPPED:
            s = cap * tanh(s / cap)
        seen = inside[None, :] & (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        shrink = tl.exp(largest - safe)
        total = total * shrink + tl.sum(p, 1)
        if CODES:
            p = tl.where(seen, p * tl.load(value_scale + beside, mask=inside, other=0)[None, :], 0.0)
        v = tl.load(value + offset[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
        v = v.to(q.dtype)
        out = out * shrink[:, None] + tl.dot(p.to(q.dtype), v, input_precision="ieee")
        largest = new
    return out, largest, total


@triton.jit
def attend(
    out, query, key, value, key_scale, value_scale, tables, query_start, seq_lens, count, scale, window, cap,
    q_token, q_head, o_token, o_head, c_block, c_token, c_head, s_block, s_token, s_head, t_row,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr,
):
    """A tile of ``QUERIES`` queries of one sequence and one key head; grid (tiles, K)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = owner(query_start, tile, count, QUERIES)
    begin = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - begin
    first_query = (tile - (begin // QUERIES + sequence)) * QUERIES
    if first_query >= queries:
        return
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, M)
    index = first_query + row // GROUP
    heads = head * GROUP + row % GROUP
    there = (row < QUERIES * GROUP) & (index < queries)
    d = tl.arange(0, WIDTH)
    mask = there[:, None] & (d < D)[None, :]
    at = (begin + index).to(tl.int64)
    q = tl.load(query + at[:, None] * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0)
    if WIDE:
        q = q.to(tl.float32)
    position = length - queries + index
    last = tl.minimum(length, length - queries + first_query + QUERIES)
    first = tl.maximum(0, length - queries + first_query - window + 1)
    found, _, total = _walk(
        q, position, first, last, head, key, value, key_scale, value_scale, tables + sequence.to(tl.int64) * t_row,
        scale, window, cap, c_block, c_token, c_head, s_block, s_token, s_head,
        M, N, D, WIDTH, BLOCK, CODES, WIDE, CAPPED,
    )
    found = found / tl.where(total == 0, 1.0, total)[:, None]
    where = out + at[:, None] * o_token + heads[:, None] * o_head + d[None, :]
    tl.store(where, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def attend_part(
    out, partial, stats, query, key, value, key_scale, value_scale, tables, seq_lens, scale, window, cap,
    q_token, q_head, o_token, o_head, c_block, c_token, c_head, s_block, s_token, s_head, t_row,
    GROUP: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, WIDE: tl.constexpr, CAPPED: tl.constexpr,
):
    """One of ``PARTS`` parts of the keys of a sequence with one query; grid (B, K, PARTS).

    ``partial`` [B, H, PARTS, WIDTH] and ``stats`` [B, H, PARTS, 2] float32 are for ``join`` where there are several.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    low = tl.maximum(0, length - window)
    span = tl.cdiv(tl.cdiv(length - low, PARTS), N) * N
    first = low + part * span
    last = tl.minimum(length, first + span)
    row = tl.arange(0, M)
    heads = head * GROUP + row
    d = tl.arange(0, WIDTH)
    mask = (row < GROUP)[:, None] & (d < D)[None, :]
    at = sequence.to(tl.int64)
    q = tl.load(query + at * q_token + heads[:, None] * q_head + d[None, :], mask=mask, other=0)
    if WIDE:
        q = q.to(tl.float32)
    position = tl.zeros([M], tl.int32) + length - 1
    found, largest, total = _walk(
        q, position, first, last, head, key, value, key_scale, value_scale, tables + at * t_row, scale, window, cap,
        c_block, c_token, c_head, s_block, s_token, s_head, M, N, D, WIDTH, BLOCK, CODES, WIDE, CAPPED,
    )
    if PARTS == 1:
        found = found / tl.where(total == 0, 1.0, total)[:, None]
        where = out + at * o_token + heads[:, None] * o_head + d[None, :]
        tl.store(where, found.to(out.dtype.element_ty), mask=mask)
    else:
        slot = ((at * tl.num_programs(1) * GROUP + heads) * PARTS + part)
        tl.store(partial + slot[:, None] * WIDTH + d[None, :], found, mask=(row < GROUP)[:, None])
        tl.store(stats + slot * 2, largest, mask=row < GROUP)
        tl.store(stats + slot * 2 + 1, total, mask=row < GROUP)


@triton.jit
def join(
    out, partial, stats, o_token, o_head, PARTS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    """The parts of one query and head put together; grid (B, H)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, WIDTH)
    slot = (sequence * tl.num_programs(1) + head) * PARTS + part
    largest = tl.load(stats + slot * 2)
    total = tl.load(stats + slot * 2 + 1)
    share = tl.exp(largest - tl.max(largest, 0))
    found = tl.sum(tl.load(partial + slot[:, None] * WIDTH + d[None, :]) * share[:, None], 0)
    found = found / tl.sum(total * share, 0)
    tl.store(out + sequence * o_token + head * o_head + d, found.to(out.dtype.element_ty), mask=d < D)
