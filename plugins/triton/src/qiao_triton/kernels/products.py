"""Products with packed weights: dense, 8-bit, 4-bit and FP8 codes, 8-bit activations; one weight, or one of several.

Weights lie [depth, O], so that neighbours in a warp read neighbours in memory; dense ones and those of KIND 4 lie
[O, depth]. Four-bit codes lie in units of 32 inputs: byte j of a unit holds input j in its low half and input 16 + j in
its high half, so that a tile needs no shuffle.

``KIND`` is 0 for floats as they are, 1 for int8 codes, 2 for 4-bit codes, 3 for the bytes of FP8 (e4m3), 4 where the
activations are int8 codes too, and 5 where the chip has no products of those: a tile's sum of them in float32 is
exact as well.

``SCALES`` is 0 where a row has one scale, 1 where a tile lies within one group, else 2.
"""

# The argument lists of kernels stand in rows.
# fmt: off

import triton
import triton.language as tl

from qiao_triton.kernels.numbers import owner


@triton.jit
def _value(code, k, n, n_ok, depth, scale, zero, s_group, GROUP: tl.constexpr, KIND: tl.constexpr,
           SCALES: tl.constexpr, ZERO: tl.constexpr):
    """float32 [k, n] of codes; a scale of a whole row is left to the end."""
    if KIND == 3:
        bits = code.to(tl.int16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        x = code.to(tl.float32)
    if SCALES == 0:
        if ZERO:
            x -= tl.load(zero + n, mask=n_ok, other=0)[None, :].to(tl.float32)
        elif KIND == 2:
            x -= 8.0
    elif SCALES == 1:
        at = tl.min(k, 0) // GROUP * s_group + n
        if ZERO:
            x -= tl.load(zero + at, mask=n_ok, other=0)[None, :].to(tl.float32)
        elif KIND == 2:
            x -= 8.0
        x *= tl.load(scale + at, mask=n_ok, other=0)[None, :].to(tl.float32)
    else:
        at = (k // GROUP * s_group)[:, None] + n[None, :]
        mask = (k < depth)[:, None] & n_ok[None, :]
        if ZERO:
            x -= tl.load(zero + at, mask=mask, other=0).to(tl.float32)
        elif KIND == 2:
            x -= 8.0
        x *= tl.load(scale + at, mask=mask, other=0).to(tl.float32)
    return x


@triton.jit
def _operand(x, WIDE: tl.constexpr):
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _sum(
    x, x_ok, weight, scale, zero, n, n_ok, first, last, depth, rows, w_depth, w_out, s_group,
    GROUP: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
):
    """[M, N] over inputs ``first`` to ``last``; ``x`` [M] points to rows, ``rows`` are those of a packed weight."""
    total = tl.zeros([M, N], tl.int32 if KIND >= 4 else tl.float32)
    for start in range(first, last, K):
        if KIND == 2:
            j = tl.arange(0, K // 2)
            packed = start // 2 + j
            at = weight + (packed.to(tl.int64) * w_depth)[:, None] + (n * w_out)[None, :]
            code = tl.load(at, mask=(packed < rows)[:, None] & n_ok[None, :], other=0).to(tl.int32)
            low = start + j // 16 * 32 + j % 16
            high = low + 16
            x_low = tl.load(x[:, None] + low[None, :], mask=x_ok[:, None] & (low < depth)[None, :], other=0)
            x_high = tl.load(x[:, None] + high[None, :], mask=x_ok[:, None] & (high < depth)[None, :], other=0)
            x_low, x_high = _operand(x_low, WIDE), _operand(x_high, WIDE)
            w_low = _value(code & 15, low, n, n_ok, depth, scale, zero, s_group, GROUP, KIND, SCALES, ZERO)
            w_high = _value((code >> 4) & 15, high, n, n_ok, depth, scale, zero, s_group, GROUP, KIND, SCALES, ZERO)
            total += tl.dot(x_low, w_low.to(x_low.dtype), input_precision="ieee")
            total += tl.dot(x_high, w_high.to(x_high.dtype), input_precision="ieee")
        else:
            k = start + tl.arange(0, K)
            k_ok = k < depth
            at = weight + (k.to(tl.int64) * w_depth)[:, None] + (n.to(tl.int64) * w_out)[None, :]
            w = tl.load(at, mask=k_ok[:, None] & n_ok[None, :], other=0)
            a = tl.load(x[:, None] + k[None, :], mask=x_ok[:, None] & k_ok[None, :], other=0)
            if KIND == 4:
                total += tl.dot(a, w, out_dtype=tl.int32)
            elif KIND == 5:
                total += tl.dot(a.to(tl.float32), w.to(tl.float32), input_precision="ieee").to(tl.int32)
            else:
                a = _operand(a, WIDE)
                if KIND != 0:
                    w = _value(w, k, n, n_ok, depth, scale, zero, s_group, GROUP, KIND, SCALES, ZERO)
                total += tl.dot(a, w.to(a.dtype), input_precision="ieee")
    return total


@triton.jit
def multiply(
    out, x, steps, weight, scale, zero, bias, tokens, outputs, depth, rows, span,
    o_part, o_row, x_row, w_depth, w_out, s_group,
    GROUP: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
):
    """A tile of ``x`` [T, I] times a weight, over inputs ``span`` by ``span``; grid (O tiles, T tiles, parts).

    With several parts ``out`` is float32 [parts, T, O] for ``add_parts``, and there is no bias.
    """
    n = tl.program_id(0) * N + tl.arange(0, N)
    m = tl.program_id(1) * M + tl.arange(0, M)
    part = tl.program_id(2)
    n_ok = n < outputs
    m_ok = m < tokens
    first = part * span
    last = tl.minimum(depth, first + span)
    total = _sum(
        x + m.to(tl.int64) * x_row, m_ok, weight, scale, zero, n, n_ok, first, last, depth, rows, w_depth, w_out,
        s_group, GROUP, KIND, SCALES, ZERO, M, N, K, WIDE,
    ).to(tl.float32)
    if KIND >= 4:
        total *= tl.load(steps + m, mask=m_ok, other=0)[:, None]
    if SCALES == 0 and KIND != 0:
        total *= tl.load(scale + n, mask=n_ok, other=0)[None, :].to(tl.float32)
    if BIAS:
        total += tl.load(bias + n, mask=n_ok, other=0)[None, :].to(tl.float32)
    at = out + part.to(tl.int64) * o_part + m.to(tl.int64)[:, None] * o_row + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@triton.jit
def add_parts(out, partial, bias, outputs, o_part, PARTS: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of ``partial`` [PARTS, T, O] and a bias, always in the same order; grid (T, O parts)."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = n < outputs
    total = tl.zeros([WIDTH], tl.float32)
    for part in range(PARTS):
        total += tl.load(partial + part * o_part + token * outputs + n, mask=mask, other=0)
    if BIAS:
        total += tl.load(bias + n, mask=mask, other=0).to(tl.float32)
    tl.store(out + token * outputs + n, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def round_rows(codes, steps, x, x_row, depth, WIDTH: tl.constexpr):
    """Activations to int8 per token: ``round(x / s)`` with ``s = max|x| / 127``; grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([WIDTH], tl.float32)
    for start in range(0, depth, WIDTH):
        k = start + tl.arange(0, WIDTH)
        v = tl.load(x + row * x_row + k, mask=k < depth, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(v))
    step = tl.max(tl.div_rn(largest, tl.full([WIDTH], 127.0, tl.float32)), 0)
    divisor = tl.where(step > 0, step, 1.0)
    tl.store(steps + row, step)
    for start in range(0, depth, WIDTH):
        k = start + tl.arange(0, WIDTH)
        v = tl.load(x + row * x_row + k, mask=k < depth, other=0).to(tl.float32)
        code = (tl.div_rn(v, divisor + v * 0.0) + 12582912.0) - 12582912.0  # to the nearest, see kernels.cache
        code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)
        tl.store(codes + row * depth + k, code, mask=k < depth)


@triton.jit
def multiply_experts(
    out, x, steps, table, order, starts, experts, outputs, depth, rows, o_row, x_row, w_depth, w_out, s_group,
    GROUP: tl.constexpr, KIND: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr, WEIGHT: tl.constexpr,
    SCALE: tl.constexpr, OFFSET: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
):
    """Rows of ``x``, in ``order`` of their expert, each tile with one expert's weight; grid (O tiles, tiles of rows).

    ``table`` [X, 3] int64 holds the addresses of weight, scale and zero, which are of the types WEIGHT, SCALE, OFFSET;
    the rows of expert e are ``order[starts[e] : starts[e + 1]]``.
    """
    tile = tl.program_id(1)
    expert = owner(starts, tile, experts, M)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    first_row = begin + (tile - (begin // M + expert)) * M
    if first_row >= end:
        return
    weight = tl.load(table + expert * 3).to(tl.pointer_type(WEIGHT))
    scale = tl.load(table + expert * 3 + 1).to(tl.pointer_type(SCALE))
    zero = tl.load(table + expert * 3 + 2).to(tl.pointer_type(OFFSET))
    n = tl.program_id(0) * N + tl.arange(0, N)
    n_ok = n < outputs
    place = first_row + tl.arange(0, M)
    m_ok = place < end
    m = tl.load(order + place, mask=m_ok, other=0)
    total = _sum(
        x + m * x_row, m_ok, weight, scale, zero, n, n_ok, 0, depth, depth, rows, w_depth, w_out,
        s_group, GROUP, KIND, SCALES, ZERO, M, N, K, WIDE,
    ).to(tl.float32)
    if KIND >= 4:
        total *= tl.load(steps + m, mask=m_ok, other=0)[:, None]
    if SCALES == 0 and KIND != 0:
        total *= tl.load(scale + n, mask=n_ok, other=0)[None, :].to(tl.float32)
    tl.store(out + m[:, None] * o_row + n[None, :], total.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])
