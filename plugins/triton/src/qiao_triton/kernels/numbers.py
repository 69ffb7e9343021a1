"""What several kernels need: rounding, tanh, and whose tile this is.

A call of one of these costs the interpreter more than what it computes: they are kept out of inner loops.
"""

# The argument lists of kernels stand in rows.
# fmt: off

import triton
import triton.language as tl


@triton.jit
def exactly(x, KIND: tl.constexpr):
    """float32 ``x`` as ``KIND``, to the nearest, ties to even: Triton's interpreter cuts bfloat16 off instead."""
    if tl.bfloat16 == KIND:
        bits = x.to(tl.int32, bitcast=True)
        high = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(x != x, 0x7FC0, high).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(KIND)


@triton.jit
def tanh(x):
    """By the logistic function, which has no overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def owner(starts, tile, count, SIZE: tl.constexpr):
    """Whose tile this is, where member i of ``count`` begins with tile ``starts[i] // SIZE + i``."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts + middle) // SIZE + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1
