"""Norms, gated activations, capped logits, and the two ends of a mixture of experts."""

# The argument lists of kernels stand in rows.
# fmt: off

import triton
import triton.language as tl

from qiao_triton.kernels.numbers import tanh


@triton.jit
def norm(out, x, residual, weight, eps, o_row, x_row, r_row, E: tl.constexpr, WIDTH: tl.constexpr, SUM: tl.constexpr):
    """RMSNorm of a row; with ``SUM`` of x + residual, which replaces the residual; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    mask = e < E
    v = tl.load(x + row * x_row + e, mask=mask, other=0).to(tl.float32)
    if SUM:
        v += tl.load(residual + row * r_row + e, mask=mask, other=0).to(tl.float32)
        rounded = v.to(residual.dtype.element_ty)
        tl.store(residual + row * r_row + e, rounded, mask=mask)
        v = rounded.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / E + eps)
    v = v * tl.load(weight + e, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * o_row + e, v.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate(out, x, o_row, x_row, F, WIDTH: tl.constexpr, GELU: tl.constexpr):
    """``silu(g) * u`` or ``gelu_tanh(g) * u`` of a part of a row; grid (T, parts)."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = f < F
    g = tl.load(x + row * x_row + f, mask=mask, other=0).to(tl.float32)
    u = tl.load(x + row * x_row + F + f, mask=mask, other=0).to(tl.float32)
    if GELU:
        g = 0.5 * g * (1.0 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    else:
        g = g * tl.sigmoid(g)
    tl.store(out + row * o_row + f, (g * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def capped(x, cap, x_row, V, WIDTH: tl.constexpr):
    """``cap * tanh(x / cap)`` in place; grid (N, parts)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = x + row * x_row + v
    tl.store(at, cap * tanh(tl.load(at, mask=v < V, other=0) / cap), mask=v < V)


@triton.jit
def route(
    weights, experts, logits, l_row, X, TOP: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """The ``TOP`` largest shares of a token's softmax, the lower expert first on a tie; grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    place = tl.arange(0, PLACES)
    x = tl.load(logits + row * l_row + e, mask=e < X, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    left = tl.where(e < X, x / tl.sum(x, 0), -1.0)
    shares = tl.zeros([PLACES], tl.float32)
    chosen = tl.zeros([PLACES], tl.int32)
    for i in tl.static_range(TOP):
        best = tl.max(left, 0)
        which = tl.min(tl.where(left == best, e, WIDTH - 1), 0)
        shares = tl.where(place == i, best, shares)
        chosen = tl.where(place == i, which, chosen)
        left = tl.where(e == which, -1.0, left)
    if NORMALISE:
        shares = shares / tl.sum(shares, 0)
    tl.store(weights + row * TOP + place, shares.to(weights.dtype.element_ty), mask=place < TOP)
    tl.store(experts + row * TOP + place, chosen.to(tl.int64), mask=place < TOP)


@triton.jit
def combine(out, x, weights, x_token, x_place, w_token, E, TOP: tl.constexpr, WIDTH: tl.constexpr):
    """The weighted sum over a token's experts of a part of the row; grid (T, parts)."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for i in range(TOP):
        w = tl.load(weights + row * w_token + i).to(tl.float32)
        total += w * tl.load(x + row * x_token + i * x_place + e, mask=e < E, other=0).to(tl.float32)
    tl.store(out + row * E + e, total.to(out.dtype.element_ty), mask=e < E)
